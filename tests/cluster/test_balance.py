"""Workers of different speeds end close together, counted on a clock that is played."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from mlxrunner.batch.order import LineCosts
from mlxrunner.batch.records import StoredLine
from mlxrunner.cache.tokens import as_tokens
from mlxrunner.cluster.dealing import Dealer

LINES, ROOM = 2400, 10
"""The lines of a batch, and the most that a worker has at a time."""
PREFIX = 300
"""The tokens of a document. The slowest worker evaluates one in less than a tenth of the run."""


def one_subtree() -> LineCosts:
    """Return the costs of questions on a single document."""
    return costs_of(np.full(LINES, PREFIX), own=30)


def documents() -> LineCosts:
    """Return the costs of 40 questions on each of many documents behind a system prompt."""
    return costs_of(np.where(np.arange(LINES) % 40 == 0, 100, 100 + PREFIX), own=30)


def large_and_small() -> LineCosts:
    """Return the costs of lines of which four in five are in one subtree, the others in none."""
    return costs_of(np.where(np.arange(LINES) < LINES * 0.8, PREFIX, 0), own=60)


def nothing_shared() -> LineCosts:
    """Return the costs of lines that share nothing."""
    return costs_of(np.zeros(LINES), own=100)


def costs_of(reused: np.ndarray, own: int) -> LineCosts:
    """Return the costs of prompts with `own` tokens of their own on average, and short answers."""
    random = np.random.default_rng(0)
    reused = reused.astype(int)
    again = np.diff(reused, prepend=reused[0])
    evaluated = random.integers(own // 2, own + own // 2, LINES) + np.maximum(-again, 0)
    evaluated[0] += reused[0]
    reused[0] = 0
    return LineCosts(evaluated, reused, random.integers(1, 32, LINES))


class Played:
    """Workers that answer one line after the other, each at a speed of its own."""

    def __init__(self, costs: LineCosts, speeds: Sequence[float]) -> None:
        self._costs, self._speeds = costs, speeds
        self.read: list[int] = []
        self._dealer = Dealer(self._line, range(len(costs)), costs, len(speeds))
        self._lines: list[list[int]] = [[] for _ in speeds]
        self._last: list[int | None] = [None] * len(speeds)
        self._running: list[tuple[float, int, int]] = []
        self.ends = [0.0] * len(speeds)
        """When each worker ended its last line."""
        self.cost = 0

    def run(self) -> None:
        """Deal lines, and answer the one that ends first, until all are answered."""
        self._deal(0.0)
        while self._running:
            now, worker, line = heapq.heappop(self._running)
            self.ends[worker] = now
            self._lines[worker].remove(line)
            assert self._dealer.answered(str(worker), line) is not None
            self._deal(now)
        assert self._dealer.is_done

    def _line(self, index: int) -> StoredLine:
        self.read.append(index)
        return StoredLine(index, f"line {index}", as_tokens([1]), None, "text", {}, None, None)

    def _deal(self, now: float) -> None:
        """Give each worker lines as the driver does, one each in turn, and let it begin one."""
        asking = list(range(len(self._speeds)))
        while asking:
            for worker in list(asking):
                lines = self._lines[worker]
                line = self._dealer.take(str(worker)) if len(lines) < ROOM else None
                if line is None:
                    asking.remove(worker)
                else:
                    lines.append(line.index)
        is_busy = {worker for _, worker, _ in self._running}
        for worker, lines in enumerate(self._lines):
            if lines and worker not in is_busy:
                cost = self._begun(worker, lines[0])
                heapq.heappush(self._running, (now + cost / self._speeds[worker], worker, lines[0]))

    def _begun(self, worker: int, line: int) -> int:
        """Return the cost of a line on a worker that has the prompt of its last one."""
        last, self._last[worker] = self._last[worker], line
        between = slice(min(last or 0, line) + 1, max(last or 0, line) + 1)
        known = 0 if last is None else int(self._costs.reused[between].min())
        again = max(0, int(self._costs.reused[line]) - known)
        cost = self._costs.of(line, line + 1) - self._costs.extra(line) + again
        self.cost += cost
        return cost


SPEEDS = {
    "alike": lambda count: [1.0] * count,
    "up to twice as fast": lambda count: [1 + number % 3 / 2 for number in range(count)],
    "one slow": lambda count: [0.25, *[1.0] * (count - 1)],
}
SHAPES = [one_subtree, documents, large_and_small, nothing_shared]


@pytest.mark.parametrize("speeds", SPEEDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [2, 4, 8])
def test_workers_end_within_a_tenth_of_each_other(
    count: int, shape: Callable[[], LineCosts], speeds: str
) -> None:
    costs = shape()
    played = Played(costs, SPEEDS[speeds](count))
    played.run()
    assert sorted(played.read) == list(range(LINES))
    assert min(played.ends) >= 0.9 * max(played.ends)
    assert played.cost <= 1.1 * costs.total
