"""Run a batch over workers: who may answer, who has ended, and the outcomes as they come.

The store stays with the driver.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from mlxrunner.batch.execution import Execution, Outcome, Outcomes, refused
from mlxrunner.batch.job import Job
from mlxrunner.batch.plan import costs_of, survey
from mlxrunner.batch.prompts import EarlierLines
from mlxrunner.batch.records import StoredLine
from mlxrunner.batch.store import Store
from mlxrunner.batch.work import Answering
from mlxrunner.cluster import worker as remote
from mlxrunner.cluster.dask_workers import DaskWorkers, LostCallError
from mlxrunner.cluster.work_queue import MOST_ENDS, WorkQueue
from mlxrunner.cluster.worker import WorkerBatch
from mlxrunner.errors import CutOffError, MlxrunnerError
from mlxrunner.profiling.profile import Profile
from mlxrunner.terminal.progress import Progress

SILENT_S = 60.0
"""Seconds without a sign of life after which a worker's lines run elsewhere."""
AHEAD = 2
"""Lines that a worker has beside those that run, so that it never waits for the next."""
WAIT_S = 0.1
"""Most seconds between two looks at Ctrl-C and at the workers."""
CLOSE_S = 5.0
"""Most seconds in which workers give their memory back at the end."""
Opened = Callable[[], AbstractContextManager[DaskWorkers]]
Then = Callable[["_Worker", Any], Iterator[Outcome]]
"""A function that takes a worker and the value of its call."""


@dataclass
class _Worker:
    """The state of a worker, as far as the driver knows it."""

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
        """Note the workers that have come."""
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
                yield from self._silent(worker)
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

    def _silent(self, worker: _Worker) -> Iterator[Outcome]:
        """Run the lines of a worker elsewhere that gave no sign of life for too long."""
        had = self._queue.of(worker.name)
        self._say(
            f"worker {worker.name}: no sign of life for {SILENT_S:g} s: its {had} unfinished lines "
            "run elsewhere"
        )
        yield from self._take_back(worker, "silent")

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
        """Take everything from a worker that is no longer there."""
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

    def _described(self, worker: _Worker, found: dict[str, dict[str, str]]) -> Iterator[Outcome]:
        """Compare a worker with this process, and let it load the model."""
        for own, its in ((self._versions, found["versions"]), (self._parts, found["parts"])):
            for name in its:
                if name != "model" and its[name] != own.get(name):
                    self._refuse(
                        worker, f"has another {name}: {its[name]} there, {own.get(name)} here"
                    )
                    return
        host = _host(worker.name)
        sharers = sum(_host(name) == host for name in self._workers)
        self._call(worker, self._begun, remote.begin, self._batch, sharers)
        yield from ()

    def _begun(self, worker: _Worker, found: tuple[int, list[str]]) -> Iterator[Outcome]:
        """Note that a worker has loaded the model."""
        lanes, said = found
        self._failures = 0
        worker.state, worker.room = "ready", lanes + AHEAD
        for text in said:
            self._say_once(text)
        yield from ()

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
    ) -> Iterator[Outcome]:
        """Take the end of a line, once."""
        if self._queue.answered(worker.name, line.index) is not None:
            for event in found.events:
                self._profile.take(event)
            yield replace(found.outcome, line=line)

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
    """Return the host in the address of a worker."""
    return name.rpartition(":")[0]


def _reason(error: BaseException) -> str:
    """Return an error of a worker in one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, MlxrunnerError) else f"{type(error).__name__}: {text}"
