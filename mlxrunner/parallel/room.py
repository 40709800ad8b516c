"""Reserve cells for each request to its end, before it begins."""

from __future__ import annotations

from collections.abc import Sequence

from mlxrunner.errors import CacheFullError
from mlxrunner.parallel.engine import Engine
from mlxrunner.parallel.request import ActiveRequest
from mlxrunner.parallel.slots import Choice, Slot


class Room:
    """The cells of an engine, and the requests that take them.

    A request begins only if there are enough cells for itself, for those that the others use, and
    for those that the others may still take. Therefore no running request ever lacks a cell. Idle
    slots don't count, because they are cleared if necessary.
    """

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

    def check(
        self, request: ActiveRequest, choice: Choice, others: Sequence[ActiveRequest]
    ) -> None:
        """Raise CacheFullError if `request` might not find room beside `others`.

        `choice`: the prefix that it shares, and the slot that has it.
        """
        if self._cells >= len(self._slots) * self._capacity:
            return
        shared = self._shared(request, choice.source, choice.matched)
        wanted = self._most(request) - shared
        busy = [other.slot.number for other in others]
        used = self._num_used(busy, (choice.source.number, shared if choice.ready else 0))
        coming = sum(self._coming(other) for other in others)
        if used + coming + wanted > self._cells:
            raise CacheFullError(
                "this request", wanted, max(0, self._cells - used - coming), self._cells
            )

    def _most(self, request: ActiveRequest) -> int:
        """Return the most tokens that `request` can have."""
        return min(len(request.tokens) + request.limit, self._capacity)

    def _coming(self, request: ActiveRequest) -> int:
        """Return the most cells that `request` may still take.

        A shift copies the tokens that the request shares with others, except for those that it
        keeps.
        """
        coming = self._most(request) - request.place
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

    def _num_used(self, busy: Sequence[int], prefix: tuple[int, int]) -> int:
        return max(group.num_used_by(busy, prefix) for group in self._adapted.groups)
