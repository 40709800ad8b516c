"""A prompt goes to the slot that has most of it."""

from __future__ import annotations

import pytest

from mlxrunner.cache.entry import as_tokens
from mlxrunner.cache.prefix import PrefixCache
from mlxrunner.engine.scheduling.allocation import WORTH_WAITING, Slot, choose
from mlxrunner.errors import NoFreeSlotError


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
