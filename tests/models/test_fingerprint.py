"""Each part of a fingerprint notices its own changes, and no others."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from support.models import change_json, save_model, tiny_config, tiny_model, write_model

from mlxrunner.models.facts import facts_of
from mlxrunner.models.files import read_header
from mlxrunner.models.fingerprint import (
    differences,
    fingerprint,
    loaded_fingerprint,
    model_parts,
    option_parts,
    with_format,
)
from mlxrunner.models.load import load_model
from mlxrunner.models.resolve import resolve


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model directory with a chat template."""
    write_model(tmp_path / "model", "llama")
    change_json(tmp_path / "model" / "tokenizer_config.json", chat_template="{{ messages }}")
    return tmp_path / "model"


Change = Callable[[Path], object]


def flip(name: str, place: float) -> Change:
    """Return a change of a byte of a tensor, from its first one at 0 to its last one at 1."""

    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        tensor, content = read_header(file).tensors[name], bytearray(file.read_bytes())
        content[tensor.begin + int(place * (tensor.nbytes - 1))] ^= 1
        file.write_bytes(content)

    return change


def settings(name: str, **values: Any) -> Change:
    return lambda folder: change_json(folder / name, **values)


def test_the_same_model_elsewhere_is_the_same(folder: Path, tmp_path: Path) -> None:
    """Neither the path counts, nor when the files were written."""
    write_model(tmp_path / "other", "llama")
    change_json(tmp_path / "other" / "tokenizer_config.json", chat_template="{{ messages }}")
    assert fingerprint(folder) == fingerprint(tmp_path / "other")


CONFIG = "tokenizer_config.json"
CHANGES: dict[str, tuple[Change, list[str]]] = {
    "a seed": (lambda f: save_model(f, tiny_model(tiny_config(), 1), tiny_config()), ["weights"]),
    "the first byte of a tensor": (flip("model.layers.1.mlp.up_proj.weight", 0), ["weights"]),
    "the last byte of a tensor": (flip("model.norm.weight", 1), ["weights"]),
    "the middle of a tensor": (flip("lm_head.weight", 0.5), ["weights"]),
    "a setting": (settings("config.json", rope_theta=5e5), ["config"]),
    "the version that wrote it": (settings("config.json", transformers_version="9"), []),
    "the template": (settings(CONFIG, chat_template="{{ x }}"), ["template"]),
    "a template in a file": (
        lambda f: (f / "chat_template.jinja").write_text("{{ y }}"),
        ["template"],
    ),
    "a special token": (settings(CONFIG, eos_token="<s>"), ["tokenizer"]),
    "the vocabulary": (settings("tokenizer.json", version="2.0"), ["tokenizer"]),
    "a tokenizer.model": (lambda f: (f / "tokenizer.model").write_bytes(b"x"), ["tokenizer"]),
}


@pytest.mark.parametrize(("change", "parts"), CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen_by_its_part(folder: Path, change: Change, parts: list[str]) -> None:
    """The others stay the same.

    The part "kv" is that of the layer caches, and not in a directory.
    """
    before = fingerprint(folder) | {"kv": ""}
    change(folder)
    assert differences(before, fingerprint(folder) | {"kv": ""}) == parts


def test_few_bytes_of_the_weights_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 192 for each tensor, however large it is, beside the header."""
    read: list[int] = []
    file, pread = folder / "model.safetensors", os.pread
    tensors = len(read_header(file).tensors)
    begin = 8 + int.from_bytes(file.read_bytes()[:8], "little")

    def counted(descriptor: int, length: int, at: int) -> bytes:
        read.append(length if at >= begin else 0)
        return pread(descriptor, length, at)

    monkeypatch.setattr(os, "pread", counted)
    fingerprint(folder)
    assert 0 < sum(read) <= 192 * tensors


DEMO_FILES = {
    "weights": "d3f2120c3a816497",
    "config": "4b0929df23898d48",
    "tokenizer": "f5a2abacd6af9345",
    "template": "4773ca072babe719",
}
"""The form in which sessions and batches of version 0.1 hold them."""


def test_digests_that_are_stored_stay_valid() -> None:
    """Files of an earlier version hold these: a change makes sessions cold and batches foreign."""
    demo = resolve("demo")
    assert fingerprint(demo) == DEMO_FILES
    assert model_parts("demo", demo) | option_parts({"max_tokens": 64, "seed": None}) == {
        "model": "demo",
        "set of weights": DEMO_FILES["weights"],
        "config.json": DEMO_FILES["config"],
        "tokenizer": DEMO_FILES["tokenizer"],
        "chat template": DEMO_FILES["template"],
        "--max-tokens": "64",
    }
    options = {"system": None, "stop": ("a", "b"), "temperature": 0.5, "kv_bits": 8}
    parts = {"--stop": '["a", "b"]', "--temperature": "0.5", "--kv-bits": "8"}
    assert option_parts(options) == parts
    assert with_format(DEMO_FILES, [])["kv"] == "ef3d7163ebe93528"


def test_the_fingerprint_of_a_loaded_model_stays_valid() -> None:
    """Events of an earlier version hold these: times of equal fingerprints are compared."""
    loaded = load_model("demo")
    given = {"context": 512, "prefill_step": 64, "kv_bits": None}
    weights = tree_flatten(loaded.model.parameters())
    assert loaded_fingerprint(weights, loaded.facts, given) == "6dd5cc4b6d9ade4e"
    assert loaded_fingerprint(weights, loaded.facts, {}) != "6dd5cc4b6d9ade4e"


def test_the_fingerprint_of_packed_weights_stays_valid() -> None:
    """A quantized model's integers count as numbers of 32 bits."""
    model = tiny_model(tiny_config())
    nn.quantize(model, group_size=32, bits=4)
    weights: Any = tree_flatten(model.parameters())
    facts = facts_of(model, tiny_config())
    assert loaded_fingerprint(weights, facts, {}) == "d2179edcc7de533e"
