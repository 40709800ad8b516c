"""Inputs and runners of batches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.batches import folder as folder
from support.batches import llama
from support.engine import Engine

from mlxrunner import Runner
from mlxrunner.testing import ByteTokenizer


@pytest.fixture
def alone() -> Runner:
    model, facts = llama()
    return Runner(model, ByteTokenizer(), facts, context=256)


@pytest.fixture
def together() -> Iterator[Engine]:
    model, facts = llama()
    with Engine(model, ByteTokenizer(), facts, max_sequences=3, context=256) as runner:
        yield runner
