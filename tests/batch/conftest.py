"""Inputs and runners of batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.batches import lines, llama
from support.engine import Engine

from mlxrunner import Runner
from mlxrunner.testing import ByteTokenizer


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text(lines(12, broken=(5,)))
    return tmp_path


@pytest.fixture
def alone() -> Runner:
    model, facts = llama()
    return Runner(model, ByteTokenizer(), facts, context=256)


@pytest.fixture
def together() -> Iterator[Engine]:
    model, facts = llama()
    with Engine(model, ByteTokenizer(), facts, max_sequences=3, context=256) as runner:
        yield runner
