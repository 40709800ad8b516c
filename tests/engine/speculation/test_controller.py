"""The controller drafts where it pays; the lookup finds the longest match, the latest of some."""

from __future__ import annotations

import random

import numpy as np
import pytest

from mlxrunner.cache.entry import TokenArray
from mlxrunner.engine.drafting import (
    DEEPEST,
    DEPTHS,
    FEWEST,
    LATER,
    MOST,
    Controller,
    DraftBudget,
    TextLookup,
    Trust,
)

SINGLE = 0.01
"""Seconds of a pass of one row."""


def measured(slope: float) -> Controller:
    """Return a controller that has measured rows which cost `slope` of a pass; it may lose any."""
    controller = Controller(budget := DraftBudget())
    budget.left = 100.0
    for _ in range(5):
        controller.passed(SINGLE)
        for depth in DEPTHS:
            controller.costs.measure(depth, SINGLE * (1 + slope * depth))
    return controller


@pytest.mark.parametrize(
    ("slope", "share", "depth"),
    [(0.0, 0.99, 15), (0.3, 0.2, 0), (0.1, 0.9, 7), (0.4, 0.75, 1), (1.2, 0.95, 0), (1.2, 0.1, 0)],
)
def test_the_depth_follows_from_the_shares_and_the_costs(
    slope: float, share: float, depth: int
) -> None:
    """Cheap rows and likely guesses make long drafts; dear rows make none."""
    assert measured(slope).depth([share] * DEEPEST, DEEPEST) == depth


def test_a_draft_has_to_fit_and_to_pay() -> None:
    """The chance that there will be a draft at all counts, if it is waited for."""
    controller = measured(0.0)
    assert [controller.depth([0.99] * DEEPEST, most) for most in (0, 1, 2, 5)] == [0, 1, 2, 5]
    controller = measured(0.1)
    assert controller.depth([0.9] * DEEPEST, DEEPEST, 0.5) > 0
    assert controller.depth([0.9] * DEEPEST, DEEPEST, 0.01) == 0


def test_a_single_disturbed_measurement_changes_nothing() -> None:
    """Other work only adds to what a pass costs, so the cheapest of a few counts."""
    controller = measured(0.1)
    controller.verified(7, 100 * SINGLE)
    controller.passed(100 * SINGLE)
    assert controller.depth([0.9] * DEEPEST, DEEPEST) == 7


def test_costs_that_were_measured_too_high_are_measured_again_but_rarely() -> None:
    """A probe comes after as many plain passes as make its loss small."""
    controller = measured(1.2)
    drafted = 0
    for _ in range(2000):
        controller.passed(SINGLE)
        depth = controller.depth([0.95] * DEEPEST, DEEPEST)
        if depth:
            drafted += 1
            controller.verified(depth, SINGLE * (1 + 1.2 * depth))
    assert 1 <= drafted <= 100
    for _ in range(3000):
        controller.passed(SINGLE)
        depth = controller.depth([0.95] * DEEPEST, DEEPEST)
        if depth:
            controller.verified(depth, SINGLE * (1 + 0.02 * depth))
    assert controller.depth([0.95] * DEEPEST, DEEPEST) > 1


def test_a_longer_draft_is_tried_now_and_then() -> None:
    """Its cost may have been measured badly."""
    controller = measured(0.1)
    depths = set()
    for _ in range(2 * LATER):
        depth = controller.depth([0.9] * DEEPEST, DEEPEST)
        depths.add(depth)
        controller.verified(depth, SINGLE * (1 + 0.1 * depth))
    assert depths == {7, 15}


def test_trust_follows_what_was_seen_and_forgets_it() -> None:
    """It begins with an assumption, and goes back towards it."""
    trust = Trust(0.5)
    assert trust.share == 0.5
    trust.learn(0, 40)
    low = trust.share
    assert low < 0.1
    trust.fade()
    assert low < trust.share < 0.5
    for _ in range(20):
        trust.learn(10, 0)
    assert trust.share > 0.9


def tokens(*found: int) -> TokenArray:
    return np.array(found, np.int32)


@pytest.mark.parametrize(
    ("text", "length", "ahead"),
    [
        ((1, 2, 3, 4, 1, 2), 2, [3, 4, 1]),
        ((1, 2, 3, 9, 2, 3, 7, 1, 2, 3), 3, [9, 2, 3]),
        ((5, 1, 2, 3, 8, 1, 2, 4, 1, 2), 2, [4, 1, 2]),
        ((1, 2, 3, 4), 0, []),
        ((1, 2, 3, 2), 0, []),
        ((7,), 0, []),
    ],
    ids=["a repeat", "the longest", "the latest", "no repeat", "too short", "one token"],
)
def test_what_came_behind_the_same_tokens_is_found(
    text: tuple[int, ...], length: int, ahead: list[int]
) -> None:
    """The lengths of the match and of what is expected are those of the text."""
    lookup = TextLookup(tokens(), tokens(*text))
    assert lookup.length == length
    assert lookup.ahead(3) == ahead


def test_a_text_that_repeats_itself_goes_round_and_the_earlier_one_is_found_at_once() -> None:
    """The tokens before it show the place; a place in the conversation is not of it."""
    lookup = TextLookup(tokens(), tokens(1, 2, 3, 1, 2, 3, 1, 2))
    assert (lookup.ahead(7), lookup.ahead(0)) == ([3, 1, 2, 3, 1, 2, 3], [])
    lookup = TextLookup(tokens(7, 8, 30, 31), tokens(1, 2, 7, 8))
    assert lookup.is_earlier
    assert lookup.ahead(2) == [30, 31]
    assert not TextLookup(tokens(), tokens(7, 8, 30, 7, 8)).is_earlier


def test_it_finds_what_a_search_of_every_place_finds() -> None:
    """The length is the longest one that any place has, up to the limit."""
    rng = random.Random(4)
    lookup, text = TextLookup(tokens(), tokens(0)), [0]
    for _ in range(400):
        before, expected = lookup.length, lookup.expected
        token = rng.randrange(3)
        text.append(token)
        lookup.add(token)
        if before and expected == token:
            assert lookup.length == before + 1
            continue
        longest = max(
            next((n for n in range(place + 1) if text[place - n] != text[-1 - n]), place + 1)
            for place in range(len(text) - 1)
        )
        longest = min(longest, MOST)
        assert lookup.length == (longest if longest >= FEWEST else 0)
