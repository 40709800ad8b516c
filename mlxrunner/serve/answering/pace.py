"""Wait for work without leaving a client in silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from mlxrunner.parallel.handle import Handle
from mlxrunner.results import Chunk

T = TypeVar("T")
FIRST_S, EVERY_S = 1.0, 4.5
"""Seconds of silence before the first beat, and between two of them: clients wait for 5."""
AHEAD = 1024
"""Most chunks that are read before their client has taken them."""


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
    """Reads the chunks of a request in a task of its own, so that a beat never disturbs it."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._chunks: asyncio.Queue[Chunk | None] = asyncio.Queue(AHEAD)
        self._error: Exception | None = None
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for chunk in self._handle:
                await self._chunks.put(chunk)
        except Exception as error:
            self._error = error
        await self._chunks.put(None)

    async def next(self, seconds: float) -> Chunk | None:
        """Return the next chunk; None behind the last one.

        Raise TimeoutError if none comes within `seconds`, and the error that ended the request.
        """
        if self._chunks.empty():
            async with asyncio.timeout(seconds):
                chunk = await self._chunks.get()
        else:
            chunk = self._chunks.get_nowait()
        if chunk is None and self._error is not None:
            raise self._error
        return chunk

    def close(self) -> None:
        """End the request, and free its slot after the step that is running."""
        self._handle.cancel()
        self._task.cancel()
