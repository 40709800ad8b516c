"""Checkpoints are kept by their use, within the budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import at, holding
from support.sample import examples

from mlxrunner.cache.checkpoints import (
    INTERVAL,
    ROLES,
    Checkpoints,
    Role,
    places_of,
    thinned,
)
from mlxrunner.testing import interrupt_at


def test_they_are_found_by_offset() -> None:
    """`at` exactly, `before` from the largest on that is not beyond."""
    some = holding(9, 30, 10, 20)
    assert some.offsets == [10, 20, 30]
    assert len(some) == some.nbytes == 3
    assert some.at(20) == at(20)
    assert some.at(21) is None
    for to, offsets in [
        (9, []),
        (10, [10]),
        (29, [20, 10]),
        (30, [30, 20, 10]),
        (99, [30, 20, 10]),
    ]:
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
    """It costs none of the others."""
    some = holding(3, 10, 20, 30)
    some.add(at(40, 4))
    assert some.offsets == [10, 20, 30]
    assert not len(holding(0, 10))


@pytest.mark.parametrize(
    ("offsets", "lost"),
    [
        pytest.param(
            [1000, 1100, 3000, 4000, 5000, 6000], 1100, id="the-gap-that-fills-the-spacing-best"
        ),
        pytest.param(
            [2500, 5200, 7200, 10200, 12000, 12600], 12000, id="the-only-one-that-does-no-harm"
        ),
        pytest.param([60, 120, 180, 240, 300, 360], 60, id="all-closer-than-is-worth-it"),
    ],
)
def test_what_lies_in_between_is_thinned_evenly(offsets: list[int], lost: int) -> None:
    """Thinning keeps free places too: with 5 of which 2 are free, a third of the text is enough."""
    kept = thinned([at(offset) for offset in offsets], 5, INTERVAL)
    assert {*offsets} - {one.offset for one in kept} == {lost}


def test_where_every_loss_does_harm_the_smallest_gap_is_left() -> None:
    """The three with roles leave less choice."""
    items = [
        at(100, role="system"),
        *map(at, (3000, 6000, 9100)),
        at(12000, role="message"),
        at(12010, role="answer"),
    ]
    assert [one.offset for one in thinned(items, 5, INTERVAL)] == [100, 6000, 9100, 12000, 12010]


def test_those_with_a_role_go_last() -> None:
    """The system prompt's end goes after the answer's begin, and the last message's begin last."""
    items = [
        at(10, role="system"),
        at(20),
        at(900, role="message"),
        at(950, role="answer"),
        at(2000),
    ]
    found = [
        [one.offset for one in thinned(items, budget, INTERVAL)] for budget in range(5, -1, -1)
    ]
    assert found == [
        [10, 20, 900, 950, 2000],
        [10, 900, 950, 2000],
        [10, 900, 950],
        [10, 900],
        [900],
        [],
    ]


marks = st.lists(
    st.tuples(st.integers(1, 5000), st.integers(0, 12), st.sampled_from([None, None, *ROLES])),
    max_size=30,
    unique_by=lambda m: m[0],
)


@examples(400)
@given(marks, st.integers(0, 60), st.integers(1, 3000))
def test_what_holds_of_every_thinning(
    given_marks: list[tuple[int, int, Role | None]], budget: int, interval: int
) -> None:
    """Thinning keeps an ordered subset within the budget, and is stable and idempotent.

    Nothing goes without need, and roles outlive the others.
    """
    items = [at(*mark) for mark in sorted(given_marks, key=lambda mark: mark[0])]
    kept = thinned(items, budget, interval)
    assert sum(item.nbytes for item in kept) <= budget
    assert kept == [item for item in items if item in kept]
    assert kept == thinned(items, budget, interval) == thinned(kept, budget, interval)
    lost = [item for item in items if item not in kept]
    if lost:
        assert sum(item.nbytes for item in items) > budget
    for item in lost:
        if item.role is not None:  # nothing that is worth less was left
            assert all(
                other.role is not None and ROLES.index(other.role) >= ROLES.index(item.role)
                for other in kept
            )
    if lost and items[-1] in lost and items[-1].role is None:
        assert all(item.role is not None for item in kept)


additions = st.lists(st.tuples(st.integers(1, 400), st.integers(1, 12)), max_size=30)


@examples(300)
@given(
    budget=st.integers(0, 40),
    adds=additions,
    cuts=st.lists(st.integers(0, 400), max_size=3),
    data=st.data(),
)
def test_the_budget_holds_whatever_is_added(
    budget: int, adds: list[tuple[int, int]], cuts: list[int], data: st.DataObject
) -> None:
    """Checkpoints are sorted and distinct within the budget after any additions, marks and cuts."""
    some = Checkpoints(budget)
    for turn, (offset, nbytes) in enumerate(adds):
        if turn % 5 == 0:
            ends = sorted(data.draw(st.sets(st.integers(1, 400), max_size=4)))
            some.mark(places_of(data.draw(st.integers(1, 500)), ends, ahead=turn % 2 == 1))
        before, room = list(some.offsets), budget - some.nbytes
        kept = some.add(at(offset, nbytes))
        assert some.nbytes <= budget
        assert some.offsets == sorted(set(some.offsets))
        assert set(some.offsets) <= {*before, offset}
        assert kept == (offset in some.offsets and offset not in before)
        if nbytes <= room:
            assert some.offsets == sorted({*before, offset})
        if turn < len(cuts):
            some.truncate(cuts[turn])
            assert all(left <= cuts[turn] for left in some.offsets)


@pytest.mark.parametrize("budget", range(1, 9))
def test_an_interrupt_at_any_line_leaves_it_whole(budget: int) -> None:
    """An interrupt leaves the old state or the new one, within the budget, and stays usable."""
    line, was_interrupted = 0, True
    while was_interrupted:
        line, was_interrupted = line + 1, False
        some = holding(budget, 10, 20, 30, 40, 50, 60, 70, 80)
        before = some.offsets
        some.mark(places_of(104, [20, 80, 100]))
        try:
            with interrupt_at(line):
                some.add(at(100))
        except KeyboardInterrupt:
            was_interrupted = True
            whole = holding(budget, 10, 20, 30, 40, 50, 60, 70, 80)
            whole.mark(places_of(104, [20, 80, 100]))
            whole.add(at(100))
            assert some.offsets in (before, whole.offsets)
            some.add(at(100))
            assert some.offsets == whole.offsets
    assert line > 10
