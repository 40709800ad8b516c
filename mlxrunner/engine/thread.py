"""The thread that owns the model of a ParallelRunner, who waits for it, and what it hands over."""

from __future__ import annotations

import atexit
import itertools
import math
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from mlxrunner.engine.engine import Engine
from mlxrunner.engine.request import ActiveRequest
from mlxrunner.engine.scheduling.eviction import step_failed
from mlxrunner.engine.scheduling.pacing import FAIR, order
from mlxrunner.errors import (
    BusyError,
    CacheFullError,
    ClosedError,
    EngineError,
    MlxrunnerError,
    NoFreeSlotError,
    TimeLimitError,
)
from mlxrunner.results import Chunk, logger
from mlxrunner.tokenizer.prompt import TokenizedPrompt

if TYPE_CHECKING:
    from asyncio import Future


class WaitingLine:
    """A line in which those of a higher priority come first, then those with a nearer deadline.

    Equal ones come as they arrived. One turn in FAIR is that of the request that arrived first, so
    that none starves.
    """

    def __init__(self) -> None:
        self._feeds: list[Feed] = []
        self._turn = 1

    def __bool__(self) -> bool:
        return bool(self._feeds)

    def add(self, feed: Feed) -> None:
        """Let a request wait."""
        self._feeds.append(feed)

    def remove(self, feed: Feed) -> None:
        """Let a request wait no longer, if it does."""
        if feed in self._feeds:
            self._feeds.remove(feed)

    @property
    def first(self) -> Feed:
        """The request whose turn it is."""
        if self._turn % FAIR == 0:
            return self._feeds[0]
        return min(self._feeds, key=lambda feed: order(feed.request.priority, feed.request.due))

    def take(self, feed: Feed) -> None:
        """Let the first request begin; the next turn comes."""
        self._feeds.remove(feed)
        self._turn += 1

    def take_overdue(self, now: float) -> list[Feed]:
        """Remove and return the requests whose deadline has come."""
        dues = [(feed, feed.request.due) for feed in self._feeds]
        overdue = [feed for feed, due in dues if due is not None and due <= now]
        for feed in overdue:
            self._feeds.remove(feed)
        return overdue


INTERRUPTED = 130
"""Exit code after Ctrl-C."""


_OPEN: weakref.WeakSet[EngineThread] = weakref.WeakSet()
"""The threads that have to end before the interpreter does."""


def end_at_exit(thread: EngineThread) -> None:
    """End the work of `thread` before the interpreter ends, and in the child of a fork."""
    if not _OPEN:
        atexit.unregister(_end_all)
        atexit.register(_end_all)
    _OPEN.add(thread)


def _end_all() -> None:
    """End the work of all threads before the interpreter ends.

    Ctrl-C while it waits for their last steps leaves at once.
    """
    # A thread that has ended its work keeps the interpreter's lock until it waits for the next.
    sys.setswitchinterval(60)
    threads = list(_OPEN)
    try:
        for thread in threads:
            thread.stop()
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(INTERRUPTED)


T = TypeVar("T")

SLICE_S = 0.1
"""Seconds after which a thread that waits looks for signals.

One that comes right before a wait would not end it.
"""
_NUMBERS = itertools.count(1)
_IDLE: list[Worker] = []
_AT_WORK: set[object] = set()


class Worker:
    """A thread that does one job after another. A job raises nothing."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], None], threading.Lock]] = SimpleQueue()
        self.thread = threading.Thread(
            target=self._work, name=f"mlxrunner-engine-{next(_NUMBERS)}", daemon=True
        )
        self.thread.start()

    def begin(self, job: Callable[[], None]) -> threading.Lock:
        """Begin a job, and return a lock that is free once it has ended."""
        done = threading.Lock()
        done.acquire()
        self._jobs.put((job, done))
        return done

    def _work(self) -> None:
        while True:
            job, done = self._jobs.get()
            job()
            del job  # with all that it holds
            _IDLE.append(self)
            done.release()


def idle_worker() -> Worker:
    """Return a thread that waits for a job, or a new one."""
    try:
        return _IDLE.pop()
    except IndexError:
        return Worker()


async def run_in_worker(work: Callable[..., T], *given: Any) -> T:
    """Run `work`, which uses MLX, in such a thread, and return what it returns in asyncio.

    A task that is cancelled does not end the work: see `has_work`.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    result: Future[T] = loop.create_future()

    def settle(act: Callable[[Any], None], found: object) -> None:
        if not result.done():
            act(found)

    def tell(act: Callable[[Any], None], found: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, act, found)

    def job() -> None:
        try:
            found = work(*given)
        except BaseException as error:
            tell(result.set_exception, error)
        else:
            tell(result.set_result, found)
        finally:
            _AT_WORK.discard(result)

    _AT_WORK.add(result)
    idle_worker().begin(job)
    return await result


def has_work() -> bool:
    """Return True if some work of `run_in_worker` has not ended, whoever waits for it."""
    return bool(_AT_WORK)


def wait_for(lock: threading.Lock) -> None:
    """Wait until `lock` is free. Ctrl-C in the main thread ends the waiting."""
    while not lock.acquire(timeout=SLICE_S):
        pass
    lock.release()


def _end_after_fork() -> None:
    for thread in list(_OPEN):
        thread.end_after_fork()
    for known in (_OPEN, _IDLE, _AT_WORK):
        known.clear()


os.register_at_fork(after_in_child=_end_after_fork)


MOST_UNREAD = 4096
"""Chunks that nobody has read at which a request pauses."""
Lock = AbstractContextManager[bool, None]
"""A lock that its owner may take again, because the garbage collector may call anything."""
Wake = Callable[[], object]
"""A function that lets somebody look again. It may be called more than once, in any thread."""


class Feed:
    """The chunks of one request that nobody has read yet, and its end.

    The lock of its runner guards all fields: the engine's thread adds, and readers take.
    """

    def __init__(self, lock: Lock, request: ActiveRequest, *, is_whole: bool = False) -> None:
        """Make the feed of `request`. `is_whole`: somebody wants all of it, so it never pauses."""
        self.lock, self.request = lock, request
        self.error: MlxrunnerError | None = None
        """The error that ended the request; None if no error did."""
        self.is_ended = False
        """True if no chunk comes any more."""
        self.is_read = False
        """True while a reader takes a chunk or waits for one."""
        self.num_whole = int(is_whole)
        """Number of those that want all of it. While there are any, the request does not pause."""
        self._chunks: deque[Chunk] = deque()
        self._wakes: list[tuple[Wake, bool]] = []
        """The functions to call when there is news: at the end only where True."""

    @property
    def is_full(self) -> bool:
        """True if the request has to pause until somebody reads. A pause ends at half."""
        most = MOST_UNREAD // 2 if self.request.is_paused else MOST_UNREAD
        return not self.num_whole and len(self._chunks) > most

    def take_over(self) -> list[Wake]:
        """Take what the request has made since the last call; return the functions to call."""
        made = self.request.chunks
        is_new = bool(made)
        while made:
            self._chunks.append(made.popleft())
        if self.request.finished:
            return self.end(self.request.error)
        return self._woken(is_end=False) if is_new else []

    def end(self, error: MlxrunnerError | None) -> list[Wake]:
        """Let no chunk come any more; return the functions to call."""
        if not self.is_ended:
            self.is_ended, self.error = True, error
        return self._woken(is_end=True)

    def _woken(self, *, is_end: bool) -> list[Wake]:
        """Forget the functions to call now, and return them."""
        woken = [wake for wake, at_end in self._wakes if is_end or not at_end]
        self._wakes = [] if is_end else [one for one in self._wakes if one[1]]
        return woken

    def begin_to_read(self) -> bool:
        """Set `is_read`. Raise BusyError if somebody else is reading."""
        with self.lock:
            if self.is_read:
                raise BusyError(
                    "another thread or task is reading this handle: let one read at a time, or "
                    "submit a request for each"
                )
            self.is_read = True
            return True

    def take(self) -> Chunk | None:
        """Return the next chunk; None if it has not come yet.

        After the last one, raise the error that ended the request, or StopIteration.
        """
        with self.lock:
            if self._chunks:
                return self._chunks.popleft()
            if not self.is_ended:
                return None
        self.check()
        raise StopIteration

    def take_all(self) -> list[Chunk]:
        """Return the chunks that have come, and forget them."""
        with self.lock:
            chunks = list(self._chunks)
            self._chunks.clear()
            return chunks

    def check(self) -> None:
        """Raise the error that ended the request, if one did."""
        if self.error is not None:
            raise self.error.with_traceback(None)

    def await_news(self, wake: Wake, *, at_end: bool = False) -> bool:
        """Return True if there are chunks or the end; else leave `wake` for when there are.

        `at_end`: only the end is waited for.
        """
        with self.lock:
            has_news = self.is_ended or (bool(self._chunks) and not at_end)
            if not has_news and (wake, at_end) not in self._wakes:
                self._wakes.append((wake, at_end))
            return has_news

    def forget(self, wake: Wake) -> None:
        """Drop a function that was left."""
        with self.lock:
            self._wakes = [one for one in self._wakes if one[0] != wake]

    @contextmanager
    def wanted_whole(self) -> Iterator[None]:
        """Let the request not pause within the block."""
        with self.lock:
            self.num_whole += 1
        try:
            yield
        finally:
            with self.lock:
                self.num_whole -= 1


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
class HeldSlot:
    """The content of a slot. Numbers of a moment: a step may be running."""

    slot: int
    is_busy: bool
    tokens: int
    bytes: int
    """Bytes that only this slot needs; what it shares with others is not counted."""
    prompt: TokenizedPrompt | None = None
    """The prompt of the request that runs in it; None if none does."""


class EngineThread:
    """A thread that opens an Engine, runs the requests that others give it, and closes it."""

    def __init__(self, open_stepper: Callable[[], Engine]) -> None:
        """Start the thread and wait until it has opened its Engine. Raise what that raises."""
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
        """Raise BusyError in this thread: `call` would wait for itself."""
        if self.is_here:
            raise BusyError(
                f"{call}: the engine's thread would wait for itself: an observer may submit and "
                "cancel requests; wait for them, read them and close the runner in another thread"
            )

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

    def held(self) -> list[HeldSlot]:
        """Return what each slot holds. It only reads numbers, as `counted` does."""
        if self.is_closed:
            return []
        requests = [feed.request for feed in list(self._running)]
        running = {one.slot.number: one.prompt for one in requests if one.is_placed}
        return [
            HeldSlot(
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

    def _main(self, open_stepper: Callable[[], Engine]) -> None:
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
        if waits and (saves := self.stepper.save_in_s) is not None:
            until = saves if until is None else min(until, saves)
        while not self._is_stopping:
            try:
                act = self._mail.get(waits, until)
            except Empty:
                return
            waits = False
            if act is not None:
                act()

    def _is_still(self) -> bool:
        """Return True if no request can continue before somebody reads, cancels or submits."""
        if self._queue or not self._running:
            return not self._queue
        return all(feed.request.is_paused for feed in self._running) and self.stepper.is_idle

    def _next_due(self) -> float | None:
        """Return the seconds until the nearest deadline; None if none comes in a lifetime."""
        dues = [feed.request.due for feed in self._running if feed.request.due is not None]
        left = min(dues, default=math.inf) - time.perf_counter()
        return None if left > threading.TIMEOUT_MAX else max(0.0, left)

    def _enqueue(self, feed: Feed) -> None:
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
            if not self._is_stopping:
                self.stepper.save_idle()
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
