"""Cells for each request to its end, whatever the others still do, before it begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from mlxrunner.cache.sequences import CacheFullError
from mlxrunner.parallel.adapt import Engine
from mlxrunner.parallel.request import Request
from mlxrunner.parallel.slots import Choice, Slot

T = TypeVar("T")


class Room:
    """The `cells` of `adapted`, and who takes them: `requests`, each of up to `capacity` tokens.

    A request begins when the cells that others use, those that they may still take, and its own
    are no more than there are: so none ever lacks one. Idle slots don't count: they give way.
    """

    def __init__(
        self,
        adapted: Engine,
        slots: Sequence[Slot],
        requests: Sequence[Request],
        *,
        capacity: int,
        cells: int,
    ) -> None:
        self._adapted, self._slots, self._requests = adapted, slots, requests
        self._capacity, self._cells = capacity, cells

    def check(self, request: Request, choice: Choice, others: Sequence[Request]) -> None:
        """Raise CacheFullError if `request` might not find room beside `others`.

        `choice`: what it shares, and with whom.
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

    def make(self, act: Callable[[], T], clear: Callable[[Slot], None]) -> T:
        """Call `act`; where it lacks room, `clear` idle slots, the least recently used first."""
        while True:
            try:
                return act()
            except CacheFullError:
                idle = [slot for slot in self._slots if not slot.is_busy and slot.tokens]
                if not idle:
                    raise
                clear(min(idle, key=lambda slot: slot.last_used))

    def _most(self, request: Request) -> int:
        """Tokens that it has at its end, or when it is full."""
        return min(len(request.prompt) + request.limit, self._capacity)

    def _coming(self, request: Request) -> int:
        """Cells that it may still take.

        One that shifts copies what it shares with others, but for what it keeps where it is.
        """
        coming = self._most(request) - request.place
        if not request.is_placed and request.source is not None:
            return coming - self._shared(request, request.source, request.promised)
        if request.shift is None:
            return coming
        others = [other.slot.number for other in self._requests if other is not request]
        kept = 0 if self._adapted.has_windows else request.shift.keep
        return coming + max(
            group.num_shared(request.slot.number, others, kept) for group in self._adapted.groups
        )

    def _shared(self, request: Request, source: Slot, tokens: int) -> int:
        """Of `tokens` tokens that `request` takes from `source`, count those that need no cells.

        None if one of the two may move its own.
        """
        movers = [
            other for other in self._requests if other.slot is source and other.shift is not None
        ]
        return 0 if request.shift is not None or movers else tokens

    def _num_used(self, busy: Sequence[int], prefix: tuple[int, int]) -> int:
        return max(group.num_used_by(busy, prefix) for group in self._adapted.groups)
