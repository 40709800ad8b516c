"""The lines that each worker gets, those of a worker that ends, and workers of several speeds."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from support.batches import entry, filled

from mlxrunner.batch.options import ORDERS, Order
from mlxrunner.batch.order import LineCosts
from mlxrunner.batch.plan import costs_of
from mlxrunner.batch.store import Store, StoredLine
from mlxrunner.cluster.driver import MOST_ENDS, WorkQueue


@pytest.fixture
def store() -> Iterator[Store]:
    """Four groups of ten lines, each group with a prefix of its own."""
    with filled([[group] * 20 + [number] for group in range(4) for number in range(10)]) as made:
        yield made


def queue_of(store: Store, parts: int = 1, order: Order = "prefix") -> WorkQueue:
    """Queue the lines of a store in this order, with answers of 5 tokens."""
    indexes, costs = costs_of(store.pending(order), {}, answer=5)
    return WorkQueue(store.line, indexes, costs, parts)


def taken(queue: WorkQueue, worker: str, count: int = 1000) -> list[int]:
    """Take lines until the worker gets no more, and return their indexes."""
    found: list[int] = []
    while len(found) < count and (line := queue.take(worker)) is not None:
        found.append(line.index)
    return found


def answer(queue: WorkQueue, store: Store, worker: str, index: int) -> bool:
    """Answer a line; False if it was answered before."""
    if queue.answered(worker, index) is None:
        return False
    store.record(index, b"{}")
    return True


@pytest.mark.parametrize("count", [1, 2, 3, 7, 40, 100])
def test_ranges_cover_the_run_order_once(store: Store, count: int) -> None:
    for order in ORDERS:
        queue = queue_of(store, count, order)
        assert sorted(taken(queue, "a")) == list(range(40))
        assert queue.is_done


def test_a_worker_goes_on_where_it_was(store: Store) -> None:
    """Two workers at a time keep to their own ranges, and so to their own prefixes."""
    queue = queue_of(store, 2)
    found: dict[str, list[int]] = {"a": [], "b": []}
    for _ in range(20):
        for worker in found:
            found[worker] += taken(queue, worker, 1)
    assert found == {"a": list(range(20)), "b": list(range(20, 40))}


def test_an_idle_worker_takes_a_part_that_begins_with_another_prefix() -> None:
    """The cut is where two long prefixes meet, not in the middle of one."""
    prompts = [[group] * 200 + [number] for group in range(5) for number in range(10)]
    with filled(prompts) as store:
        queue = queue_of(store)
        assert taken(queue, "a", 10) == list(range(10))
        begun = [taken(queue, worker, 1) for worker in "bcd"]
        assert sorted(begun) == [[20], [30], [40]]
        for index in range(10):
            answer(queue, store, "a", index)
        assert taken(queue, "a", 10)[:5] == list(range(10, 15))


def test_the_last_lines_are_shared_out(store: Store) -> None:
    """Others take what a slow worker has not begun, as long as that pays."""
    queue = queue_of(store)
    taken(queue, "slow", 1)
    answered = 0
    while found := taken(queue, "fast", 1):
        answered += answer(queue, store, "fast", found[0])
    assert answered >= 34


def test_a_worker_has_no_more_lines_than_its_share_of_what_is_left(store: Store) -> None:
    """The rest of its range is for others, or for later, when it has answered."""
    queue = queue_of(store, 2)
    first, other = taken(queue, "a", 1), taken(queue, "b", 1)
    for _ in range(15):
        answer(queue, store, "b", other[0])
        other = taken(queue, "b", 1)
    assert len(first + taken(queue, "a")) <= 5, "b is much faster"
    assert not queue.is_done


def test_lines_of_an_ended_worker_run_again_alone(store: Store) -> None:
    queue = queue_of(store)
    lost = taken(queue, "a", 3)
    other = taken(queue, "b", 1)
    assert queue.lost("a") == []
    assert queue.take("b") is None, "it ends what it has first"
    answer(queue, store, "b", other[0])
    for index in lost:
        assert taken(queue, "b") == [index], "one at a time"
        answer(queue, store, "b", index)
    rest = taken(queue, "b")
    assert sorted([*lost, *other, *rest]) == list(range(40))


def test_others_go_on_while_one_runs_what_was_lost(store: Store) -> None:
    queue = queue_of(store, 4)
    taken(queue, "a", 3)
    queue.lost("a")
    assert len(taken(queue, "b")) == 1
    assert len(taken(queue, "c", 5)) == 5


def test_a_line_that_ends_three_workers_is_given_up_and_the_others_are_not(store: Store) -> None:
    queue, ends, guilty = queue_of(store), 0, []
    answered = set[int]()
    for number in range(1000):
        worker = f"w{number}"
        while found := taken(queue, worker, 8):
            if 17 in found:
                ends += 1
                guilty += [line.index for line in queue.lost(worker)]
                break
            answered |= {index for index in found if answer(queue, store, worker, index)}
        if queue.is_done and not queue.running:
            break
    assert (guilty, ends) == ([17], MOST_ENDS)
    assert answered == set(range(40)) - {17}


def test_a_worker_that_left_for_another_reason_blames_no_line(store: Store) -> None:
    queue = queue_of(store, 40)
    for _ in range(2 * MOST_ENDS):
        assert taken(queue, "a", 1) == [0]
        assert queue.lost("a", is_to_blame=False) == []


def test_an_answer_that_comes_twice_counts_once(store: Store) -> None:
    """A worker that was silent comes back with its answer, before or after the other one."""
    queue = queue_of(store)
    assert taken(queue, "a", 2) == [0, 1]
    queue.lost("a")
    assert taken(queue, "b", 1) == [0]
    assert queue.answered("a", 0) is not None
    assert queue.answered("b", 0) is None
    assert queue.answered("a", 1) is not None
    assert queue.answered("a", 1) is None
    assert taken(queue, "b") == list(range(2, 40))


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_each_line_is_answered_once(store: Store, seed: int) -> None:
    """Workers come, end, fall silent and answer late, at random."""
    chosen = random.Random(seed)
    queue = queue_of(store, chosen.randint(1, 9), chosen.choice(ORDERS))
    answered: list[int] = []
    has: dict[str, list[int]] = {f"w{number}": [] for number in range(4)}
    late: list[tuple[str, int]] = []
    while queue.running or not queue.is_done:
        worker = chosen.choice(list(has))
        match chosen.randrange(20):
            case 0:
                is_late = chosen.random() < 0.5
                late += [(worker, index) for index in has.pop(worker) if is_late]
                queue.lost(worker, is_to_blame=False)
                has[f"w{chosen.random()}"] = []
            case 1 if late:
                name, index = late.pop()
                answered += [index] if answer(queue, store, name, index) else []
            case number if number % 2 and has[worker]:
                index = has[worker].pop(chosen.randrange(len(has[worker])))
                answered += [index] if answer(queue, store, worker, index) else []
            case _ if len(has[worker]) < 5:
                has[worker] += taken(queue, worker, 1)
    assert sorted(answered) == list(range(40))


LINES, ROOM = 2400, 10
"""The lines of a batch, and the most that a worker has at a time."""
PREFIX = 300
"""The tokens of a document. The slowest worker evaluates one in less than a tenth of the run."""


def one_subtree() -> LineCosts:
    """Return the costs of questions on a single document."""
    return shape_of(np.full(LINES, PREFIX), own=30)


def documents() -> LineCosts:
    """Return the costs of 40 questions on each of many documents after a system prompt."""
    return shape_of(np.where(np.arange(LINES) % 40 == 0, 100, 100 + PREFIX), own=30)


def large_and_small() -> LineCosts:
    """Return the costs of lines of which four in five are in one subtree, the others in none."""
    return shape_of(np.where(np.arange(LINES) < LINES * 0.8, PREFIX, 0), own=60)


def nothing_shared() -> LineCosts:
    """Return the costs of lines that share nothing."""
    return shape_of(np.zeros(LINES), own=100)


def shape_of(reused: np.ndarray, own: int) -> LineCosts:
    """Return the costs of prompts with `own` tokens of their own on average, and short answers."""
    random = np.random.default_rng(0)
    reused = reused.astype(int)
    again = np.diff(reused, prepend=reused[0])
    evaluated = random.integers(own // 2, own + own // 2, LINES) + np.maximum(-again, 0)
    evaluated[0] += reused[0]
    reused[0] = 0
    return LineCosts(evaluated, reused, random.integers(1, 32, LINES))


class SimulatedWorkers:
    """Workers that answer one line after the other, each at a speed of its own."""

    def __init__(self, costs: LineCosts, speeds: Sequence[float]) -> None:
        self._costs, self._speeds = costs, speeds
        self.read: list[int] = []
        self._queue = WorkQueue(self._line, range(len(costs)), costs, len(speeds))
        self._lines: list[list[int]] = [[] for _ in speeds]
        self._last: list[int | None] = [None] * len(speeds)
        self._running: list[tuple[float, int, int]] = []
        self.ends = [0.0] * len(speeds)
        """When each worker ended its last line."""
        self.cost = 0

    def run(self) -> None:
        """Send lines, and answer the one that ends first, until all are answered."""
        self._send(0.0)
        while self._running:
            now, worker, line = heapq.heappop(self._running)
            self.ends[worker] = now
            self._lines[worker].remove(line)
            assert self._queue.answered(str(worker), line) is not None
            self._send(now)
        assert self._queue.is_done

    def _line(self, index: int) -> StoredLine:
        self.read.append(index)
        return entry(index, [1])

    def _send(self, now: float) -> None:
        """Give each worker lines as the driver does, one each in turn, and let it begin one."""
        asking = list(range(len(self._speeds)))
        while asking:
            for worker in list(asking):
                lines = self._lines[worker]
                line = self._queue.take(str(worker)) if len(lines) < ROOM else None
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
    played = SimulatedWorkers(costs, SPEEDS[speeds](count))
    played.run()
    assert sorted(played.read) == list(range(LINES))
    assert min(played.ends) >= 0.9 * max(played.ends)
    assert played.cost <= 1.1 * costs.total
