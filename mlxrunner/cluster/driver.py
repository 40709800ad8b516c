"""Run a batch over workers: who answers which line, who has ended, and the outcomes as they come.

The store stays with the driver. A worker takes lines from its own range of the run order, so that
what shares a prefix stays together. Dask's scheduler steals tasks too, but knows no prefixes, and
blames every task of a worker that ended. A queue of pieces, each a share of the rest, was simulated
in the place of ranges that are split (the shapes and speeds of tests/cluster/test_work_queue.py, 2
to 8 workers): its workers ended up to 50 % apart with large pieces, and with small ones evaluated
up to 37 % more than one machine. Here both stay below 10 %.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

from mlxrunner.batch.execution import Execution, Outcome, Outcomes, refused
from mlxrunner.batch.job import Job
from mlxrunner.batch.order import LineCosts, cut, split
from mlxrunner.batch.plan import costs_of, survey
from mlxrunner.batch.prompts import EarlierLines
from mlxrunner.batch.store import Store, StoredLine
from mlxrunner.batch.work import Answering
from mlxrunner.cluster import worker as remote
from mlxrunner.cluster.dask_workers import DaskWorkers, LostCallError
from mlxrunner.cluster.worker import WorkerBatch
from mlxrunner.errors import CutOffError, MlxrunnerError
from mlxrunner.profiling.profile import Profile
from mlxrunner.terminal.output import Progress

SILENT_S = 60.0
"""Seconds without a sign of life after which a worker's lines run elsewhere."""
AHEAD = 2
"""Lines that a worker has beside those that run, so that it never waits for the next."""
WAIT_S = 0.1
"""Most seconds between two looks at Ctrl-C and at the workers."""
CLOSE_S = 5.0
"""Most seconds in which workers give their memory back at the end."""
Opened = Callable[[], AbstractContextManager[DaskWorkers]]
Then = Callable[["_Worker", Any], Iterable[Outcome]]
"""A function that takes a worker and the value of its call."""


@dataclass
class _Worker:
    name: str
    sign: Any = None
    silent_s: float = 0.0
    """Seconds since the sign changed."""
    state: str = "new"
    """"new", "opening" (its versions are asked, or it loads the model), "ready", "silent" or
    "refused"."""
    room: int = 0
    """The most lines that it has at a time."""
    calls: set[Future[Any]] = field(default_factory=set)
    unsent: list[StoredLine] = field(default_factory=list)
    """Lines to send again at its next sign of life: the connection broke before it answered."""


@contextmanager
def over_workers(
    opened: Opened, profile: Profile, job: Job, store: Store, context: int, progress: Progress
) -> Iterator[Answering]:
    """Open the workers, and yield what answers the lines of `store` on them.

    Events of all requests go to `profile`. If no line can be run, no worker is opened.
    """
    found = survey(store.left(job.order), job.defaults, context)
    if not found.lines:
        yield lambda is_stopping, tick: Execution(None, job, EarlierLines()).run(
            store.pending(job.order)
        )
        return
    key, own = secrets.token_hex(8), (profile.is_wanted, profile.log_text)
    batch = WorkerBatch(key, job, found, store.counts, context, *own)
    with opened() as workers:
        driver = Driver(workers, batch, job.parts(), profile, progress.say)
        yield partial(driver.run, store, job.order)


class Driver:
    """Runs the lines of a batch on workers."""

    def __init__(
        self,
        workers: DaskWorkers,
        batch: WorkerBatch,
        parts: dict[str, str],
        profile: Profile,
        say: Callable[[str], None],
    ) -> None:
        """Use workers whose copy of the model has the same `parts`. `say` tells people."""
        self._cluster, self._batch, self._profile, self._say = workers, batch, profile, say
        self._parts = parts
        self._versions = remote.versions()
        self._workers: dict[str, _Worker] = {}
        self._calls: dict[Future[Any], tuple[str, Then, StoredLine | None]] = {}
        self._said: set[str] = set()
        self._refused: dict[str, str] = {}
        self._failures = 0
        """Workers that ended while they loaded the model, since the last that did not."""

    def run(
        self, store: Store, order: Any, is_stopping: Callable[[], bool], tick: Callable[[], None]
    ) -> Outcomes:
        """Yield the outcomes of the lines as they end, until all have or the run is stopped."""
        self._look()
        indexes, costs = costs_of(store.left(order), self._batch.job.defaults)
        self._queue = WorkQueue(store.line, indexes, costs, max(1, len(self._workers)))
        before = time.monotonic()
        try:
            while True:
                tick()
                now = time.monotonic()
                yield from self._watch(min(now - before, 10 * WAIT_S))
                before = now
                if not is_stopping():
                    yield from self._send_lines()
                if self._is_over(is_stopping()):
                    return
                for call in self._cluster.ended(WAIT_S):
                    yield from self._finish(call)
        finally:
            self._close()

    def _is_over(self, is_stopping: bool) -> bool:
        """Return True if all lines have ended, or the run stops and no worker has a line.

        A run that stops sends nothing, so the lines of a worker that ended wait for `--resume`.
        """
        if is_stopping:
            return not self._queue.held
        return self._queue.is_done and not self._queue.running

    def _look(self) -> None:
        for name in self._cluster.signs:
            self._workers.setdefault(name, _Worker(name))

    def _watch(self, seconds: float) -> Iterator[Outcome]:
        """Look for workers that came, ended, fell silent or came back; `seconds` have passed."""
        self._look()
        signs = self._cluster.signs
        for name, worker in list(self._workers.items()):
            if name not in signs:
                yield from self._ended(worker)
                continue
            is_alive = signs[name] != worker.sign
            worker.sign = signs[name]
            worker.silent_s = 0.0 if is_alive else worker.silent_s + seconds
            if worker.silent_s > SILENT_S and worker.state == "ready":
                self._say(
                    f"worker {name}: no sign of life for {SILENT_S:g} s: its "
                    f"{self._queue.of(name)} unfinished lines run elsewhere"
                )
                yield from self._take_back(worker, "silent")
            elif is_alive and worker.state == "silent":
                self._say(f"worker {name}: is back")
                worker.state = "ready"
            elif is_alive and worker.state == "new":
                worker.state = "opening"
                self._call(worker, self._described, remote.describe, self._batch.job.model)
            elif is_alive and worker.state == "ready":
                unsent, worker.unsent = worker.unsent, []
                for line in unsent:
                    self._send(worker, line)
        self._check_left()

    def _check_left(self) -> None:
        """Say that nobody is there. Raise CutOffError if that can't change by itself."""
        states = Counter(worker.state for worker in self._workers.values())
        if self._failures >= MOST_ENDS and not states["ready"]:
            raise CutOffError(
                f"{self._failures} workers ended while they loaded the model: is there enough "
                "memory for all of them?"
            )
        if states["refused"] and states["refused"] == len(self._workers):
            raise CutOffError(f"no worker can be used: {next(iter(self._refused.values()))}")
        if not self._workers:
            self._say_once("no worker is there: the batch waits for one")

    def _ended(self, worker: _Worker) -> Iterator[Outcome]:
        del self._workers[worker.name]
        self._refused.pop(worker.name, None)
        self._failures += worker.state in ("new", "opening")
        for call in worker.calls:
            self._calls.pop(call, None)
            call.cancel()
        had = self._queue.of(worker.name)
        if worker.state != "refused":
            elsewhere = f": its {had} unfinished lines run elsewhere" if had else ""
            self._say(f"worker {worker.name} has ended{elsewhere}")
        yield from self._take_back(worker, "ended")

    def _take_back(
        self, worker: _Worker, state: str, *, is_to_blame: bool = True
    ) -> Iterator[Outcome]:
        """Take back the lines of a worker, which has this state now.

        Yield the errors of those that ended too many workers.
        """
        worker.state = state
        worker.unsent.clear()
        for line in self._queue.lost(worker.name, is_to_blame=is_to_blame):
            why = f"{MOST_ENDS} workers ended while they ran this line; it is not tried again"
            yield Outcome(line, error=why, kind="other")

    def _call(
        self,
        worker: _Worker,
        then: Then,
        function: Callable[..., Any],
        *arguments: Any,
        line: StoredLine | None = None,
    ) -> None:
        """Call a function on a worker, which may answer a `line`; `then` gets its value."""
        call = self._cluster.call(worker.name, function, *arguments)
        worker.calls.add(call)
        self._calls[call] = worker.name, then, line

    def _finish(self, call: Future[Any]) -> Iterator[Outcome]:
        """Give the value of a call to what waits for it, or deal with its error."""
        if call not in self._calls:
            return
        name, then, line = self._calls.pop(call)
        worker = self._workers[name]
        worker.calls.discard(call)
        error = LostCallError(name) if call.cancelled() else call.exception()
        if error is None:
            yield from then(worker, call.result())
        elif worker.state == "opening":
            if isinstance(error, LostCallError):
                worker.state = "new"
            else:
                self._refuse(worker, _reason(error))
        elif worker.state == "ready" and isinstance(error, LostCallError) and line is not None:
            worker.unsent.append(line)
        elif worker.state == "ready":
            yield from self._begin_again(worker, error)

    def _described(self, worker: _Worker, found: dict[str, dict[str, str]]) -> Iterable[Outcome]:
        """Compare a worker with this process, and let it load the model."""
        for own, its in ((self._versions, found["versions"]), (self._parts, found["parts"])):
            for name in its:
                if name != "model" and its[name] != own.get(name):
                    self._refuse(
                        worker, f"has another {name}: {its[name]} there, {own.get(name)} here"
                    )
                    return ()
        host = _host(worker.name)
        sharers = sum(_host(name) == host for name in self._workers)
        self._call(worker, self._begun, remote.begin, self._batch, sharers)
        return ()

    def _begun(self, worker: _Worker, found: tuple[int, list[str]]) -> Iterable[Outcome]:
        lanes, said = found
        self._failures = 0
        worker.state, worker.room = "ready", lanes + AHEAD
        for text in said:
            self._say_once(text)
        return ()

    def _refuse(self, worker: _Worker, why: str) -> None:
        worker.state = "refused"
        self._refused[worker.name] = f"worker {worker.name}: {why}"
        self._say(f"{self._refused[worker.name]}; it gets no lines")

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)

    def _send_lines(self) -> Iterator[Outcome]:
        """Give lines to all workers that have room, to each one in turn."""
        ready = [worker for worker in self._workers.values() if worker.state == "ready"]
        while ready:
            for worker in list(ready):
                has_room = self._queue.of(worker.name) < worker.room
                line = self._queue.take(worker.name) if has_room else None
                if line is None:
                    ready.remove(worker)
                elif line.error is not None:
                    self._queue.answered(worker.name, line.index)
                    yield refused(line, line.error)
                else:
                    self._send(worker, line)

    def _send(self, worker: _Worker, line: StoredLine) -> None:
        """Send a line. Only observers of a runner need its prompt."""
        sent = line if self._batch.has_events else replace(line, prompt=None)
        then = partial(self._answered, line)
        self._call(worker, then, remote.answer, self._batch.key, sent, line=line)

    def _answered(
        self, line: StoredLine, worker: _Worker, found: remote.LineReply
    ) -> Iterable[Outcome]:
        if self._queue.answered(worker.name, line.index) is None:
            return ()  # it was answered before
        for event in found.events:
            self._profile.take(event)
        return (replace(found.outcome, line=line),)

    def _begin_again(self, worker: _Worker, error: BaseException) -> Iterator[Outcome]:
        """Let a worker whose engine ended begin again; its lines run elsewhere.

        No line is to blame if the worker has begun another batch meanwhile.
        """
        is_to_blame = not isinstance(error, remote.NotOpenError)
        if is_to_blame:
            self._say(f"worker {worker.name}: {_reason(error)}; it begins again")
        yield from self._take_back(worker, "new", is_to_blame=is_to_blame)

    def _close(self) -> None:
        """Let the workers give their memory back, as far as they answer."""
        for call in self._calls:
            call.cancel()
        self._calls.clear()
        ready = [worker for worker in self._workers.values() if worker.state == "ready"]
        left = {self._cluster.call(one.name, remote.end, self._batch.key) for one in ready}
        end = time.monotonic() + CLOSE_S
        with suppress(CutOffError):
            while left and time.monotonic() < end:
                left.difference_update(self._cluster.ended(WAIT_S))


def _host(name: str) -> str:
    return name.rpartition(":")[0]


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, MlxrunnerError) else f"{type(error).__name__}: {text}"


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
    since: int = 0
    """The cost of what all workers had answered when it came."""
    range: _Range | None = None
    lines: dict[int, StoredLine] = field(default_factory=dict)
    """The lines that it has not answered, by index."""
    costs: dict[int, int] = field(default_factory=dict)
    answered: int = 0
    """The cost of the lines that it has answered."""
    last: int | None = None
    """The place of the last line that it got."""

    @property
    def held(self) -> int:
        """The cost of the lines that it has not answered."""
        return sum(self.costs.values())


class WorkQueue:
    """Gives lines to workers, by their names. No processes, no clocks, no wire.

    A worker without a range takes a part of the range that would take longest, as much of it as
    both workers' speeds let end at the same time. The speed of a worker is what it has answered
    while all answered so much: no worker has more lines at a time than its share of what is left.
    Lines that were on a worker when it ended run again, each alone on a worker, so that a line that
    ends workers is found.
    """

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
            if index not in self._open or any(index in one.lines for one in self._workers.values()):
                continue
            self._ends[index] += is_to_blame
            if self._ends[index] < MOST_ENDS:
                self._suspects[index] = line, own.costs[index]
                continue
            del self._open[index], self._ends[index]
            given_up.append(line)
        return given_up

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
