"""Short names of models, as Ollama writes them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mlxrunner.config.file import read_config_file
from mlxrunner.config.names import hub_id_of, known_models, suggestion_for


def test_every_row_is_a_name_with_a_size_and_a_repository() -> None:
    """No repository has two names, and each family has one size that its name stands for."""
    models = set(known_models().values())
    assert 30 <= len(models) == len({one.hub_id for one in models})
    for one in models:
        assert re.fullmatch(r"[a-z0-9.-]+:[0-9.]+b", one.name)
        assert re.fullmatch(r"mlx-community/[\w.-]+(4bit|Q8)", one.hub_id)
        assert 1e8 < one.nbytes < one.needed_bytes < 1e11
        assert known_models()[one.name.partition(":")[0]].name.startswith(one.name.split(":")[0])


@pytest.mark.parametrize(
    ("name", "repository"),
    [
        ("llama3.2:1b", "mlx-community/Llama-3.2-1B-Instruct-4bit"),
        ("llama3.2", "mlx-community/Llama-3.2-3B-Instruct-4bit"),
        ("Llama3.2:latest", "mlx-community/Llama-3.2-3B-Instruct-4bit"),
        ("demo", "demo"),
        ("owner/name", "owner/name"),
    ],
)
def test_a_short_name_stands_for_a_repository(name: str, repository: str) -> None:
    assert hub_id_of(name) == repository


def test_a_directory_comes_before_a_short_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mistral").mkdir()
    monkeypatch.chdir(tmp_path)
    assert hub_id_of("mistral") == "mistral"


def test_an_alias_comes_before_a_short_name_and_may_stand_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[aliases]\nmistral = "demo"\nfast = "qwen3:4b"\n')
    monkeypatch.setenv("MLXRUNNER_CONFIG", str(file))
    config = read_config_file()
    assert config.name_of("mistral") == "demo"
    assert config.name_of("fast") == "mlx-community/Qwen3-4B-4bit"


GEMMAS = "gemma2:2b gemma2:9b gemma3:1b gemma3:4b gemma3:12b gemma3:27b".split()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("llama3.2:7b", "llama3.2 is known as llama3.2:1b, llama3.2:3b; "),
        ("llama-3.2-1b-instruct", "did you mean 'llama3.2:1b'? "),
        ("Qwen3-8B-4bit", "did you mean 'qwen3:8b'? "),
        ("gemma3-4b", "did you mean 'gemma3:4b'? "),
        ("lama", ""),
        ("phi3", "there are phi4:14b, phi4-mini:3.8b; "),
        ("gemma:7b", f"there are {', '.join(GEMMAS)}; "),
        ("https://huggingface.co/owner/name/tree/main", "did you mean 'owner/name'? "),
        ("", ""),
        ("x" * 10_000, ""),
    ],
)
def test_an_unknown_name_gets_the_nearest_known_one(name: str, hint: str) -> None:
    assert suggestion_for(name) == hint
