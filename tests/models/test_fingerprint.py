"""What a saved entry depends on: each part notices its own changes, and no others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxrunner.models.fingerprint import differences, fingerprint
from mlxrunner.models.resolve import read_header
from mlxrunner.testing_models import save_model, tiny_config, tiny_model, write_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model directory with a chat template."""
    write_model(tmp_path / "model", "llama")
    change_json(tmp_path / "model" / "tokenizer_config.json", chat_template="{{ messages }}")
    return tmp_path / "model"


def change_json(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def flip(folder: Path, name: str, place: Callable[[int, int], int]) -> None:
    """Change a byte of a tensor."""
    file = folder / "model.safetensors"
    header, content = read_header(file), bytearray(file.read_bytes())
    begin = len(content) - max(
        entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"
    )
    first, last = header[name]["data_offsets"]
    content[begin + place(first, last)] ^= 1
    file.write_bytes(content)


def test_the_same_model_elsewhere_is_the_same(folder: Path, tmp_path: Path) -> None:
    """Neither the path counts, nor when the files were written."""
    write_model(tmp_path / "other", "llama")
    change_json(tmp_path / "other" / "tokenizer_config.json", chat_template="{{ messages }}")
    assert fingerprint(folder) == fingerprint(tmp_path / "other")


CHANGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a seed": (lambda f: save_model(f, tiny_model(tiny_config(), 1), tiny_config()), ["weights"]),
    "the first byte of a tensor": (lambda f: flip(f, "model.layers.1.mlp.up_proj.weight", lambda first, last: first), ["weights"]),
    "the last byte of a tensor": (lambda f: flip(f, "model.norm.weight", lambda first, last: last - 1), ["weights"]),
    "the middle of a tensor": (lambda f: flip(f, "lm_head.weight", lambda first, last: (first + last) // 2), ["weights"]),
    "a setting": (lambda f: change_json(f / "config.json", rope_theta=5e5), ["config"]),
    "the version that wrote it": (lambda f: change_json(f / "config.json", transformers_version="9"), []),
    "the template": (lambda f: change_json(f / "tokenizer_config.json", chat_template="{{ x }}"), ["template"]),
    "a template in a file": (lambda f: (f / "chat_template.jinja").write_text("{{ y }}"), ["template"]),
    "a special token": (lambda f: change_json(f / "tokenizer_config.json", eos_token="<s>"), ["tokenizer"]),
    "the vocabulary": (lambda f: change_json(f / "tokenizer.json", version="2.0"), ["tokenizer"]),
    "a tokenizer.model": (lambda f: (f / "tokenizer.model").write_bytes(b"x"), ["tokenizer"]),
}  # fmt: skip


@pytest.mark.parametrize(("change", "parts"), CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen_by_its_part(
    folder: Path, change: Callable[[Path], object], parts: list[str]
) -> None:
    """The others stay the same. The part "kv" is that of the layer caches, and not in a directory."""
    before = fingerprint(folder) | {"kv": ""}
    change(folder)
    assert differences(before, fingerprint(folder) | {"kv": ""}) == parts


def test_few_bytes_of_the_weights_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 192 for each tensor, however large it is, beside the header."""
    import os

    read: list[int] = []
    pread = os.pread
    tensors = len(read_header(folder / "model.safetensors")) - 1
    begin = 8 + int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")
    monkeypatch.setattr(
        os, "pread", lambda fd, n, at: (read.append(n if at >= begin else 0), pread(fd, n, at))[1]
    )
    fingerprint(folder)
    assert 0 < sum(read) <= 192 * tensors
