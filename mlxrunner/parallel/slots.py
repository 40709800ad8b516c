"""Which slot a new prompt goes to, and where its prefix comes from. Bookkeeping only: no tensors, no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mlxrunner.cache.tokens import TokenArray, TokenBuffer, as_tokens, common_prefix
from mlxrunner.errors import MlxrunnerError

WORTH_WAITING = 16
"""Tokens of a prefix that somebody else is evaluating at the moment, for which a new prompt waits instead of evaluating them again."""


class NoFreeSlotError(MlxrunnerError):
    """Every slot has a request."""

    def __init__(self, slots: int) -> None:
        super().__init__(f"all {slots} slots are in use: finish or cancel a request, or load with more max_sequences")


@dataclass
class Slot:
    """A sequence of the cache. `tokens`: those whose forward pass was dispatched; `planned`: what its request is about to evaluate.

    Tokens are forgotten before their cells are touched, and noted after they are there: a slot never claims what it does not have.
    """

    number: int
    tokens: TokenBuffer = field(default_factory=TokenBuffer)
    planned: TokenArray = field(default_factory=lambda: as_tokens([]))
    is_busy: bool = False
    last_used: int = 0


@dataclass(frozen=True)
class Choice:
    """`slot` is to be used with `matched` tokens of `source`'s; `ready`: whether they have been evaluated yet."""

    slot: Slot
    source: Slot
    matched: int
    ready: bool = True


def choose(
    slots: Sequence[Slot],
    prompt: TokenArray,
    *,
    own: Slot | None = None,
    ahead: Sequence[Slot] | None = None,
    can_resume: Callable[[Slot, int], bool] = lambda slot, matched: True,
) -> Choice:
    """The free slot with the longest common prefix, or the least recently used free one to which a longer prefix is copied.

    A still longer prefix that another request is about to evaluate is worth waiting for. `own`: the only slot that comes into question;
    None: any that is free, NoFreeSlotError if all are busy. `ahead`: those that may be waited for (all that are busy); `can_resume`: whether
    all is there that a query behind the first so many tokens of a slot looks at.
    """
    free = [slot for slot in slots if not slot.is_busy] if own is None else [own]
    if not free:
        raise NoFreeSlotError(len(slots))
    busy = [slot for slot in slots if slot.is_busy] if ahead is None else ahead
    stored = {slot.number: common_prefix(slot.tokens.array, prompt) for slot in slots}
    stored = {slot.number: stored[slot.number] if can_resume(slot, stored[slot.number]) else 0 for slot in slots}
    planned = {slot.number: common_prefix(slot.planned, prompt) for slot in busy}
    best_free = max(free, key=lambda slot: (stored[slot.number], -slot.last_used))
    best = max(slots, key=lambda slot: stored[slot.number])
    oldest = min(free, key=lambda slot: slot.last_used)
    # Where many share a prefix, all take it from the first, whatever else two of them have in common.
    enough = max(planned.values(), default=0) - WORTH_WAITING
    promised = next((slot for slot in busy if planned[slot.number] > enough), None)
    if promised is not None and planned[promised.number] >= stored[best.number] + WORTH_WAITING:
        return Choice(oldest, promised, planned[promised.number], ready=False)
    if stored[best.number] > stored[best_free.number]:
        return Choice(oldest, best, stored[best.number])
    return Choice(best_free, best_free, stored[best_free.number])


def share(budget: int, wants: Sequence[int], first: int) -> list[int]:
    """How many tokens each of several prefills gets of a step's `budget`: in turn, beginning with number `first`, none starves."""
    given = [0] * len(wants)
    order = [(first + i) % len(wants) for i in range(len(wants))]
    hungry = [i for i in order if wants[i]]
    while budget and hungry:
        each = max(1, budget // len(hungry))
        for i in hungry:
            take = min(each, wants[i] - given[i], budget)
            given[i] += take
            budget -= take
        hungry = [i for i in hungry if given[i] < wants[i]]
    return given
