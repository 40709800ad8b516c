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


def slots_of(*given: dict[str, Any]) -> list[Slot]:
    """Return slots that hold `has`, are to evaluate `planned`, and share up to `exact` tokens."""
    slots = []
    for number, one in enumerate(given):
        planned, state = as_tokens(one.get("planned", [])), (one.get("busy"), one.get("used", 0))
        made = Slot(number, PrefixCache(list), planned, *state, asked=one.get("asked", 0))
        made.cache.entry.tokens.extend(one.get("has", []))
        made.exact = one.get("exact", made.exact)
        slots.append(made)
    return slots


def chosen(slots: list[Slot], prompt: list[int]) -> tuple[int, int, int, bool]:
    """Return the slot for a prompt, the one it takes its prefix from, how much, and if at once."""
    choice = choose(slots, as_tokens(prompt))
    return choice.slot.number, choice.source.number, choice.matched, choice.ready


HEADER, TRUNK = list(range(100, 120)), list(range(WORTH_WAITING))
LONG, BUSY = list(range(100)), {"busy": True}
A, B = [*HEADER, *range(50)], [*HEADER, *range(200, 250)]
FIRST, OTHER = {"has": A, "used": 1, "asked": 40}, {"has": [1] * 70, "used": 1, "asked": 60}
CHOICES: dict[str, tuple[list[dict[str, Any]], list[int], tuple[int, int, int, bool]]] = {
    "the longest common prefix": (
        [{"has": [1, 2, 9]}, {"has": [1, 2, 3, 4]}, {}],
        [1, 2, 3, 5],
        (1, 1, 3, True),
    ),
    "a longer one of a busy slot is copied into the least recently used one": (
        [{"has": [1, 2], "used": 5}, BUSY | {"has": [1, 2, 3, 4]}, {"has": [7], "used": 3}],
        [1, 2, 3, 9],
        (2, 1, 3, True),
    ),
    "nothing in common goes to the least recently used slot": (
        [{"has": [1], "used": 5}, {"has": [2], "used": 2}, {"has": [3], "used": 9}],
        [8],
        (1, 0, 0, True),
    ),
    "one that is being evaluated is waited for if it is long enough": (
        [BUSY | {"planned": [*TRUNK, 100]}, {}],
        [*TRUNK, 200],
        (1, 0, WORTH_WAITING, False),
    ),
    "else it is evaluated again": (
        [BUSY | {"planned": [*TRUNK, 100]}, {}],
        [*TRUNK[:-1], 200],
        (1, 0, 0, True),
    ),
    "many take it from the first, not from one with a token more in common": (
        [BUSY | {"planned": [*LONG, 7]}, BUSY | {"planned": [*LONG, 8]}, {}],
        [*LONG, 8, 9],
        (2, 0, 100, False),
    ),
    "a common header does not make two conversations share a slot": (
        [FIRST, {}],
        B,
        (1, 0, 20, True),
    ),
    "a third conversation replaces the one that was used least recently": (
        [FIRST | {"used": 2, "asked": 60}, {"has": B, "used": 1, "asked": 60}],
        [*HEADER, 7, 8],
        (1, 0, 20, True),
    ),
    "the next turn goes on in place": ([FIRST, {}], [*A, 1, 2, 3], (0, 0, 70, True)),
    "so does one without a short tail": ([FIRST, {}], [*A[:-3], 9], (0, 0, 67, True)),
    "an edit leaves the old branch": ([FIRST, {}], [*A[:-30], 9], (1, 0, 40, True)),
    "so does another answer": ([FIRST, {}], A[:-30], (1, 0, 39, True)),
    "without an empty slot another answer gives up its own old one": (
        [FIRST | {"used": 5}, OTHER],
        A[:40],
        (0, 0, 39, True),
    ),
    "so does an edit of the last message": (
        [FIRST | {"used": 5}, OTHER],
        [*A[:36], 9, 9, 9],
        (0, 0, 36, True),
    ),
    "moved tokens are not shared": (
        [BUSY | {"has": list(range(40)), "exact": 10}, {}],
        list(range(50)),
        (1, 0, 10, True),
    ),
}


@pytest.mark.parametrize(("given", "prompt", "expected"), CHOICES.values(), ids=CHOICES)
@pytest.mark.exhaustive(len(CHOICES))
def test_a_prompt_goes_to_the_slot_that_has_most_of_it(
    given: list[dict[str, Any]], prompt: list[int], expected: tuple[int, int, int, bool]
) -> None:
    assert chosen(slots_of(*given), prompt) == expected


def test_no_free_slot_is_an_error_with_the_number_of_slots() -> None:
    with pytest.raises(NoFreeSlotError, match="all 2 slots are in use"):
        choose(slots_of(BUSY, BUSY), as_tokens([1]))


def test_a_prefix_that_has_been_evaluated_and_is_gone_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A window has moved on: what an idle slot can resume is better than nothing."""
    ahead = BUSY | {"has": list(range(200)), "planned": list(range(250))}
    slots, prompt = slots_of({"has": [*range(98), 7], "used": 1}, ahead, {}), [*range(130), 250]
    monkeypatch.setattr(Slot, "reach", lambda slot, to: to if slot.number == 0 else 0)
    assert chosen(slots, prompt)[1:] == (0, 98, True)
    slots[1].tokens.truncate(110)
    assert chosen(slots, prompt)[1:] == (1, 130, False)


def test_one_token_of_a_prompt_is_left_to_evaluate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot is asked to resume at that place, not at the one after it."""
    asked: list[int] = []
    monkeypatch.setattr(Slot, "reach", lambda slot, to: asked.append(to) or to)
    assert chosen(slots_of({"has": [1, 2, 3, 4]}), [1, 2, 3])[2] == 2
    assert asked == [2]


def test_a_request_claims_its_whole_answer_or_an_even_share_of_what_is_left() -> None:
    """At least LEAST tokens, or the whole answer; it grows by such shares, too."""
    assert claimed(10, 100, free=1000, total=1000, slots=4) == 100
    assert claimed(1000, 32000, 9000, 9000, slots=4) == 2000
    assert claimed(1000, 32000, 9000, 9000, slots=1) == 8000
    assert claimed(0, 32000, 300, 9000, slots=8) == LEAST
    assert claimed(0, 20, 20, 9000, slots=8) == 20
    grows = {
        (5000, 4000): 1000,
        (5000, 400): LEAST,
        (5000, 7): 7,
        (3, 4000): 3,
        (3, 0): 0,
        (3, -9): 0,
    }
    assert {pair: grown(*pair, running=4) for pair in grows} == grows


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
