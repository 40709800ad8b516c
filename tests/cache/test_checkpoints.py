"""Which checkpoints are kept, and where a prefill pauses to take one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxrunner.cache.checkpoints import HEADER, NEAR_END, SPACING, Checkpoint, Checkpoints, stops


def at(offset: int, nbytes: int = 1, *, anchor: bool = False) -> Checkpoint:
    return Checkpoint(offset, nbytes, is_anchor=anchor)


def holding(budget: int, *offsets: int, anchor: int | None = None) -> Checkpoints:
    """Checkpoints of one byte each, added in this order."""
    found = Checkpoints(budget)
    for offset in offsets:
        found.add(at(offset, anchor=offset == anchor))
    return found


def test_they_are_found_by_offset() -> None:
    """`at` exactly, `before` from the largest on that is not beyond."""
    some = holding(9, 30, 10, 20)
    assert some.offsets == [10, 20, 30]
    assert len(some) == some.nbytes == 3
    assert some.at(20) == at(20)
    assert some.at(21) is None
    for to, offsets in [(9, []), (10, [10]), (29, [20, 10]), (30, [30, 20, 10]), (99, [30, 20, 10])]:
        assert [one.offset for one in some.before(to)] == offsets


@pytest.mark.parametrize(("to", "left"), [(0, []), (19, [10]), (20, [10, 20]), (99, [10, 20, 30])])
def test_truncate_drops_what_lies_beyond(to: int, left: list[int]) -> None:
    """The one at the offset itself stays."""
    some = holding(9, 10, 20, 30)
    some.truncate(to)
    assert some.offsets == left


def test_one_per_offset() -> None:
    """The first one: what it holds is what a second one would."""
    some = Checkpoints(100)
    some.add(at(10, 5))
    some.add(at(10, 7))
    assert (some.offsets, some.nbytes) == ([10], 5)


def test_one_that_is_larger_than_the_budget_is_not_kept() -> None:
    """And costs none of the others."""
    some = holding(3, 10, 20, 30)
    some.add(at(40, 4))
    assert some.offsets == [10, 20, 30]
    assert not len(holding(0, 10))


@pytest.mark.parametrize(
    ("offsets", "new", "left"),
    [
        pytest.param([10, 12, 20], 30, [10, 20, 30], id="at-12-leaves-10-tokens"),
        pytest.param([10, 20, 22, 40], 60, [10, 22, 40, 60], id="at-20-leaves-12-tokens"),
        pytest.param([10, 20, 30], 31, [10, 20, 31], id="just-before-the-new-one"),
        pytest.param([10, 20, 30], 16, [10, 16, 30], id="the-new-one-in-the-middle"),
        pytest.param([10, 20, 30], 5, [5, 20, 30], id="the-new-one-at-the-front"),
        pytest.param([1000, 2000, 3000], 3001, [1000, 2000, 3001], id="the-last-one-is-replaced-by-a-later-one"),
    ],
)
def test_the_one_whose_loss_leaves_the_smallest_gap_goes_first(offsets: list[int], new: int, left: list[int]) -> None:
    """Gap: the tokens between the one before it (or the beginning) and the one after it."""
    some = holding(len(offsets), *offsets)
    some.add(at(new))
    assert some.offsets == left


def test_the_anchor_goes_last() -> None:
    """The system prompt's end, though it is close to others; given up only when there is nothing else."""
    some = holding(3, 10, 12, 14, anchor=12)
    for new in (16, 18, 100, 101):
        some.add(at(new))
        assert 12 in some.offsets
    some.add(at(200, 2))
    assert some.offsets == [12, 200]
    some.add(at(300, 3))
    assert some.offsets == [300]


def test_a_long_conversation_is_covered_evenly() -> None:
    """With room for 8, a thousand turns leave no gap much larger than the even one."""
    some = Checkpoints(8)
    for turn in range(1, 1001):
        some.add(at(turn * 100, anchor=turn == 1))
    gaps = [right - left for left, right in pairwise(some.offsets)]
    assert len(some) == 8
    assert some.offsets[0] == 100
    assert some.offsets[-1] == 100_000
    assert max(gaps) <= 3 * 100_000 / 8


def gap(offset: int, offsets: list[int]) -> float:
    """Tokens that would be without a checkpoint if the one at `offset` went; the last one's reach as far again."""
    around = [0, *sorted(offsets), max(offsets) * 2]
    index = around.index(offset, 1)
    return around[index + 1] - around[index - 1]


additions = st.lists(st.tuples(st.integers(1, 400), st.integers(1, 12), st.booleans()), max_size=30)


@settings(max_examples=300, deadline=None)
@given(budget=st.integers(0, 40), adds=additions, cuts=st.lists(st.integers(0, 400), max_size=3))
def test_the_budget_holds_whatever_is_added(budget: int, adds: list[Any], cuts: list[int]) -> None:
    """Sorted, distinct, never over the budget; the new one stays; nothing is dropped for nothing."""
    some = Checkpoints(budget)
    for turn, (offset, nbytes, anchor) in enumerate(adds):
        before, has_anchor = list(some.offsets), [one.offset for one in some.before(10**6) if one.is_anchor]
        room = budget - some.nbytes
        some.add(at(offset, nbytes, anchor=anchor and not has_anchor))
        assert some.nbytes <= budget
        assert some.offsets == sorted(set(some.offsets))
        assert set(some.offsets) <= {*before, offset}
        if offset in before or nbytes > budget:
            assert some.offsets == before
        else:
            assert offset in some.offsets
            lost = set(before) - set(some.offsets)
            assert bool(lost) == (nbytes > room)
            assert not lost & set(has_anchor) or set(some.offsets) == {offset}
        if turn < len(cuts):
            some.truncate(cuts[turn])
            assert all(kept <= cuts[turn] for kept in some.offsets)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 500), unique=True, min_size=2, max_size=20), st.integers(1, 6))
def test_no_other_loss_would_leave_a_smaller_gap(offsets: list[int], budget: int) -> None:
    """When one of equal size has to go."""
    some = Checkpoints(budget)
    for new in offsets:
        before = list(some.offsets)
        some.add(at(new))
        for lost in set(before) - set(some.offsets):
            assert gap(lost, [*before, new]) == min(gap(other, [*before, new]) for other in before)


def chat(*lengths: int) -> tuple[list[int], int]:
    """Ends of messages of so many tokens, and the tokens of the prompt: an answer's header follows."""
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return ends, ends[-1] + 4


@pytest.mark.parametrize(
    ("lengths", "start", "expected"),
    [
        pytest.param([100, 50], 0, [100, 150], id="system-and-question"),
        pytest.param([100, 50, 400, 30], 0, [100, 550, 580], id="system-question-answer-question"),
        pytest.param([100, 300, 400, 30], 0, [100, 400, 800, 830], id="long-enough-to-be-worth-it"),
        pytest.param([100, 300, 400, 30], 600, [800, 830], id="only-what-is-new"),
        pytest.param([100, 300, 400, 30], 830, [], id="only-the-header-is-new"),
        pytest.param([2500], 0, [1000, 2000, 2500], id="one-long-message"),
        pytest.param([1000 + SPACING, 7], 0, [1256, 1263], id="no-stop-just-before-another"),
        pytest.param([1001 + SPACING, 7], 0, [1000, 1257, 1264], id="a-stop-that-is-far-enough-from-the-next"),
        pytest.param([100, SPACING, SPACING, 7], 0, [100, 356, 612, 619], id="just-far-enough-from-each-other"),
        pytest.param([100, SPACING - 1, SPACING, 7], 0, [100, 611, 618], id="not-quite-far-enough"),
        pytest.param([3], 0, [3], id="one-short-message"),
    ],
)
def test_the_stops_of_a_chat(lengths: list[int], start: int, expected: list[int]) -> None:
    """The system prompt's end, the last message's beginning and end, far-apart others, one in 1000 tokens elsewhere."""
    ends, total = chat(*lengths)
    assert stops(start, total, ends, 1000) == expected


@pytest.mark.parametrize(
    ("start", "total", "expected"),
    [(0, 5, []), (0, NEAR_END, []), (0, 100, [92]), (95, 100, []), (50, 100, [92]), (0, 3000, [1000, 2000, 2992])],
)
def test_a_prompt_without_messages_stops_shortly_before_its_end(start: int, total: int, expected: list[int]) -> None:
    """And every 1000 tokens."""
    assert stops(start, total, [], 1000) == expected


@pytest.mark.parametrize(("total", "expected"), [(600 + HEADER, [100, 600]), (601 + HEADER, [100, 600, 657])])
def test_a_message_that_goes_on_after_the_last_end(total: int, expected: list[int]) -> None:
    """Where that is longer than a header, the place shortly before the prompt's end is a stop too."""
    assert stops(0, total, [100, 600], 1000) == expected


def test_many_short_messages_are_few_stops() -> None:
    """A thousand messages of 20 tokens split 20,000 tokens no more often than SPACING says."""
    ends, total = chat(*[20] * 1000)
    found = stops(0, total, ends, 1024)
    assert len(found) <= total // SPACING + 4
    assert {ends[0], ends[-2], ends[-1]} <= set(found)


@settings(max_examples=400, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60) | st.integers(1, 4000), max_size=25),
    header=st.integers(0, 200),
    interval=st.integers(1, 3000),
    data=st.data(),
)
def test_what_holds_of_all_stops(lengths: list[int], header: int, interval: int, data: st.DataObject) -> None:
    """For any messages, start and interval."""
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    total = (ends[-1] if ends else 0) + header
    start = data.draw(st.integers(0, max(0, total - 1)))
    found = stops(start, total, ends, interval)
    # Within what is evaluated, in order, and ending so that one short pass is left for the answer's seed.
    assert found == sorted(set(found))
    assert all(start < stop < total for stop in found)
    assert total - (found or [start])[-1] <= HEADER
    assert total - (found or [start])[-1] <= NEAR_END or found[-1:] == [end for end in ends if end < total][-1:]
    # The places that the next prompt is most likely to leave this one at.
    inside = [end for end in ends if start < end < total]
    likely = {end for end in (*ends[:1], *inside[-2:]) if start < end <= (found or [start])[-1]}
    assert likely <= set(found)
    # Never far from a stop, and no stop without need.
    assert all(right - left <= interval + SPACING for left, right in pairwise([start, *found, total]))
    last = (found or [0])[-1]
    for left, right in pairwise(found):
        if not {left, right} <= {*likely, last}:
            assert right - left >= min(SPACING, interval)
