"""Assign requests to slots: give each the prefix that it can share, or let it wait for one.

Knows nothing about steps. Slots change in an order that an interrupt may cut anywhere.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import numpy as np

from mlxrunner.cache.checkpoints import places_of
from mlxrunner.cache.lease import Source
from mlxrunner.cache.lookup import LostTokens
from mlxrunner.cache.prefix import PrefixCache
from mlxrunner.cache.shared.sequences import END
from mlxrunner.cache.tokens import TokenArray, as_tokens, common_prefix
from mlxrunner.errors import CacheFullError
from mlxrunner.parallel.engine import Engine
from mlxrunner.parallel.request import ActiveRequest
from mlxrunner.parallel.room import Room
from mlxrunner.parallel.slots import Choice, Slot, choose, least_worth
from mlxrunner.results import log_lookup

T = TypeVar("T")
LOSSES = 4
"""Losses of tokens to remember for each slot, so that a later lookup can explain them."""


class Assigner:
    """The slots of an engine, and the requests in them."""

    def __init__(
        self,
        engine: Engine,
        slots: Sequence[Slot],
        requests: list[ActiveRequest],
        room: Room,
        message_ends: TokenArray,
    ) -> None:
        """Assign `requests`, the running ones in order of arrival, to `slots`.

        `message_ends`: the tokens that end a message. Checkpoints are taken at such places.
        """
        self._engine, self._slots, self._requests = engine, slots, requests
        self._room, self._message_ends = room, message_ends
        self._losses: deque[LostTokens] = deque(maxlen=LOSSES * len(slots))

    def admit(self, request: ActiveRequest, began: tuple[int, int]) -> None:
        """Give a request a slot and the prefix that it can share.

        `began`: the moment, see `Scheduler.moment`. Raise NoFreeSlotError or CacheFullError if
        there is no room now.
        """
        clock = request.clock
        # Place waiting requests first: the slot whose prefix they share may be taken now.
        self.place_waiting()
        choice = choose(self._slots, request.tokens)
        self._room.check(request, choice, self._requests)
        slot = request.slot = choice.slot
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

        Requests whose prefix will not come, or that lacked room, choose again.
        """
        for number, request in enumerate(self._requests):
            if request.is_placed:
                continue
            source, promised = request.source, request.promised
            if source is None:
                self._place_again(request, self._requests[:number])
            elif (
                source.shared_with(request.todo) >= promised and source.reach(promised) == promised
            ):
                self._resume(request, source)
            elif not source.is_busy or source.will_share_with(request.todo) < promised:
                self._place_again(request, self._requests[:number])

    def clear(self, slot: Slot, why: str = "another conversation") -> None:
        """Forget the tokens of a slot, because of `why`."""
        slot.exact = END
        if slot.cache.is_busy:
            slot.cache.free(why)
        else:
            slot.cache.reset(why)
        self._remember_losses()

    def free(self, slot: Slot) -> None:
        """Forget the tokens and the request of a slot."""
        self.clear(slot, "an error")
        slot.is_busy, slot.planned = False, slot.planned[:0]

    def make_room(self, act: Callable[[], T]) -> T:
        """Call `act` and return its result, after clearing idle slots if it lacks cells.

        Slots of least worth come first. Raise CacheFullError if no slot is left to clear.
        """
        while True:
            try:
                return act()
            except CacheFullError:
                self._clear_one_or_raise()

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

        self.make_room(check)

    def _clear_one_or_raise(self) -> None:
        """Clear the idle slot of least worth; raise the present error if there is none."""
        idle = [slot for slot in self._slots if not slot.is_busy and slot.tokens]
        if not idle:
            raise
        self.clear(least_worth(idle))

    def _follow(self, request: ActiveRequest, choice: Choice) -> None:
        """Take the prefix that another slot has, or begin to wait for it."""
        if choice.ready:
            self._resume(request, choice.source)
        else:
            # Others must not share tokens that will be replaced.
            self.clear(request.slot)
            request.source, request.promised = choice.source, choice.matched

    def _resume(self, request: ActiveRequest, source: Slot) -> None:
        """Give the request's slot what `source` has of its prompt."""
        slot = request.slot
        copied = None if source is slot else Source(source.cache, source.exact)
        if copied is not None and slot.tokens:
            self.clear(slot)
        self._explain(slot.cache, request.todo)
        slot.exact = END
        lease = request.lease = slot.cache.begin(request.todo, source=copied)
        lease.open()
        found = lease.lookup
        request.place, request.is_placed, request.source = found.cached, True, None
        if not request.sampled:
            request.lookup = found
        if source is slot:
            request.trimmed = max(0, request.trimmed - found.cached)
        coming = request.limit - request.sampled
        self._engine.expect(slot.number, len(request.todo) - found.cached + coming)
        if lease.needs_checkpoints:
            ends = np.flatnonzero(np.isin(request.todo, self._message_ends)) + 1
            lease.mark(places_of(len(request.todo), ends.tolist()))
        log_lookup(len(request.todo), found.matched, found.cached)

    def _place_again(self, request: ActiveRequest, ahead: Sequence[ActiveRequest]) -> None:
        """Choose again, from the present content of the slots. Without room the request waits."""
        request.source, request.promised = None, 0
        before = [other.slot for other in ahead]
        choice = choose(self._slots, request.todo, own=request.slot, ahead=before)
        others = [other for other in self._requests if other.is_placed or other.source is not None]
        with suppress(CacheFullError):
            self._room.check(request, choice, others)
            self._follow(request, choice)

    def _remember_losses(self) -> None:
        """Take over what the slots have lost: any later prompt may miss it."""
        for slot in self._slots:
            if not slot.cache.is_busy and (loss := slot.cache.forget_loss()) is not None:
                self._losses.append(loss)

    def _explain(self, cache: PrefixCache, prompt: TokenArray) -> None:
        """Let the next lookup of `cache` report the loss that `prompt` misses most."""
        self._remember_losses()
        shared = [common_prefix(loss.tokens, prompt) for loss in self._losses]
        if any(shared):
            index = shared.index(max(shared))
            loss = self._losses[index]
            del self._losses[index]
            cache.lose(loss.reason, loss.by, as_tokens(loss.tokens))
