"""What a prompt lost because its conversation was given up to make room."""

from __future__ import annotations

import numpy as np

from mlxrunner.cache.evictions import Evictions
from mlxrunner.cache.lookup import Lookup, explained
from mlxrunner.cache.tokens import as_tokens

PROMPT = as_tokens([*range(20), 99])


def found(entry: int, matched: int) -> Lookup:
    return explained(Lookup(len(PROMPT), entry, matched, matched))


def test_the_longest_conversation_given_up_explains_the_loss() -> None:
    """Among several, the one that shares most with the prompt says who took its place."""
    evictions = Evictions()
    evictions.add(PROMPT[:12], by=3)
    evictions.add(PROMPT[:18], by=7)
    evictions.add(as_tokens([5, 6]), by=8)
    told = evictions.explained(found(entry=9, matched=5), PROMPT)
    assert (told.reason, told.freed_by, told.lost) == ("evicted", "request 7", 13)


def test_nothing_is_explained_where_something_longer_is_still_there() -> None:
    """A shorter conversation given up cost nothing, and neither did one without a common token."""
    evictions = Evictions()
    before = found(entry=30, matched=18)
    assert evictions.explained(before, PROMPT) is before
    evictions.add(PROMPT[:18], by=1)
    evictions.add(as_tokens([7, 7]), by=2)
    assert evictions.explained(before, PROMPT) is before


def test_the_last_token_of_a_prompt_is_never_lost() -> None:
    """It has to be evaluated in any case."""
    evictions = Evictions()
    evictions.add(PROMPT, by=1)
    whole = found(entry=21, matched=20)
    assert evictions.explained(whole, PROMPT) is whole
    assert evictions.explained(found(entry=9, matched=0), PROMPT).lost == 20


def test_the_oldest_are_forgotten_beyond_a_number_of_tokens() -> None:
    """And a conversation is copied: its buffer may be used again."""
    evictions, tokens = Evictions(most_tokens=30), PROMPT[:18].copy()
    evictions.add(tokens, by=1)
    tokens[:] = 0
    assert evictions.explained(found(0, 0), PROMPT).lost == 18
    evictions.add(as_tokens(np.arange(100, 120)), by=2)
    assert evictions.explained(found(0, 0), PROMPT).reason == "empty"
