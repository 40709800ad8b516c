"""The work that all protocols share: bodies of requests are read, and answers delivered.

Fields of a body that are not known are tolerated, those in the way are refused. An answer is
delivered whole or as a stream of frames.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Container,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from mlxrunner.batch.openai_format import READ
from mlxrunner.config.names import SAME
from mlxrunner.config.option import as_whole, names, with_whole_characters, without_nulls
from mlxrunner.config.request_fields import is_known
from mlxrunner.options import GenerateOptions
from mlxrunner.server.events import (
    BAD_DOCUMENT,
    BAD_PICTURE,
    AnswerEnd,
    AnswerEvent,
    ApiError,
    Client,
    Ping,
    ServerRequest,
    TextDelta,
    ThinkingDelta,
    ToolCallEvent,
    api_error_of,
    error_response,
)
from mlxrunner.server.manager import ModelManager
from mlxrunner.server.tools.reader import joined
from mlxrunner.templates.messages import PartError, arguments_of_call, parts_of, settled
from mlxrunner.terminal.output import one_line

LONGEST_FIELD, MOST_LEFT_OUT = 60, 40
"""Most characters of a field's name in the list of what was left out, and most of its entries."""
_BOUNDS = {"ge": -(2**63), "le": 2**63 - 1}
"""The bounds of an integer without bounds of its own: 64 bits."""


def _read_as_json(schema: Any) -> None:
    """Change a pydantic schema, and those in it, so that they read values as JSON has them.

    A whole float is an integer, and a boolean is not a number. A list ends its check at its first
    wrong item: a body has room for millions of them.
    """
    if not isinstance(schema, dict):
        for part in schema if isinstance(schema, list | tuple) else ():
            _read_as_json(part)
        return
    if schema.get("type") == "list":
        schema["fail_fast"] = True
        items = schema.get("items_schema", {})
        if items.get("type") == "int" and not items.get("strict"):
            # Python is called for floats only: a prompt may have a million tokens.
            exact = _BOUNDS | {**items, "strict": True}
            float_too = core_schema.no_info_before_validator_function(as_whole, {**exact})
            either = {"type": "union", "choices": [exact, float_too], "mode": "left_to_right"}
            schema["items_schema"] = either
    if schema.get("type") == "float":
        schema["strict"] = True
    if schema.get("type") == "int" and not schema.get("strict"):
        exact = _BOUNDS | {**schema, "strict": True}
        schema.clear()
        schema.update(core_schema.no_info_before_validator_function(as_whole, exact))
    for part in schema.values():
        _read_as_json(part)


class RequestBody(BaseModel):
    """An object of a request. A null counts as not given. Fields that are not known are kept."""

    model_config = ConfigDict(extra="allow", strict=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return without_nulls(given) if isinstance(given, dict) else given

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of the class, changed by `_read_as_json`."""
        schema = handler(source)
        _read_as_json(schema)
        return schema


_TEXT = {"type": "string"}
_PARTS = {"anyOf": [{"type": "object", "properties": {"type": _TEXT}}, _TEXT]}
_CONTENT = {"anyOf": [_TEXT, {"type": "array", "items": _PARTS}, {"type": "null"}]}
SentContent = Annotated[Any, WithJsonSchema(_CONTENT)]
"""A content as a client sent it: a text or a list of parts, and whatever `parts_of` makes of
another value, which a client would repeat with each request.
"""


def _as_text(value: Any) -> str | None:
    """Return a value as a text; None for one that says nothing, such as null or an empty list."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value) if value or isinstance(value, (int, float)) else None


HistoryText = Annotated[str | None, BeforeValidator(_as_text)]
"""A text of an earlier message, such as the id of a call. Another value is taken as its JSON: a
client would repeat it with each request.
"""


def present(items: Any) -> Any:
    """Return a list without its nulls, which count as not given."""
    return [one for one in items if one is not None] if isinstance(items, list) else items


def plain(content: Any) -> Any:
    """Return a content without the nulls of its parts, which count as not given."""
    if not isinstance(content, list):
        return content
    return [without_nulls(one) if isinstance(one, dict) else one for one in content]


def with_thoughts(messages: Iterable[M]) -> Iterator[tuple[int, M, str]]:
    """Yield messages with their numbers, and the thinking that stands before each.

    A message of role "thinking" is that of the next one.
    """
    thought = ""
    for number, message in enumerate(messages):
        if message.role == "thinking":
            found = parts_of("", plain(message.content)).content
            thought += found if isinstance(found, str) else ""
        else:
            yield number, message, thought
            thought = ""


class TalkMessage(RequestBody):
    """A message of a conversation, as OpenAI's chats and Ollama have it."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function", "thinking"]
    """"function" is the older name of "tool"; the content of "thinking" is that of the answer
    after it.
    """
    content: SentContent = None
    tool_call_id: HistoryText = None


M = TypeVar("M", bound=TalkMessage)


def shown_messages(
    messages: Sequence[dict[str, Any]],
) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Return messages as `ServerRequest` has them, and the types that became short texts.

    Arguments of calls that are no JSON object are the text of one argument. Raise ApiError for
    a part that the user has just sent and a model can't be shown.
    """
    try:
        found, kinds = settled(messages)
    except PartError as error:
        code = {"picture": BAD_PICTURE, "document": BAD_DOCUMENT}.get(error.kind, "invalid_request")
        where = error.where.replace(" ", ".")
        raise ApiError(400, str(error), code=code, param=where) from error
    for message in found:
        for call in message.get("tool_calls", ()):
            arguments, is_object = arguments_of_call(call["function"]["arguments"])
            call["function"]["arguments"] = arguments
            if not is_object:
                kinds = tuple(sorted({*kinds, "arguments"}))
    return found, kinds


OPTIONS = frozenset((*names(GenerateOptions), *SAME))
"""The names of our options, and those of other programs for them."""


def unread(fields: Mapping[str, Any], reads: Container[str] = (), prefix: str = "") -> list[str]:
    """Return what a client is told of the fields that nobody here knows, and that are ignored.

    `reads` are those that the protocol reads itself. `prefix` comes before each name.
    """
    return [
        f"field {prefix}{one_line(name, LONGEST_FIELD)}"
        for name in fields
        if not (name in OPTIONS or name in READ or name in reads or is_known(name))
    ]


def report(ended: AnswerEnd, left_out: Sequence[str] = ()) -> dict[str, Any]:
    """Return the field `mlxrunner` of a response: what was reused, and what was left out."""
    usage, cause = ended.usage, ended.cause
    body: dict[str, Any] = {
        "outcome": usage.outcome,
        "reason": usage.reason,
        "cached_tokens": usage.cached_tokens,
        "missed_tokens": usage.missed_tokens,
        "displaced_tokens": usage.displaced_tokens,
        "new_tokens": usage.new_tokens,
        "lost_tokens": usage.cache.lost_tokens,
        "cause": cause and cause.name,
        "remedy": cause and cause.remedy,
        "message": cause and cause.message,
        "rules": list(ended.rules),
    }
    if ended.note:
        body["note"] = ended.note.text
    if ended.replaced:
        body["replaced"] = list(ended.replaced)
    if left_out:
        body["left_out"] = list(left_out[:MOST_LEFT_OUT])
    return body


def headers(asked: ServerRequest, ended: AnswerEnd) -> dict[str, str]:
    found = report(ended) | {"rules": ",".join(ended.rules) or None}
    said = [
        f"{name.removesuffix('_tokens')}={found[name]}" for name in _SAID if found[name] is not None
    ]
    return (
        {"x-mlxrunner-cache": "; ".join(said)} | ids_of(asked.id) | replaced_header(ended.replaced)
    )


_COUNTS = tuple(f"{kind}_tokens" for kind in ("cached", "missed", "displaced", "new", "lost"))
_SAID = ("outcome", *_COUNTS, "reason", "cause", "message", "rules")
"""The members of a report that the header has, too, in their order there."""


def ids_of(request_id: str) -> dict[str, str]:
    return {"request-id": request_id, "x-request-id": request_id}


def replaced_before(asked: ServerRequest, answers: ModelManager) -> dict[str, str]:
    """Return what `replaced_header` can say of a stream, before its prompt is made."""
    has_picture = any(
        part["type"] == "image"
        for message in asked.messages
        if not isinstance(message["content"], str)
        for part in message["content"]
    )
    unseen = ["picture"] if has_picture and not answers.card(asked.model).sees else []
    return replaced_header(sorted({*asked.replaced, *unseen}))


def replaced_header(kinds: Sequence[str]) -> dict[str, str]:
    """Return the header that names the types of what became short texts, if anything did."""
    return {"x-mlxrunner-replaced": ", ".join(kinds)} if kinds else {}


SESSIONS = "x-claude-code-session-id session_id session-id x-session-id x-session-affinity".split()
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
        except RecursionError as error:
            raise HTTPException(400, "the body is nested too deeply") from error
        except (msgspec.MsgspecError, UnicodeError) as error:
            # Nothing but a number can be valid in itself and out of range.
            is_number = isinstance(error, msgspec.ValidationError)
            more = "; a number has to be between -1.8e308 and 1.8e308, with at most 4,300 digits"
            said = f"the body is not valid JSON: {error}{more if is_number else ''}"
            raise HTTPException(400, said) from error


def route_class(prefix: str, *, any_type: bool = False) -> type[APIRoute]:
    """Return the class of the routes of a protocol, for `APIRouter(route_class=...)`.

    The ids of its requests begin with `prefix`. With `any_type` a body is JSON whatever its
    Content-Type says, as for a bare `curl -d`.
    """

    class Route(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler = super().get_route_handler()

            async def answered(request: Request) -> Response:
                scope = request.scope
                if any_type:
                    others = [one for one in scope["headers"] if one[0] != b"content-type"]
                    kind = (b"content-type", b"application/json")
                    scope = {**scope, "headers": [*others, kind]}
                request = JsonRequest(scope, request.receive)
                request.state.id = prefix + uuid.uuid4().hex[:24]
                try:
                    return await handler(request)
                except ClientLeftError:
                    return Response(status_code=LEFT)
                except Exception as error:  # each has to come in the protocol's own shape
                    found = api_error_of(error)
                    return error_response(request.url.path, found, request.state.id)

            return answered

    return Route


def client_of(request: Request, session: object = None) -> Client:
    """Return who asks. `session` is what the body says of the conversation, if no header does.

    What is meant for a user may be long there: Claude Code's is an object with its device, too.
    The names are shown on pages and in terminals, so nothing in them controls one.
    """
    agent = request.headers.get("user-agent", "").split(" ")[0].partition("/")[0]
    named = (*map(request.headers.get, SESSIONS), session if isinstance(session, str) else None)
    found = next(filter(None, named), None)
    name = one_line(agent, LONGEST_NAME)
    return Client(name, None if found is None else one_line(found, LONGEST_SESSION))


T = TypeVar("T")


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

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None], **more: Any) -> None:
        async def frames() -> AsyncGenerator[bytes, None]:
            yield first
            async for frame in rest:
                yield frame

        super().__init__(frames(), **more)
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the frames. The end of the connection cancels the task that makes the next one."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._rest.aclose()


async def stream(
    request: Request,
    frames: AsyncGenerator[bytes, None],
    media_type: str,
    more: Mapping[str, str] | None = None,
) -> FrameResponse:
    """Return the response once its first frame is there, so that an early error has its status.

    `more`: further headers.
    """
    first = await while_connected(request, _next(frames)) or b""
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no", **(more or {})}
    headers |= ids_of(request.state.id)
    return FrameResponse(first, frames, media_type=media_type, headers=headers)


async def deliver(
    request: Request,
    answers: ModelManager,
    several: Sequence[ServerRequest],
    writer: EventWriter,
    *,
    streams: bool,
) -> Response:
    """Return one or several answers, which run side by side, whole or as a stream.

    Raise ClientLeftError if the client leaves.
    """
    if streams:
        source = frames(merged(answers, several), writer)
        said = replaced_before(several[0], answers)
        return await stream(request, source, writer.media_type, said)
    found = await while_connected(request, _wholes(answers, several))
    return JSONResponse(writer.whole(found), headers=headers(several[0], found[0].end))


class EventWriter(ABC):
    """Writes answers as a protocol has them: whole, or their events as the frames of a stream."""

    media_type = "text/event-stream"
    """The type of a stream; server-sent events by default."""

    @abstractmethod
    def whole(self, answers: Sequence[WholeAnswer]) -> dict[str, Any]:
        """Return the object of whole answers."""

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
            if has_begun:
                for frame in writer.write(index, event):
                    yield frame
            else:
                has_begun = True
                yield b"".join([*writer.begin(), *writer.write(index, event)])
        for frame in writer.finish():
            yield frame
    except Exception as error:  # the status is sent: the stream has to say it
        if not has_begun:
            raise
        yield writer.error(api_error_of(error))
    finally:
        await events.aclose()


class WholeAnswer:
    """A whole answer, made of its events."""

    def __init__(self, events: Sequence[AnswerEvent]) -> None:
        """Join `events`, the last of which is the end."""
        (self.end,) = (one for one in events if isinstance(one, AnswerEnd))
        self.events = events
        parts = list(joined(one for one in events if not isinstance(one, Ping | AnswerEnd)))
        self.parts = [one for one in parts if isinstance(one, ToolCallEvent) or one.text]
        """Texts, thoughts and calls in their order, neighbours of one kind joined."""
        self.calls = [one for one in parts if isinstance(one, ToolCallEvent)]
        self.text = "".join(one.text for one in parts if isinstance(one, TextDelta))
        self.thought = "".join(one.text for one in parts if isinstance(one, ThinkingDelta))
        self.tokens = [token for one in parts if isinstance(one, TextDelta) for token in one.tokens]
        """The tokens of the text, if log-probabilities were asked for."""


async def _wholes(answers: ModelManager, several: Sequence[ServerRequest]) -> list[WholeAnswer]:
    """Return the whole answers of several requests, which run side by side."""
    found: list[list[AnswerEvent]] = [[] for _ in several]
    together = [replace(asked, is_whole=True) for asked in several]
    async with aclosing(merged(answers, together)) as events:
        async for index, event in events:
            found[index].append(event)
    return [WholeAnswer(one) for one in found]


async def events_of(
    answers: ModelManager, asked: ServerRequest
) -> AsyncGenerator[AnswerEvent, None]:
    """Yield the events of an answer. Closing this closes the answer.

    Raise RuntimeError if the last event does not end it.
    """
    event: AnswerEvent | None = None
    async with aclosing(answers.answer(asked)) as events:
        async for event in events:
            yield event
    if not isinstance(event, AnswerEnd):
        raise RuntimeError(f"the answer has no end, but {event!r:.80}")


async def merged(
    answers: ModelManager, several: Sequence[ServerRequest]
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


async def _next(source: AsyncIterator[T]) -> T | None:
    return await anext(source, None)
