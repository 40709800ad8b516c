"""Which slot a new prompt goes to, and where its prefix comes from. Bookkeeping only: no tensors, no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mlxrunner.cache.sequences import END
from mlxrunner.cache.tokens import TokenArray, TokenBuffer, as_tokens, common_prefix
from mlxrunner.errors import MlxrunnerError

WORTH_WAITING = 16
"""Tokens of a prefix that somebody else is evaluating at the moment, for which a new prompt waits instead of evaluating them again."""
SHORT_TAIL = 4
"""Tokens by which a conversation that goes on may differ: templates end an answer in their own way."""
EDITED = 4
"""A prompt that shares all but one in EDITED tokens of a slot's last prompt edits its last message."""


class NoFreeSlotError(MlxrunnerError):
    """Every slot has a request."""

    def __init__(self, slots: int) -> None:
        super().__init__(
            f"all {slots} slots are in use: finish or cancel a request, or load with more max_sequences"
        )


@dataclass
class Slot:
    """A sequence of the cache. `tokens`: those whose forward pass was dispatched; `planned`: what its request is about to evaluate.

    `asked`: tokens of the last request's prompt. `exact`: as many of `tokens` as a cold run would store the same keys for.
    Tokens are forgotten before their cells are touched, and noted after they are there: a slot never claims what it does not have.
    """

    number: int
    tokens: TokenBuffer = field(default_factory=TokenBuffer)
    planned: TokenArray = field(default_factory=lambda: as_tokens([]))
    is_busy: bool = False
    last_used: int = 0
    asked: int = 0
    exact: int = END

    def shared_with(self, prompt: TokenArray) -> int:
        """The first tokens of `prompt` that are in this slot, as a cold run would store them."""
        return min(common_prefix(self.tokens.array, prompt), self.exact)

    def will_share_with(self, prompt: TokenArray) -> int:
        """The first tokens of `prompt` that will be in this slot; 0 if they have been evaluated."""
        shared = common_prefix(self.planned, prompt)
        return shared if shared > len(self.tokens) else 0


@dataclass(frozen=True)
class Choice:
    """`slot` is to be used with the first `matched` tokens of `source`; `ready`: whether they have been evaluated yet."""

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
    """Choose the slot for `prompt`, and the slot, busy or not, whose prefix it shares.

    At least one token of `prompt` is left to evaluate. A much longer prefix that another request is
    about to evaluate is waited for. `own`: the only slot that comes into question; None: any that is
    free, NoFreeSlotError if all are busy. `ahead`: those that may be waited for (all that are busy).
    `can_resume(slot, n)`: whether all is stored that a query behind its first n tokens sees.
    """
    free = [slot for slot in slots if not slot.is_busy] if own is None else [own]
    if not free:
        raise NoFreeSlotError(len(slots))
    busy = [slot for slot in slots if slot.is_busy] if ahead is None else ahead
    most = len(prompt) - 1
    shared = {slot.number: slot.shared_with(prompt) for slot in slots}
    ready = {number: min(count, most) for number, count in shared.items()}
    ready = {
        slot.number: ready[slot.number] if can_resume(slot, ready[slot.number]) else 0
        for slot in slots
    }
    target = own or _going_on(free, shared)
    best = max(slots, key=lambda slot: (ready[slot.number], slot is target))
    source, matched, is_ready = _awaited(busy, prompt, most, ready[best.number]) or (
        best,
        ready[best.number],
        True,
    )
    if target is None or (own is None and matched > shared[target.number]):
        target = min(free, key=lambda slot: (bool(slot.tokens), slot.last_used))
    return Choice(target, source, matched, is_ready)


def _awaited(
    busy: Sequence[Slot], prompt: TokenArray, most: int, ready: int
) -> tuple[Slot, int, bool] | None:
    """The slot that will have so much more of `prompt` than is `ready` that it is waited for."""
    coming = [min(slot.will_share_with(prompt), most) for slot in busy]
    # Where many share a prefix, all take it from the first, whatever else two of them have in common.
    enough = max(coming, default=0) - WORTH_WAITING
    for slot, count in zip(busy, coming, strict=True):
        if count > enough:
            return (slot, count, False) if count >= ready + WORTH_WAITING else None
    return None


def _going_on(free: Sequence[Slot], shared: dict[int, int]) -> Slot | None:
    """The slot whose conversation goes on: where the prompt has all of its tokens but a short tail.

    Where no slot is empty, also where the prompt edits its last message or asks it again.
    """
    alike = sorted(
        (slot for slot in free if shared[slot.number]),
        key=lambda slot: (-shared[slot.number], slot.last_used),
    )
    tails = {slot.number: len(slot.tokens) - shared[slot.number] for slot in alike}
    whole = (
        slot for slot in alike if tails[slot.number] <= min(SHORT_TAIL, shared[slot.number] // 2)
    )
    edited = (slot for slot in alike if shared[slot.number] >= slot.asked - slot.asked // EDITED)
    return next(whole, next(edited, None) if all(slot.tokens for slot in free) else None)


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
