"""Runners of the oracle in mixes of layers, what they answer, and what a cold one would."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from support.engine import last_pass_of
from support.mixes import CHECKPOINTS, FEW, NO_HELP, SLACK, mixes_of

from mlxrunner import Runner
from mlxrunner.testing import oracle_runner

MIXES: dict[str, tuple[list[str], dict[str, int]]] = {
    "full": (["full", "full"], NO_HELP),
    "sliding": (["full", "sliding"], NO_HELP),
    "sliding-slack": (["full", "sliding"], SLACK),
    "sliding-checkpoints": (["sliding", "full"], CHECKPOINTS),
    "recurrent": (["recurrent", "full"], NO_HELP),
    "recurrent-checkpoints": (["recurrent", "full"], CHECKPOINTS),
    "composite": (["composite"], NO_HELP),
    "composite-few-checkpoints": (["composite"], FEW),
    "chunked-checkpoints": (["chunked", "full"], CHECKPOINTS),
    "unknown-checkpoints": (["unknown", "full"], CHECKPOINTS),
    "all": (["full", "sliding", "recurrent", "composite", "chunked"], NO_HELP),
    "all-checkpoints": (["full", "sliding", "recurrent", "composite", "chunked"], CHECKPOINTS),
}


mixes = mixes_of(MIXES)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that grow and move every few tokens, checkpoints that are close to each other."""
    monkeypatch.setattr("mlxrunner.cache.layers.extents.STEP", 4)
    monkeypatch.setattr("mlxrunner.cache.layers.full.STEP", 8)
    monkeypatch.setattr("mlxrunner.cache.checkpoints.SPACING", 3)
    last_pass_of(3, monkeypatch)


def tokens(runner: Runner, prompt: list[int], n: int = 6, **options: Any) -> list[int]:
    return [
        chunk.token
        for chunk in runner.generate(prompt, max_tokens=n, **options)
        if chunk.token is not None
    ]


def cold(kinds: Sequence[str], prompt: list[int], n: int = 6, **options: Any) -> list[int]:
    """Return the answer of a new runner. Without options, the same answer is computed once."""
    if options:
        return tokens(oracle_runner(kinds), prompt, n, **options)
    return [*_cold(tuple(kinds), tuple(prompt), n)]


@cache
def _cold(kinds: tuple[str, ...], prompt: tuple[int, ...], n: int) -> list[int]:
    return tokens(oracle_runner(kinds), [*prompt], n)


def is_consistent(runner: Runner) -> bool:
    entry = runner.entry
    return entry.is_true and (len(entry.tokens) > 0 or not entry.caches)


def fail(runner: Runner, prompt: list[int], error: BaseException, forward: int, layer: int) -> None:
    """An error from inside the model, before `layer` of its `forward`-th forward pass."""
    model = runner.model
    first = len(model.forwards)

    def on_layer(index: int) -> None:
        if len(model.forwards) - first == forward and index == layer:
            raise error

    model.on_layer = on_layer
    with pytest.raises(type(error)):
        tokens(runner, prompt, 20)
    model.on_layer = lambda index: None


def usage_of(runner: Runner, prompt: list[int]) -> Any:
    return list(runner.generate(prompt, max_tokens=3))[-1].usage
