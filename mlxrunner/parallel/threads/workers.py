"""Threads that run MLX, and that are kept for the next job instead of being ended.

MLX stores compiled functions for each thread. It frees them when the thread ends, and needs the
interpreter for that: a thread that ends, or is ended, while the interpreter does so aborts the
process. A thread that waits for a job harms nobody.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from asyncio import Future

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


def _forget() -> None:
    _IDLE.clear()
    _AT_WORK.clear()


os.register_at_fork(after_in_child=_forget)
