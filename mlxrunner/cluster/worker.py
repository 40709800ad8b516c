"""Answer lines on a worker. The driver calls `describe`, `begin`, `answer` and `end` there.

A worker process has one model, on a thread of its own, and answers the lines of one batch at a
time. Knows nothing about Dask. Both sides have the same versions of all packages, which the driver
compares before it calls anything but `describe`; so objects of this program cross the wire as
they are.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from queue import Empty, SimpleQueue
from typing import Any

from mlxrunner.batch.execution import Execution, Outcome
from mlxrunner.batch.job import Job
from mlxrunner.batch.plan import Survey
from mlxrunner.batch.prompts import EarlierLines
from mlxrunner.batch.store import LineCounts, StoredLine
from mlxrunner.batch.work import open_runner
from mlxrunner.cache.entry import as_tokens
from mlxrunner.engine.engine import Engine
from mlxrunner.models.fingerprint import model_parts
from mlxrunner.models.resolve import resolve
from mlxrunner.profiling.profile import Profile, as_line
from mlxrunner.runner import Runner
from mlxrunner.system import device

PACKAGES = ("mlxrunner", "mlx", "mlx-lm")
"""The packages that have the same version on all machines."""


class NotOpenError(Exception):
    """A worker was asked for a line of a batch that it has not begun, or that it has ended."""


@dataclass(frozen=True)
class WorkerBatch:
    """A batch as a worker gets it."""

    key: str
    """The name of this run of the batch, which no other has."""
    job: Job
    found: Survey
    """The survey of the lines, which decides how many run at a time."""
    counts: LineCounts
    """The numbers of lines of the whole batch."""
    context: int
    """The most tokens of a prompt and its answer."""
    has_events: bool = False
    """True if an event of each request goes back."""
    log_text: bool = False
    """True if these events show text where a prompt leaves the entry."""


@dataclass(frozen=True)
class LineReply:
    """The end of a line."""

    outcome: Outcome
    events: list[str]


class WorkerSession:
    """The lines of one batch on this worker, as many at a time as fit, and their model."""

    def __init__(self, batch: WorkerBatch) -> None:
        """Load the model on a thread of its own. Raise what that raises."""
        self.key, self._batch = batch.key, batch
        self._lines: SimpleQueue[StoredLine | None] = SimpleQueue()
        self._waiting: dict[int, Future[LineReply]] = {}
        """The future outcomes of the lines that are here, by index."""
        self._lock = threading.Lock()
        self._has_ended = False
        self._events: list[str] = []
        self.said: list[str] = []
        """The remarks of loading the model, for people."""
        self._steps = 0
        self._opened: Future[int] = Future()
        self._thread = threading.Thread(target=self._work, name="mlxrunner-worker", daemon=True)
        self._thread.start()
        self.lanes = self._opened.result()

    @property
    def sign(self) -> Any:
        """A sign of life: a value that changes with each step; without lines, at each call."""
        return self._steps if self._waiting else time.time()

    def answer(self, line: StoredLine) -> Future[LineReply]:
        """Return the future outcome of a line, with the events since the last outcome.

        The driver may send a line that is here already, because it had given up this worker for a
        while. Such a line is answered once. Raise NotOpenError if the session has ended.
        """
        with self._lock:
            if self._has_ended:
                raise NotOpenError(self.key)
            if (waiting := self._waiting.get(line.index)) is None:
                waiting = self._waiting[line.index] = Future()
                self._lines.put(line)
        return waiting

    def close(self) -> None:
        """Answer the lines that have come, free the model, and end the thread."""
        self._lines.put(None)
        self._thread.join()

    def _work(self) -> None:
        error: BaseException = NotOpenError(self.key)
        try:
            runner = self._open()
            try:
                self._answer_all(runner)
            finally:
                if isinstance(runner, Engine):
                    runner.close()
        except BaseException as found:
            error = found
        finally:
            self._fail_all(error)

    def _open(self) -> Runner | Engine:
        batch = self._batch
        runner = open_runner(batch.job, batch.found, batch.context, self.said.append)
        if batch.has_events:
            Profile(
                "batch",
                log_text=batch.log_text,
                sinks=[lambda event: self._events.append(as_line(event))],
            ).watch(runner)
        self._opened.set_result(runner.num_slots if isinstance(runner, Engine) else 1)
        return runner

    def _answer_all(self, runner: Runner | Engine) -> None:
        begun = EarlierLines(parallel=isinstance(runner, Engine), counts=self._batch.counts)
        execution = Execution(runner, self._batch.job, begun, tick=self._tick)
        while (first := self._lines.get()) is not None:
            with closing(execution.run(_WaitingLines(first, self._lines))) as outcomes:
                for outcome in outcomes:
                    self._finish(outcome)

    def _tick(self) -> None:
        self._steps += 1

    def _finish(self, outcome: Outcome) -> None:
        self._steps += 1
        events, self._events[:] = list(self._events), []
        with self._lock:
            waiting = self._waiting.pop(outcome.line.index)
        line = replace(outcome.line, tokens=as_tokens([]), prompt=None)  # the driver has it
        waiting.set_result(LineReply(replace(outcome, line=line), events))

    def _fail_all(self, error: BaseException) -> None:
        """Let all who wait know that the session has ended."""
        global _session
        if _session is self:
            _session = None
        if not self._opened.done():
            self._opened.set_exception(error)
        with self._lock:
            self._has_ended = True
            left = list(self._waiting.values())
            self._waiting.clear()
        for future in left:
            future.set_exception(error)


class _WaitingLines(Iterator[StoredLine]):
    """A line and those in a queue. It ends where none waits, and continues when one comes."""

    def __init__(self, first: StoredLine, lines: SimpleQueue[StoredLine | None]) -> None:
        self._first: StoredLine | None = first
        self._lines = lines

    def __next__(self) -> StoredLine:
        line, self._first = self._first, None
        if line is None:
            with suppress(Empty):
                line = self._lines.get_nowait()
                if line is None:
                    self._lines.put(None)
        if line is None:
            raise StopIteration
        return line


_session: WorkerSession | None = None
_opening = threading.Lock()


def versions() -> dict[str, str]:
    """Return the versions on which answers depend, by package."""
    return {name: version(name) for name in PACKAGES}


def describe(model: str) -> dict[str, Any]:
    """Return the versions of this worker and the parts of its copy of the model.

    Its form never changes: drivers of other versions read it.
    """
    parts = model_parts(model, resolve(model))
    return {"versions": versions(), "parts": parts, "pid": os.getpid()}


def begin(batch: WorkerBatch, sharers: int) -> tuple[int, list[str]]:
    """Load the model for a batch. Return how many lines run at a time, and remarks for people.

    Lines of another batch are answered before. `sharers` processes use the memory of this machine.
    """
    global _session
    with _opening:
        if _session is not None:
            _session.close()
        device.share_memory(sharers)
        _session = session = WorkerSession(batch)
    return session.lanes, session.said


async def answer(key: str, line: StoredLine) -> LineReply:
    """Return the outcome of a line. Raise NotOpenError if this worker has not begun the batch."""
    session = _session
    if session is None or session.key != key:
        raise NotOpenError(key)
    return await asyncio.shield(asyncio.wrap_future(session.answer(line)))  # others wait, too


def end(key: str) -> None:
    """Give back the memory of the model after a batch, if no other batch has begun."""
    with _opening:
        if _session is not None and _session.key == key:
            _session.close()


def sign(worker: object = None) -> Any:
    """Return a sign of life: a value that changes as long as this worker works."""
    session = _session
    return time.time() if session is None else session.sign
