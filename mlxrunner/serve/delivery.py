"""Read requests of any protocol as JSON, and deliver answers whole or as streams of frames."""

from __future__ import annotations

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec
from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from mlxrunner.batch.openai_format import TokenLogprob
from mlxrunner.config.option import with_whole_characters
from mlxrunner.serve.errors import api_error_of, error_response
from mlxrunner.serve.events import (
    AnswerEnd,
    AnswerEvent,
    ApiError,
    Client,
    ServerRequest,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallStart,
)
from mlxrunner.serve.fields import replaced_before
from mlxrunner.serve.models import AnswerBackend
from mlxrunner.terminal.text import one_line

SESSIONS = (
    "x-claude-code-session-id",
    "session_id",
    "session-id",
    "x-session-id",
    "x-session-affinity",
)
"""Headers in which clients name the conversation."""
LONGEST_NAME, LONGEST_SESSION = 80, 256
"""Most characters of the names of a client and of its conversation: longer ones are shortened."""
LEFT = 499
"""The status of a request whose client left: nobody reads it but the log."""


class JsonRequest(Request):
    """A request whose body is JSON that can be written as JSON again."""

    async def json(self) -> Any:
        """Return the body. Raise HTTPException if it is not JSON, as NaN is not.

        Half of a character is U+FFFD: programs cut texts within an emoji, and send what is left
        with each request from then on.
        """
        body = await self.body()
        try:
            try:
                return msgspec.json.decode(body)
            except msgspec.ValidationError:
                raise
            except (msgspec.MsgspecError, UnicodeError):
                text = body.decode(errors="replace")
                whole = await asyncio.to_thread(with_whole_characters, text)
                return msgspec.json.decode(whole)
        except msgspec.ValidationError as error:  # nothing but a number can be one too many
            raise HTTPException(
                400,
                f"the body is not valid JSON: {error}; a number has to be between -1.8e308 and "
                "1.8e308, with at most 4,300 digits",
            ) from error
        except RecursionError as error:
            raise HTTPException(400, "the body is nested too deeply") from error
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise HTTPException(400, f"the body is not valid JSON: {error}") from error


def route_class(prefix: str, *, any_type: bool = False) -> type[APIRoute]:
    """Return the class of the routes of a protocol, for `APIRouter(route_class=...)`.

    The ids of its requests begin with `prefix`. With `any_type` a body is JSON whatever its
    Content-Type says, as for a bare `curl -d`.
    """

    class Route(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler = super().get_route_handler()

            async def answered(request: Request) -> Response:
                scope = _as_json(request.scope) if any_type else request.scope
                request = JsonRequest(scope, request.receive)
                request.state.id = new_id(prefix)
                try:
                    return await handler(request)
                except ClientLeftError:
                    return Response(status_code=LEFT)
                except Exception as error:  # each has to come in the protocol's own shape
                    found = api_error_of(error)
                    return error_response(request.url.path, found, request.state.id)

            return answered

    return Route


def _as_json(scope: Any) -> Any:
    """Return the scope of a request with the Content-Type of JSON."""
    others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
    return {**scope, "headers": [*others, (b"content-type", b"application/json")]}


def new_id(prefix: str) -> str:
    """Return a new id that begins with `prefix`."""
    return prefix + uuid.uuid4().hex[:24]


def client_of(request: Request, session: object = None) -> Client:
    """Return who asks. `session` is what the body says of the conversation, if no header does.

    What is meant for a user may be long there: Claude Code's is an object with its device, too.
    The names are shown on pages and in terminals, so nothing in them controls one.
    """
    agent = request.headers.get("user-agent", "").split(" ")[0].partition("/")[0]
    named = _session(request.headers)
    if named is None and isinstance(session, str):
        named = session or None
    return Client(
        name=one_line(agent, LONGEST_NAME),
        session=None if named is None else one_line(named, LONGEST_SESSION),
        address=request.client.host if request.client else "",
    )


def _session(headers: Mapping[str, str]) -> str | None:
    return next((headers[name] for name in SESSIONS if headers.get(name)), None)


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


async def stream_answers(
    request: Request,
    answers: AnswerBackend,
    several: Sequence[ServerRequest],
    writer: EventWriter,
    media_type: str = EVENT_STREAM,
) -> FrameResponse:
    """Return the stream of one or several answers, which run side by side."""
    source = frames(merged(answers, several), writer)
    said = replaced_before(several[0], answers)
    return await stream(request, source, media_type, several[0].id, said)


async def whole_answers(
    request: Request, answers: AnswerBackend, several: Sequence[ServerRequest]
) -> list[WholeAnswer]:
    """Return the whole answers of several requests. Raise ClientLeftError if the client leaves."""
    return await while_connected(request, wholes(answers, several))


async def _first(frames: AsyncIterator[bytes]) -> bytes:
    return await anext(frames, b"")


async def _behind(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    try:
        yield first
        async for frame in rest:
            yield frame
    finally:
        await rest.aclose()


class EventWriter(ABC):
    """Writes the events of answers as the frames of a protocol."""

    def begin(self) -> Iterable[bytes]:
        """Return what comes before the first event."""
        return ()

    @abstractmethod
    def write(self, index: int, event: AnswerEvent) -> Iterable[bytes]:
        """Return the frames of an event of answer number `index`."""

    def finish(self) -> Iterable[bytes]:
        """Return what comes after the last event."""
        return ()

    @abstractmethod
    def error(self, refused: ApiError) -> bytes:
        """Return the frame of an error, which is the last one."""


async def frames(
    events: AsyncGenerator[tuple[int, AnswerEvent], None], writer: EventWriter
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
        yield writer.error(api_error_of(error))
    finally:
        await events.aclose()


@dataclass
class AnswerCall:
    """A tool call of an answer."""

    id: str
    name: str
    arguments: str = ""
    """The JSON text of the arguments so far."""


@dataclass
class WholeAnswer:
    """An answer, as far as its events have come."""

    text: str = ""
    thought: str = ""
    calls: list[AnswerCall] = field(default_factory=list)
    tokens: list[TokenLogprob] = field(default_factory=list)
    """The tokens of the text, if log-probabilities were asked for."""
    parts: list[TextDelta | ThinkingDelta | AnswerCall] = field(default_factory=list)
    """Texts, thoughts and calls in their order, neighbours of one kind joined."""
    ended: AnswerEnd | None = None

    def add(self, event: AnswerEvent) -> None:
        """Add the next event."""
        match event:
            case TextDelta(text, tokens):
                self.text += text
                self.tokens.extend(tokens)
                self._join(event)
            case ThinkingDelta(text):
                self.thought += text
                self._join(event)
            case ToolCallStart(_, call_id, name):
                self.calls.append(AnswerCall(call_id, name))
                self.parts.append(self.calls[-1])
            case ToolCallDelta(_, text):
                self.calls[-1].arguments += text
            case AnswerEnd():
                self.ended = event

    def _join(self, event: TextDelta | ThinkingDelta) -> None:
        last = self.parts[-1] if self.parts else None
        if isinstance(last, TextDelta | ThinkingDelta) and type(last) is type(event):
            self.parts[-1] = type(event)(last.text + event.text)
        elif event.text:
            self.parts.append(type(event)(event.text))

    @property
    def end(self) -> AnswerEnd:
        """The last event. Raise RuntimeError if it has not come."""
        if self.ended is None:
            raise RuntimeError("the answer has no end")
        return self.ended


async def wholes(answers: AnswerBackend, several: Sequence[ServerRequest]) -> list[WholeAnswer]:
    """Return the whole answers of several requests, which run side by side."""
    found = [WholeAnswer() for _ in several]
    together = [replace(asked, is_whole=True) for asked in several]
    async with aclosing(merged(answers, together)) as events:
        async for index, event in events:
            found[index].add(event)
    return found


async def events_of(
    answers: AnswerBackend, asked: ServerRequest
) -> AsyncGenerator[AnswerEvent, None]:
    """Yield the events of an answer. Closing this closes the answer.

    Raise RuntimeError if the last event does not end it.
    """
    events = answers.answer(asked)
    event: AnswerEvent | None = None
    try:
        async for event in events:
            yield event
        if not isinstance(event, AnswerEnd):
            raise RuntimeError(f"the answer has no end, but {event!r:.80}")
    finally:
        close = getattr(events, "aclose", None)
        if close is not None:
            await close()


async def merged(
    answers: AnswerBackend, several: Sequence[ServerRequest]
) -> AsyncGenerator[tuple[int, AnswerEvent], None]:
    """Yield the events of several answers with their numbers, as they come.

    The first error ends all of them.
    """
    if len(several) == 1:  # needs no task for each event
        async with aclosing(events_of(answers, several[0])) as events:
            async for one in events:
                yield 0, one
        return
    sources = [events_of(answers, asked) for asked in several]
    waiting = {asyncio.ensure_future(_next(source)): n for n, source in enumerate(sources)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = waiting.pop(task)
                event = task.result()
                if event is not None:
                    waiting[asyncio.ensure_future(_next(sources[index]))] = index
                    yield index, event
    finally:
        await end(*waiting)
        for source in sources:
            await source.aclose()


async def _next(source: AsyncIterator[AnswerEvent]) -> AnswerEvent | None:
    return await anext(source, None)
