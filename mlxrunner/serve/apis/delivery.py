"""Deliver an answer: as a stream of frames, or whole; and end it when its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
)
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from fastapi import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from mlxrunner.serve.apis.refusals import refusal_of
from mlxrunner.serve.events import Event, RefusedError

T = TypeVar("T")

EVENT_STREAM = "text/event-stream"
"""The media type of a stream of server-sent events."""


class ClientLeftError(Exception):
    """The client closed the connection before its answer was ready."""


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. Cancel it and raise ClientLeftError if the client leaves."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_left(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeftError
    finally:
        await end(task, watch)


async def _left(receive: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have ended. Their errors are of no interest any more."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError, Exception):
            await task


class FrameResponse(StreamingResponse):
    """A stream whose source is closed at its end, also if nobody read its first frame."""

    def __init__(self, frames: AsyncGenerator[bytes, None], media_type: str, **more: Any) -> None:
        super().__init__(frames, media_type=media_type, **more)
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the frames. The end of the connection cancels the task that makes the next one."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._frames.aclose()


async def stream(
    request: Request,
    frames: AsyncGenerator[bytes, None],
    media_type: str,
    request_id: str,
    more: Mapping[str, str] | None = None,
) -> FrameResponse:
    """Return the response once its first frame is there, so that an early error has its status.

    `more`: further headers.
    """
    first = await while_connected(request, _first(frames))
    headers = {
        "cache-control": "no-cache",
        "x-accel-buffering": "no",
        "request-id": request_id,
        "x-request-id": request_id,
        **(more or {}),
    }
    return FrameResponse(_behind(first, frames), media_type, headers=headers)


async def _first(frames: AsyncIterator[bytes]) -> bytes:
    return await anext(frames, b"")


async def _behind(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    try:
        yield first
        async for frame in rest:
            yield frame
    finally:
        await rest.aclose()


class Writer(Protocol):
    """Writes the events of answers as the frames of a protocol."""

    def begin(self) -> Iterator[bytes]:
        """Yield what comes before the first event."""
        ...

    def write(self, index: int, event: Event) -> Iterator[bytes]:
        """Yield the frames of an event of answer number `index`."""
        ...

    def finish(self) -> Iterator[bytes]:
        """Yield what comes after the last event."""
        ...

    def error(self, refused: RefusedError) -> bytes:
        """Return the frame of an error, which is the last one."""
        ...


async def frames(
    events: AsyncGenerator[tuple[int, Event], None], writer: Writer
) -> AsyncGenerator[bytes, None]:
    """Yield the frames of a stream. An error before the first event is raised, a later one sent."""
    has_begun = False
    try:
        async for index, event in events:
            if not has_begun:
                has_begun = True
                yield b"".join([*writer.begin(), *writer.write(index, event)])
                continue
            for frame in writer.write(index, event):
                yield frame
        for frame in writer.finish():
            yield frame
    except Exception as error:  # the status is sent: the stream has to say it
        if not has_begun:
            raise
        yield writer.error(refusal_of(error))
    finally:
        await events.aclose()
