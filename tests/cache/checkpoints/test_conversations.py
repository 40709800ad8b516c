"""Conversations lose no more than their edits may cost."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import at, stops
from support.sample import examples

from mlxrunner.cache.checkpoints import (
    HEADER,
    INTERVAL,
    NEAR_END,
    PINNED,
    SPACING,
    Checkpoints,
    places_of,
    spacing,
)
from mlxrunner.testing import interrupt_at

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
        st.sampled_from(
            ["append", "append", "append", "edit", "regenerate", "shift", "interrupt", "restore"]
        ),
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


Act = Callable[[Checkpoints, list[int], int, random.Random], int]


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


ACTS: dict[str, Act] = {
    "append": append,
    "edit": edit,
    "regenerate": regenerate,
    "shift": shift,
    "interrupt": interrupt,
    "restore": restore,
}
