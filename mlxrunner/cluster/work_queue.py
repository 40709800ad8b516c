"""Decide which worker answers which line. No processes, no clocks, no wire.

A worker takes lines from its own range of the run order, so that what shares a prefix stays
together. A worker without one takes a part of the range that would take longest, as much of it as
both workers' speeds let end at the same time. The speed of a worker is what it has answered while
all answered so much: no worker has more lines at a time than its share of what is left. Lines that
were on a worker when it ended run again, each alone on a worker, so that a line that ends workers
is found.

Dask's scheduler steals tasks too, but knows no prefixes, and blames every task of a worker that
ended. A queue of pieces, each a share of the rest, was simulated in the place of ranges that are
split (the shapes and speeds of tests/cluster/test_work_queue.py, 2 to 8 workers): its workers ended
up to 50 % apart with large pieces, and with small ones evaluated up to 37 % more than one machine.
Here both stay below 10 %.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from mlxrunner.batch.order import LineCosts, cut, split
from mlxrunner.batch.records import StoredLine

MOST_ENDS = 3
"""The workers that a line may end before it gets an error."""
STEADY = 32
"""Each worker is taken to have answered an even share's 32nd part at even speed before it began."""
PLENTY = 32
"""A worker gets lines without a look at its share while 32 times what it has is left for each."""


@dataclass
class _Range:
    """A part of the run order: the places from `first` to before `end`."""

    first: int
    end: int


@dataclass
class _WorkerLines:
    """The work of one worker."""

    since: int = 0
    """The cost of what all workers had answered when it came."""
    range: _Range | None = None
    lines: dict[int, StoredLine] = field(default_factory=dict)
    """The lines that it has not answered, by index."""
    costs: dict[int, int] = field(default_factory=dict)
    """The costs of these lines."""
    answered: int = 0
    """The cost of the lines that it has answered."""
    last: int | None = None
    """The place of the last line that it got."""

    @property
    def held(self) -> int:
        """The cost of the lines that it has not answered."""
        return sum(self.costs.values())


class WorkQueue:
    """Gives lines to workers, by their names."""

    def __init__(
        self,
        read: Callable[[int], StoredLine],
        indexes: Sequence[int],
        costs: LineCosts,
        parts: int,
    ) -> None:
        """Hold the lines with these indexes, in the order in which they run best, and these costs.

        `read` returns a line. They are cut into `parts` at first, one for each worker.
        """
        self._read, self._indexes, self._costs = read, indexes, costs
        places = pairwise(cut(costs, parts))
        self._free = deque(_Range(first, end) for first, end in places if first < end)
        self._steady = max(costs.total, 1) / (STEADY * parts)
        self._answered = 0
        """The cost of the lines that were answered."""
        self._untaken = costs.total
        """The cost of the lines that no worker has had."""
        self._workers: dict[str, _WorkerLines] = {}
        self._open: dict[int, StoredLine] = {}
        self._suspects: dict[int, tuple[StoredLine, int]] = {}
        """The lines that run alone, with their costs."""
        self._ends: Counter[int] = Counter()
        self._alone: str | None = None
        """The worker that runs suspects."""

    @property
    def running(self) -> int:
        """The number of lines that a worker has, or had when it ended."""
        return len(self._open)

    @property
    def held(self) -> int:
        """The number of lines that a worker has."""
        return sum(len(one.lines) for one in self._workers.values())

    @property
    def is_done(self) -> bool:
        """True if every line was answered, or is running."""
        is_held = any(one.range is not None for one in self._workers.values())
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
                line, cost = self._suspects.pop(next(iter(self._suspects)))
                return self._given(own, line, cost)
            self._alone = None
        return None if self._has_its_share(own) else self._next(own)

    def answered(self, worker: str, index: int) -> StoredLine | None:
        """Note that this worker answered a line. Return it; None if it was answered before."""
        own = self._workers.get(worker)
        if own is not None and own.lines.pop(index, None) is not None:
            cost = own.costs.pop(index)
            own.answered += cost
            self._answered += cost
        self._suspects.pop(index, None)
        self._ends.pop(index, None)
        return self._open.pop(index, None)

    def lost(self, worker: str, *, is_to_blame: bool = True) -> list[StoredLine]:
        """Take back all lines of a worker that ended, for other workers.

        Return the lines that have ended too many workers and are not tried again. `is_to_blame`:
        True if one of its lines may have ended this worker.
        """
        own = self._workers.pop(worker, _WorkerLines())
        if self._alone == worker:
            self._alone = None
        if own.range is not None:
            self._free.appendleft(own.range)
        given_up = []
        for index, line in own.lines.items():
            if index not in self._open or self._is_elsewhere(index):
                continue
            self._ends[index] += is_to_blame
            if self._ends[index] < MOST_ENDS:
                self._suspects[index] = line, own.costs[index]
                continue
            del self._open[index], self._ends[index]
            given_up.append(line)
        return given_up

    def _is_elsewhere(self, index: int) -> bool:
        return any(index in one.lines for one in self._workers.values())

    def _worker(self, worker: str) -> _WorkerLines:
        return self._workers.setdefault(worker, _WorkerLines(self._answered))

    def _given(self, own: _WorkerLines, line: StoredLine, cost: int) -> StoredLine:
        own.lines[line.index] = self._open[line.index] = line
        own.costs[line.index] = cost
        return line

    def _speed(self, own: _WorkerLines) -> float:
        """Return what a worker answers while all answer as much as they do."""
        expected = (self._answered - own.since) / len(self._workers)
        return (own.answered + self._steady) / (expected + self._steady)

    def _has_its_share(self, own: _WorkerLines) -> bool:
        """Return True if the worker's lines take as long as all that is left takes all workers."""
        if not own.lines or self._untaken > PLENTY * own.held * len(self._workers):
            return False
        busy = [one for one in self._workers.values() if one.lines or one.range or one is own]
        left = self._untaken + sum(one.held for one in busy)
        return own.held * sum(map(self._speed, busy)) >= left * self._speed(own)

    def _next(self, own: _WorkerLines) -> StoredLine | None:
        """Return the next line of a range for this worker; None if none is left for it."""
        if own.range is None:
            own.range = self._free.popleft() if self._free else self._part(own)
        if own.range is None:
            return None
        place = own.range.first
        line = self._read(self._indexes[place])
        own.range.first += 1
        if own.range.first == own.range.end:
            own.range = None
        cost = self._costs.of(place, place + 1)
        is_next = own.last is not None and own.last + 1 == place
        own.last = place
        alone = int(self._costs.sums[place + 1] - self._costs.sums[place])
        self._untaken -= alone
        return self._given(own, line, alone if is_next else cost)

    def _part(self, own: _WorkerLines) -> _Range | None:
        """Cut off a part of the range that takes longest for which that pays, if there is one."""
        ranges = [(one, one.range) for one in self._workers.values() if one.range is not None]

        def seconds(pair: tuple[_WorkerLines, _Range]) -> float:
            one, left = pair
            return (one.held + self._costs.of(left.first, left.end)) / self._speed(one)

        for other, left in sorted(ranges, key=seconds, reverse=True):
            speed = self._speed(own) / self._speed(other)
            place = split(
                self._costs, left.first, left.end, held=other.held, speed=speed, last=own.last
            )
            if place is not None:
                part = _Range(place, left.end)
                left.end = place
                if place == left.first:
                    other.range = None
                return part
        return None
