"""Requests take turns by priority and deadline, and none starves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrunner.engine.scheduling.pacing import FAIR, FairShare, TokenDemand, check, deal_evenly
from mlxrunner.errors import OptionError


@given(st.integers(0, 60), st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(0, 20))
def test_a_step_is_shared_without_waste_and_nobody_starves(
    budget: int, wants: list[int], first: int
) -> None:
    """All of the budget is used while anybody wants more; shares differ by a token at most."""
    given_ = deal_evenly(budget, wants, first)
    assert all(0 <= got <= want for got, want in zip(given_, wants, strict=True))
    assert sum(given_) == min(budget, sum(wants))
    short = [got for got, want in zip(given_, wants, strict=True) if got < want]
    if short and budget >= len(wants):
        assert min(short) > 0


def test_turns_go_round() -> None:
    assert [deal_evenly(1, [5, 5, 5], turn).index(1) for turn in range(3)] == [0, 1, 2]


def dealt(budget: int, *wants: TokenDemand, turns: int = 1) -> list[int]:
    """Return what each request got in the last of some turns."""
    order = FairShare()
    for _ in range(turns):
        given_ = order.deal(budget, wants)
    return given_


def test_interactive_requests_come_first_and_batch_gets_what_is_left() -> None:
    assert dealt(10, TokenDemand(8, "batch"), TokenDemand(6), TokenDemand(2, "batch")) == [2, 6, 2]
    assert dealt(10, TokenDemand(8, "batch"), TokenDemand(60)) == [0, 10]


def test_within_a_priority_the_nearest_deadline_comes_first() -> None:
    assert dealt(10, TokenDemand(5), TokenDemand(5, due=9.0), TokenDemand(5, due=3.0)) == [0, 5, 5]
    assert dealt(10, TokenDemand(9, "batch", due=1.0), TokenDemand(9), TokenDemand(9)) == [0, 9, 1]


def test_a_prompt_that_needs_little_is_done_first_and_equal_ones_take_turns() -> None:
    wants = [TokenDemand(64, left=900), TokenDemand(30, left=30), TokenDemand(64, left=64)]
    assert dealt(64, *wants) == [0, 30, 34]
    equal = [TokenDemand(9, left=9)] * 3
    assert [dealt(9, *equal, turns=turn).index(9) for turn in (1, 2, 3)] == [1, 2, 0]
    assert dealt(9, *equal, turns=FAIR) == [3, 3, 3]


def test_one_turn_in_eight_is_shared_by_all() -> None:
    """A flood of interactive requests, or of deadlines, lets nothing starve."""
    wants = [TokenDemand(100, "batch"), TokenDemand(100), TokenDemand(100, due=1.0)]
    given_ = [dealt(30, *wants, turns=turn) for turn in range(1, FAIR + 1)]
    assert given_[-1] == [10, 10, 10]
    assert all(one == [0, 0, 30] for one in given_[:-1])


@pytest.mark.parametrize(
    ("priority", "deadline", "message"),
    [
        ("urgent", None, "priority: 'urgent' is not known, it has to be one of interactive, batch"),
        (3, None, "priority: 3 is not known"),
        ("batch", 0, "deadline: 0 is out of range, it has to be more than 0"),
        ("batch", "soon", "deadline: 'soon' is not a number"),
    ],
)
def test_wrong_terms_are_refused(priority: str, deadline: float, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        check(priority, deadline)  # type: ignore[arg-type]
