"""How anything is measured here: sides that take turns in one process, each run as the reader of the tokens sees it.

Another side begins each round, so that what slows the machine slows all of them, and they are compared round by round.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream

from mlxrunner.bench.sides import Side
from mlxrunner.runner import Runner

Begin = Callable[[str], None]
"""Called with the name of what is done next."""


@dataclass(frozen=True)
class Run:
    """Seconds to the first token (`ttft`), from there to the last (`decode`), and of these the reading thread's own (`python`);
    `peak`: bytes of all MLX memory; `stored`: bytes that hold the entry's tokens afterwards, of our side."""

    tokens: list[int]
    ttft: float
    decode: float
    python: float
    peak: int
    stored: int = 0


def alternate(
    runner: Runner,
    sides: Mapping[str, Side],
    prompt: list[int],
    count: int,
    rounds: int,
    begin: Begin = lambda name: None,
) -> dict[str, list[Run]]:
    """`rounds` cold runs of each side after one that doesn't count; says so if they gave different tokens."""
    runs: dict[str, list[Run]] = {side: [] for side in sides}
    for turn in range(rounds + 1):
        begin(
            f"cold prompt of {len(prompt)}, "
            + (f"round {turn} of {rounds}" if turn else "warming up")
        )
        for side in in_turn(sides, turn):
            runner.reset()
            runs[side].append(measure(sides[side], prompt, count, runner))
    if len({tuple(run.tokens) for those in runs.values() for run in those}) > 1:
        print(f"{', '.join(sides)}: not the same tokens after {len(prompt)}", file=sys.stderr)
    return {side: those[1:] for side, those in runs.items()}


def in_turn(sides: Mapping[str, Any], turn: int) -> list[str]:
    return list(sides) if turn % 2 else list(sides)[::-1]


def measure(side: Side, prompt: list[int], count: int, runner: Runner) -> Run:
    """All `count` tokens of an answer; a first token alone is read from an answer of two, whose second one nobody waits for."""
    wait()
    mx.reset_peak_memory()
    began = time.perf_counter()
    answer = side(prompt, max(count, 2))
    tokens = [next(answer)]
    first, first_python = time.perf_counter(), time.thread_time()
    while len(tokens) < count:
        tokens.append(next(answer))
    last, last_python = time.perf_counter(), time.thread_time()
    answer.close()
    stored = runner.entry.used_bytes
    return Run(
        tokens,
        first - began,
        last - first,
        last_python - first_python,
        mx.get_peak_memory(),
        stored,
    )


def wait() -> None:
    """For what the last run left on its way; and give back what it no longer needs."""
    mx.synchronize()
    mx.synchronize(generation_stream)
    gc.collect()
    mx.clear_cache()


def some_tokens(runner: Runner, count: int, seed: int = 0) -> list[int]:
    tokens: list[int] = (
        np.random.default_rng(seed).integers(runner.facts.vocab, size=count).tolist()
    )
    return tokens
