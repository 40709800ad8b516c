"""A model that mlx-lm lacks is loaded with its encoder by every command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("mlx_vlm", reason="needs the extra vision")

from click.testing import CliRunner, Result
from support.seeing import write_seeing

from mlxrunner import ModelError, ParallelRunner, Runner, cli
from mlxrunner.loading import plan_model
from mlxrunner.models.facts import is_run_by_mlx_vlm
from mlxrunner.models.load import load_either
from mlxrunner.server.models import card_of
from mlxrunner.system import mlx_vlm_internals as internals

SHAPES = Path(__file__).parents[2] / "docs/images/shapes.png"


def typed(*arguments: object, text: str = "") -> Result:
    return CliRunner().invoke(cli.main, [*map(str, arguments)], input=text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing(tmp_path_factory.mktemp("only"), "idefics3")


def test_those_that_mlx_lm_runs_are_loaded_for_text(tmp_path: Path, folder: Path) -> None:
    """Their encoder is loaded where it is asked for."""
    assert is_run_by_mlx_vlm(str(folder))
    assert not is_run_by_mlx_vlm(str(write_seeing(tmp_path / "text", "gemma3")))
    assert not is_run_by_mlx_vlm("demo")
    assert not is_run_by_mlx_vlm(str(tmp_path / "missing"))


def test_each_way_to_load_it_brings_its_encoder(folder: Path) -> None:
    """Text is answered as well, and a picture is seen."""
    with Runner.load(folder, context=256, reserve=False) as runner:
        alone = runner.complete("Hello", max_tokens=4).tokens
    with ParallelRunner.load(folder, max_sequences=1, context=256, reserve=False) as many:
        assert many.submit("Hello", max_tokens=4).result().tokens == alone
        message = {"role": "user", "content": [{"type": "image", "image": SHAPES}]}
        assert many.submit([message], max_tokens=2).result().usage is not None
    assert hasattr(load_either(str(folder)).model, "sight")
    assert "pictures" in plan_model(str(folder)).table()
    assert card_of("it", str(folder), None, pictures=False).sees


def test_commands_need_no_option(folder: Path, tmp_path: Path) -> None:
    """Generate, chat, batch, plan, show and verify."""
    answered = typed("generate", "-m", folder, "--no-reserve", "--max-tokens", 3, "Hello")
    assert answered.exit_code == 0, answered.output
    asked = f"/image {SHAPES}\nWhat?\n"
    chat = typed("chat", "-m", folder, "--no-reserve", "--max-tokens", 3, text=asked)
    assert chat.exit_code == 0, chat.output
    assert "is attached to the next message" in chat.output
    assert "loaded again" not in chat.output
    lines, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines.write_text('{"prompt": "a"}\n{"prompt": "ab"}\n')
    batch = typed("batch", lines, "-o", out, "-m", folder, "--max-tokens", 2, "--no-reserve")
    assert batch.exit_code == 0, batch.output
    assert [json.loads(line)["finish_reason"] for line in out.read_text().splitlines()] == [
        "length",
        "length",
    ]
    assert "pictures" in typed("plan", folder).output
    assert "idefics3" in typed("show", folder).output


@pytest.mark.exhaustive(0)
def test_it_is_verified(folder: Path) -> None:
    """Rows that such a model refuses say so, and the others are tested."""
    found = typed("verify", folder, "--context", 400, "--json")
    rows = {row["name"]: row for row in json.loads(found.stdout)["rows"]}
    assert found.exit_code == 0, found.output
    assert "nothing is guessed" in rows["guessed tokens"]["untested"]
    assert rows["append"]["verdict"] == "ok"


def test_what_it_needs_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, wherever it is loaded."""
    monkeypatch.setattr(internals, "is_installed", lambda: False)
    with pytest.raises(ModelError, match=r"not one that mlx-lm supports: .* install .*mlx-vlm"):
        Runner.load(folder, reserve=False)
    other = write_seeing(tmp_path, "idefics3")  # cards are kept while a file stays as it is
    assert not card_of("it", str(other), None, pictures=False).sees
