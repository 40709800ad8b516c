"""Allocate slots and cells: which prefix a request shares, what it takes, and who steps back.

A shared token counts once, also for a request that still waits for it. Idle slots do not count,
because they are cleared if necessary. A conversation that comes back from disk, or makes way for
another one, is moved a piece at a time between the steps.

A request claims cells for its prompt and for a part of its answer, and claims more as the answer
grows. Where nothing is left, the youngest request of the lowest priority steps back: it waits, and
resumes later where it was. The first request of the highest priority never steps back for another,
and each fits alone, since the context is never longer than all cells. Therefore each request that
begins comes to its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np

from mlxrunner.cache.account import TokenAccounting
from mlxrunner.cache.entry import (
    TokenArray,
    TokenBuffer,
    as_tokens,
    common_prefix,
    goes_on,
    places_of,
)
from mlxrunner.cache.pool.causal import CausalCache
from mlxrunner.cache.pool.cells import SHORT_PREFIX
from mlxrunner.cache.prefix import CopySource, PrefixCache
from mlxrunner.cache.protocol import END
from mlxrunner.cache.saved import SavedEntry
from mlxrunner.engine.backends.backend import Backend
from mlxrunner.engine.request import ActiveRequest
from mlxrunner.engine.scheduling.eviction import EvictionPolicy, RequestFinalizer
from mlxrunner.engine.scheduling.pacing import PRIORITIES
from mlxrunner.errors import CacheFullError, NoFreeSlotError
from mlxrunner.models.facts import DEPENDS
from mlxrunner.results import log_lookup

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
    last_used: int = 0
    """The number of the step in which its last request ended."""
    asked: int = 0
    """Number of tokens of the last request's prompt."""
    exact: int = END
    """Number of first `tokens` whose keys are those that a cold run would store."""
    rests: bool = False
    """True if its request waits for room to continue: what it holds may be given up."""

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
        """Return the largest offset <= `to` from which a prompt can continue."""
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


def choose(
    slots: Sequence[Slot],
    prompt: TokenArray,
    *,
    own: Slot | None = None,
    ahead: Sequence[Slot] | None = None,
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
    best, ready = _best(slots, shared, most, target)
    source, matched, is_ready = _awaited(busy, prompt, most, ready) or (best, ready, True)
    if target is None or (own is None and matched > shared[target.number]):
        target = (least or least_used)(free)
    return SlotChoice(target, source, matched, is_ready)


def least_used(slots: Sequence[Slot]) -> Slot:
    """Return an empty slot, or the one that was used least recently."""
    return min(slots, key=lambda slot: (bool(slot.tokens), slot.last_used))


def _best(
    slots: Sequence[Slot], shared: dict[int, int], most: int, target: Slot | None
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
        found = slot.reach(offered)
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
SOON = LEAST
"""Tokens of each running answer for which room is made in advance."""
LATER = "submit it again when another request has ended"


def claimed(prompt: int, answer: int, free: int, total: int, slots: int) -> int:
    """Return the tokens of its answer that a request claims at its begin.

    These are an even share of the `free` cells of `total`, if `slots` slots are free, its own
    included. `prompt`: tokens of the prompt that need cells; a prefix that is shared needs none.
    `answer`: its most tokens that are still to come. Raise CacheFullError if the request has to
    wait.
    """
    least = min(answer, LEAST)
    left = free - prompt
    if left < least:
        raise CacheFullError("this request", prompt + least, max(0, free), total, LATER)
    return min(answer, max(least, left // max(1, slots)))


def grown(left: int, free: int, running: int) -> int:
    """Return the tokens that a request claims when its answer reaches the end of its claim.

    `left`: most tokens of the answer that are still to come. `free`: cells that nobody claims.
    `running`: number of requests that may grow. The result is 0 if there is no cell.
    """
    return max(0, min(left, free, max(LEAST, free // max(1, running))))


def steps_back(running: Sequence[ActiveRequest]) -> ActiveRequest:
    """Return the request that gives its cells up: the youngest of the lowest priority."""
    return max(reversed(running), key=lambda one: PRIORITIES.index(one.priority))


class KVAllocator:
    """The cells of an engine, and the requests that take them."""

    def __init__(
        self,
        adapted: Backend,
        slots: Sequence[Slot],
        requests: Sequence[ActiveRequest],
        *,
        capacity: int,
        cells: int,
    ) -> None:
        """Manage `cells` cells per layer for running `requests` of up to `capacity` tokens each."""
        self._adapted, self._slots, self._requests = adapted, slots, requests
        self._capacity, self._cells = capacity, cells
        # Without groups no layer has cells.
        self.is_ample = cells >= len(slots) * capacity or not adapted.groups

    def check(
        self, request: ActiveRequest, choice: SlotChoice, others: Sequence[ActiveRequest]
    ) -> None:
        """Claim the cells of `request`, beside `others`.

        `choice`: the prefix that it shares, and the slot that has it. Raise CacheFullError if it
        has to wait for room.
        """
        if self.is_ample:
            request.claimed = self._capacity
            return
        shared = self._shared(request, choice.source, choice.matched)
        free = self._free(others, (choice.source.number, shared if choice.ready else 0))
        todo = self._todo(request)
        slots = sum(not slot.is_busy or slot is choice.slot for slot in self._slots)
        answer = self._most(request) - todo
        request.claimed = todo + claimed(todo - shared, answer, free, self._cells, slots)

    def grow(self, request: ActiveRequest) -> None:
        """Let the claim of `request` grow if it has no cell for its next token.

        In a full context a shift makes room. Raise CacheFullError if there is no cell.
        """
        left = self._most(request) - request.claimed
        if request.place < request.claimed or left <= 0:
            return
        holding = self.holding
        more = grown(left, self._free(holding), len(holding))
        if not more:
            raise CacheFullError("the next token", 1, 0, self._cells, LATER)
        request.claimed += more

    @property
    def may_copy(self) -> bool:
        """True if no claim needs the cells that the copy of a short prefix takes."""
        return self.is_ample or self._free(self.holding) >= SHORT_PREFIX

    @property
    def soon(self) -> int:
        """The most cells that the next tokens of running requests take, SOON of each."""
        return sum(min(SOON, self._most(one) - one.place) for one in self.holding)

    def wait(self, request: ActiveRequest) -> None:
        """Claim only what a request that stepped back needs to continue."""
        todo = self._todo(request)
        request.claimed = todo + min(self._most(request) - todo, SOON)

    @property
    def holding(self) -> list[ActiveRequest]:
        """The requests that have cells, or claim the rest of a prefix that they wait for."""
        return [request for request in self._requests if request.holds_cells]

    def _free(self, others: Sequence[ActiveRequest], prefix: tuple[int, int] = (0, 0)) -> int:
        """Return the number of cells that `others` neither use nor claim.

        `prefix`: a slot, and the number of its first tokens that count as used, too.
        """
        busy = [other.slot.number for other in others]
        used = max(group.num_used_by(busy, prefix) for group in self._adapted.groups)
        return self._cells - used - sum(self._coming(other) for other in others)

    def _todo(self, request: ActiveRequest) -> int:
        """Return the cells that the tokens to evaluate take; shifts make room for the others."""
        return min(len(request.todo), self._capacity)

    def _most(self, request: ActiveRequest) -> int:
        return min(len(request.tokens) + request.limit, self._capacity)

    def _coming(self, request: ActiveRequest) -> int:
        """Return the most cells that `request` may still take within its claim.

        A shift copies the tokens that the request shares with others, except for those that it
        keeps.
        """
        coming = max(0, request.claimed - request.place)
        if not request.is_placed and request.source is not None:
            return coming - self._shared(request, request.source, request.promised)
        if request.shift is None:
            return coming
        others = [other.slot.number for other in self._requests if other is not request]
        has_windows = any(group.window for group in self._adapted.groups)
        kept = 0 if has_windows else request.shift.keep
        return coming + max(
            group.num_shared(request.slot.number, others, kept) for group in self._adapted.groups
        )

    def _shared(self, request: ActiveRequest, source: Slot, tokens: int) -> int:
        """Return how many of the `tokens` that `request` takes from `source` need no cells.

        That is all of them, or none if `request` or a request in `source` may shift.
        """
        movers = [
            other for other in self._requests if other.slot is source and other.shift is not None
        ]
        return 0 if request.shift is not None or movers else tokens


DONE = object()
Resume = Callable[[ActiveRequest, Slot, int], None]
"""A function that places a request in a slot, of which some tokens were just restored."""


class OffloadTasks:
    """The work on slots that takes long, a piece at a time."""

    def __init__(
        self,
        engine: Backend,
        requests: Sequence[ActiveRequest],
        room: KVAllocator,
        residents: EvictionPolicy,
        resume: Resume,
    ) -> None:
        """Work for `requests`, the running ones, in the slots of `residents`."""
        self._engine, self._requests = engine, requests
        self._room, self._residents, self._resume = room, residents, resume
        self._behind = residents.behind
        self._ahead: Generator[None, None, None] | None = None
        """The parking of a conversation for answers that grow."""
        self._tried: dict[int, tuple[int, int]] = {}
        """The slots that were parked for these, each with its `_moment`."""
        self.are_on = False
        """True if parking and restoring are done in pieces."""

    @property
    def is_any(self) -> bool:
        """True if there is something to do between two steps."""
        if self.are_on and self._ahead is None:
            self._look_ahead()
        if self._ahead is not None or any(one.offload_task is not None for one in self._requests):
            return True
        return self.are_on and self._behind.wait_s(is_idle=False) == 0

    def run(self, seconds: float) -> None:
        """Go on with all tasks for about some seconds: one piece at least."""
        until = time.perf_counter() + seconds
        for request in self._requests:
            while request.offload_task is not None:
                self._go_on(request)
                if time.perf_counter() >= until:
                    return
        while self._ahead is not None:
            if next(self._ahead, DONE) is DONE:
                self._ahead = None
            if time.perf_counter() >= until:
                return
        if self.are_on:
            self._behind.go_on(until - time.perf_counter(), is_idle=False)

    def stop(self) -> None:
        """Leave what is parked for growing answers, and saved, undone."""
        self._behind.stop()
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()

    def restoring(self, slot: Slot, saved: SavedEntry, count: int) -> Generator[None, None, int]:
        """Restore a conversation, of which a prompt shares `count` tokens, and return these."""
        yield from self._residents.restoring(slot, saved)
        return count

    def making_way(
        self, request: ActiveRequest, choice: SlotChoice
    ) -> Generator[None, None, int] | None:
        """Return the task that offloads a conversation for `request`, which then chooses again.

        None if all that has to be given up for it is parked fast.
        """
        victim = self._victim_of(request, choice) if self.are_on else None
        if victim is None:
            return None
        request.parked_ahead.add(victim.number)
        return self._parking(victim)

    def _parking(self, slot: Slot) -> Generator[None, None, int]:
        yield from self._residents.parking_ahead(slot)
        return 0

    def _go_on(self, request: ActiveRequest) -> None:
        """Do a piece of a request's task. At its end, place the request, or let it choose again.

        It also chooses again if others took the cells meanwhile.
        """
        try:
            next(request.offload_task or iter(()))
        except StopIteration as done:
            request.offload_task = None
            if done.value:
                self._resume(request, request.slot, done.value)
        except CacheFullError:
            request.offload_task = None

    def _victim_of(self, request: ActiveRequest, choice: SlotChoice) -> Slot | None:
        """Return a slot that will be given up for `request`, and takes long to be parked."""
        slot = request.slot
        stays = choice.ready and choice.source is slot and choice.parked is None
        if not (stays and goes_on(choice.matched, len(slot.tokens))) and self._is_slow(
            slot, request
        ):
            return slot
        lacking = request.claimed - len(slot.tokens) - self._num_free
        if choice.parked is None and choice.source is not slot:
            lacking -= choice.matched
        kept = (slot, choice.source)
        return self._slow_one(lacking, kept, lambda one: self._is_slow(one, request))

    def _look_ahead(self) -> None:
        """Begin to park a conversation whose cells the running answers need soon."""
        if self._room.is_ample or not self._residents.idle():
            return
        slot = self._slow_one(self._room.soon - self._num_free, (), self._is_new)
        if slot is not None:
            self._tried[slot.number] = _moment(slot)
            self._ahead = self._residents.parking_ahead(slot)

    def _is_new(self, slot: Slot) -> bool:
        return self._tried.get(slot.number) != _moment(slot) and self._residents.lacks_files(slot)

    def _is_slow(self, slot: Slot, request: ActiveRequest) -> bool:
        is_new = slot.number not in request.parked_ahead
        return is_new and self._residents.lacks_files(slot)

    def _slow_one(
        self, lacking: int, kept: Sequence[Slot], is_slow: Callable[[Slot], bool]
    ) -> Slot | None:
        """Return the first slot that `is_slow` of those given up if `lacking` cells are missing.

        `kept`: slots that are not given up.
        """
        if self._room.is_ample or not self._full or lacking <= 0:
            return None
        idle = [slot for slot in self._residents.idle() if slot not in kept]
        while idle and lacking > 0:
            victim = self._residents.least(idle)
            if is_slow(victim):
                return victim
            idle.remove(victim)
            lacking -= min(group.num_own(victim.number) for group in self._full)
        return None

    @property
    def _full(self) -> list[CausalCache]:
        return [group for group in self._engine.groups if group.memory is None]

    @property
    def _num_free(self) -> int:
        return min((group.num_free for group in self._full), default=0)


def _moment(slot: Slot) -> tuple[int, int]:
    """Return a mark of the conversation in a slot, which changes when it is used."""
    return slot.last_used, len(slot.tokens)


class SlotAssigner:
    """The slots of an engine, and the room that the requests in them need."""

    def __init__(
        self,
        engine: Backend,
        slots: Sequence[Slot],
        requests: list[ActiveRequest],
        room: KVAllocator,
        residents: EvictionPolicy,
        endings: RequestFinalizer,
        accounting: TokenAccounting,
        message_ends: TokenArray,
    ) -> None:
        """Assign `requests`, the running ones in order of arrival, to `slots`.

        `endings` end those that find no room. `accounting` counts their tokens. `message_ends`: the
        tokens that end a message. Checkpoints are taken at such places.
        """
        self._accounting, self._endings = accounting, endings
        self._engine, self._slots, self._requests = engine, slots, requests
        self._room, self.residents, self._message_ends = room, residents, message_ends
        self._submitted = 0
        self.offload_tasks = OffloadTasks(engine, requests, room, residents, self._resume)
        self.is_reusable = True
        """False if no prompt may reuse what another one has evaluated."""

    def admit(self, request: ActiveRequest, began: tuple[int, int]) -> None:
        """Give a request a slot and the prefix that it can share.

        `began`: the moment, see `Scheduler.moment`. Raise NoFreeSlotError or CacheFullError if
        there is no room now.
        """
        clock = request.clock
        # Place waiting requests first: the slot whose prefix they share may be taken now.
        self.place_waiting()
        choice = self._choose(request)
        self._room.check(request, choice, self._requests)
        self._submitted += 1
        slot, request.submitted = choice.slot, self._submitted
        request.slot = slot
        request.trimmed = len(slot.tokens)
        try:
            clock.lookup_began = time.perf_counter()
            slot.is_busy, slot.planned = True, request.tokens
            request.began = began
            self._follow(request, choice)
            clock.lookup_s = time.perf_counter() - clock.lookup_began
            request.open_account(self._accounting)
            self._requests.append(request)
        except BaseException:
            self.free(slot)
            raise

    def place_waiting(self) -> None:
        """Give waiting requests their prefix, once it is evaluated.

        Requests whose prefix will not come, or that lacked room, choose again. None takes room that
        one of higher priority waits for.
        """
        waiting = [pair for pair in enumerate(self._requests) if not pair[1].is_placed]
        has_room = True
        for _, group in groupby(sorted(waiting, key=_rank), key=_rank):
            has_room = all(self._try_to_place(*pair, has_room=has_room) for pair in group)

    def _try_to_place(self, number: int, request: ActiveRequest, *, has_room: bool) -> bool:
        """Place request `number` if its prefix is there. Return False if it waits for room.

        `has_room`: True if no request of higher priority waits for room.
        """
        source, promised, todo = request.source, request.promised, request.todo
        if request.offload_task is not None:
            return True
        if source is not None:
            if source.shared_with(todo) >= promised and source.reach(promised) == promised:
                self._resume(request, source)
                return True
            if source.is_busy and source.will_share_with(todo) >= promised:
                return True
        if not has_room:
            request.source = None
            return False
        self._place_again(request, self._requests[:number])
        return request.is_placed or request.source is not None

    def free(self, slot: Slot) -> None:
        """Forget the request of a slot, and its tokens; a single slot keeps what is whole."""
        if self._engine.is_single:
            slot.cache.release()
        else:
            self.residents.clear(slot, "an error")
        slot.is_busy, slot.planned = False, slot.planned[:0]

    def make_cells_for_shift(self, request: ActiveRequest, begin: int) -> None:
        """Clear idle slots until a shift can copy the request's shared tokens from `begin` on.

        Raise CacheFullError if no slot is left to clear.
        """
        others = [other.number for other in self._slots if other is not request.slot]

        def check() -> None:
            for group in self._engine.groups:
                needed = group.num_shared(request.slot.number, others, begin)
                if needed > group.num_free:
                    raise CacheFullError("a shift", needed, group.num_free, group.num_cells)

        self.residents.make_room(check, request)

    def _choose(
        self,
        request: ActiveRequest,
        own: Slot | None = None,
        ahead: Sequence[Slot] | None = None,
    ) -> SlotChoice:
        """Choose a slot and a source, or a conversation on disk that has more of the prompt."""
        least = self.residents.least
        if not self.is_reusable:
            for slot in self._slots:
                if not slot.is_busy or slot is own:
                    slot.cache.reset(DEPENDS)
            slots = [slot for slot in self._slots if not slot.is_busy or slot is own]
            return choose(slots, request.todo, own=own, ahead=[])
        choice = choose(self._slots, request.todo, own=own, ahead=ahead, least=least)
        found = self.residents.find(request.todo, choice.matched)
        if found is None:
            return choice
        free = [slot for slot in self._slots if not slot.is_busy]
        slot = own or least(free)
        return SlotChoice(slot, slot, 0, parked=found)

    def _follow(self, request: ActiveRequest, choice: SlotChoice) -> None:
        """Take the prefix that a slot or the disk has, or begin to wait for it."""
        slot = request.slot
        offload_task = self.offload_tasks.making_way(request, choice)
        if offload_task is not None:
            request.offload_task = offload_task
        elif choice.parked is not None:
            saved = self.residents.read(*choice.parked)
            self.residents.give_up(slot, request, "slot")
            if self.offload_tasks.are_on:
                request.offload_task = self.offload_tasks.restoring(slot, saved, choice.parked[1])
            else:
                for _ in self.residents.restoring(slot, saved):
                    pass
                self._resume(request, slot, choice.parked[1])
        elif choice.ready:
            if choice.source is slot:
                self.residents.set_aside(slot, choice.matched, request)
            else:
                self.residents.give_up(slot, request, "slot")
            self._resume(request, choice.source)
        else:
            # Others must not share tokens that will be replaced.
            self.residents.give_up(slot, request, "slot")
            request.source, request.promised = choice.source, choice.matched
        self.residents.fit(request)

    def _resume(self, request: ActiveRequest, source: Slot, restored: int = 0) -> None:
        """Give the request's slot what `source` has of its prompt.

        `restored`: number of tokens of the slot that were just read from disk.
        """
        slot, prompt = request.slot, request.todo
        copied = None if source is slot else CopySource(source.cache, source.exact)
        self.residents.explain(slot.cache, prompt)
        slot.exact, slot.rests = END, False
        lease = slot.cache.begin(
            prompt, source=copied, ahead=request.is_ahead, is_shifted=request.prompt.is_shifted
        )
        request.lease = lease
        lease.take()
        if copied is not None:
            self._engine.copied(source.number, slot.number, lease.lookup.cached)
        found = replace(lease.lookup, restored=min(restored, lease.lookup.cached))
        if request.clock.lookup_s:  # it waited: its lookup was timed before
            found = replace(found, rewind_s=0.0)
        request.place, request.is_placed, request.source = found.cached, True, None
        request.evaluated_from = found.cached
        if not request.sampled:
            request.lookup = found
        if source is slot:
            request.trimmed = max(0, request.trimmed - found.cached)
        coming = request.limit - request.sampled
        count = len(prompt) - found.cached + coming
        beside = [one.slot.number for one in self._requests if one.is_placed]
        self._engine.expect(slot.number, count, may_copy=self._room.may_copy, beside=beside)
        if lease.needs_checkpoints:
            ends = np.flatnonzero(np.isin(prompt, self._message_ends)) + 1
            at = None if self._engine.is_single else found.cached
            lease.mark(places_of(len(prompt), ends.tolist(), ahead=request.is_ahead, at=at))
            request.checkpoint_if_due()
        if not request.is_ahead:
            log_lookup(len(prompt), found.matched, found.cached)

    def _place_again(self, request: ActiveRequest, ahead: Sequence[ActiveRequest]) -> None:
        """Choose again, from the present content of the slots. Without room the request waits.

        Nobody waits meanwhile for what it will evaluate.
        """
        slot = request.slot
        request.source, request.promised, slot.planned = None, 0, slot.planned[:0]
        choice = self._choose(request, slot, [other.slot for other in ahead])
        others = [other for other in self._requests if other.holds_cells]
        with suppress(CacheFullError):
            self._room.check(request, choice, others)
            self._follow(request, choice)
            slot.planned = request.todo

    def make_room_for(self, requests: Sequence[ActiveRequest]) -> None:
        """Make room in the full contexts of `requests`; one without cells for that ends."""
        for request in [one for one in requests if one.is_decoding or (one.is_placed and one.left)]:
            try:
                self._make_room(request)
            except CacheFullError as error:
                request.ending = "no room"
                self._endings.fail(request, error)

    def grow(self) -> None:
        """Let claims grow. Raise CacheFullError if a request has no cell for its next token."""
        for request in self._requests:
            if request.is_decoding:
                self._room.grow(request)

    def make_way(self, error: CacheFullError) -> None:
        """Let requests step back until all others have cells, before these can begin again."""
        lacking: CacheFullError | None = error
        while lacking is not None:
            self._lack_room(lacking)
            lacking = None
            try:
                self.grow()
            except CacheFullError as again:
                lacking = again

    def _lack_room(self, error: CacheFullError) -> None:
        """Let the youngest request of lowest priority wait for cells.

        End it if no other one holds any.
        """
        holding = self._room.holding
        request = steps_back(holding)
        if len(holding) == 1:
            request.ending = "no room"
            self._endings.fail(request, error)
            return
        if request.is_placed:
            request.give_way()
            if request.slot.exact != END:
                self.residents.clear(request.slot, "a lack of room")
            elif self.offload_tasks.are_on:
                self.residents.rest(request.slot)
            else:
                self.residents.give_up(request.slot, None, "memory")
        request.stop_offload_task()
        request.source = None
        request.slot.planned = request.slot.planned[:0]  # nobody shall wait for it
        self._room.wait(request)

    def _make_room(self, request: ActiveRequest) -> None:
        """Drop the oldest half after the kept tokens if the next token would not fit.

        The remaining tokens are evaluated again if keys can't be moved, or if a window lacks tokens
        that the next one sees.
        """
        shift, slot, lease = request.shift, request.slot, request.lease
        if shift is None or request.place < shift.context:
            return
        keep, discard = shift.keep, shift.discard(request.place)
        request.next_checkpoint = 0  # offsets move: ask again
        tokens = slot.tokens.array
        kept = np.concatenate([tokens[:keep], tokens[keep + discard :]])
        slot.planned, request.shifted = slot.planned[:0], request.shifted + discard
        closes = all(cache.can_shift(keep, discard) for cache in lease.caches)
        if closes:
            self.make_cells_for_shift(request, keep + discard)
        if lease.shift(keep, discard, self._engine.rotate):
            if not self._engine.is_single:
                slot.exact = min(slot.exact, keep)
            if request.left:
                request.todo = np.append(kept, request.todo[request.place :])
            request.place = request.moved = lease.recorded
            return
        request.is_stuck = request.is_stuck or closes
        slot.exact, request.moved = END, 0
        left = lease.restart(kept)
        coming = request.todo[request.place :] if request.left else np.array(request.last)
        request.place = request.evaluated_from = lease.recorded
        request.todo = np.append(kept, coming)
        request.reevaluated += len(left)


def _rank(numbered: tuple[int, ActiveRequest]) -> int:
    return PRIORITIES.index(numbered[1].priority)
