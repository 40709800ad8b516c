"""A prompt has places for checkpoints, and a prefill pauses there to take them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import at, stops
from support.sample import examples

from mlxrunner.cache.checkpoints import (
    HEADER,
    NEAR_END,
    SPACING,
    Checkpoints,
    Role,
    places_of,
    spacing,
)


@pytest.mark.parametrize(
    ("ends", "total", "ahead", "roles"),
    [
        pytest.param(
            [100, 150], 154, False, {100: "message", 150: "answer"}, id="system-and-question"
        ),
        pytest.param(
            [100, 150, 300, 340],
            344,
            False,
            {100: "system", 300: "message", 340: "answer"},
            id="a-second-question",
        ),
        pytest.param(
            [1176, 1200],
            1204,
            False,
            {1168: "system", 1176: "message", 1200: "answer"},
            id="a-long-system-prompt",
        ),
        pytest.param(
            [SPACING, 300, 400],
            404,
            False,
            {SPACING - NEAR_END: "system", 300: "message", 400: "answer"},
            id="just-long",
        ),
        pytest.param(
            [SPACING - 1, 300, 400],
            404,
            False,
            {SPACING - 1: "system", 300: "message", 400: "answer"},
            id="not-quite",
        ),
        pytest.param([50], 54, False, {50: "answer"}, id="one-message"),
        pytest.param([], 100, False, {92: "answer"}, id="no-messages"),
        pytest.param([], NEAR_END, False, {}, id="too-short-for-any"),
        pytest.param(
            [100, 600],
            601 + HEADER,
            False,
            {100: "system", 600: "message", 593 + HEADER: "answer"},
            id="goes-on",
        ),
        pytest.param(
            [100, 150, 300], 330, True, {100: "system", 300: "message"}, id="while-it-is-typed"
        ),
    ],
)
def test_the_places_of_a_prompt(
    ends: list[int], total: int, ahead: bool, roles: dict[int, Role]
) -> None:
    """The places are the system prompt's end, the last message's begin and the answer's.

    Of a long system prompt the place is shortly before its end.
    """
    places = places_of(total, ends, ahead=ahead)
    assert places.roles == roles
    assert places.until == (total if ahead else max(roles, default=0))


@pytest.mark.parametrize(
    ("at_", "place"),
    [(None, 300), (291, 300), (292, 292), (299, 299), (300, 300), (310, 300), (100, 300)],
)
def test_the_last_message_begins_where_its_prompt_is_evaluated_to(
    at_: int | None, place: int
) -> None:
    """A few tokens before its true place, no pass has to end there."""
    places = places_of(344, [100, 300, 340], at=at_)
    assert places.roles == {100: "system", place: "message", 340: "answer"}


@pytest.mark.parametrize("first", [1, NEAR_END, NEAR_END + 1])
def test_no_place_is_at_the_beginning(first: int) -> None:
    """A cold start is as good there."""
    roles = places_of(first + 40, [first, first + 36], at=0).roles
    role = "system" if first <= NEAR_END else "message"
    assert roles == {first: role, first + 36: "answer"}


def test_while_a_draft_is_typed_the_place_of_the_last_answer_keeps_its_role() -> None:
    """The answer may still be regenerated instead."""
    some = Checkpoints(4)
    some.mark(places_of(344, [100, 150, 300, 340]))
    for offset in (100, 300, 340):
        some.add(at(offset))
    for typed in range(500, 1000, 7):
        some.mark(places_of(typed, [100, 150, 300, 340, 480], ahead=True))
        for offset in (480, typed):
            some.add(at(offset))
    assert some.offsets[:3] == [100, 340, 480]
    some.mark(places_of(1004, [100, 150, 300, 340, 480, 1000]))
    assert [one.role for one in some][:3] == ["system", None, "message"]


@pytest.mark.parametrize(
    ("ends", "total", "start", "expected"),
    [
        pytest.param([100, 150], 154, 0, [100, 150], id="system-and-question"),
        pytest.param([100, 150, 550, 580], 584, 0, [100, 550, 580], id="question-answer-question"),
        pytest.param([100, 150, 550, 580], 584, 560, [580], id="only-what-is-new"),
        pytest.param([100, 150, 550, 580], 584, 580, [], id="only-the-header-is-new"),
        pytest.param([2500], 2504, 0, [1000, 2000, 2500], id="one-long-message"),
        pytest.param([1200], 1204, 0, [1200], id="no-stop-just-before-another"),
        pytest.param([1251], 1255, 0, [1000, 1251], id="far-enough-from-the-next"),
        pytest.param(
            [100, 700, 2900, 3000],
            3004,
            0,
            [100, 700, 1700, 2900, 3000],
            id="at-a-message-end-if-one-is-near",
        ),
        pytest.param(
            [5000, 5100],
            5104,
            0,
            [1000, 2000, 3000, 4000, 4992, 5000, 5100],
            id="inside-a-long-system-prompt",
        ),
        pytest.param([], 5, 0, [], id="short-text"),
        pytest.param([], 3000, 0, [1000, 2000, 2992], id="text"),
    ],
)
def test_where_a_prefill_pauses(
    ends: list[int], total: int, start: int, expected: list[int]
) -> None:
    """At the places of the prompt, and one in 1000 tokens where the budget has room."""
    assert stops(Checkpoints(100, 1000), start, places_of(total, ends)) == expected


@examples(300)
@given(
    lengths=st.lists(st.integers(1, 60) | st.integers(1, 4000), max_size=25),
    header=st.integers(0, 200),
    interval=st.integers(1, 3000),
    budget=st.integers(1, 40),
    data=st.data(),
)
def test_what_holds_of_all_stops(
    lengths: list[int], header: int, interval: int, budget: int, data: st.DataObject
) -> None:
    """Stops are in order, at all places, near each other and few, for any prompt and settings."""
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    total = (ends[-1] if ends else 0) + header
    start = data.draw(st.integers(0, max(0, total - 1)))
    places = places_of(total, ends)
    found = stops(Checkpoints(budget, interval), start, places)
    assert found == sorted(set(found))
    assert {place for place in places.roles if place > start} <= set(found)
    assert total - max([start, *found]) <= max(HEADER, total - places.until)
    widest = 4 * spacing(total, budget, interval) // 3
    assert all(
        right - left <= widest + widest // 4 + 1 for left, right in pairwise([start, *found])
    )
    most = len(places.roles) + 2 * (total - start) // min(SPACING, interval) + 2
    assert len(found) <= most
