"""Which slot a prompt goes to, and how a step is shared."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrunner.cache.tokens import TokenBuffer, as_tokens
from mlxrunner.parallel.slots import WORTH_WAITING, NoFreeSlotError, Slot, choose, share


def slot(number: int, tokens: list[int], *, busy: bool = False, used: int = 0, planned: list[int] | None = None) -> Slot:
    return Slot(number, TokenBuffer(tokens), as_tokens(planned or []), busy, used)


def test_the_free_slot_with_the_longest_common_prefix_wins() -> None:
    """And uses what it has."""
    slots = [slot(0, [1, 2, 9]), slot(1, [1, 2, 3, 4]), slot(2, [])]
    choice = choose(slots, as_tokens([1, 2, 3, 5]))
    assert (choice.slot.number, choice.source.number, choice.matched, choice.ready) == (1, 1, 3, True)


def test_a_longer_prefix_of_a_busy_slot_is_copied_into_the_least_recently_used_one() -> None:
    """The free slot's own shorter prefix is given up."""
    slots = [slot(0, [1, 2], used=5), slot(1, [1, 2, 3, 4], busy=True), slot(2, [7], used=3)]
    choice = choose(slots, as_tokens([1, 2, 3, 9]))
    assert (choice.slot.number, choice.source.number, choice.matched) == (2, 1, 3)


def test_nothing_in_common_goes_to_the_least_recently_used_slot() -> None:
    """So that what was used lately can be shared longer."""
    slots = [slot(0, [1], used=5), slot(1, [2], used=2), slot(2, [3], used=9)]
    assert choose(slots, as_tokens([8])).slot.number == 1


def test_a_prefix_that_is_being_evaluated_is_waited_for_if_it_is_long_enough() -> None:
    """Otherwise it is evaluated again."""
    prefix = list(range(WORTH_WAITING))
    slots = [slot(0, [], busy=True, planned=[*prefix, 100]), slot(1, [])]
    choice = choose(slots, as_tokens([*prefix, 200]))
    assert (choice.slot.number, choice.source.number, choice.matched, choice.ready) == (1, 0, WORTH_WAITING, False)
    assert choose(slots, as_tokens([*prefix[:-1], 200])).ready


def test_no_free_slot_is_an_error_with_the_number_of_slots() -> None:
    """Never a wait without end."""
    with pytest.raises(NoFreeSlotError, match="all 2 slots are in use"):
        choose([slot(0, [], busy=True), slot(1, [], busy=True)], as_tokens([1]))


@given(st.integers(0, 60), st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(0, 20))
def test_a_step_is_shared_without_waste_and_nobody_starves(budget: int, wants: list[int], first: int) -> None:
    """All of the budget is used while anybody wants more, and who gets less than he wants gets no less than others but for one token."""
    given_ = share(budget, wants, first)
    assert all(0 <= got <= want for got, want in zip(given_, wants, strict=True))
    assert sum(given_) == min(budget, sum(wants))
    short = [got for got, want in zip(given_, wants, strict=True) if got < want]
    if short and budget >= len(wants):
        assert min(short) > 0


def test_turns_go_round() -> None:
    """With one token to give, each is first once."""
    assert [share(1, [5, 5, 5], turn).index(1) for turn in range(3)] == [0, 1, 2]


def test_many_with_one_prefix_take_it_from_the_first() -> None:
    """Not from one that by chance begins its own part with the same token: that one would have to be waited for, too."""
    trunk = list(range(100))
    slots = [slot(0, [], busy=True), slot(1, [], busy=True), slot(2, [])]
    slots[0].planned, slots[1].planned = as_tokens([*trunk, 7]), as_tokens([*trunk, 8])
    choice = choose(slots, as_tokens([*trunk, 8, 9]))
    assert (choice.source.number, choice.matched, choice.ready) == (0, 100, False)
