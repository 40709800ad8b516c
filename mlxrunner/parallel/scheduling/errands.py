"""Park and restore conversations in pieces, between the steps.

A request may have an errand before it is placed: its conversation comes back from disk, or another
one is parked to make way for it. As answers grow, the conversations that will have to make room are
parked before their cells are needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence

from mlxrunner.cache.layers.protocol import SavedEntry
from mlxrunner.cache.pool.causal import CausalCache
from mlxrunner.cache.tokens import goes_on
from mlxrunner.errors import CacheFullError
from mlxrunner.parallel.rows.engine import Engine
from mlxrunner.parallel.scheduling.request import ActiveRequest
from mlxrunner.parallel.scheduling.residents import Residents
from mlxrunner.parallel.scheduling.room import Room
from mlxrunner.parallel.scheduling.slots import Choice, Slot

DONE = object()
Resume = Callable[[ActiveRequest, Slot, int], None]
"""A function that places a request in a slot, of which some tokens were just restored."""


class Errands:
    """The work on slots that takes long, a piece at a time."""

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[ActiveRequest],
        room: Room,
        residents: Residents,
        resume: Resume,
    ) -> None:
        """Work for `requests`, the running ones, in the slots of `residents`."""
        self._engine, self._requests = engine, requests
        self._room, self._residents, self._resume = room, residents, resume
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
        return self._ahead is not None or any(one.errand is not None for one in self._requests)

    def run(self, seconds: float) -> None:
        """Go on with all errands for about some seconds: one piece at least."""
        until = time.perf_counter() + seconds
        for request in self._requests:
            while request.errand is not None:
                self._go_on(request)
                if time.perf_counter() >= until:
                    return
        while self._ahead is not None:
            if next(self._ahead, DONE) is DONE:
                self._ahead = None
            if time.perf_counter() >= until:
                return

    def stop(self) -> None:
        """Leave what is parked for growing answers undone."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()

    def restoring(self, slot: Slot, saved: SavedEntry, count: int) -> Generator[None, None, int]:
        """Restore a conversation, of which a prompt shares `count` tokens, and return these."""
        yield from self._residents.restoring(slot, saved)
        return count

    def making_way(
        self, request: ActiveRequest, choice: Choice
    ) -> Generator[None, None, int] | None:
        """Return the errand that parks a conversation for `request`, which then chooses again.

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
        """Do a piece of a request's errand. At its end, place the request, or let it choose again.

        It also chooses again if others took the cells meanwhile.
        """
        try:
            next(request.errand or iter(()))
        except StopIteration as done:
            request.errand = None
            if done.value:
                self._resume(request, request.slot, done.value)
        except CacheFullError:
            request.errand = None

    def _victim_of(self, request: ActiveRequest, choice: Choice) -> Slot | None:
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
        """The cells of layers that see all tokens."""
        return [group for group in self._engine.groups if group.memory is None]

    @property
    def _num_free(self) -> int:
        return min((group.num_free for group in self._full), default=0)


def _moment(slot: Slot) -> tuple[int, int]:
    """Return a mark of the conversation in a slot, which changes when it is used."""
    return slot.last_used, len(slot.tokens)
