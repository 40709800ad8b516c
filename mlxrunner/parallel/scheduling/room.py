"""Count the cells that running requests have, claim and need. `claims.py` decides from the counts.

A shared token counts once, also for a request that still waits for it. Idle slots don't count,
because they are cleared if necessary.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxrunner.errors import CacheFullError
from mlxrunner.parallel.rows.engine import Engine
from mlxrunner.parallel.scheduling.claims import (
    LATER,
    LEAST,
    Need,
    Standing,
    claimed,
    grown,
    steps_back,
)
from mlxrunner.parallel.scheduling.request import ActiveRequest
from mlxrunner.parallel.scheduling.slots import Choice, Slot


class Room:
    """The cells of an engine, and the requests that take them."""

    def __init__(
        self,
        adapted: Engine,
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
        self, request: ActiveRequest, choice: Choice, others: Sequence[ActiveRequest]
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
        need = Need(todo - shared, self._most(request) - todo)
        slots = sum(not slot.is_busy or slot is choice.slot for slot in self._slots)
        request.claimed = todo + claimed(need, free, self._cells, slots)

    def grow(self, request: ActiveRequest) -> None:
        """Let the claim of `request` grow if it has no cell for its next token.

        In a full context a shift makes room. Raise CacheFullError if there is no cell.
        """
        left = self._most(request) - request.claimed
        if request.place < request.claimed or left <= 0:
            return
        holding = self._holding()
        more = grown(left, self._free(holding), len(holding))
        if not more:
            raise CacheFullError("the next token", 1, 0, self._cells, LATER)
        request.claimed += more

    @property
    def soon(self) -> int:
        """The most cells that the next tokens of running requests take, LEAST of each."""
        return sum(min(LEAST, self._most(one) - one.place) for one in self._holding())

    def steps_back(self) -> tuple[ActiveRequest, bool]:
        """Return the request that has to give its cells up, and whether no other one has any."""
        holding = self._holding()
        standing = [Standing(request.priority, arrival) for arrival, request in enumerate(holding)]
        return holding[steps_back(standing)], len(holding) == 1

    def wait(self, request: ActiveRequest) -> None:
        """Claim only what a request that stepped back needs to go on."""
        todo = self._todo(request)
        request.claimed = todo + min(self._most(request) - todo, LEAST)

    def _holding(self) -> list[ActiveRequest]:
        """Return the requests that have cells, or claim the rest of a prefix that they wait for."""
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
        """Return the most tokens that `request` can have."""
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
