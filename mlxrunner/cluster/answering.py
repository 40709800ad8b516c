"""Answer lines on a worker. The driver calls the functions `describe`, `begin`, `answer` and `end`.

A worker process has one model, on a thread of its own, and answers the lines of one batch at a
time. Knows nothing about the engine that calls it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from importlib.metadata import version
from itertools import chain
from queue import Empty, SimpleQueue
from typing import Any

from mlxrunner.batch.execution import Execution, Outcome
from mlxrunner.batch.prompts import EarlierLines
from mlxrunner.batch.records import StoredLine
from mlxrunner.batch.work import open_runner
from mlxrunner.cluster.wire import Plain, SentBatch, line_of, plain_outcome
from mlxrunner.models.fingerprint import model_parts
from mlxrunner.models.resolve import resolve
from mlxrunner.parallel.stepper import Stepper
from mlxrunner.profiling.profile import Profile, as_line
from mlxrunner.runner import Runner
from mlxrunner.system import device

PACKAGES = ("mlxrunner", "mlx", "mlx-lm")
"""The packages that have the same version on all machines."""


class NotOpenError(Exception):
    """A worker was asked for a line of a batch that it has not begun, or that it has ended."""


class Desk:
    """The place where a worker answers the lines of one batch, as many at a time as fit."""

    def __init__(self, batch: SentBatch) -> None:
        """Load the model on the desk's thread. Raise what that raises."""
        self.key, self._batch = batch.key, batch
        self._lines: SimpleQueue[StoredLine | None] = SimpleQueue()
        self._waiting: dict[int, Future[Plain]] = {}
        """The future outcomes of the lines that are here, by index."""
        self._lock = threading.Lock()
        self._has_ended = False
        self._events: list[str] = []
        self._said: list[str] = []
        self._steps = 0
        self._opened: Future[int] = Future()
        self._thread = threading.Thread(target=self._work, name="mlxrunner-desk", daemon=True)
        self._thread.start()
        self.lanes = self._opened.result()
        """The number of lines at a time."""

    @property
    def said(self) -> list[str]:
        """The remarks of loading the model, for people."""
        return self._said

    @property
    def sign(self) -> Any:
        """A sign of life: a value that changes with each step; without lines, at each call."""
        return self._steps if self._waiting else time.time()

    def answer(self, line: StoredLine) -> Future[Plain]:
        """Return the future outcome of a line, with the events since the last outcome.

        The driver may send a line that is here already, because it had given up this worker for a
        while. Such a line is answered once. Raise NotOpenError if the desk has ended.
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
        """Open the runner, answer lines until None comes, and close the runner."""
        error: BaseException = NotOpenError(self.key)
        try:
            runner = self._open()
            try:
                self._answer_all(runner)
            finally:
                if isinstance(runner, Stepper):
                    runner.close()
        except BaseException as found:
            error = found
        finally:
            self._fail_all(error)

    def _open(self) -> Runner | Stepper:
        job, found = self._batch.its_job(), self._batch.its_survey()
        runner = open_runner(job, found, self._batch.context, self._said.append)
        if self._batch.has_events:
            Profile(
                "batch",
                log_text=self._batch.log_text,
                sinks=[lambda event: self._events.append(as_line(event))],
            ).watch(runner)
        self._opened.set_result(runner.num_slots if isinstance(runner, Stepper) else 1)
        return runner

    def _answer_all(self, runner: Runner | Stepper) -> None:
        begun = EarlierLines(parallel=isinstance(runner, Stepper), counts=self._batch.its_counts())
        execution = Execution(runner, self._batch.its_job(), begun, tick=self._tick)
        while (first := self._lines.get()) is not None:
            lines = chain([first], _Ready(self))
            with closing(execution.run(lines)) as outcomes:
                for outcome in outcomes:
                    self._land(outcome)

    def _tick(self) -> None:
        self._steps += 1

    def ready(self) -> StoredLine:
        """Return a line that waits. Raise queue.Empty if none does."""
        line = self._lines.get_nowait()
        if line is None:
            self._lines.put(None)
            raise Empty
        return line

    def _land(self, outcome: Outcome) -> None:
        """Give an outcome to whoever waits for it."""
        self._steps += 1
        events, self._events[:] = list(self._events), []
        reply = {"outcome": plain_outcome(outcome), "events": events}
        with self._lock:
            waiting = self._waiting.pop(outcome.line.index)
        waiting.set_result(reply)

    def _fail_all(self, error: BaseException) -> None:
        """Let all who wait know that the desk has ended."""
        global _desk
        if _desk is self:
            _desk = None
        if not self._opened.done():
            self._opened.set_exception(error)
        with self._lock:
            self._has_ended = True
            left = list(self._waiting.values())
            self._waiting.clear()
        for future in left:
            future.set_exception(error)


class _Ready(Iterator[StoredLine]):
    """The lines that wait at a desk. It ends where none waits, and goes on when one comes."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def __next__(self) -> StoredLine:
        try:
            return self._desk.ready()
        except Empty:
            raise StopIteration from None


_desk: Desk | None = None
_opening = threading.Lock()


def versions() -> dict[str, str]:
    """Return the versions on which answers depend, by package."""
    return {name: version(name) for name in PACKAGES}


def describe(model: str) -> Plain:
    """Return the versions of this worker and the parts of its copy of the model.

    Its form never changes: drivers of other versions read it.
    """
    parts = model_parts(model, resolve(model))
    return {"versions": versions(), "parts": parts, "pid": os.getpid()}


def begin(batch: SentBatch, sharers: int) -> Plain:
    """Load the model for a batch, and return how many lines run at a time.

    Lines of another batch are answered before. `sharers` processes use the memory of this machine.
    """
    global _desk
    with _opening:
        if _desk is not None:
            _desk.close()
        device.share_memory(sharers)
        _desk = desk = Desk(batch)
    return {"lanes": desk.lanes, "said": desk.said}


def answer(key: str, line: Plain) -> Plain:
    """Return the outcome of a line. Raise NotOpenError if this worker has not begun the batch."""
    desk = _desk
    if desk is None or desk.key != key:
        raise NotOpenError(key)
    return desk.answer(line_of(line)).result()


def end(key: str) -> None:
    """Give back the memory of the model after a batch, if no other batch has begun."""
    with _opening:
        if _desk is not None and _desk.key == key:
            _desk.close()


def sign(worker: object = None) -> Any:
    """Return a sign of life: a value that changes as long as this worker works."""
    desk = _desk
    return time.time() if desk is None else desk.sign
