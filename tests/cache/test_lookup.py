"""The reason for which a prompt reused no more."""

from __future__ import annotations

import pytest

from mlxrunner.cache.account import Lookup, LostTokens, explained
from mlxrunner.cache.entry import as_tokens

PROMPT = as_tokens([*range(20), 99])


@pytest.mark.parametrize(
    ("evicted", "entry", "matched", "reason", "known"),
    [
        (18, 9, 5, "evicted", 18),
        (18, 0, 0, "evicted", 18),
        (21, 9, 0, "evicted", 21),
        (18, 30, 18, "diverged", 18),
        (5, 18, 18, None, 18),
        (0, 9, 5, "diverged", 5),
    ],
    ids=[
        "a longer match than what is left",
        "nothing is left",
        "the last token is evaluated in any case",
        "as much is still there",
        "more is still there",
        "without a common token",
    ],
)
def test_an_eviction_is_the_reason_where_it_cost_a_longer_match(
    evicted: int, entry: int, matched: int, reason: str | None, known: int
) -> None:
    """The loss names the request that took the place."""
    given_up = PROMPT[:evicted] if evicted else as_tokens([7, 7])
    found = Lookup(len(PROMPT), entry, matched, matched)
    told = explained(found, LostTokens("evicted", "request 7", given_up), PROMPT)
    assert (told.reason, told.known) == (reason, known)
    assert told.evicted_by == ("request 7" if reason == "evicted" else None)
