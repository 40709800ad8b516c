"""Wait for work without leaving a client in silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from mlxrunner.parallel.handle import Handle, news_of
from mlxrunner.results import Chunk

T = TypeVar("T")
FIRST_S, EVERY_S = 1.0, 4.5
"""Seconds of silence before the first beat, and between two of them: clients wait for 5."""
FAST_S, GATHERED_S = 0.008, 0.016
"""Seconds between the tokens of a fast stream, and seconds between two of its deliveries.

Each delivery wakes the event loop and the client, so fast tokens share one: a screen shows about 60
pictures a second. Slower tokens are delivered as soon as they come.
"""


class Beats:
    """The moments at which a client that gets nothing else is told that it is not forgotten."""

    def __init__(self, first: float = FIRST_S, every: float = EVERY_S) -> None:
        self._every = every
        self._due = asyncio.get_running_loop().time() + first

    @property
    def left(self) -> float:
        """Seconds until the next beat."""
        return max(0.0, self._due - asyncio.get_running_loop().time())

    def begin_again(self) -> None:
        """Count the silence from now on."""
        self._due = asyncio.get_running_loop().time() + self._every

    async def until(self, work: Awaitable[T]) -> AsyncIterator[None]:
        """Yield at each beat until `work` is done. Closing the iterator leaves `work` running.

        Read the result, or the exception, from `work` afterwards.
        """
        future = asyncio.ensure_future(work)
        future.add_done_callback(look_at)
        while True:
            done, _ = await asyncio.wait({future}, timeout=self.left)
            if done:
                return
            self.begin_again()
            yield


def look_at(future: asyncio.Future[Any]) -> None:
    """Take the exception of a future, which those who wait for it raise: nobody may be left."""
    if not future.cancelled():
        future.exception()


class Reader:
    """Reads the chunks of a request, so that a beat never disturbs it."""

    def __init__(self, handle: Handle, *, is_whole: bool = False) -> None:
        """Read the chunks of `handle`. `is_whole`: nobody wants any of them before the last."""
        self._handle, self._is_whole = handle, is_whole
        self._last, self._is_fast = float("-inf"), False

    async def next(self, seconds: float) -> list[Chunk]:
        """Return the chunks that have come, at least one; none behind the last one.

        Those of a fast stream are gathered. Raise TimeoutError if none comes within `seconds`, and
        the error that ended the request.
        """
        if self._is_fast:
            await self._gather()
        if not await news_of(self._handle, seconds, at_end=self._is_whole):
            raise TimeoutError
        if self._since() < FAST_S:
            await self._gather()
        self._last = asyncio.get_running_loop().time()
        chunks = self._handle.poll()
        self._is_fast = len(chunks) > 1
        if not chunks and self._handle.error is not None:
            raise self._handle.error.with_traceback(None)
        return chunks

    async def _gather(self) -> None:
        """Wait until it is time for a delivery, or for the end."""
        if (early := GATHERED_S - self._since()) > 0:
            await news_of(self._handle, early, at_end=True)

    def _since(self) -> float:
        """Return the seconds since the last delivery."""
        return asyncio.get_running_loop().time() - self._last

    def close(self) -> None:
        """End the request, and free its slot after the step that is running."""
        self._handle.cancel()
