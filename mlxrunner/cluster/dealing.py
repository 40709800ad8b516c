"""Decide which worker answers which line. No processes, no clocks, no wire.

A worker takes lines from its own stretch of the run order, so that what shares a prefix stays
together. A worker without one takes a part of the costliest that is left. Lines that were on a
worker when it ended run again, each alone on a worker, so that a line that ends workers is found.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from mlxrunner.batch.records import StoredLine
from mlxrunner.batch.shards.cut import Costs, cut, split

MOST_ENDS = 3
"""The workers that a line may end before it gets an error."""


@dataclass
class _Stretch:
    """A part of the run order: the places from `first` to before `end`."""

    first: int
    end: int


@dataclass
class _Worker:
    """The work of one worker."""

    stretch: _Stretch | None = None
    lines: dict[int, StoredLine] = field(default_factory=dict)
    """The lines that it has not answered, by index."""


class Dealer:
    """Deals lines to workers, by their names."""

    def __init__(
        self, read: Callable[[int], StoredLine], indexes: Sequence[int], costs: Costs, parts: int
    ) -> None:
        """Deal the lines with these indexes, in the order in which they run best, and these costs.

        `read` returns a line. They are cut into `parts` at first, one for each worker.
        """
        self._read, self._indexes, self._costs = read, indexes, costs
        places = pairwise(cut(costs, parts))
        self._free = deque(_Stretch(first, end) for first, end in places if first < end)
        self._workers: dict[str, _Worker] = {}
        self._open: dict[int, StoredLine] = {}
        self._suspects: dict[int, StoredLine] = {}
        self._ends: Counter[int] = Counter()
        self._alone: str | None = None
        """The worker that runs suspects."""

    @property
    def running(self) -> int:
        """The number of lines that a worker has, or had when it ended."""
        return len(self._open)

    @property
    def is_done(self) -> bool:
        """True if every line was answered, or is running."""
        is_held = any(one.stretch is not None for one in self._workers.values())
        return not (is_held or self._suspects or self._free)

    def of(self, worker: str) -> int:
        """Return the number of lines that this worker has."""
        return len(self._worker(worker).lines)

    def take(self, worker: str) -> StoredLine | None:
        """Return the next line for this worker; None if it gets none now."""
        own = self._worker(worker)
        if self._suspects and self._alone is None:
            self._alone = worker
        if self._alone == worker:
            if own.lines:
                return None
            if self._suspects:
                return self._given(own, self._suspects.pop(next(iter(self._suspects))))
            self._alone = None
        line = self._next(own)
        return None if line is None else self._given(own, line)

    def answered(self, worker: str, index: int) -> StoredLine | None:
        """Take a line from this worker that it has answered; None if it was answered before."""
        self._worker(worker).lines.pop(index, None)
        self._suspects.pop(index, None)
        self._ends.pop(index, None)
        return self._open.pop(index, None)

    def lost(self, worker: str, *, is_to_blame: bool = True) -> list[StoredLine]:
        """Take all lines from a worker that ended. Return those that have ended too many.

        With `is_to_blame` false its lines had no part in that.
        """
        own = self._workers.pop(worker, _Worker())
        if self._alone == worker:
            self._alone = None
        if own.stretch is not None:
            self._free.appendleft(own.stretch)
        guilty = []
        for index, line in own.lines.items():
            if index not in self._open or self._is_elsewhere(index):
                continue
            self._ends[index] += is_to_blame
            if self._ends[index] < MOST_ENDS:
                self._suspects[index] = line
                continue
            del self._open[index], self._ends[index]
            guilty.append(line)
        return guilty

    def _is_elsewhere(self, index: int) -> bool:
        return any(index in one.lines for one in self._workers.values())

    def _worker(self, worker: str) -> _Worker:
        return self._workers.setdefault(worker, _Worker())

    def _given(self, own: _Worker, line: StoredLine) -> StoredLine:
        own.lines[line.index] = self._open[line.index] = line
        return line

    def _next(self, own: _Worker) -> StoredLine | None:
        """Return the next line of a stretch for this worker; None if none is left for it."""
        if own.stretch is None:
            own.stretch = self._free.popleft() if self._free else self._part()
        if own.stretch is None:
            return None
        line = self._read(self._indexes[own.stretch.first])
        own.stretch.first += 1
        if own.stretch.first == own.stretch.end:
            own.stretch = None
        return line

    def _part(self) -> _Stretch | None:
        """Cut off a part of the costliest stretch for which that pays; None if there is none."""
        held = [one.stretch for one in self._workers.values() if one.stretch is not None]
        for stretch in sorted(held, key=lambda one: -self._costs.of(one.first, one.end)):
            place = split(self._costs, stretch.first, stretch.end)
            if place is not None:
                part = _Stretch(place, stretch.end)
                stretch.end = place
                return part
        return None
