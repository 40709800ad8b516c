"""The thread that owns a model: it takes requests from any thread and drives a Stepper.

Nothing of MLX happens in any other thread. Callers leave functions in its mail, and read what it
made from the feeds of their requests.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue

from mlxrunner.errors import (
    CacheFullError,
    ClosedError,
    EngineError,
    MlxrunnerError,
    NoFreeSlotError,
    ObserverError,
    TimeLimitError,
)
from mlxrunner.parallel.scheduling.endings import step_failed
from mlxrunner.parallel.scheduling.request import ActiveRequest
from mlxrunner.parallel.stepper import Stepper
from mlxrunner.parallel.threads.exits import end_at_exit
from mlxrunner.parallel.threads.feed import Feed, Lock, Wake
from mlxrunner.parallel.threads.waiting import WaitingLine
from mlxrunner.parallel.threads.workers import idle_worker, wait_for
from mlxrunner.results import logger
from mlxrunner.tokenizer.prompt import TokenizedPrompt


@dataclass(frozen=True)
class Stats:
    """The state of a ParallelRunner. Numbers of a moment: a step may be running."""

    slots: int
    """The number of slots: the most requests that run at a time."""
    busy: int = 0
    """Slots whose request runs."""
    paused: int = 0
    """Requests among them that wait for somebody to read their chunks."""
    waiting: int = 0
    """Requests that wait for a slot, or for room."""
    tokens: int = 0
    """Tokens that the slots hold; a token that several slots share counts for each."""
    bytes: int = 0
    """Bytes of the keys, values and checkpoints, as of the last begin or end of a request."""
    steps: int = 0
    """The number of steps so far."""
    parked: int = 0
    """Bytes on disk of parked conversations."""


@dataclass(frozen=True)
class Held:
    """The content of a slot. Numbers of a moment: a step may be running."""

    slot: int
    """The number of the slot."""
    is_busy: bool
    """True while its request runs."""
    tokens: int
    """Tokens of its conversation."""
    bytes: int
    """Bytes that only this slot needs; what it shares with others is not counted."""
    prompt: TokenizedPrompt | None = None
    """The prompt of the request that runs in it; None if none does."""


class EngineThread:
    """A thread that opens a Stepper, runs the requests that others give it, and closes it."""

    def __init__(self, open_stepper: Callable[[], Stepper]) -> None:
        """Start the thread and wait until it has opened its Stepper. Raise what that raises."""
        self.lock: Lock = threading.RLock()
        """Guards the feeds, and the fields below that callers change."""
        self._live: set[Feed] = set()
        """The requests that have not ended, whether they run or wait."""
        self._refusal: MlxrunnerError | None = None
        """The error that a new request gets; None while the runner is open."""
        self._mail: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._queue = WaitingLine()
        self._running: list[Feed] = []
        self._has_room = True
        self._is_stopping = False
        self._bytes = 0
        self._opened = threading.Lock()
        self._opened.acquire()
        self._failure: BaseException | None = None
        self._ended = threading.Lock()
        worker = idle_worker()
        self._thread = worker.thread
        end_at_exit(self)
        self._ended = worker.begin(partial(self._main, open_stepper))
        try:
            wait_for(self._opened)
        except BaseException:
            self.stop()
            raise
        if self._failure is not None:
            raise self._failure

    # What any thread may call.

    @property
    def is_here(self) -> bool:
        """True in this thread."""
        return threading.current_thread() is self._thread

    @property
    def is_closed(self) -> bool:
        """True after `stop`, and if the thread has died."""
        return self._refusal is not None

    def check(self) -> None:
        """Raise ClosedError after `stop`, and EngineError if the thread has died."""
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)

    def may_wait(self, call: str) -> None:
        """Raise ObserverError in this thread: `call` would wait for itself."""
        if self.is_here:
            raise ObserverError(call)

    def submit(self, request: ActiveRequest, *, is_whole: bool = False) -> Feed:
        """Queue a request and return its feed."""
        feed = Feed(self.lock, request, is_whole=is_whole)
        with self.lock:
            self.check()
            self._live.add(feed)
            self._mail.put(partial(self._enqueue, feed))
        return feed

    def cancel(self, feed: Feed) -> None:
        """End a request: its readers see the end now, and its slot is free with the next step."""
        with self.lock:
            wake = [] if feed.is_ended else feed.end(None)
            self._mail.put(partial(self._cancel, feed))
        _call(wake)

    def drop(self, feed: Feed) -> None:
        """End a request that nobody reads any more. Takes no lock: the garbage collector calls."""
        self._mail.put(partial(self._cancel, feed))

    def wake(self) -> None:
        """Let the thread look at the feeds again."""
        self._mail.put(None)

    def counted(self) -> Stats:
        """Return the present state. It only reads numbers, so any thread may do it at any time."""
        if self.is_closed:
            return Stats(self.stepper.num_slots)
        running = list(self._running)
        return Stats(
            slots=self.stepper.num_slots,
            busy=len(running),
            paused=sum(feed.request.is_paused for feed in running),
            waiting=max(0, len(self._live) - len(running)),
            tokens=self.stepper.num_tokens,
            bytes=self._bytes,
            steps=self.stepper.steps,
            parked=self.stepper.parked_bytes,
        )

    def held(self) -> list[Held]:
        """Return what each slot holds. It only reads numbers, as `counted` does."""
        if self.is_closed:
            return []
        requests = [feed.request for feed in list(self._running)]
        running = {one.slot.number: one.prompt for one in requests if one.is_placed}
        return [
            Held(
                slot.number,
                slot.is_busy,
                len(slot.tokens),
                slot.cache.entry.used_bytes + slot.cache.entry.checkpoints.nbytes,
                running.get(slot.number),
            )
            for slot in self.stepper.slots
        ]

    def stop(self) -> None:
        """Let the thread end after its step. All requests that have not ended get a ClosedError."""
        with self.lock:
            if self._refusal is None:
                self._refusal = ClosedError("ParallelRunner")
            self._is_stopping = True
            wake = self._end_all(self._refusal)
            self._mail.put(None)
        _call(wake)

    def join(self) -> None:
        """Wait until the thread has ended its work."""
        wait_for(self._ended)

    def end_after_fork(self) -> None:
        """End all requests in the child of a fork, where this thread is missing.

        Another thread that is missing may have held the lock.
        """
        self.lock._at_fork_reinit()  # type: ignore[attr-defined]
        if self._refusal is None:
            self._refusal = EngineError(RuntimeError("a fork, which copies no threads"))
        self._end_all(self._refusal)
        if self._ended.locked():
            self._ended.release()

    # What only this thread calls.

    def _main(self, open_stepper: Callable[[], Stepper]) -> None:
        try:
            self.stepper = stepper = open_stepper()
        except BaseException as error:
            self._failure = error
            return
        finally:
            self._opened.release()
        stepper.tell_first(self._hand_over_first)
        try:
            while not self._is_stopping:
                self._read_mail()
                self._admit()
                self._step()
                self._hand_over()
        except BaseException as error:
            logger.debug("the engine's thread has died", exc_info=True)
            self._die(error)
        finally:
            with suppress(BaseException):
                stepper.close()

    def _die(self, error: BaseException) -> None:
        """End all requests with an error that says why the thread has died."""
        with self.lock:
            self._refusal = EngineError(error)
            wake = self._end_all(self._refusal)
        _call(wake)

    def _end_all(self, error: MlxrunnerError) -> list[Wake]:
        wake = [one for feed in self._live for one in ([] if feed.is_ended else feed.end(error))]
        self._live.clear()
        return wake

    def _read_mail(self) -> None:
        """Do what others asked for. Wait for it if nothing can run."""
        waits = self._is_still()
        until = self._next_due() if waits else None
        while not self._is_stopping:
            try:
                act = self._mail.get(waits, until)
            except Empty:
                return
            waits = False
            if act is not None:
                act()

    def _is_still(self) -> bool:
        """Return True if no request can go on before somebody reads, cancels or submits."""
        if self._queue or not self._running:
            return not self._queue
        return all(feed.request.is_paused for feed in self._running) and self.stepper.is_idle

    def _next_due(self) -> float | None:
        """Return the seconds until the nearest deadline; None if none comes in a lifetime."""
        dues = [feed.request.due for feed in self._running if feed.request.due is not None]
        left = min(dues, default=math.inf) - time.perf_counter()
        return None if left > threading.TIMEOUT_MAX else max(0.0, left)

    def _enqueue(self, feed: Feed) -> None:
        """Let a request wait for its turn, which may be the next one."""
        if not feed.is_ended:
            self._queue.add(feed)
            self._has_room = self._has_room or self._queue.first is feed

    def _cancel(self, feed: Feed) -> None:
        if feed in self._running:
            self.stepper.cancel(feed.request)
            self._leave(feed)
        elif feed in self._live:
            self._queue.remove(feed)
            self._forget(feed)

    def _leave(self, feed: Feed) -> None:
        """Forget a request that was running; others may have room now."""
        self._running.remove(feed)
        self._has_room = True
        self._bytes = self.stepper.used_bytes
        self._forget(feed)

    def _forget(self, feed: Feed) -> None:
        with self.lock:
            self._live.discard(feed)

    def _admit(self) -> None:
        """Begin the requests that wait, while there is room."""
        for feed in self._queue.take_overdue(time.perf_counter()):
            self._refuse(feed, TimeLimitError(feed.request.deadline or 0))
        while self._queue and self._has_room:
            feed = self._queue.first
            feed.request.clock.postpone()
            try:
                self.stepper.admit(feed.request)
            except (NoFreeSlotError, CacheFullError) as error:
                if self._running:
                    self._has_room = False
                    return
                self._refuse(feed, error)
            except Exception as error:
                self._refuse(feed, step_failed(error))
            else:
                self._running.append(feed)
                self._bytes = self.stepper.used_bytes
            self._queue.take(feed)

    def _refuse(self, feed: Feed, error: MlxrunnerError) -> None:
        """End a request that never finds room, or whose deadline came before it could begin."""
        with self.lock:
            self._live.discard(feed)
            wake = [] if feed.is_ended else feed.end(error)
        _call(wake)

    def _step(self) -> None:
        """Run a step. The requests that fail in it have errors of their own."""
        if not self._running:
            return
        try:
            self.stepper.step()
        except Exception:
            if not any(feed.request.finished for feed in self._running):
                raise
            logger.debug("a step failed", exc_info=True)
        if self.stepper.is_idle and not any(feed.request.finished for feed in self._running):
            self._let_go_on()

    def _let_go_on(self) -> None:
        """End the pauses if other requests wait for the room that the paused ones hold.

        Their limit bounds then what nobody reads. Otherwise a caller that reads its answers in
        another order would wait for ever.
        """
        paused = [feed for feed in self._running if feed.request.is_paused]
        if self._queue or len(paused) < len(self._running):
            for feed in paused:
                feed.num_whole += 1

    def _hand_over_first(self) -> None:
        """Give the readers the first tokens of their answers, before the next step is built."""
        with self.lock:
            running = [feed for feed in self._running if not feed.request.finished]
            wake = [one for feed in running if not feed.is_ended for one in feed.take_over()]
        _call(wake)

    def _hand_over(self) -> None:
        """Give the readers what the step has made, and note who has to pause."""
        wake: list[Wake] = []
        with self.lock:
            for feed in self._running:
                if not feed.is_ended:
                    wake += feed.take_over()
                feed.request.is_paused = feed.is_full
        for feed in [feed for feed in self._running if feed.request.finished]:
            self._leave(feed)
        _call(wake)


def _call(wake: Iterable[Wake]) -> None:
    for one in wake:
        one()
