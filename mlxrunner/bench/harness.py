"""Measure requests as the reader of their tokens sees them, on backends that take turns.

All backends run in one process, and another one begins each round. A disturbance of the machine
slows all of them, and they are compared round by round.
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

from mlxrunner.bench.backends import Backend
from mlxrunner.runner import Runner

Begin = Callable[[str], None]
"""A function that is called with the name of the next piece of work."""


@dataclass(frozen=True)
class Run:
    """One measured request."""

    tokens: list[int]
    """The tokens of the answer."""
    ttft: float
    """The seconds to the first token."""
    decode: float
    """The seconds from the first token to the last."""
    python: float
    """The seconds of `decode` that the reading thread itself computed."""
    peak: int
    """The peak of all MLX memory, in bytes."""
    stored: int = 0
    """The bytes of the runner's entry that hold tokens afterwards, for our own backend only."""


def alternate(
    runner: Runner,
    backends: Mapping[str, Backend],
    prompt: list[int],
    count: int,
    rounds: int,
    begin: Begin = lambda name: None,
) -> dict[str, list[Run]]:
    """Run each backend cold `rounds` times, after one run that does not count.

    `count` is the number of tokens to answer. Print a line on standard error if the backends give
    different tokens.
    """
    runs: dict[str, list[Run]] = {backend: [] for backend in backends}
    for turn in range(rounds + 1):
        begin(
            f"cold prompt of {len(prompt)}, "
            + (f"round {turn} of {rounds}" if turn else "warming up")
        )
        for backend in in_turn(backends, turn):
            runner.reset()
            runs[backend].append(measure(backends[backend], prompt, count, runner))
    if len({tuple(run.tokens) for those in runs.values() for run in those}) > 1:
        print(f"{', '.join(backends)}: not the same tokens after {len(prompt)}", file=sys.stderr)
    return {backend: those[1:] for backend, those in runs.items()}


def in_turn(backends: Mapping[str, Any], turn: int) -> list[str]:
    """Return the names in the order of round `turn`: forwards in odd rounds, else backwards."""
    return list(backends) if turn % 2 else list(backends)[::-1]


def measure(backend: Backend, prompt: list[int], count: int, runner: Runner) -> Run:
    """Measure an answer of `count` tokens.

    A single token is measured as the first of two, so that the second is already being computed, as
    it is for a reader.
    """
    wait()
    mx.reset_peak_memory()
    began = time.perf_counter()
    answer = backend(prompt, max(count, 2))
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
    """Wait for the last run to end on the device, and give back its memory."""
    mx.synchronize()
    mx.synchronize(generation_stream)
    gc.collect()
    mx.clear_cache()


def some_tokens(runner: Runner, count: int, seed: int = 0) -> list[int]:
    """Return `count` random tokens of the runner's vocabulary."""
    tokens: list[int] = (
        np.random.default_rng(seed).integers(runner.facts.vocab, size=count).tolist()
    )
    return tokens
