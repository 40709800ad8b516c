"""The handle of a request of a ParallelRunner: its growing answer, for any thread and asyncio."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Self, TypeVar

from mlxrunner.cache.account import PromptAccount
from mlxrunner.config.option import check_number
from mlxrunner.engine.thread import SLICE_S, EngineThread, Feed
from mlxrunner.errors import MlxrunnerError
from mlxrunner.results import Chunk, Result

if TYPE_CHECKING:
    from asyncio import Future

T = TypeVar("T")


class Handle:
    """The growing answer of a request.

    Iterate it, with `for` or `async for`, for its chunks, or take the whole `result`. All members
    may be called in any thread. Each chunk goes to one reader. Threads and tasks may take turns;
    one that reads while another waits for a chunk gets a BusyError.

    A request pauses, while others go on, where nobody has read its last 4,096 chunks. A handle that
    is dropped cancels its request, and so does the end of a `with` block.
    """

    def __init__(self, thread: EngineThread, feed: Feed, keeps: object) -> None:
        """Make the handle of `feed`. `keeps` lives as long as the handle."""
        self._thread, self._feed, self._keeps = thread, feed, keeps
        self._result: Result | None = None

    def __del__(self) -> None:
        feed = getattr(self, "_feed", None)  # None: Ctrl-C came before it was there
        if feed is not None and not feed.is_ended:
            self._thread.drop(feed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        """Wait for the next chunk. Behind the last one, raise the error that ended the request."""
        return self._alone(self._next)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        """Wait for the next chunk. Cancelling the task that waits cancels the request."""
        is_mine = False
        try:
            is_mine = self._feed.begin_to_read()
            while (chunk := self._took_async()) is None:
                await self._news()
            return chunk
        finally:
            if is_mine:
                self._feed.is_read = False

    @property
    def error(self) -> MlxrunnerError | None:
        """The error that ended the request, or None."""
        return self._feed.error

    @property
    def finished(self) -> bool:
        """True once the last chunk is ready, or will never come."""
        return self._feed.is_ended

    @property
    def reached(self) -> int:
        """Number of the prompt's tokens that are evaluated or reused so far."""
        request = self._feed.request
        return min(request.place, len(request.tokens))

    @property
    def account(self) -> PromptAccount:
        """The account of the prompt's tokens, once the request has ended."""
        return self._feed.request.account

    def poll(self) -> list[Chunk]:
        """Return the chunks that are ready, without waiting."""
        chunks = self._alone(self._feed.take_all)
        self._has_read()
        return chunks

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the request has ended, for at most `timeout` seconds; return True if it has.

        Meanwhile the request does not pause, even if nobody reads.
        """
        if timeout is not None:
            check_number("timeout", timeout)
        with self._feed.wanted_whole():
            self._has_read()
            return wait_for_news([self], timeout, at_end=True)

    def result(self) -> Result:
        """Wait for the end and return the result, or raise the error that ended the request.

        Chunks that were read before are not in it. Raise CancelledError if the request was
        cancelled.
        """
        return self._alone(self._whole)

    def cancel(self) -> None:
        """End the request: readers see the end at once, and its slot is free after the next step.

        Its evaluated tokens can be reused. A second call is allowed, also after the end.
        """
        if not self._feed.is_ended:
            self._thread.cancel(self._feed)

    def _alone(self, read: Callable[[], T]) -> T:
        """Return what `read` returns. Raise BusyError if somebody else is reading."""
        is_mine = False
        try:
            is_mine = self._feed.begin_to_read()
            return read()
        finally:
            if is_mine:
                self._feed.is_read = False

    def _next(self) -> Chunk:
        while (chunk := self._feed.take()) is None:
            wait_for_news([self])
        self._has_read()
        return chunk

    def _took_async(self) -> Chunk | None:
        try:
            chunk = self._feed.take()
        except StopIteration:
            raise StopAsyncIteration from None
        self._has_read()
        return chunk

    def _whole(self) -> Result:
        if self._result is None:
            self.wait()
            self._feed.check()
            self._result = Result.of(self._feed.take_all())
        return self._result

    def _has_read(self) -> None:
        """Let the request go on if it pauses and somebody has read enough."""
        if self._feed.request.is_paused and not self._feed.is_full:
            self._thread.wake()

    async def _news(self) -> None:
        """Wait in the event loop until there are chunks, or the end."""
        import asyncio

        self._thread.may_wait("async for")
        loop = asyncio.get_running_loop()
        news: Future[bool] = loop.create_future()
        wake = partial(_wake_loop, news)
        if self._feed.await_news(wake):
            return
        try:
            await news
        except asyncio.CancelledError:
            self.cancel()
            raise
        finally:
            self._feed.forget(wake)


def wait_for_news(
    handles: Sequence[Handle], timeout: float | None = None, *, at_end: bool = False
) -> bool:
    """Wait until one of the handles has chunks, or the end, for at most `timeout` seconds.

    Return False if the time is over. `at_end`: wait only for an end.
    """
    until = math.inf if timeout is None else time.monotonic() + timeout
    mail: SimpleQueue[None] = SimpleQueue()
    wake = partial(mail.put, None)
    try:
        while not any(handle._feed.await_news(wake, at_end=at_end) for handle in handles):
            left = until - time.monotonic()
            if not left > 0:  # NaN is no time
                return False
            handles[0]._thread.may_wait("waiting for a request")
            with suppress(Empty):
                mail.get(timeout=min(left, SLICE_S))
    finally:
        for handle in handles:
            handle._feed.forget(wake)
    return True


async def news_of(handle: Handle, seconds: float, *, at_end: bool = False) -> bool:
    """Wait in the event loop until `handle` has chunks, or the end, for at most `seconds`.

    Return False if the time is over. Nothing is read. `at_end`: wait only for the end, and let the
    request not pause meanwhile. Cancelling the task that waits leaves the request running.
    """
    import asyncio

    loop, feed = asyncio.get_running_loop(), handle._feed
    news: Future[bool] = loop.create_future()
    wake = partial(_wake_loop, news)
    with feed.wanted_whole() if at_end else nullcontext():
        handle._has_read()
        if feed.await_news(wake, at_end=at_end):
            return True
        timer = loop.call_later(seconds, _settle, news, False)
        try:
            return await news
        finally:
            timer.cancel()
            feed.forget(wake)


def _wake_loop(news: Future[bool]) -> None:
    """Let the task that awaits `news` go on. Its event loop may be closed by now."""
    try:
        news.get_loop().call_soon_threadsafe(_settle, news)
    except RuntimeError:
        return


def _settle(news: Future[bool], has_come: bool = True) -> None:
    if not news.done():
        news.set_result(has_come)
