"""Make room for the next tokens: shift full contexts, let claims grow, let requests step back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlxrunner.cache.pool.interface import END
from mlxrunner.errors import CacheFullError
from mlxrunner.parallel.rows.engine import Engine
from mlxrunner.parallel.scheduling.assign import Assigner
from mlxrunner.parallel.scheduling.endings import Endings
from mlxrunner.parallel.scheduling.request import ActiveRequest
from mlxrunner.parallel.scheduling.room import Room


class RoomMaker:
    """The room that running requests need for their next tokens."""

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[ActiveRequest],
        room: Room,
        assigner: Assigner,
        endings: Endings,
        capacity: int,
    ) -> None:
        """Make room for `requests`, the running ones, of up to `capacity` tokens each."""
        self._engine, self._requests, self._capacity = engine, requests, capacity
        self._room, self._assigner, self._endings = room, assigner, endings
        self._residents = assigner.residents

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
        request, is_only = self._room.steps_back()
        if is_only:
            request.ending = "no room"
            self._endings.fail(request, error)
            return
        if request.is_placed:
            request.give_way()
            if request.slot.exact != END:
                self._residents.clear(request.slot, "a lack of room")
            elif self._assigner.errands.are_on:
                self._residents.rest(request.slot)
            else:
                self._residents.give_up(request.slot, None, "memory")
        request.stop_errand()
        request.source = None
        request.slot.planned = request.slot.planned[:0]  # nobody shall wait for it
        self._room.wait(request)

    def _make_room(self, request: ActiveRequest) -> None:
        """Drop the oldest half behind the kept tokens if the next token would not fit.

        The remaining tokens are evaluated again if keys can't be moved, or if a window lacks tokens
        that the next one sees.
        """
        shift, slot, lease = request.shift, request.slot, request.lease
        if shift is None or request.place < self._capacity:
            return
        keep, discard = shift.keep, shift.discard(request.place)
        tokens = slot.tokens.array
        kept = np.concatenate([tokens[:keep], tokens[keep + discard :]])
        slot.planned, request.shifted = slot.planned[:0], request.shifted + discard
        closes = all(cache.can_shift(keep, discard) for cache in lease.caches)
        if closes:
            self._assigner.make_cells_for_shift(request, keep + discard)
        if lease.shift(keep, discard, self._engine.rotate):
            slot.exact = min(slot.exact, keep)
            if request.left:
                request.todo = np.append(kept, request.todo[request.place :])
            request.place = request.moved = lease.recorded
            return
        request.is_stuck = request.is_stuck or closes
        slot.exact, request.moved = END, 0
        left = lease.restart(kept)
        coming = request.todo[request.place :] if request.left else np.array(request.last)
        request.place = lease.recorded
        request.todo = np.append(kept, coming)
        request.reevaluated += len(left)
