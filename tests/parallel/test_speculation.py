"""Guessed tokens never change an answer of a request that runs beside others."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from support.checked import ARCHITECTURES, WITH_WINDOWS, parts
from support.guessed import GuessedHistory
from support.sample import fewer

STATES = ["qwen3_next", "lfm2", "mamba2", "jamba", "deepseek_v3", "llama4", "falcon_h1", "rwkv7"]


@pytest.mark.exhaustive(5, "llama", "gemma3_text", "qwen3_next", "llama4", "mamba2")
@pytest.mark.parametrize("name", [*ARCHITECTURES, *STATES])
def test_any_history_with_guesses_gives_the_answers_of_cold_single_runs(name: str) -> None:
    """Guesses are right, half right and wrong; requests shift, stop, fail and are interrupted."""
    seen = Counter[str]()
    for seed in range(fewer(4, 1)):
        rng = random.Random(f"{name} {seed}")
        window = rng.choice([4, 16, 33, 70]) if name in WITH_WINDOWS else 0
        one = GuessedHistory(parts(name, window), rng)
        one.weights = (8.0, 12.0, 1.0, 0.5, 2.0, 0.5, 0.0)
        one.failures = KeyboardInterrupt, RuntimeError
        one.open()
        for _ in range(fewer(60, 30)):
            rng.choices(one.acts, one.weights)[0](one.runner)
        one.close()
        seen += one.seen
    assert seen["answered"] > 3
    assert min(seen["wrong"], seen["right"]) > 5
