"""The lookup finds the longest match, the latest of several, and follows it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from mlxrunner.cache.entry import TokenArray
from mlxrunner.engine.drafting import FEWEST, MOST, TextLookup


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


def test_a_text_that_repeats_itself_goes_round() -> None:
    """Where the place reaches the end of the answer, the period is drafted again."""
    lookup = TextLookup(tokens(), tokens(1, 2, 3, 1, 2, 3, 1, 2))
    assert lookup.ahead(7) == [3, 1, 2, 3, 1, 2, 3]
    assert lookup.ahead(0) == []


def test_a_match_is_followed_while_it_holds_and_left_where_it_does_not() -> None:
    """A token that agrees makes the match longer; another one begins a new search."""
    lookup = TextLookup(tokens(), tokens(1, 2, 3, 4, 5, 9, 1, 2))
    lookup.add(3)
    assert (lookup.length, lookup.expected) == (3, 4)
    lookup.add(8)
    assert (lookup.length, lookup.expected, lookup.ahead(4)) == (0, None, [])


def test_the_earlier_text_is_found_from_the_first_token() -> None:
    """The tokens before it show the place; a place in the conversation is not of it."""
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
