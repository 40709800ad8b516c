"""Ollama's API: the body of a request, the answer, the stream; lists of models and downloads."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BeforeValidator, Field

from mlxrunner.batch.openai_format import ANY_OBJECT, TURN, TokenLogprob, finite
from mlxrunner.config.names import hub_id_of
from mlxrunner.config.option import without_nulls
from mlxrunner.config.request_fields import held, is_neutral
from mlxrunner.models.resolve import HUB_ID, folder_if_here, not_a_hub_id, pull
from mlxrunner.options import GenerateOptions
from mlxrunner.server.events import (
    AnswerEnd,
    AnswerEvent,
    ApiError,
    Client,
    ServerRequest,
    TextDelta,
    ThinkingDelta,
    ToolCallEvent,
    api_error_of,
    field_error,
)
from mlxrunner.server.manager import ModelManager
from mlxrunner.server.models import ModelCard
from mlxrunner.server.openai import checked_effort, options_of
from mlxrunner.server.protocol import (
    OPTIONS,
    EventWriter,
    HistoryText,
    RequestBody,
    TalkMessage,
    WholeAnswer,
    client_of,
    deliver,
    end,
    plain,
    present,
    report,
    route_class,
    shown_messages,
    stream,
    unread,
    while_connected,
    with_thoughts,
)
from mlxrunner.templates.messages import UNREAD_PICTURE, Parts, Shown, StandIn, parts_of

UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
"""Seconds of each unit of a duration."""
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")


class OllamaToolCall(RequestBody):
    """A call in an earlier answer."""

    class OllamaFunction(RequestBody):
        """A function: what it is called, and with what."""

        name: str = "unknown"
        arguments: Any = None
        """An object. Another value, of an answer that was cut off, is taken, too."""

    id: HistoryText = None
    function: OllamaFunction = OllamaFunction()


class OllamaMessage(TalkMessage):
    """A message of the conversation."""

    thinking: HistoryText = None
    tool_calls: Annotated[list[OllamaToolCall] | None, BeforeValidator(present)] = None
    tool_name: HistoryText = None
    images: list[Any] | None = None


class OllamaRequest(RequestBody):
    """The fields of both kinds of requests."""

    model: str = Field(min_length=1)
    stream: bool = True
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = None
    logprobs: bool = False
    top_logprobs: int | None = None


class OllamaChatRequest(OllamaRequest):
    """The body of a request for the next message of a conversation."""

    messages: Annotated[list[OllamaMessage] | None, BeforeValidator(present)] = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateRequest(OllamaRequest):
    """The body of a request for the answer to one prompt."""

    prompt: str | None = None
    system: str | None = None
    raw: bool = False
    images: list[Any] | None = None


def read(
    body: OllamaChatRequest | OllamaGenerateRequest, client: Client, request_id: str
) -> ServerRequest:
    """Return what a body asks for. Raise ApiError or OptionError."""
    extra = body.model_extra or {}
    held(extra, TURN)
    for name in OPTIONS & (extra.keys() - TURN):
        if not is_neutral(extra[name]):
            raise field_error(name, "send it as a member of options, where it is heeded")
    is_raw = isinstance(body, OllamaGenerateRequest) and body.raw
    if isinstance(body, OllamaGenerateRequest) and body.raw and body.images:
        raise field_error("images", "a raw prompt has no place for pictures")
    messages, replaced = shown_messages(() if is_raw else list(_messages(body)))
    level = body.think if isinstance(body.think, str) else None
    thinking = body.think if isinstance(body.think, bool) else None
    return ServerRequest(
        protocol="ollama",
        model=body.model,
        messages=messages,
        replaced=replaced,
        prompt=body.prompt if is_raw and isinstance(body, OllamaGenerateRequest) else None,
        tools=_tools(body.tools or []) if isinstance(body, OllamaChatRequest) else (),
        thinking=True if level else thinking,
        effort=checked_effort(level or None, "think"),
        options=_options(body),
        keep_alive=seconds_of(body.keep_alive),
        client=client,
        id=request_id,
    )


def left_out(body: OllamaChatRequest | OllamaGenerateRequest) -> list[str]:
    """Return the fields that are ignored because nobody here knows them."""
    return [*unread(body.model_extra or {}), *unread(body.options or {}, (), "options.")]


def is_empty(body: OllamaChatRequest | OllamaGenerateRequest) -> bool:
    """Return True if a body only loads a model, or unloads it."""
    return not (body.messages if isinstance(body, OllamaChatRequest) else body.prompt)


def seconds_of(given: float | str | None) -> float | None:
    """Return the seconds of `keep_alive`: a number, or a text such as "5m". Raise ApiError."""
    if given is None:
        return None
    if isinstance(given, str):
        sign, text = (-1.0, given[1:]) if given.startswith("-") else (1.0, given)
        parts = _DURATION.findall(text)
        if "".join(number + unit for number, unit in parts) == text and parts:
            return sign * sum(float(number) * UNITS[unit] for number, unit in parts)
        try:
            given = float(given)
        except ValueError:
            given = math.nan
    if not math.isfinite(given):
        raise field_error(
            "keep_alive",
            'it has to be seconds, or a duration such as "5m" or "1h30m"; negative: for ever',
        )
    return given


def _messages(body: OllamaChatRequest | OllamaGenerateRequest) -> Iterator[dict[str, Any]]:
    if isinstance(body, OllamaGenerateRequest):
        if body.system:
            yield {"role": "system", "content": body.system}
        content = Parts([*_pictures("images", body.images), body.prompt or ""])
        yield {"role": "user", "content": content}
        return
    waiting: list[str] = []
    for number, message, thought in with_thoughts(body.messages or ()):
        where = f"messages.{number}"
        content = parts_of(f"{where}.content", plain(message.content))
        content[:0] = _pictures(f"{where}.images", message.images)
        role = "tool" if message.role == "function" else message.role
        found: dict[str, Any] = {"role": role, "content": content}
        if role == "assistant":
            if message.thinking or thought:
                found["reasoning_content"] = thought + (message.thinking or "")
            if message.tool_calls:
                found["tool_calls"] = _calls(number, message.tool_calls)
                waiting = [call["id"] for call in found["tool_calls"]]
        elif role == "tool":
            found["tool_call_id"] = message.tool_call_id or (
                waiting.pop(0) if waiting else f"call_{number}"
            )
            if message.tool_name:
                found["name"] = message.tool_name
        yield found


def _pictures(where: str, images: list[Any] | None) -> Iterator[Shown | StandIn]:
    """Yield the pictures of a message, and a stand-in for each that is none."""
    for number, image in enumerate(images or ()):
        why, name = "a picture has to be base64", f"{where}.{number}"
        is_text = isinstance(image, str)
        yield Shown(image) if is_text else StandIn("picture", UNREAD_PICTURE, name, why)


def _calls(number: int, calls: list[OllamaToolCall]) -> list[dict[str, Any]]:
    """Return the calls of message `number`. Ollama's clients give them no ids: they get some."""
    return [
        {
            "id": call.id or f"call_{number}_{place}",
            "type": "function",
            "function": {"name": call.function.name, "arguments": call.function.arguments},
        }
        for place, call in enumerate(calls)
    ]


def _tools(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for number, tool in enumerate(given):
        match tool:
            case {"function": {"name": str()}} if tool.get("type") in (None, "function"):
                continue
        where = f"tools.{number}"
        raise field_error(where, f"it has to be a function with a name, not {tool!r:.80}")
    return [{"type": "function", "function": without_nulls(tool["function"])} for tool in given]


def _options(body: OllamaRequest) -> dict[str, Any]:
    off = ("typical_p", "tfs_z")  # which Ollama writes as 0
    given = without_nulls(body.options or {})
    given = {name: one for name, one in given.items() if not (name in off and one == 0)}
    kept, wanted = held(given, TURN, "options."), OPTIONS | TURN
    own = {name: value for name, value in kept.items() if name in wanted}
    own |= {name: value for name, value in (body.model_extra or {}).items() if name in TURN}
    # Where Ollama has a number for "no limit" or "by chance", we have nothing.
    for name in ("num_predict", "seed", "repeat_last_n"):
        if isinstance(own.get(name), int | float) and own[name] < 0:
            del own[name]
    if own.get("repeat_last_n") == 0:
        own = {name: value for name, value in own.items() if not name.startswith("repeat_")}
    if body.logprobs:
        own |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    options, _ = options_of(own)
    if isinstance(body.format, dict):
        options["schema"] = body.format
    elif body.format == "json":
        options["schema"] = ANY_OBJECT
    elif body.format:
        raise field_error("format", f'{body.format!r:.80} is neither "json" nor a schema')
    GenerateOptions.of(**options)
    return options


NDJSON, NS = "application/x-ndjson", 1_000_000_000
"""The media type of a stream of lines, and the nanoseconds of a second."""


def line(body: Any) -> bytes:
    return msgspec.json.encode(body) + b"\n"


def stamp(seconds: float) -> str:
    """Return a Unix time as Ollama writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


class OllamaWriter(EventWriter):
    """Writes an answer as an object, or as a line for each piece. A call comes when whole."""

    media_type = NDJSON

    def __init__(
        self, asked: ServerRequest, name: str, *, is_chat: bool, left_out: Sequence[str] = ()
    ) -> None:
        """Write answers of the model with this `name`. `left_out`: what is ignored."""
        self._asked, self._name, self._is_chat = asked, name, is_chat
        self._left_out = left_out
        self._began = time.monotonic()

    def piece(
        self,
        text: str = "",
        thought: str = "",
        calls: Sequence[ToolCallEvent] = (),
        tokens: Sequence[TokenLogprob] = (),
    ) -> dict[str, Any]:
        """Return an object that is not the last one."""
        body: dict[str, Any] = {"model": self._name, "created_at": stamp(time.time())}
        if not self._is_chat:
            body |= {"response": text} | ({"thinking": thought} if thought else {})
        else:
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if thought:
                message["thinking"] = thought
            if calls:
                message["tool_calls"] = list(map(_call, calls))
            body["message"] = message
        if tokens:
            body["logprobs"] = [_logprob(token) for token in tokens]
        return body | {"done": False}

    def end(self, ended: AnswerEnd) -> dict[str, Any]:
        """Return the fields of the last object."""
        used = ended.usage
        timing = used.timing
        total = time.monotonic() - self._began
        parts = timing.prefill_s + timing.decode_s
        return {
            "done": True,
            "done_reason": "length" if ended.reason == "length" else "stop",
            "total_duration": int(max(total, parts) * NS),
            "load_duration": int(max(total - parts, 0) * NS),
            "prompt_eval_count": used.prompt_tokens,
            "prompt_eval_duration": int(timing.prefill_s * NS),
            "eval_count": used.completion_tokens,
            "eval_duration": int(timing.decode_s * NS),
            "mlxrunner": report(ended, self._left_out),
        }

    def whole(self, answers: Sequence[WholeAnswer]) -> dict[str, Any]:
        (answer,) = answers
        body = self.piece(answer.text, answer.thought, answer.calls, answer.tokens)
        return body | self.end(answer.end)

    def empty(self, reason: str) -> dict[str, Any]:
        """Return the object for a request that only loads a model, or unloads it."""
        return self.piece() | {"done": True, "done_reason": reason}

    def write(self, index: int, event: AnswerEvent) -> Iterator[bytes]:
        """Yield the lines of an event. A heartbeat is a line without text."""
        match event:
            case TextDelta(text, tokens):
                yield line(self.piece(text, tokens=tokens))
            case ThinkingDelta(text):
                yield line(self.piece(thought=text))
            case ToolCallEvent():
                yield line(self.piece(calls=[event]))
            case AnswerEnd():
                yield line(self.piece() | self.end(event))
            case _:
                yield line(self.piece())

    def error(self, refused: ApiError) -> bytes:
        return line({"error": refused.message})


def _call(call: ToolCallEvent) -> dict[str, Any]:
    given = json.loads(call.arguments or "{}")
    return {"id": call.id, "function": {"index": call.index, "name": call.name, "arguments": given}}


def _logprob(token: TokenLogprob) -> dict[str, Any]:
    others = [_shown(text, logprob) for text, _, logprob in token.top]
    return {**_shown(token.text, token.logprob), "top_logprobs": others}


def _shown(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": finite(logprob)}


FOR_EVER = 100 * 365 * 24 * 3600
"""Seconds until a model is unloaded that never is: Ollama's clients want a time."""


def listed(card: ModelCard) -> dict[str, Any]:
    """Return the entry of a model in the list of all."""
    return {
        "name": card.name,
        "model": card.name,
        "modified_at": stamp(card.modified),
        "size": card.bytes,
        "digest": card.digest,
        "details": _details(card),
    }


def running(card: ModelCard) -> dict[str, Any]:
    """Return the entry of a model in the list of those that are loaded."""
    expires = time.time() + FOR_EVER if card.expires is None else card.expires
    entry = listed(card)
    del entry["modified_at"]
    more = {"expires_at": stamp(expires), "size_vram": card.bytes, "context_length": card.context}
    return entry | more


def described(card: ModelCard) -> dict[str, Any]:
    """Return all that is known of a model."""
    has = {"completion": True, "tools": card.has_tools, "thinking": card.has_thinking}
    has["vision"] = card.sees
    family = card.architecture or "unknown"
    info: dict[str, Any] = {"general.architecture": family, "general.basename": card.name}
    if card.context:
        info[f"{family}.context_length"] = card.context
    return {
        "license": "",
        "modelfile": f"FROM {card.name}",
        "parameters": "",
        "template": card.template,
        "modified_at": stamp(card.modified),
        "details": _details(card),
        "model_info": info,
        "capabilities": [name for name, is_there in has.items() if is_there],
    }


def _details(card: ModelCard) -> dict[str, Any]:
    details: dict[str, Any] = {"parent_model": "", "format": "safetensors"}
    details["family"] = card.architecture
    details["families"] = [card.architecture] if card.architecture else []
    return details | {"parameter_size": "", "quantization_level": ""}


Pull = Callable[..., Path]
"""A function that downloads a model: `mlxrunner.models.resolve.pull`."""
PERIOD_S = 0.2
"""Seconds between two lines about one file."""


class PullStoppedError(Exception):
    """The client has left: nobody waits for the download."""


async def progress(name: str, pull: Pull = pull) -> AsyncGenerator[dict[str, Any], None]:
    """Download a model, and yield what Ollama's clients are told meanwhile.

    Closing this ends the download; what came of a file is kept. Raise ModelError.
    """
    yield {"status": "pulling manifest"}
    reached: dict[str, tuple[int, int]] = {}
    is_left = False

    def tell(file: str, done: int, whole: int) -> None:
        if is_left:
            raise PullStoppedError
        reached[file] = done, whole

    work = asyncio.ensure_future(asyncio.to_thread(pull, name, tell=tell))
    said: dict[str, tuple[int, int]] = {}
    try:
        while not work.done():
            await asyncio.wait({work}, timeout=PERIOD_S)
            new = [one for one in list(reached.items()) if said.get(one[0]) != one[1]]
            said |= new
            for file, (done, whole) in new:
                counts = {"total": whole, "completed": done}
                yield {"status": f"pulling {file}", "digest": file, **counts}
        work.result()
        yield {"status": "success"}
    finally:
        is_left = True
        await end(work)


async def lines(
    events: AsyncGenerator[dict[str, Any], None],
) -> AsyncGenerator[bytes, None]:
    """Yield the lines of a stream. An error is the last line, as the status has been sent."""
    try:
        async for event in events:
            yield line(event)
    except Exception as error:  # the client has to be told in any case
        yield line({"error": api_error_of(error).message})
    finally:
        await events.aclose()


class ModelRequest(RequestBody):
    """A body that names a model. Older clients say `name`."""

    model: str = ""
    name: str = ""

    @property
    def given(self) -> str:
        """The name. Raise ApiError if there is none."""
        if not (self.model or self.name):
            raise field_error("model", "it has to be the name of a model")
        return self.model or self.name


class PullRequest(ModelRequest):
    """The body of a request to download a model."""

    stream: bool = Field(default=True)


def router(answers: ModelManager, pull: Pull = pull) -> APIRouter:
    """Return the routes. `pull` downloads models."""
    routes = APIRouter(route_class=route_class("req_", any_type=True), tags=["ollama"])

    async def answer(body: OllamaChatRequest | OllamaGenerateRequest, request: Request) -> Response:
        asked = read(body, client_of(request), request.state.id)
        _check_thinking(answers, asked)
        is_chat = isinstance(body, OllamaChatRequest)
        writer = OllamaWriter(asked, body.model, is_chat=is_chat, left_out=left_out(body))
        if is_empty(body):
            seconds = seconds_of(body.keep_alive)
            await while_connected(request, answers.hold(asked.model, seconds))
            return JSONResponse(writer.empty("unload" if seconds == 0 else "load"))
        return await deliver(request, answers, [asked], writer, streams=body.stream)

    @routes.post("/api/chat")
    async def chat(body: OllamaChatRequest, request: Request) -> Response:
        """Answer a conversation. An empty one loads the model, or unloads it."""
        return await answer(body, request)

    @routes.post("/api/generate")
    async def generate(body: OllamaGenerateRequest, request: Request) -> Response:
        """Answer a prompt. An empty one loads the model, or unloads it."""
        return await answer(body, request)

    @routes.post("/api/pull")
    async def pull_from_hub(body: PullRequest, request: Request) -> Response:
        """Download a model of the hub. One that is here and not of the hub succeeds at once."""
        name = hub_id_of(body.given.removesuffix(":latest"))
        is_here = _is_only_here(answers, name)
        if not is_here and not HUB_ID.fullmatch(name):
            raise ApiError(400, str(not_a_hub_id(name)), param="model", code="model_not_found")
        events = progress(name, (lambda *_, **__: Path()) if is_here else pull)
        if body.stream:
            return await stream(request, lines(events), NDJSON)

        async def last() -> dict[str, object]:
            async with aclosing(events):
                return [event async for event in events][-1]

        return JSONResponse(await while_connected(request, last()))

    _add_catalog(routes, answers)
    return routes


def _add_catalog(routes: APIRouter, answers: ModelManager) -> None:
    """Add the routes that tell of models and of the server."""

    @routes.head("/api/tags", include_in_schema=False)
    @routes.get("/api/tags")
    async def list_models() -> Response:
        """List the models that a request may name."""
        return JSONResponse({"models": [listed(card) for card in answers.models()]})

    @routes.get("/api/ps")
    async def list_running() -> Response:
        """List the models that are loaded."""
        cards = [card for card in answers.models() if card.is_loaded]
        return JSONResponse({"models": [running(card) for card in cards]})

    @routes.post("/api/show")
    async def show(body: ModelRequest) -> Response:
        """Describe a model."""
        return JSONResponse(described(answers.card(body.given)))

    @routes.head("/api/version", include_in_schema=False)
    @routes.get("/api/version")
    async def say_version() -> Response:
        """Say which version this is. Clients compare it with those of Ollama."""
        return JSONResponse({"version": OLLAMA_VERSION, "mlxrunner": program_version()})

    @routes.head("/", include_in_schema=False)
    async def probe() -> Response:
        """Say that the server is there, as Ollama's clients ask."""
        return PlainTextResponse("Ollama is running")


OLLAMA_VERSION = "0.14.0"
"""The version of Ollama whose API this is: its clients refuse servers that are too old.

Codex wants 0.13.4, for the Responses API; from 0.14.0 on Ollama also speaks Anthropic's.
"""


def program_version() -> str:
    try:
        return version("mlxrunner")
    except PackageNotFoundError:
        return "unknown"


def _is_only_here(answers: ModelManager, name: str) -> bool:
    """Return True for a model with files on this machine that are not in the hub's cache.

    A folder or an alias may have a name like one of the hub.
    """
    with suppress(ApiError):
        is_here = answers.card(name).bytes > 0
        named_so = HUB_ID.fullmatch(name) and not Path(name).is_dir()
        return is_here and not (named_so and folder_if_here(name) is not None)
    return False


def _check_thinking(answers: ModelManager, asked: ServerRequest) -> None:
    """Raise ApiError, as Ollama does, if a model is to think that can't."""
    if asked.thinking and not answers.card(asked.model).has_thinking:
        raise ApiError(
            400,
            f'"{asked.model}" does not support thinking: leave out think, or say think: false',
            param="think",
        )
