"""Choose the slot of a prompt and the cells that it may take, from counts alone: no tensors.

A request claims cells for its prompt and for a part of its answer, and claims more as the answer
grows. Where nothing is left, the youngest request of the lowest priority steps back: it waits, and
goes on later where it was. The first request of the highest priority never steps back for another,
and each fits alone, since the context is never longer than all cells. Therefore each request that
begins comes to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxrunner.cache.entry import TokenArray, TokenBuffer, as_tokens, common_prefix, goes_on
from mlxrunner.cache.pool.interface import END
from mlxrunner.cache.prefix import PrefixCache
from mlxrunner.engine.scheduling.pacing import PRIORITIES, Priority
from mlxrunner.errors import CacheFullError, NoFreeSlotError

WORTH_WAITING = 16
"""Fewest tokens that make waiting worthwhile.

A new prompt waits for a prefix that another request is evaluating if this saves at least as many.
"""
EDITED = 4
"""Largest edited part of a slot's last prompt: one in EDITED of its tokens.

A prompt that shares the rest of them counts as an edit of its last message.
"""


@dataclass(eq=False)
class Slot:
    """A sequence of the engine: a prefix cache of its own, for one request at a time."""

    number: int
    cache: PrefixCache
    planned: TokenArray = field(default_factory=lambda: as_tokens([]))
    """The prompt of its request, which will be evaluated."""
    is_busy: bool = False
    """True if it has a request."""
    last_used: int = 0
    """The number of the step in which its last request ended."""
    asked: int = 0
    """Number of tokens of the last request's prompt."""
    exact: int = END
    """Number of first `tokens` whose keys are those that a cold run would store."""
    rests: bool = False
    """True if its request waits for room to go on: what it holds may be given up."""

    @property
    def tokens(self) -> TokenBuffer:
        """The tokens of its entry: those whose forward pass was dispatched."""
        return self.cache.entry.tokens

    def shared_with(self, prompt: TokenArray) -> int:
        """Return the number of first tokens of `prompt` that this slot holds exactly.

        These tokens have the keys that a cold run would store.
        """
        return min(common_prefix(self.tokens.array, prompt), self.exact)

    def will_share_with(self, prompt: TokenArray) -> int:
        """Return the number of first tokens of `prompt` that this slot will have.

        Return 0 if it has them already.
        """
        shared = common_prefix(self.planned, prompt)
        return shared if shared > len(self.tokens) else 0

    def reach(self, to: int) -> int:
        """Return the largest offset <= `to` from which a prompt can go on."""
        return self.cache.entry.reach(to)[0] if to else 0


@dataclass(frozen=True)
class SlotChoice:
    """The slot of a prompt, and the source of its prefix."""

    slot: Slot
    source: Slot
    """The slot that has, or will have, the first `matched` tokens."""
    matched: int
    ready: bool = True
    """True if these tokens are evaluated already."""
    parked: tuple[Any, int] | None = None
    """The conversation to read from disk, and its tokens to read; None: none.

    It needs cells of its own, and `matched` is 0.
    """


Reach = Callable[[Slot, int], int]
"""A function of a slot and an offset: see `Slot.reach`."""


def choose(
    slots: Sequence[Slot],
    prompt: TokenArray,
    *,
    own: Slot | None = None,
    ahead: Sequence[Slot] | None = None,
    reach: Reach = Slot.reach,
    least: Callable[[Sequence[Slot]], Slot] | None = None,
) -> SlotChoice:
    """Choose the slot for `prompt`, and the slot, busy or not, whose prefix it shares.

    At least one token of `prompt` is left to evaluate. The prompt waits for a prefix that another
    request is about to evaluate if that is much longer. `own`: the slot to use; None: any free one.
    `ahead`: the slots that may be waited for (default: all busy ones). `least`: which of some slots
    is given up first (default: `least_used`). Raise NoFreeSlotError if all slots are busy.
    """
    free = [slot for slot in slots if not slot.is_busy] if own is None else [own]
    if not free:
        raise NoFreeSlotError(len(slots))
    busy = [slot for slot in slots if slot.is_busy] if ahead is None else ahead
    most = len(prompt) - 1
    shared = {slot.number: slot.shared_with(prompt) for slot in slots}
    target = own or _going_on(free, shared)
    best, ready = _best(slots, shared, most, target, reach)
    source, matched, is_ready = _awaited(busy, prompt, most, ready) or (best, ready, True)
    if target is None or (own is None and matched > shared[target.number]):
        target = (least or least_used)(free)
    return SlotChoice(target, source, matched, is_ready)


def least_used(slots: Sequence[Slot]) -> Slot:
    """Return an empty slot, or the one that was used least recently."""
    return min(slots, key=lambda slot: (bool(slot.tokens), slot.last_used))


def _best(
    slots: Sequence[Slot], shared: dict[int, int], most: int, target: Slot | None, reach: Reach
) -> tuple[Slot, int]:
    """Return the slot that offers most tokens of a prompt, and their number.

    `most`: the most tokens to share. `target` is preferred among equals.
    """
    best, ready = target or slots[0], -1
    order = sorted(slots, key=lambda slot: (-min(shared[slot.number], most), slot is not target))
    for slot in order:
        offered = min(shared[slot.number], most)
        if offered <= ready:
            break
        found = reach(slot, offered)
        if found > ready:
            best, ready = slot, found
    return best, ready


def _awaited(
    busy: Sequence[Slot], prompt: TokenArray, most: int, ready: int
) -> tuple[Slot, int, bool] | None:
    """Return the slot to wait for, with the number of tokens that it will have.

    Return None if waiting for more than the `ready` tokens is not worth it. `most`: the most tokens
    to share.
    """
    coming = [min(slot.will_share_with(prompt), most) for slot in busy]
    # All requests with a common prefix wait for the first of them, even if two share more.
    enough = max(coming, default=0) - WORTH_WAITING
    for slot, count in zip(busy, coming, strict=True):
        if count > enough:
            return (slot, count, False) if count >= ready + WORTH_WAITING else None
    return None


def _going_on(free: Sequence[Slot], shared: dict[int, int]) -> Slot | None:
    """Return the free slot whose conversation the prompt continues, or None.

    The prompt has all tokens of that slot but a short tail. If no slot is empty, the result may
    also be a slot whose last message the prompt edits or repeats. `shared`: the tokens that the
    prompt shares with each slot.
    """
    alike = sorted(
        (slot for slot in free if shared[slot.number]),
        key=lambda slot: (-shared[slot.number], slot.last_used),
    )
    whole = (slot for slot in alike if goes_on(shared[slot.number], len(slot.tokens)))
    edited = (slot for slot in alike if shared[slot.number] >= slot.asked - slot.asked // EDITED)
    return next(whole, next(edited, None) if all(slot.tokens for slot in free) else None)


LEAST = 256
"""Least tokens of an answer that a request claims at once, unless its answer is shorter."""
LATER = "submit it again when another request has ended"


@dataclass(frozen=True)
class CellDemand:
    """The cells that a request needs."""

    prompt: int
    """Tokens of its prompt that need cells; a prefix that is shared needs none."""
    answer: int
    """Most tokens of its answer that are still to come."""


@dataclass(frozen=True)
class QueuePlace:
    """The place of a running request among the others."""

    priority: Priority
    arrival: int
    """A number that is higher for each later request."""


def claimed(need: CellDemand, free: int, total: int, slots: int) -> int:
    """Return the tokens of its answer that a request claims at its begin.

    These are an even share of the `free` cells of `total`, if `slots` slots are free, its own
    included. Raise CacheFullError if the request has to wait.
    """
    least = min(need.answer, LEAST)
    left = free - need.prompt
    if left < least:
        raise CacheFullError("this request", need.prompt + least, max(0, free), total, LATER)
    return min(need.answer, max(least, left // max(1, slots)))


def grown(left: int, free: int, running: int) -> int:
    """Return the tokens that a request claims when its answer reaches the end of its claim.

    `left`: most tokens of the answer that are still to come. `free`: cells that nobody claims.
    `running`: number of requests that may grow. The result is 0 if there is no cell.
    """
    return max(0, min(left, free, max(LEAST, free // max(1, running))))


def steps_back(running: Sequence[QueuePlace]) -> int:
    """Return the index of the request that gives its cells up: the youngest of lowest priority."""
    return max(
        range(len(running)),
        key=lambda i: (PRIORITIES.index(running[i].priority), running[i].arrival),
    )
