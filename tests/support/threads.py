"""Runners for many threads, requests of all sorts, and threads that begin at once."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mlxrunner import ParallelRunner

LONG: dict[str, Any] = {"max_tokens": 100, "stop_tokens": []}
"""Options of an answer that takes a while."""


def opened(parts: Any, slots: int = 2, context: int = 128, **settings: Any) -> ParallelRunner:
    return ParallelRunner(*parts, max_sequences=slots, context=context, **settings)


def in_threads(count: int, act: Callable[[int], object]) -> None:
    """Call `act` in `count` threads at once, with their numbers. Raise the error of one of them."""
    together = threading.Barrier(count)

    def begin(number: int) -> object:
        together.wait()
        return act(number)

    with ThreadPoolExecutor(count) as pool:
        for future in [pool.submit(begin, number) for number in range(count)]:
            future.result()


def asked(rng: random.Random, trunk: list[int]) -> tuple[list[int], dict[str, Any]]:
    """Return a random prompt that may begin like others, and options."""
    prompt = trunk[: rng.choice([0, 5, 30])] + [
        rng.randrange(290) for _ in range(rng.randint(1, 9))
    ]
    options: dict[str, Any] = {"max_tokens": rng.randint(1, 12), "stop_tokens": []}
    kinds: list[dict[str, Any]] = [
        {},
        {},
        {"temperature": 1.0, "seed": rng.randrange(9)},
        {"repetition_penalty": 1.3},
        {"logprobs": 2},
        {"schema": {"type": "integer", "minimum": 1, "maximum": 99}, "max_tokens": 5},
    ]
    return prompt, options | rng.choice(kinds)
