"""Decide which worker answers which line. No processes, no clocks, no wire.

A worker takes lines from its own stretch of the run order, so that what shares a prefix stays
together. A worker without one takes half of the longest that is left. Lines that were on a worker
when it ended run again, each alone on a worker, so that a line that ends workers is found.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from mlxrunner.batch.options import Order
from mlxrunner.batch.records import StoredLine
from mlxrunner.batch.store import Store
from mlxrunner.cache.tokens import common_prefix

MOST_ENDS = 3
"""The workers that a line may end before it gets an error."""
NEAR = 16
"""The lines on each side of the middle among which a stretch is cut."""


@dataclass
class Stretch:
    """A part of the run order: the places behind `after`, up to `until`."""

    after: int
    until: int

    @property
    def left(self) -> int:
        """The number of its places."""
        return self.until - self.after


@dataclass
class _Worker:
    """What a worker has to do."""

    stretch: Stretch | None = None
    lines: dict[int, StoredLine] = field(default_factory=dict)
    """The lines that it has not answered, by index."""


class Dealer:
    """Deals the lines of a store that have no answer to workers, by their names."""

    def __init__(self, store: Store, order: Order, stretches: Iterable[Stretch]) -> None:
        """Deal these stretches, which cover the run order, the first ones first."""
        self._store, self._order = store, order
        self._free = deque(stretches)
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
        held = (one.stretch for one in self._workers.values() if one.stretch is not None)
        return not self._suspects and not self._free and not any(one.left for one in held)

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
        if own.stretch is not None and own.stretch.left:
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
        """Return the next line of a stretch for this worker; None if none is left."""
        while True:
            if own.stretch is None or not own.stretch.left:
                own.stretch = self._free.popleft() if self._free else self._half()
            if own.stretch is None:
                return None
            for place, line in self._store.placed(self._order, own.stretch.after):
                if place > own.stretch.until:
                    break
                own.stretch.after = place
                if line.index not in self._open:
                    return line
            own.stretch = None

    def _half(self) -> Stretch | None:
        """Cut off the second half of the longest stretch; None if all are short."""
        held = [one.stretch for one in self._workers.values() if one.stretch is not None]
        longest = max(held, key=lambda one: one.left, default=None)
        if longest is None or longest.left < 2:
            return None
        middle = self._seam(longest)
        half = Stretch(middle, longest.until)
        longest.until = middle
        return half

    def _seam(self, stretch: Stretch) -> int:
        """Return the place near the middle behind which the least of a prefix is cut."""
        middle, reach = stretch.after + stretch.left // 2, min(NEAR, stretch.left // 4)
        seams = self._shared(middle - reach, middle + reach)
        found = min(((shared, abs(place - middle), place) for place, shared in seams), default=None)
        return middle if found is None else found[2]

    def _shared(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield places from `first` to `last`, and what each line shares with the next one."""
        before: tuple[int, StoredLine] | None = None
        for place, line in self._store.placed(self._order, first - 1):
            if before is not None:
                yield before[0], common_prefix(before[1].tokens, line.tokens)
            if place > last:
                return
            before = place, line


def even_stretches(store: Store, order: Order, count: int) -> list[Stretch]:
    """Cut the run order into `count` stretches with about equal numbers of places."""
    lines, first = store.counts.lines, 0 if order == "prefix" else -1
    ends = [first + lines * number // count for number in range(count + 1)]
    return [Stretch(begin, end) for begin, end in pairwise(ends) if end > begin]
