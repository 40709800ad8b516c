"""OpenAI's chat completions: the body of a request, the answer, the stream; the list of models."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import accumulate
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BeforeValidator, Field

from mlxrunner.batch.openai_format import (
    EFFORTS,
    READ,
    TokenLogprob,
    chat_logprobs,
    completion_usage,
    form_of,
    text_logprobs,
    translate,
)
from mlxrunner.config.names import SAME
from mlxrunner.config.option import as_whole, names, shown, without_nulls
from mlxrunner.config.request_fields import held, is_neutral
from mlxrunner.errors import OptionError
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
    ToolChoice,
    error_response,
    field_error,
    openai_error,
)
from mlxrunner.server.manager import ModelManager
from mlxrunner.server.models import ModelCard
from mlxrunner.server.protocol import (
    EventWriter,
    HistoryText,
    RequestBody,
    SentContent,
    WholeAnswer,
    client_of,
    deliver,
    plain,
    present,
    report,
    route_class,
    shown_messages,
    text_of,
    unread,
)
from mlxrunner.templates.messages import Parts, item_text, parts_of

OPTIONS = frozenset(names(GenerateOptions))
"""The names of our options, which a body may have, too."""
FORMS = ("schema", "choices")
"""Our options that vLLM's `structured_outputs` stands for."""
MOST_ANSWERS = 16
"""The most answers that one request may ask for."""

Tools = Sequence[Mapping[str, Any]]
"""Functions as `ServerRequest` has them."""


class StreamOptions(RequestBody):
    """Wishes about a stream."""

    include_usage: bool = False


class OpenAIRequest(RequestBody):
    """The fields that all bodies have."""

    model: str = ""
    stream: bool = False
    user: str | None = None
    prompt_cache_key: str | None = None


class SampledRequest(OpenAIRequest):
    """The fields of bodies that may ask for several answers."""

    n: int = Field(default=1, ge=1, le=MOST_ANSWERS)
    stream_options: StreamOptions | None = None

    @property
    def has_usage(self) -> bool:
        """True if a stream is to end with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


def options_of(
    fields: Mapping[str, Any], *, counts_logprobs: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options and the template's variables that the fields of a body ask for.

    Fields that are not known are ignored. Raise OptionError for one that is not supported, and for
    a wrong value. A `max_tokens` of -1 is no limit, as for llama.cpp and LM Studio.
    """
    given = held(without_nulls(fields), READ)
    given = {
        name: value
        for name, value in given.items()
        if not (value == -1 and SAME.get(name, name) == "max_tokens")
    }
    if given.get("template") == "":
        del given["template"]  # Ollama's text of that name
    if given.get("top_k") == -1:
        del given["top_k"]  # as vLLM says that all tokens count
    if type(seed := as_whole(given.get("seed"))) is int and seed < 0:
        given["seed"] = seed % 2**64
    if "max_completion_tokens" in given:
        given.pop("max_tokens", None)  # the older name of the same
    translated = translate(given, {}, counts_logprobs=counts_logprobs)
    options = {name: value for name, value in translated.items() if name in OPTIONS - {"tools"}}
    try:
        options |= form_of(options, translated.get("response_format"), {})
        variables = options.pop("template", None) or {}
        if isinstance(options.get("stop"), str):
            options["stop"] = [options["stop"]]
        GenerateOptions.of(**options, template=variables)
    except OptionError as error:
        raise OptionError(_as_sent(str(error), given)) from error
    return options, variables


def _as_sent(message: str, given: Mapping[str, Any]) -> str:
    """Return a message about one of our options, with the name that the client gave to it."""
    sent = {SAME.get(name, name): name for name in given}
    for name, meant in (("top_logprobs", ("logprobs",)), ("structured_outputs", FORMS)):
        sent |= dict.fromkeys(meant, name) if name in given else {}
    ours = re.split(": | has to be ", message, maxsplit=1)[0]
    return sent.get(ours, ours) + message.removeprefix(ours)


def checked_effort(effort: str | None, param: str) -> str | None:
    """Return how much to think. Raise ApiError if it is not known; `param` names the field."""
    if effort is None or effort in EFFORTS:
        return effort
    known = ", ".join(EFFORTS)
    raise field_error(param, f"{effort!r:.80} is not known, only {known}")


def with_seed(options: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return the options of answer number `index` of several: each has a seed of its own."""
    if options.get("seed") is None or index == 0:
        return dict(options)
    return {**options, "seed": (options["seed"] + index) % 2**64}


def choice_of(given: Any, tools: Tools) -> tuple[ToolChoice, Tools]:
    """Return the use of tools that `tool_choice` asks for, and the tools that it allows.

    Raise ApiError.
    """
    match given:
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(allowed)}}:
            pass
        case {"type": "allowed_tools", "mode": mode, "tools": list(allowed)}:
            pass
        case _:
            return _choice_of(given, tools), tools
    if mode not in ("auto", "required"):
        raise field_error("tool_choice", f"mode {shown(mode)} is neither auto nor required")
    wanted = [name for tool in allowed for name in _named(tool)]
    unknown = set(wanted) - {tool["function"]["name"] for tool in tools}
    if unknown:
        raise field_error("tool_choice", f"{min(unknown)!r:.80} is not among the tools")
    few = [tool for tool in tools if tool["function"]["name"] in wanted]
    return _choice_of(mode, few), few


def _named(tool: Any) -> Iterator[str]:
    """Yield the name of an allowed tool, if it is a function: the model is told of no others."""
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            yield name
        case {"type": "function", "name": str(name)}:
            yield name


def _choice_of(given: Any, tools: Tools) -> ToolChoice:
    match given:
        case None | "auto":
            return ToolChoice()
        case "none":
            return ToolChoice("none")
        case "required":
            choice = ToolChoice("required")
        case _ if named := [*_named(given)]:
            choice = ToolChoice("named", named[0])
        case _:
            raise field_error(
                "tool_choice",
                f"{shown(given)} is not supported; it has to be none, auto or "
                "required, or an object of the type function or allowed_tools",
            )
    known = [tool["function"]["name"] for tool in tools]
    if not known or choice.name not in (None, *known):
        why = "there are no tools" if not known else f"{choice.name!r:.80} is not among the tools"
        raise field_error("tool_choice", why)
    return choice


class ChatFunction(RequestBody):
    """A function: what it is called, and with what."""

    name: HistoryText = None
    arguments: Any = None
    """The JSON text of an object. Another value, of an answer that was cut off, is taken, too."""


class ChatToolCall(RequestBody):
    """A call in an earlier answer. One of a type that is not known becomes a text."""

    id: HistoryText = None
    type: HistoryText = None
    function: ChatFunction | None = None


class ChatMessage(RequestBody):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function", "thinking"]
    """"function" is the older name of "tool"; the content of "thinking" is that of the answer
    behind it.
    """
    content: SentContent = None
    tool_calls: Annotated[list[ChatToolCall] | None, BeforeValidator(present)] = None
    tool_call_id: HistoryText = None
    function_call: ChatFunction | None = None
    """The older form of `tool_calls`."""
    name: HistoryText = None
    refusal: HistoryText = None
    reasoning_content: HistoryText = None
    reasoning: HistoryText = None


class ChatTool(RequestBody):
    """A tool, of any type."""

    type: str = "function"
    function: dict[str, Any] | None = None


class ChatCompletionRequest(SampledRequest):
    """The body of a request for a chat completion."""

    messages: Annotated[list[ChatMessage], BeforeValidator(present)] = Field(min_length=1)
    tools: list[ChatTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None


def read(body: ChatCompletionRequest, client: Client, request_id: str) -> list[ServerRequest]:
    """Return what a body asks for, one request for each answer. Raise ApiError."""
    extra = dict(body.model_extra or {})
    thinking, level = _thinking(extra)
    options, variables = options_of(extra)
    given = [
        _tool(number, tool)
        for number, tool in enumerate(body.tools or ())
        if tool.type == "function"
    ]
    choice, tools = choice_of(body.tool_choice, given)
    effort = checked_effort(body.reasoning_effort or level, "reasoning_effort")
    messages, replaced = shown_messages(_messages(body.messages))
    return [
        ServerRequest(
            protocol="chat",
            model=body.model,
            messages=messages,
            replaced=replaced,
            tools=tools,
            tool_choice=choice,
            parallel_calls=body.parallel_tool_calls is not False,
            thinking=False if effort == "none" else thinking,
            effort=effort,
            options=with_seed(options, number),
            variables=variables,
            client=client,
            id=request_id if number == 0 else f"{request_id}-{number}",
        )
        for number in range(body.n)
    ]


def _thinking(extra: dict[str, Any]) -> tuple[bool | None, str | None]:
    """Take the fields for thinking of other servers, and return whether and how much to think."""
    said: bool | None = None
    level: str | None = None
    for name in ("think", "enable_thinking", "thinking", "reasoning"):
        match extra.pop(name, None):
            case None | {"type": "adaptive" | "auto"}:
                continue
            case bool(value) if name != "reasoning":
                said = value
            case {"type": "enabled" | "disabled" as kind} if name == "thinking":
                said = kind == "enabled"
            case {"effort": str(given)} | str(given) if name in ("reasoning", "think") and given:
                said, level = True, given
            case {"enabled": bool(value)} if name == "reasoning":
                said = value
            case value if not is_neutral(value):
                raise field_error(name, f"{shown(value)} is not known; send reasoning_effort")
    return said, level


def left_out(body: ChatCompletionRequest) -> list[str]:
    """Return the tools that the model is not told of, and the fields that are ignored."""
    tools = [f"tool {tool.type}" for tool in body.tools or () if tool.type != "function"]
    return [*tools, *unread(body.model_extra or {})]


def _tool(number: int, tool: ChatTool) -> dict[str, Any]:
    if tool.function is None or not isinstance(tool.function.get("name"), str):
        where = f"tools.{number}.function"
        raise field_error(where, "it has to be an object with a name")
    return {"type": "function", "function": without_nulls(tool.function)}


def _messages(given: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages as `ServerRequest` has them, with `Parts` as contents."""
    found: list[dict[str, Any]] = []
    thought, waiting = "", list[str]()
    for number, message in enumerate(given):
        if message.role == "thinking":
            thought += text_of(message.content)
            continue
        one = _message(number, message, thought)
        thought = ""
        if message.role == "assistant":
            waiting = [call["id"] for call in one.get("tool_calls", ()) if "id" in call]
        elif one["role"] == "tool":
            one["tool_call_id"] = _answered(number, message, waiting, len(given))
        found.append(one)
    return found


def _answered(number: int, message: ChatMessage, waiting: list[str], count: int) -> str:
    """Return the id of the call that a result answers; without one, that of the next call.

    Raise ApiError if there is none, and the message is the last.
    """
    given = message.tool_call_id
    if given is None and not waiting and number == count - 1:
        name = f"messages.{number}.tool_call_id"
        raise field_error(name, "it has to be the id of a tool call")
    found = given if given is not None else next(iter(waiting), f"call_{number}")
    if found in waiting:
        waiting.remove(found)
    return found


def _message(number: int, message: ChatMessage, thought: str) -> dict[str, Any]:
    """Return a message with `Parts` as its content. `thought`: the thinking before it."""
    where = f"messages.{number}"
    content = parts_of(f"{where}.content", plain(message.content))
    role = "tool" if message.role == "function" else message.role
    found: dict[str, Any] = {"role": role, "content": content}
    calls = list(message.tool_calls or ())
    if message.function_call is not None:
        calls.append(ChatToolCall(id=f"call_{number}", function=message.function_call))
    if role == "assistant":
        if message.refusal and not any(content):
            content[:] = [message.refusal]
        if thought := thought + (message.reasoning_content or message.reasoning or ""):
            found["reasoning_content"] = thought
        own = [made for call in calls if (made := _call(call, where, content)) is not None]
        if own:
            found["tool_calls"] = own
    elif calls:
        content += [item_text(where, call.model_dump(exclude_none=True)) for call in calls]
    if message.name:
        found["name"] = message.name
    return found


def _call(call: ChatToolCall, where: str, content: Parts) -> dict[str, Any] | None:
    """Return a call; None if its text, in `content`, takes its place."""
    own = {"id": call.id} if call.id is not None else {}
    custom = (call.model_extra or {}).get("custom")
    if call.function is not None and call.function.name:
        function = {"name": call.function.name, "arguments": call.function.arguments}
    elif isinstance(custom, dict) and isinstance(custom.get("name"), str):
        function = {"name": custom["name"], "arguments": {"input": custom.get("input")}}
    else:
        content.append(item_text(where, call.model_dump(exclude_none=True)))
        return None
    return {**own, "type": "function", "function": function}


FINISH_REASONS = {
    "stop": "stop",
    "stop_sequence": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
}
"""Their word for each reason of an end."""
DONE = b"data: [DONE]\n\n"
"""The last frame of a stream."""


def frame(body: Any) -> bytes:
    """Return an object as a frame of a stream."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def head(asked: ServerRequest, kind: str, created: int) -> dict[str, Any]:
    """Return the fields with which an object of this kind begins."""
    return {
        "id": asked.id,
        "object": kind,
        "created": created,
        "model": asked.model,
        "system_fingerprint": None,
    }


def usage_body(ends: Sequence[AnswerEnd]) -> dict[str, Any]:
    """Return the usage of several answers to one prompt, which is counted once."""
    first = ends[0].usage
    answered = sum(end.usage.completion_tokens for end in ends)
    thought = sum(end.thinking_tokens for end in ends)
    used = completion_usage(first.prompt_tokens, first.cached_tokens, answered)
    return used | {"completion_tokens_details": {"reasoning_tokens": thought}}


def _answer_message(answer: WholeAnswer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.calls:
        message["content"] = answer.text or None
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in answer.calls
        ]
    if answer.thought:
        message["reasoning_content"] = answer.thought
    return message


def _logprobs(tokens: Any) -> dict[str, Any]:
    return {"content": chat_logprobs(tokens), "refusal": None}


class ChunkWriter(EventWriter):
    """Writes the events of answers as chunks of a kind: what chats and completions share."""

    def __init__(
        self, kind: str, several: Sequence[ServerRequest], *, usage: bool, left_out: Sequence[str]
    ) -> None:
        """Begin a stream of `several` answers. With `usage` the last chunk has it."""
        self._kind, self._several, self._left_out = kind, several, left_out
        self._has_usage, self._created = usage, int(time.time())
        self._ends: dict[int, AnswerEnd] = {}

    def usage(self, ends: Sequence[AnswerEnd]) -> dict[str, Any]:
        """Return the usage of all answers."""
        return usage_body(ends)

    def _used(self, ends: Sequence[AnswerEnd]) -> dict[str, Any]:
        return {"usage": self.usage(ends), "mlxrunner": report(ends[0], self._left_out)}

    def finish(self) -> Iterator[bytes]:
        """Yield the usage, if it is wanted, and the end."""
        if self._has_usage:
            ends = [self._ends[number] for number in range(len(self._several))]
            yield self.frame([], **self._used(ends))
        yield DONE

    def error(self, refused: ApiError) -> bytes:
        """Return the frame of an error, which is the last one."""
        return frame({"error": openai_error(refused)})

    def frame(self, choices: Sequence[Mapping[str, Any]], **more: Any) -> bytes:
        """Return a chunk with `choices`."""
        first = head(self._several[0], self._kind, self._created)
        return frame(first | {"choices": choices} | more)

    def end(self, index: int, ended: AnswerEnd, choice: Mapping[str, Any]) -> bytes:
        """Return the chunk with the reason of the end. The last one says what was reused."""
        self._ends[index] = ended
        if len(self._ends) < len(self._several) or self._has_usage:
            return self.frame([choice])
        return self.frame([choice], mlxrunner=report(self._ends[0], self._left_out))


class ChatWriter(ChunkWriter):
    """Writes answers as chat completions, or as the stream of their chunks."""

    def whole(self, answers: Sequence[WholeAnswer]) -> dict[str, Any]:
        """Return the object of whole answers."""
        first, wanted = self._several[0], self._several[0].options.get("logprobs") is not None
        choices = [
            {
                "index": number,
                "message": _answer_message(answer),
                "logprobs": _logprobs(answer.tokens) if wanted else None,
                "finish_reason": FINISH_REASONS[answer.end.reason],
            }
            for number, answer in enumerate(answers)
        ]
        found = head(first, "chat.completion", self._created) | {"choices": choices}
        return found | self._used([answer.end for answer in answers])

    def begin(self) -> Iterator[bytes]:
        """Yield the chunks that say who speaks."""
        for number in range(len(self._several)):
            yield self._chunk(number, {"role": "assistant", "content": ""})

    def write(self, index: int, event: AnswerEvent) -> Iterator[bytes]:
        """Yield the chunks of an event. A heartbeat is a comment and a chunk without content."""
        match event:
            case TextDelta(text, tokens):
                if text or tokens:
                    yield self._chunk(index, {"content": text}, tokens)
            case ThinkingDelta(text):
                if text:
                    yield self._chunk(index, {"reasoning_content": text})
            case ToolCallEvent(number, call_id, name, arguments):
                function = {"name": name, "arguments": ""}
                call = {"index": number, "id": call_id, "type": "function", "function": function}
                yield self._chunk(index, {"tool_calls": [call]})
                piece = {"index": number, "function": {"arguments": arguments}}
                yield self._chunk(index, {"tool_calls": [piece]})
            case AnswerEnd():
                reason = FINISH_REASONS[event.reason]
                yield self.end(index, event, self._choice(index, {}, None, reason))
            case _:
                yield b": heartbeat\n\n" + self._chunk(index, {})

    def _chunk(self, index: int, delta: dict[str, Any], tokens: Any = ()) -> bytes:
        logprobs = _logprobs(tokens) if tokens else None
        return self.frame([self._choice(index, delta, logprobs, None)])

    def _choice(self, index: int, delta: Any, logprobs: Any, reason: str | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def router(answers: ModelManager) -> APIRouter:
    """Return the routes of chat completions."""
    routes = APIRouter(route_class=route_class("chatcmpl-"), tags=["openai"])

    @routes.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        """Answer a conversation, as a completion or as a stream of chunks."""
        body.model = body.model or answers.card("").name
        client = client_of(request, body.prompt_cache_key or body.user)
        several = read(body, client, request.state.id)
        kind = "chat.completion.chunk"
        writer = ChatWriter(kind, several, usage=body.has_usage, left_out=left_out(body))
        return await deliver(request, answers, several, writer, streams=body.stream)

    return routes


def is_anthropic(request: Request) -> bool:
    """Return True if the client speaks Anthropic's API: it names the version of that."""
    return "anthropic-version" in request.headers


def models_router(answers: ModelManager) -> APIRouter:
    """Return the routes."""
    routes = APIRouter(route_class=route_class("req_"), tags=["models"])

    @routes.get("/v1/models")
    async def list_models(request: Request) -> Response:
        """List the models that a request may name."""
        cards = answers.models()
        if is_anthropic(request):
            ends = {name: cards[at].name if cards else None for name, at in _ENDS.items()}
            data = [_anthropic(card) for card in cards]
            return JSONResponse({"data": data, "has_more": False, **ends})
        return JSONResponse({"object": "list", "data": [_openai(card) for card in cards]})

    @routes.get("/v1/models/{name:path}")
    async def retrieve_model(name: str, request: Request) -> Response:
        """Describe a model."""
        try:
            card = answers.card(name)
        except ApiError as refused:
            path = "/v1/messages" if is_anthropic(request) else request.url.path
            return error_response(path, refused, request.state.id)
        return JSONResponse(_anthropic(card) if is_anthropic(request) else _openai(card))

    return routes


_ENDS = {"first_id": 0, "last_id": -1}


def _openai(card: ModelCard) -> dict[str, Any]:
    described = {"id": card.name, "object": "model", "created": int(card.modified)}
    described |= {"owned_by": "mlxrunner", "context_length": card.context or None}
    return {**described, "input_modalities": ["text", "image"] if card.sees else ["text"]}


def _anthropic(card: ModelCard) -> dict[str, Any]:
    created = datetime.fromtimestamp(card.modified, UTC).isoformat()
    named = {"id": card.name, "type": "model", "display_name": card.name, "created_at": created}
    return {**named, "max_input_tokens": card.context or None}


RAW = READ - {"tools", "tool_choice", "parallel_tool_calls", "documents"}
"""The fields that may come with raw text. A chat template would write the others."""


class CompletionRequest(SampledRequest):
    """The body of a request for completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool = False
    best_of: int | None = None
    logprobs: int | None = None


def read_completion(
    body: CompletionRequest, client: Client, request_id: str
) -> list[ServerRequest]:
    """Return what a body asks for: `n` requests for each prompt. Raise ApiError."""
    extra = dict(body.model_extra or {})
    if extra.get("add_special_tokens") is True:
        del extra["add_special_tokens"]  # as they are where the model wants them
    extra = held(extra, RAW)
    if body.best_of not in (None, body.n):
        raise field_error(
            "best_of", f"{body.best_of} is not supported, only the same number as n: {body.n}"
        )
    prompts = _raw_prompts(body.prompt)
    if len(prompts) * body.n > MOST_ANSWERS:
        raise field_error(
            "prompt",
            f"{len(prompts)} prompts with n={body.n} are more than {MOST_ANSWERS} answers: "
            "send them in several requests, or use mlxrunner batch",
        )
    if body.echo:
        _check_echo(body, prompts)
    options, _ = options_of({**extra, "logprobs": body.logprobs}, counts_logprobs=True)
    return [
        ServerRequest(
            protocol="completions",
            model=body.model,
            prompt=prompt,
            options=with_seed(options, number),
            client=client,
            id=request_id if number == place == 0 else f"{request_id}-{place * body.n + number}",
        )
        for place, prompt in enumerate(prompts)
        for number in range(body.n)
    ]


def _raw_prompts(given: str | Sequence[Any]) -> list[str | list[int]]:
    """Return the prompts: one, or several. Raise ApiError for one that is empty."""
    one = isinstance(given, str) or (given and isinstance(given[0], int))
    prompts: list[Any] = [given] if one else list(given)
    if not prompts or not all(prompts):
        raise field_error("prompt", "it is empty")
    return prompts


def _check_echo(body: CompletionRequest, prompts: Sequence[str | list[int]]) -> None:
    if body.logprobs is not None or not all(isinstance(prompt, str) for prompt in prompts):
        raise field_error("echo", "it is not supported with logprobs, or with a prompt of tokens")


class CompletionWriter(ChunkWriter):
    """Writes answers as completions, or as the stream of their chunks."""

    def __init__(self, body: CompletionRequest, several: Sequence[ServerRequest]) -> None:
        left_out = unread(body.model_extra or {})
        super().__init__("text_completion", several, usage=body.has_usage, left_out=left_out)
        self._body = body
        self._offsets = [len(self._echoed(number)) for number in range(len(several))]

    def _echoed(self, number: int) -> str:
        """Return the prompt that comes before the answer; empty if it is not wanted."""
        return str(self._several[number].prompt) if self._body.echo else ""

    def whole(self, answers: Sequence[WholeAnswer]) -> dict[str, Any]:
        """Return the object of whole answers. Nothing in raw text is thinking."""
        choices = []
        for number, answer in enumerate(answers):
            texts = (one.text for one in answer.parts if not isinstance(one, ToolCallEvent))
            text, reason = self._echoed(number) + "".join(texts), FINISH_REASONS[answer.end.reason]
            choices.append(self._choice(number, text, answer.tokens, reason))
        found = head(self._several[0], "text_completion", self._created) | {"choices": choices}
        return found | self._used([answer.end for answer in answers])

    def begin(self) -> Iterator[bytes]:
        """Yield the prompts, if they are wanted."""
        for number in range(len(self._several)):
            if self._echoed(number):
                yield self._chunk(number, self._echoed(number))

    def write(self, index: int, event: AnswerEvent) -> Iterator[bytes]:
        """Yield the chunks of an event. A heartbeat is a comment and a chunk without text."""
        match event:
            case TextDelta(text, tokens):
                if text or tokens:
                    yield self._chunk(index, text, tokens)
            case ThinkingDelta(text):
                yield self._chunk(index, text)
            case AnswerEnd():
                choice = self._choice(index, "", (), FINISH_REASONS[event.reason])
                yield self.end(index, event, choice)
            case _:
                yield b": heartbeat\n\n" + self._chunk(index, "")

    def usage(self, ends: Sequence[AnswerEnd]) -> dict[str, Any]:
        """Return the usage of all answers. Each prompt is counted once."""
        each = ends[:: self._body.n]
        return completion_usage(
            sum(end.usage.prompt_tokens for end in each),
            sum(end.usage.cached_tokens for end in each),
            sum(end.usage.completion_tokens for end in ends),
        )

    def _chunk(self, index: int, text: str, tokens: Sequence[TokenLogprob] = ()) -> bytes:
        return self.frame([self._choice(index, text, tokens, None)])

    def _choice(
        self, index: int, text: str, tokens: Sequence[TokenLogprob], reason: str | None
    ) -> dict[str, Any]:
        logprobs = text_logprobs(tokens) if tokens else None
        if logprobs is not None:
            ends = [*accumulate((len(one.text) for one in tokens), initial=self._offsets[index])]
            logprobs["text_offset"], self._offsets[index] = ends[:-1], ends[-1]
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def completions_router(answers: ModelManager) -> APIRouter:
    """Return the routes of completions."""
    routes = APIRouter(route_class=route_class("cmpl-"), tags=["openai"])

    @routes.post("/v1/completions")
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue raw text, as a completion or as a stream of chunks."""
        body.model = body.model or answers.card("").name
        client = client_of(request, body.prompt_cache_key or body.user)
        several = read_completion(body, client, request.state.id)
        writer = CompletionWriter(body, several)
        return await deliver(request, answers, several, writer, streams=body.stream)

    return routes
