"""Checkpoints: where prompts pause to take them, which are kept, and what conversations lose."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sample import examples

from mlxrunner.cache.entry import (
    HEADER,
    INTERVAL,
    NEAR_END,
    PINNED,
    ROLES,
    SPACING,
    Checkpoint,
    CheckpointPlaces,
    Checkpoints,
    Role,
    places_of,
    spacing,
    thinned,
)
from mlxrunner.testing import interrupt_at


def at(offset: int, nbytes: int = 1, role: Role | None = None) -> Checkpoint:
    return Checkpoint(offset, nbytes, role=role)


def holding(budget: int, *offsets: int) -> Checkpoints:
    """Checkpoints of one byte each, added in this order."""
    found = Checkpoints(budget)
    for offset in offsets:
        found.add(at(offset))
    return found


def stops(some: Checkpoints, start: int, places: CheckpointPlaces, nbytes: int = 1) -> list[int]:
    """Where a prefill from `start` on pauses, taking a checkpoint each time."""
    some.mark(places)
    at_, found = start, []
    while (stop := some.next_stop(at_)) is not None:
        assert at_ < stop <= places.until
        found.append(stop)
        some.add(at(stop, nbytes))
        at_ = stop
    return found


PLACES: dict[str, tuple[list[int], int, dict[int, Role]]] = {
    "system and question": ([100, 150], 154, {100: "message", 150: "answer"}),
    "a second question": (
        [100, 150, 300, 340],
        344,
        {100: "system", 300: "message", 340: "answer"},
    ),
    "a long system prompt": (
        [1176, 1200],
        1204,
        {1168: "system", 1176: "message", 1200: "answer"},
    ),
    "just long": (
        [SPACING, 300, 400],
        404,
        {SPACING - NEAR_END: "system", 300: "message", 400: "answer"},
    ),
    "not quite": (
        [SPACING - 1, 300, 400],
        404,
        {SPACING - 1: "system", 300: "message", 400: "answer"},
    ),
    "one message": ([50], 54, {50: "answer"}),
    "no messages": ([], 100, {92: "answer"}),
    "too short for any": ([], NEAR_END, {}),
    "goes on": (
        [100, 600],
        601 + HEADER,
        {100: "system", 600: "message", 593 + HEADER: "answer"},
    ),
}


@pytest.mark.parametrize(("ends", "total", "roles"), PLACES.values(), ids=PLACES)
def test_the_places_of_a_prompt(ends: list[int], total: int, roles: dict[int, Role]) -> None:
    """The places are the system prompt's end, the last message's begin and the answer's.

    Of a long system prompt the place is shortly before its end.
    """
    places = places_of(total, ends)
    assert (places.roles, places.until) == (roles, max(roles, default=0))


def test_the_places_while_a_prompt_is_typed() -> None:
    places = places_of(330, [100, 150, 300], ahead=True)
    assert (places.roles, places.until) == ({100: "system", 300: "message"}, 330)


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


PAUSES: dict[str, tuple[list[int], int, int, list[int]]] = {
    "system and question": ([100, 150], 154, 0, [100, 150]),
    "question, answer, question": ([100, 150, 550, 580], 584, 0, [100, 550, 580]),
    "only what is new": ([100, 150, 550, 580], 584, 560, [580]),
    "only the header is new": ([100, 150, 550, 580], 584, 580, []),
    "one long message": ([2500], 2504, 0, [1000, 2000, 2500]),
    "no stop just before another": ([1200], 1204, 0, [1200]),
    "far enough from the next": ([1251], 1255, 0, [1000, 1251]),
    "a message's end that is near": ([100, 700, 2900, 3000], 3004, 0, [100, 700, 1700, 2900, 3000]),
    "a long system prompt": ([5000, 5100], 5104, 0, [*range(1000, 5000, 1000), 4992, 5000, 5100]),
    "short text": ([], 5, 0, []),
    "text": ([], 3000, 0, [1000, 2000, 2992]),
}


@pytest.mark.parametrize(("ends", "total", "start", "expected"), PAUSES.values(), ids=PAUSES)
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


def test_they_are_found_by_offset() -> None:
    """`at` exactly, `before` from the largest on that is not beyond."""
    some = holding(9, 30, 10, 20)
    assert some.offsets == [10, 20, 30]
    assert len(some) == some.nbytes == 3
    assert (some.at(20), some.at(21)) == (at(20), None)
    found = {to: [one.offset for one in some.before(to)] for to in (9, 10, 29, 30, 99)}
    whole = [30, 20, 10]
    assert found == {9: [], 10: [10], 29: [20, 10], 30: whole, 99: whole}


@pytest.mark.parametrize(("to", "left"), [(0, []), (19, [10]), (20, [10, 20]), (99, [10, 20, 30])])
def test_truncate_drops_what_lies_beyond(to: int, left: list[int]) -> None:
    """The one at the offset itself stays."""
    some = holding(9, 10, 20, 30)
    some.truncate(to)
    assert some.offsets == left


def test_one_per_offset_that_fits_is_kept() -> None:
    """The first one holds what a second would; a too large one costs none of the others."""
    some = Checkpoints(100)
    for nbytes in (5, 7):
        some.add(at(10, nbytes))
    assert (some.offsets, some.nbytes) == ([10], 5)
    some = holding(3, 10, 20, 30)
    some.add(at(40, 4))
    assert some.offsets == [10, 20, 30]
    assert not len(holding(0, 10))


@pytest.mark.parametrize(
    ("offsets", "lost"),
    [
        ([1000, 1100, 3000, 4000, 5000, 6000], 1100),
        ([2500, 5200, 7200, 10200, 12000, 12600], 12000),
        ([60, 120, 180, 240, 300, 360], 60),
    ],
    ids=["the gap that fills the spacing best", "the only one that does no harm", "all are close"],
)
def test_what_lies_in_between_is_thinned_evenly(offsets: list[int], lost: int) -> None:
    """Thinning keeps free places too: with 5 of which 2 are free, a third of the text is enough."""
    kept = thinned([at(offset) for offset in offsets], 5, INTERVAL)
    assert {*offsets} - {one.offset for one in kept} == {lost}


def test_those_with_a_role_go_last() -> None:
    """The system prompt's end goes after the answer's begin, and the last message's begin last.

    Where every loss does harm, the smallest gap is left.
    """
    roles: dict[int, Role] = {10: "system", 900: "message", 950: "answer"}
    items = [at(offset, role=roles.get(offset)) for offset in (10, 20, 900, 950, 2000)]
    left = [[one.offset for one in thinned(items, count, INTERVAL)] for count in range(5, -1, -1)]
    assert left[:3] == [[10, 20, 900, 950, 2000], [10, 900, 950, 2000], [10, 900, 950]]
    assert left[3:] == [[10, 900], [900], []]
    roles = {100: "system", 12000: "message", 12010: "answer"}
    items = [at(offset, role=roles.get(offset)) for offset in (100, 3000, 6000, 9100, 12000, 12010)]
    assert [one.offset for one in thinned(items, 5, INTERVAL)] == [100, 6000, 9100, 12000, 12010]


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


Turn = tuple[int, int]
"""Tokens of a message and of its answer."""
SHORT: list[Turn] = [(60, 120)] * 40
LONG: list[Turn] = [(900, 1400)] * 40
MIXED: list[Turn] = [[(40, 60), (2500, 300), (100, 900), (20, 20)][i % 4] for i in range(40)]
HISTORIES = {"short": SHORT, "long": LONG, "mixed": MIXED}


def talk(
    some: Checkpoints, system: int, turns: Sequence[Turn], header: int = 4
) -> Iterator[tuple[int, int, int]]:
    """Return a conversation as the pipeline has it, with the places and the length of all."""
    ends, at_ = [system], 0
    for message, answer in turns:
        begin = ends[-1]
        ends.append(begin + message)
        total = ends[-1] + header
        stops(some, at_, places_of(total, ends))
        at_ = total
        ends.append(total + answer)
        while (due := max(some.due(at_), at_ + 1)) < ends[-1]:
            some.add(at(due))
            at_ = due
        at_ = ends[-1] - 1
        yield begin, total, at_


def lost(some: Checkpoints, matched: int) -> int:
    """Return the tokens that a prompt evaluates again if it shares `matched` tokens."""
    return matched - max((offset for offset in some.offsets if offset <= matched), default=0)


def widest_gap(some: Checkpoints, length: int) -> int:
    """The most that an edit anywhere loses."""
    return max(right - left for left, right in pairwise([0, *some.offsets, length]))


@pytest.mark.parametrize("turns", HISTORIES.values(), ids=HISTORIES)
@pytest.mark.parametrize("system", [20, 300, 1176, 5000])
@pytest.mark.parametrize("budget", [4, 5, 6, 8, 12, 16])
def test_forty_turns(budget: int, system: int, turns: list[Turn]) -> None:
    """Forty turns lose no more than their kind of edit may cost.

    Regenerate and think-strip lose the answer's header, an edit of the last message nothing, a line
    more in a long system prompt its last few tokens, and an edit anywhere at most 1.5 intervals:
    one in `length / (budget - 3)` tokens, or the configured one.
    """
    some = Checkpoints(budget)
    for begin, total, length in talk(some, system, turns):
        assert lost(some, begin) == 0
        assert lost(some, total) == lost(some, total - 1) + 1 == 4
        assert lost(some, system) <= NEAR_END
        if system >= SPACING:
            assert lost(some, system - 2) < NEAR_END
        interval = max(INTERVAL, length / (budget - PINNED))
        assert widest_gap(some, length) <= 1.5 * interval


@pytest.mark.parametrize("budget", [8, 16, 64])
def test_a_very_long_conversation_is_covered_evenly(budget: int) -> None:
    """The widest gap of hundreds of turns is below twice the interval.

    What was given up cannot be had back.
    """
    for turns in ([(100, 200)] * 600, LONG, MIXED * 4):
        some = Checkpoints(budget)
        for _, _, length in talk(some, 300, turns):
            assert widest_gap(some, length) <= 1.9 * max(INTERVAL, length / (budget - PINNED))


histories = st.lists(
    st.tuples(
        st.sampled_from("append append append edit regenerate shift interrupt restore".split()),
        st.integers(1, 80) | st.integers(1, 5000),
        st.integers(1, 80) | st.integers(1, 3000),
    ),
    min_size=1,
    max_size=40,
)


@examples(150)
@given(
    histories,
    st.integers(4, 24),
    st.integers(64, 2000),
    st.integers(1, 6000),
    st.randoms(use_true_random=False),
)
def test_the_bound_that_always_holds(
    history: list[tuple[str, int, int]], budget: int, interval: int, system: int, rng: random.Random
) -> None:
    """No gap is wider than twice what the budget allows for the longest text so far.

    Places keep their checkpoints, and the same history leads to the same ones.
    """
    runs = [
        play(history, budget, interval, system, random.Random(seed)) for seed in [rng.random()] * 2
    ]
    assert runs[0] == runs[1]


def play(
    history: list[tuple[str, int, int]], budget: int, interval: int, system: int, rng: random.Random
) -> list[int]:
    some, ends, at_, longest = Checkpoints(budget, interval), [system], 0, 0
    for kind, message, answer in history:
        at_ = ACTS[kind](some, ends, at_, rng)
        some.truncate(at_)
        ends.append(ends[-1] + message)
        total = ends[-1] + 4
        places = places_of(total, ends)
        stops(some, at_, places)
        longest = max(longest, total + answer)
        assert some.nbytes <= budget
        assert {place for place in places.roles if place > at_} <= set(some.offsets)
        allowed = max(
            1.25 * 4 / 3 * spacing(longest, budget, interval) + 2,
            2 * longest / (budget - PINNED),
            2 * min(SPACING, interval),
        )
        assert widest_gap(some, total) <= allowed + HEADER
        at_ = total
        while (due := max(some.due(at_), at_ + 1)) < total + answer:
            some.add(at(due))
            at_ = due
        ends.append(total + answer)
        at_ = ends[-1] - 1
        assert some.nbytes <= budget
    return some.offsets


def append(some: Checkpoints, ends: list[int], at_: int, rng: random.Random) -> int:
    return at_


def edit(some: Checkpoints, ends: list[int], at_: int, rng: random.Random) -> int:
    del ends[rng.randrange(1, len(ends) + 1) :]
    return ends[-1] - lost(some, ends[-1])


def regenerate(some: Checkpoints, ends: list[int], at_: int, rng: random.Random) -> int:
    if len(ends) > 2:
        del ends[-2:]
    return ends[-1] - lost(some, ends[-1])


def shift(some: Checkpoints, ends: list[int], at_: int, rng: random.Random) -> int:
    """All but the system prompt is forgotten, and evaluated again at other offsets."""
    del ends[1:]
    some.truncate(ends[0])
    return ends[0] - lost(some, ends[0])


def interrupt(some: Checkpoints, ends: list[int], at_: int, rng: random.Random) -> int:
    """Ctrl-C while one more is taken: what is lost is that one, at most."""
    before = set(some.offsets)
    with suppress(KeyboardInterrupt), interrupt_at(rng.randint(1, 60)):
        some.add(at(at_ + 1))
    assert set(some.offsets) <= before | {at_ + 1}
    some.truncate(at_)
    return at_


def restore(some: Checkpoints, ends: list[int], at_: int, rng: random.Random) -> int:
    """Saved and read again: the same ones are kept, with their roles."""
    again = Checkpoints(some.budget, some.interval)
    for item in some:
        again.add(item)
    assert list(again) == list(some)
    return at_


ACTS = {act.__name__: act for act in (append, edit, regenerate, shift, interrupt, restore)}
