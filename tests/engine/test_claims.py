"""Requests claim cells, grow, wait and step back. Each one that begins comes to its end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mlxrunner.engine.scheduling.allocation import (
    LEAST,
    claimed,
    grown,
    steps_back,
)
from mlxrunner.errors import CacheFullError


def test_a_request_that_fits_claims_its_whole_answer() -> None:
    assert claimed(10, 100, free=1000, total=1000, slots=4) == 100


def test_a_long_answer_claims_an_even_share_of_what_is_left() -> None:
    assert claimed(1000, 32000, 9000, 9000, slots=4) == 2000
    assert claimed(1000, 32000, 9000, 9000, slots=1) == 8000


def test_a_claim_is_at_least_256_tokens_or_the_whole_answer() -> None:
    assert claimed(0, 32000, 300, 9000, slots=8) == LEAST
    assert claimed(0, 20, 20, 9000, slots=8) == 20


@pytest.mark.parametrize(
    ("prompt", "answer", "free", "numbers"),
    [
        (100, 50, 149, "needs 150 free cells, but 149 of 200 are free"),
        (100, 9000, 180, "needs 356 free cells, but 180 of 200 are free"),
        (100, 50, -3, "needs 150 free cells, but 0 of 200 are free"),
    ],
    ids=["an answer", "its least part", "nothing is free"],
)
def test_a_request_waits_for_what_it_needs(
    prompt: int, answer: int, free: int, numbers: str
) -> None:
    with pytest.raises(CacheFullError, match=f"{numbers}.*when another request has ended"):
        claimed(prompt, answer, free, 200, 4)


def test_an_answer_grows_by_an_even_share() -> None:
    assert grown(left=5000, free=4000, running=4) == 1000
    assert grown(left=5000, free=400, running=4) == LEAST
    assert grown(left=5000, free=7, running=4) == 7
    assert grown(left=3, free=4000, running=4) == 3
    assert grown(left=3, free=0, running=4) == grown(left=3, free=-9, running=4) == 0


@pytest.mark.parametrize(
    ("running", "index"),
    [
        (["interactive", "interactive", "interactive"], 2),
        (["interactive", "batch", "interactive"], 1),
        (["batch", "batch", "interactive"], 1),
        (["batch"], 0),
    ],
)
def test_the_youngest_of_the_lowest_priority_steps_back(running: list[str], index: int) -> None:
    """Requests come in the order of their arrival."""
    requests: list[Any] = [SimpleNamespace(priority=priority) for priority in running]
    assert steps_back(requests) is requests[index]
