"""Assign requests to slots: give each the prefix that it can share, or let it wait for one.

Knows nothing about steps. Slots change in an order that an interrupt may cut anywhere.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby

import numpy as np

from mlxrunner.cache.checkpoints import places_of
from mlxrunner.cache.pool.interface import END
from mlxrunner.cache.prefix import CopySource
from mlxrunner.cache.tokens import TokenArray
from mlxrunner.errors import CacheFullError
from mlxrunner.models.facts import DEPENDS
from mlxrunner.parallel.rows.engine import Engine
from mlxrunner.parallel.scheduling.errands import Errands
from mlxrunner.parallel.scheduling.request import ActiveRequest
from mlxrunner.parallel.scheduling.residents import Residents
from mlxrunner.parallel.scheduling.room import Room
from mlxrunner.parallel.scheduling.slots import Choice, Slot, choose
from mlxrunner.parallel.scheduling.turns import PRIORITIES
from mlxrunner.results import log_lookup


class Assigner:
    """The slots of an engine, and the requests in them."""

    def __init__(
        self,
        engine: Engine,
        slots: Sequence[Slot],
        requests: list[ActiveRequest],
        room: Room,
        residents: Residents,
        message_ends: TokenArray,
    ) -> None:
        """Assign `requests`, the running ones in order of arrival, to `slots`.

        `message_ends`: the tokens that end a message. Checkpoints are taken at such places.
        """
        self._engine, self._slots, self._requests = engine, slots, requests
        self._room, self.residents, self._message_ends = room, residents, message_ends
        self._submitted = 0
        self.errands = Errands(engine, requests, room, residents, self._resume)
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
        if request.errand is not None:
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
        """Forget the tokens and the request of a slot."""
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
    ) -> Choice:
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
        return Choice(slot, slot, 0, parked=found)

    def _follow(self, request: ActiveRequest, choice: Choice) -> None:
        """Take the prefix that a slot or the disk has, or begin to wait for it."""
        slot = request.slot
        errand = self.errands.making_way(request, choice)
        if errand is not None:
            request.errand = errand
        elif choice.parked is not None:
            saved = self.residents.read(*choice.parked)
            self.residents.give_up(slot, request, "slot")
            if self.errands.are_on:
                request.errand = self.errands.restoring(slot, saved, choice.parked[1])
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
        lease = request.lease = slot.cache.begin(prompt, source=copied)
        lease.take()
        if copied is not None:
            self._engine.copied(source.number, slot.number, lease.lookup.cached)
        found = replace(lease.lookup, restored=min(restored, lease.lookup.cached))
        if request.clock.lookup_s:  # it waited: its lookup was timed before
            found = replace(found, rewind_s=0.0)
        request.place, request.is_placed, request.source = found.cached, True, None
        if not request.sampled:
            request.lookup = found
        if source is slot:
            request.trimmed = max(0, request.trimmed - found.cached)
        coming = request.limit - request.sampled
        self._engine.expect(slot.number, len(prompt) - found.cached + coming)
        if lease.needs_checkpoints:
            ends = np.flatnonzero(np.isin(prompt, self._message_ends)) + 1
            lease.mark(places_of(len(prompt), ends.tolist(), at=found.cached))
            request.checkpoint_if_due()
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


def _rank(numbered: tuple[int, ActiveRequest]) -> int:
    """Return the rank of a request's priority, 0 for the highest."""
    return PRIORITIES.index(numbered[1].priority)
