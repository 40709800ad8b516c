"""The counts of a prompt where text has moved, and the reason for which it reused no more.

All four counts are held against a full memory in tests/reuse/test_accounts.py.
"""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from support.accounts import tiled

from mlxrunner.cache.account import (
    MOST_REQUESTS,
    RUN,
    ConversationName,
    Lookup,
    LostTokens,
    PromptAccount,
    TokenAccounting,
    explained,
    moved_runs,
)
from mlxrunner.cache.entry import as_tokens


def text(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 30_000) for _ in range(count)]


def counted(
    accounting: TokenAccounting, prompt: list[int], cached: int = 0, client: str = ""
) -> PromptAccount:
    """Run a request that reuses `cached` tokens, and return its account."""
    opened = accounting.begin(as_tokens(prompt), name=ConversationName(client, None))
    return accounting.end(opened, cached, cached, len(prompt), as_tokens([]))


BEGIN, MIDDLE, END = text(1, 100), text(2, 200), text(3, 300)
OLD = [*BEGIN, *MIDDLE, *END]
EDITS = {
    "same": (OLD, 0),
    "goes on": ([*OLD, *text(4, 50)], 0),
    "changed word": ([*BEGIN, 7, *OLD[101:]], 499),
    "date in front": ([*text(5, 9), *OLD[9:]], 591),
    "inserted message": ([*BEGIN, *text(6, 80), *MIDDLE, *END], 500),
    "removed message": ([*BEGIN, *END], 300),
    "moved block": ([*BEGIN, *END, *MIDDLE], 500),
    "moved to the front": ([*END, *BEGIN, *MIDDLE], 600),
    "twice, once known": ([*BEGIN, *END, *END], 300),
    "summary": ([*BEGIN, *text(7, 60), *END[200:]], 100),
    "other text": (text(8, 600), 0),
    "only the beginning": ([*BEGIN, *text(9, 400)], 0),
}


@pytest.mark.parametrize("edit", EDITS)
def test_text_behind_a_change_is_displaced_to_within_a_run(edit: str) -> None:
    """The place of the change costs, and not the text itself."""
    prompt, wanted = EDITS[edit]
    accounting = TokenAccounting()
    counted(accounting, OLD)
    shared = next(
        (n for n, pair in enumerate(zip(OLD, prompt, strict=False)) if pair[0] != pair[1]), 600
    )
    found = counted(accounting, prompt, cached=min(shared, len(prompt) - 1))
    assert (found.missed, found.shared) == (0, min(shared, len(prompt)))
    assert wanted - RUN <= found.displaced <= wanted
    for run in found.moved:
        assert prompt[run.begin : run.end] == OLD[run.earlier : run.earlier + run.end - run.begin]


@pytest.mark.parametrize("seed", range(30))
def test_moved_runs_are_those_of_a_slow_search(seed: int) -> None:
    """With few words that repeat, and many edits: to within a run for each of them."""
    rng = random.Random(seed)
    old = [rng.randrange(2000 if seed % 2 else 40) for _ in range(400)]
    new, edits = list(old), rng.randint(1, 4)
    for _ in range(edits):
        at, size = rng.randrange(len(new)), rng.randint(1, 60)
        block = new[at : at + size]
        if rng.random() < 0.7:
            del new[at : at + size]
        if rng.random() < 0.7:
            place = rng.randrange(len(new) + 1)
            new[place:place] = block if rng.random() < 0.6 else [rng.randrange(2000)] * 3
    runs = moved_runs(as_tokens(old), as_tokens(new))
    assert all(a.end <= b.begin for a, b in pairwise(runs))
    places = [
        place for run in runs for place in range(run.earlier, run.earlier + run.end - run.begin)
    ]
    assert len(places) == len(set(places))
    found = sum(run.end - run.begin for run in runs)
    assert abs(found - tiled(old, new)) <= RUN * edits


def test_a_prefix_that_another_request_evaluates_is_missed_if_it_gets_there() -> None:
    """Two requests begin at once; the first is cut off early or not."""
    for reached, missed in ((600, 599), (250, 250)):
        accounting = TokenAccounting()
        first = accounting.begin(as_tokens(OLD))
        second = accounting.begin(as_tokens(OLD))
        accounting.end(first, 0, 0, reached, as_tokens([]))
        assert accounting.end(second, 0, 0, 600, as_tokens([])).missed == missed


def test_what_runs_beside_a_prompt_is_no_eviction() -> None:
    """A request that begins later finds it evaluated, so that something gave it up."""
    accounting = TokenAccounting()
    first, second = (accounting.begin(as_tokens(OLD)) for _ in range(2))
    accounting.end(first, 0, 0, 600, as_tokens([]))
    later = accounting.begin(as_tokens(OLD))
    found, tokens = Lookup(600, 900, 550, 550, "diverged"), as_tokens([])
    for opened, reason in ((second, "side_by_side"), (later, "evicted")):
        account = accounting.end(opened, 550, 550, 600, tokens)
        assert (account.missed, found.reason_for(account, "")) == (49, reason)
        assert found.reason_for(account, "line_failed") == "line_failed"


@pytest.mark.parametrize(("missed", "is_few"), [(7, True), (8, False), (30, True), (31, False)])
def test_few_missed_tokens_are_not_told_as_lost(missed: int, is_few: bool) -> None:
    """The disk cache may hold them: reading the long prefix again would take longer."""
    cached = 100 if missed < 10 else 1000 - missed
    account = PromptAccount(missed, is_restarted=True)
    found = Lookup(1001, 1500, cached, cached, "diverged")
    assert found.reason_for(account, "") == ("diverged" if is_few else "restarted")


def test_memory_is_bounded() -> None:
    """Many long conversations: the oldest are forgotten, the newest are compared with."""
    accounting = TokenAccounting()
    for seed in range(100):
        counted(accounting, text(seed, 1000), client=str(seed % 3))
    assert len(accounting._history) <= MOST_REQUESTS
    assert counted(accounting, [5, *text(99, 1000)[1:]], client="0").displaced == 999


PROMPT = as_tokens([*range(20), 99])


EVICTIONS: dict[str, tuple[int, int, int, str | None, int]] = {
    "a longer match than what is left": (18, 9, 5, "evicted", 18),
    "nothing is left": (18, 0, 0, "evicted", 18),
    "the last token is evaluated in any case": (21, 9, 0, "evicted", 21),
    "as much is still there": (18, 30, 18, "diverged", 18),
    "more is still there": (5, 18, 18, None, 18),
    "without a common token": (0, 9, 5, "diverged", 5),
}


@pytest.mark.parametrize(
    ("evicted", "entry", "matched", "reason", "known"), EVICTIONS.values(), ids=EVICTIONS
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
