"""A prompt goes to the slot that has most of it; requests claim cells, grow and step back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mlxrunner.cache.entry import as_tokens
from mlxrunner.cache.prefix import PrefixCache
from mlxrunner.engine.scheduling.allocation import (
    LEAST,
    WORTH_WAITING,
    Slot,
    choose,
    claimed,
    grown,
    steps_back,
)
from mlxrunner.errors import CacheFullError, NoFreeSlotError


def slot(
    number: int,
    tokens: list[int],
    *,
    busy: bool = False,
    used: int = 0,
    planned: list[int] | None = None,
    asked: int = 0,
) -> Slot:
    made = Slot(number, PrefixCache(list), as_tokens(planned or []), busy, used, asked=asked)
    made.cache.entry.tokens.extend(tokens)
    return made


def test_the_free_slot_with_the_longest_common_prefix_wins() -> None:
    """The request uses what the slot has."""
    slots = [slot(0, [1, 2, 9]), slot(1, [1, 2, 3, 4]), slot(2, [])]
    choice = choose(slots, as_tokens([1, 2, 3, 5]))
    assert (choice.slot.number, choice.source.number, choice.matched, choice.ready) == (
        1,
        1,
        3,
        True,
    )


def test_a_longer_prefix_of_a_busy_slot_is_copied_into_the_least_recently_used_one() -> None:
    """The free slot's own shorter prefix is given up."""
    slots = [slot(0, [1, 2], used=5), slot(1, [1, 2, 3, 4], busy=True), slot(2, [7], used=3)]
    choice = choose(slots, as_tokens([1, 2, 3, 9]))
    assert (choice.slot.number, choice.source.number, choice.matched) == (2, 1, 3)


def test_nothing_in_common_goes_to_the_least_recently_used_slot() -> None:
    """Tokens that were used lately can be shared longer."""
    slots = [slot(0, [1], used=5), slot(1, [2], used=2), slot(2, [3], used=9)]
    assert choose(slots, as_tokens([8])).slot.number == 1


def test_a_prefix_that_is_being_evaluated_is_waited_for_if_it_is_long_enough() -> None:
    """Otherwise it is evaluated again."""
    prefix = list(range(WORTH_WAITING))
    slots = [slot(0, [], busy=True, planned=[*prefix, 100]), slot(1, [])]
    choice = choose(slots, as_tokens([*prefix, 200]))
    assert (choice.slot.number, choice.source.number, choice.matched, choice.ready) == (
        1,
        0,
        WORTH_WAITING,
        False,
    )
    assert choose(slots, as_tokens([*prefix[:-1], 200])).ready


def test_no_free_slot_is_an_error_with_the_number_of_slots() -> None:
    """Never a wait without end."""
    with pytest.raises(NoFreeSlotError, match="all 2 slots are in use"):
        choose([slot(0, [], busy=True), slot(1, [], busy=True)], as_tokens([1]))


def test_many_with_one_prefix_take_it_from_the_first() -> None:
    """All take the prefix from the first, not from one with a token of its own in common."""
    trunk = list(range(100))
    slots = [slot(0, [], busy=True), slot(1, [], busy=True), slot(2, [])]
    slots[0].planned, slots[1].planned = as_tokens([*trunk, 7]), as_tokens([*trunk, 8])
    choice = choose(slots, as_tokens([*trunk, 8, 9]))
    assert (choice.source.number, choice.matched, choice.ready) == (0, 100, False)


HEADER = list(range(100, 120))
A, B = [*HEADER, *range(50)], [*HEADER, *range(200, 250)]


def test_a_common_header_does_not_make_two_conversations_share_a_slot() -> None:
    """The second one takes what they share into an empty slot; the first one stays whole."""
    choice = choose([slot(0, A, used=1, asked=40), slot(1, [])], as_tokens(B))
    assert (choice.slot.number, choice.source.number, choice.matched) == (1, 0, len(HEADER))


def test_a_third_conversation_replaces_the_one_that_was_used_least_recently() -> None:
    """Where no slot is empty."""
    slots = [slot(0, A, used=2, asked=60), slot(1, B, used=1, asked=60)]
    choice = choose(slots, as_tokens([*HEADER, 7, 8]))
    assert (choice.slot.number, choice.matched) == (1, len(HEADER))


@pytest.mark.parametrize(
    ("prompt", "place"),
    [
        ([*A, 1, 2, 3], "in place"),
        ([*A[:-3], 9], "in place"),
        ([*A[:-30], 9], "empty"),
        (A[:-30], "empty"),
    ],
    ids=["next turn", "short tail", "edit", "regenerate"],
)
def test_a_conversation_goes_on_in_place_if_all_but_a_short_tail_of_it_does(
    prompt: list[int], place: str
) -> None:
    """Else its old branch stays as long as there is an empty slot."""
    choice = choose([slot(0, A, used=1, asked=40), slot(1, [])], as_tokens(prompt))
    assert (choice.slot.number, choice.source.number) == (0 if place == "in place" else 1, 0)


@pytest.mark.parametrize(
    "prompt", [A[:40], [*A[:36], 9, 9, 9]], ids=["regenerate", "edit of the last message"]
)
def test_where_no_slot_is_empty_an_edit_gives_up_its_own_old_answer(prompt: list[int]) -> None:
    """Not another conversation, although that one was used less recently."""
    choice = choose(
        [slot(0, A, used=5, asked=40), slot(1, [1] * 70, used=1, asked=60)], as_tokens(prompt)
    )
    assert (choice.slot.number, choice.source.number) == (0, 0)


def test_a_prefix_that_has_been_evaluated_and_is_gone_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A window has moved on: what an idle slot can resume is better than nothing."""
    prompt = [*range(130), 250]
    slots = [
        slot(0, [*range(98), 7], used=1),
        slot(1, list(range(200)), busy=True, planned=list(range(250))),
        slot(2, []),
    ]
    monkeypatch.setattr(Slot, "reach", lambda slot, to: to if slot.number == 0 else 0)
    choice = choose(slots, as_tokens(prompt))
    assert (choice.source.number, choice.matched, choice.ready) == (0, 98, True)
    slots[1].tokens.truncate(110)
    choice = choose(slots, as_tokens(prompt))
    assert (choice.source.number, choice.matched, choice.ready) == (1, 130, False)


def test_one_token_of_a_prompt_is_left_to_evaluate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot is asked to resume at that place, not at the one behind it."""
    asked: list[int] = []
    monkeypatch.setattr(Slot, "reach", lambda slot, to: asked.append(to) or to)
    choice = choose([slot(0, [1, 2, 3, 4])], as_tokens([1, 2, 3]))
    assert (choice.matched, asked) == (2, [2])


def test_tokens_that_were_moved_are_not_shared() -> None:
    """A cold run would store other keys for them."""
    moved = slot(0, list(range(40)), busy=True)
    moved.exact = 10
    choice = choose([moved, slot(1, [])], as_tokens(list(range(50))))
    assert (choice.source.number, choice.matched) == (0, 10)


def test_a_request_that_fits_claims_its_whole_answer() -> None:
    assert claimed(10, 100, free=1000, total=1000, slots=4) == 100


def test_a_long_answer_claims_an_even_share_of_what_is_left() -> None:
    assert claimed(1000, 32000, 9000, 9000, slots=4) == 2000
    assert claimed(1000, 32000, 9000, 9000, slots=1) == 8000


def test_a_claim_is_at_least_256_tokens_or_the_whole_answer() -> None:
    assert claimed(0, 32000, 300, 9000, slots=8) == LEAST
    assert claimed(0, 20, 20, 9000, slots=8) == 20


@pytest.mark.parametrize(
    ("prompt", "answer", "free", "numbers"),
    [
        (100, 50, 149, "needs 150 free cells, but 149 of 200 are free"),
        (100, 9000, 180, "needs 356 free cells, but 180 of 200 are free"),
        (100, 50, -3, "needs 150 free cells, but 0 of 200 are free"),
    ],
    ids=["an answer", "its least part", "nothing is free"],
)
def test_a_request_waits_for_what_it_needs(
    prompt: int, answer: int, free: int, numbers: str
) -> None:
    with pytest.raises(CacheFullError, match=f"{numbers}.*when another request has ended"):
        claimed(prompt, answer, free, 200, 4)


def test_an_answer_grows_by_an_even_share() -> None:
    assert grown(left=5000, free=4000, running=4) == 1000
    assert grown(left=5000, free=400, running=4) == LEAST
    assert grown(left=5000, free=7, running=4) == 7
    assert grown(left=3, free=4000, running=4) == 3
    assert grown(left=3, free=0, running=4) == grown(left=3, free=-9, running=4) == 0


@pytest.mark.parametrize(
    ("running", "index"),
    [
        (["interactive", "interactive", "interactive"], 2),
        (["interactive", "batch", "interactive"], 1),
        (["batch", "batch", "interactive"], 1),
        (["batch"], 0),
    ],
)
def test_the_youngest_of_the_lowest_priority_steps_back(running: list[str], index: int) -> None:
    """Requests come in the order of their arrival."""
    requests: list[Any] = [SimpleNamespace(priority=priority) for priority in running]
    assert steps_back(requests) is requests[index]
