"""Random histories of mixed requests give each answer of a cold single runner."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from support.histories import WITH_WINDOWS, CheckedHistory, parts


def history(name: str, seed: int, events: int) -> Counter[str]:
    rng = random.Random(f"{name} {seed}")
    window = rng.choice([4, 16, 33, 70]) if name in WITH_WINDOWS else 0
    one = CheckedHistory(parts(name, window), rng)
    one.run(events)
    return one.seen


@pytest.mark.usefixtures("proved_once")
@pytest.mark.exhaustive(1)
@pytest.mark.parametrize("name", ["olmo3", "exaone4", "qwen3", "phi3"])
def test_any_history_gives_the_answers_of_cold_single_runs(name: str) -> None:
    """Every history of shares, shifts, stops, forms and interrupts gives cold single answers.

    Windows have any size against the context, and there are few cells or enough. The other
    architectures are in `test_stateful.py`.
    """
    seen = Counter[str]()
    for seed in range(8):
        seen += history(name, seed, 40)
        has_all = seen["answered"] > 8 and min(seen["shifted"], seen["reused"]) > 0
        if has_all and seed:
            break
    assert has_all
