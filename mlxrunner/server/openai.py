"""OpenAI's chat completions: the body of a request, the answer, the stream; the list of models."""

from __future__ import annotations

import re
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import accumulate
from typing import Annotated, Any

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
    TalkMessage,
    WholeAnswer,
    client_of,
    deliver,
    plain,
    present,
    report,
    route_class,
    shown_messages,
    unread,
    with_thoughts,
)
from mlxrunner.server.tools.formats import Tools
from mlxrunner.templates.messages import Parts, item_text, parts_of

OPTIONS = frozenset(names(GenerateOptions))
"""The names of our options, which a body may have, too."""
FORMS = ("schema", "choices")
"""Our options that vLLM's `structured_outputs` stands for."""
MOST_ANSWERS = 16
"""The most answers that one request may ask for."""


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
    a wrong value. A `max_tokens` of -1 is not a limit, as for llama.cpp and LM Studio, and so is a
    `top_k` of -1, as for vLLM.
    """
    given = {
        name: value
        for name, value in held(without_nulls(fields), READ).items()
        if not (value == -1 and SAME.get(name, name) in ("max_tokens", "top_k"))
        and (name, value) != ("template", "")  # Ollama's text of that name
    }
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


class ChatMessage(TalkMessage):
    """A message of the conversation."""

    tool_calls: Annotated[list[ChatToolCall] | None, BeforeValidator(present)] = None
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
    found, waiting = list[dict[str, Any]](), list[str]()
    for number, message, thought in with_thoughts(given):
        one = _message(number, message, thought)
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


def frame(body: Any) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _call_body(call: ToolCallEvent, arguments: str) -> dict[str, Any]:
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _answer_message(answer: WholeAnswer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.calls:
        message["content"] = answer.text or None
        message["tool_calls"] = [_call_body(call, call.arguments) for call in answer.calls]
    if answer.thought:
        message["reasoning_content"] = answer.thought
    return message


class ChunkWriter(EventWriter):
    """Writes the events of answers as chunks: what chats and completions share."""

    kinds: tuple[str, str]
    """The types of the object of whole answers, and of a chunk."""
    heartbeat: Mapping[str, Any]
    """The fields of a choice in which nothing is said."""
    lists_nothing = False
    """True if the log-probabilities of an answer without tokens are an empty list."""

    def __init__(
        self, body: SampledRequest, several: Sequence[ServerRequest], left_out: Sequence[str]
    ) -> None:
        """Write `several` answers to the request `body`. With a usage the last chunk has it."""
        self._body, self._several, self._left_out = body, several, left_out
        self._created = int(time.time())
        self._ends: dict[int, AnswerEnd] = {}

    @abstractmethod
    def logprobs(self, index: int, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the log-probabilities of the next tokens of an answer."""

    def usage(self, ends: Sequence[AnswerEnd]) -> dict[str, Any]:
        """Return the usage of several answers to one prompt, which is counted once."""
        first = ends[0].usage
        answered = sum(end.usage.completion_tokens for end in ends)
        thought = sum(end.thinking_tokens for end in ends)
        used = completion_usage(first.prompt_tokens, first.cached_tokens, answered)
        return used | {"completion_tokens_details": {"reasoning_tokens": thought}}

    def _used(self, ends: Sequence[AnswerEnd]) -> dict[str, Any]:
        return {"usage": self.usage(ends), "mlxrunner": report(ends[0], self._left_out)}

    def whole(self, answers: Sequence[WholeAnswer]) -> dict[str, Any]:
        wanted = self.lists_nothing and self._several[0].options.get("logprobs") is not None
        choices = [
            self._choice(number, self.said(number, one), one.tokens, one.end, wanted=wanted)
            for number, one in enumerate(answers)
        ]
        found = self._head(self.kinds[0]) | {"choices": choices}
        return found | self._used([answer.end for answer in answers])

    @abstractmethod
    def said(self, index: int, answer: WholeAnswer) -> dict[str, Any]:
        """Return the fields of a choice with a whole answer."""

    def finish(self) -> Iterator[bytes]:
        """Yield the usage, if it is wanted, and the end."""
        if self._body.has_usage:
            ends = [self._ends[number] for number in range(len(self._several))]
            yield self._frame([], **self._used(ends))
        yield b"data: [DONE]\n\n"

    def error(self, refused: ApiError) -> bytes:
        return frame({"error": openai_error(refused)})

    def _head(self, kind: str) -> dict[str, Any]:
        first = self._several[0]
        found = {"id": first.id, "object": kind, "created": self._created, "model": first.model}
        return found | {"system_fingerprint": None}

    def _frame(self, choices: Sequence[Mapping[str, Any]], **more: Any) -> bytes:
        return frame(self._head(self.kinds[1]) | {"choices": choices} | more)

    def chunk(
        self, index: int, said: Mapping[str, Any], tokens: Sequence[TokenLogprob] = ()
    ) -> bytes:
        """Return a chunk in which the choice `index` has the fields `said`."""
        return self._frame([self._choice(index, said, tokens)])

    def _choice(
        self,
        index: int,
        said: Mapping[str, Any],
        tokens: Sequence[TokenLogprob] = (),
        ended: AnswerEnd | None = None,
        *,
        wanted: bool = False,
    ) -> dict[str, Any]:
        logprobs = self.logprobs(index, tokens) if tokens or wanted else None
        reason = ended and ("stop" if ended.reason == "stop_sequence" else ended.reason)
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}

    def write(self, index: int, event: AnswerEvent) -> Iterator[bytes]:
        """Yield the last chunk of an answer, which says what was reused; or that of a heartbeat.

        A heartbeat is a comment and a chunk without content.
        """
        if not isinstance(event, AnswerEnd):
            yield b": heartbeat\n\n" + self.chunk(index, self.heartbeat)
            return
        self._ends[index] = event
        is_last = len(self._ends) == len(self._several) and not self._body.has_usage
        more = {"mlxrunner": report(self._ends[0], self._left_out)} if is_last else {}
        yield self._frame([self._choice(index, self.heartbeat, (), event)], **more)


class ChatWriter(ChunkWriter):
    """Writes answers as chat completions, or as the stream of their chunks."""

    kinds = ("chat.completion", "chat.completion.chunk")
    heartbeat: Mapping[str, Any] = {"delta": {}}
    lists_nothing = True

    def said(self, index: int, answer: WholeAnswer) -> dict[str, Any]:
        return {"message": _answer_message(answer)}

    def logprobs(self, index: int, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {"content": chat_logprobs(tokens), "refusal": None}

    def begin(self) -> Iterator[bytes]:
        """Yield the chunks that say who speaks."""
        for number in range(len(self._several)):
            yield self.chunk(number, {"delta": {"role": "assistant", "content": ""}})

    def write(self, index: int, event: AnswerEvent) -> Iterator[bytes]:
        match event:
            case TextDelta(text, tokens):
                yield self.chunk(index, {"delta": {"content": text}}, tokens)
            case ThinkingDelta(text):
                yield self.chunk(index, {"delta": {"reasoning_content": text}})
            case ToolCallEvent(number):
                call = {"index": number, **_call_body(event, "")}
                yield self.chunk(index, {"delta": {"tool_calls": [call]}})
                piece = {"index": number, "function": {"arguments": event.arguments}}
                yield self.chunk(index, {"delta": {"tool_calls": [piece]}})
            case _:
                yield from super().write(index, event)


def router(answers: ModelManager) -> APIRouter:
    routes = APIRouter(route_class=route_class("chatcmpl-"), tags=["openai"])

    @routes.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        """Answer a conversation, as a completion or as a stream of chunks."""
        body.model = body.model or answers.card("").name
        client = client_of(request, body.prompt_cache_key or body.user)
        several = read(body, client, request.state.id)
        writer = ChatWriter(body, several, left_out(body))
        return await deliver(request, answers, several, writer, streams=body.stream)

    return routes


def is_anthropic(request: Request) -> bool:
    """Return True if the client speaks Anthropic's API: it names the version of that."""
    return "anthropic-version" in request.headers


def models_router(answers: ModelManager) -> APIRouter:
    routes = APIRouter(route_class=route_class("req_"), tags=["models"])

    @routes.get("/v1/models")
    async def list_models(request: Request) -> Response:
        """List the models that a request may name."""
        cards = answers.models()
        if not is_anthropic(request):
            return JSONResponse({"object": "list", "data": [_openai(card) for card in cards]})
        ends = {
            name: cards[at].name if cards else None
            for name, at in (("first_id", 0), ("last_id", -1))
        }
        data = [_anthropic(card) for card in cards]
        return JSONResponse({"data": data, "has_more": False, **ends})

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
    is_one = isinstance(body.prompt, str) or (body.prompt and isinstance(body.prompt[0], int))
    prompts: list[Any] = [body.prompt] if is_one else list(body.prompt)
    if not prompts or not all(prompts):
        raise field_error("prompt", "it is empty")
    if len(prompts) * body.n > MOST_ANSWERS:
        raise field_error(
            "prompt",
            f"{len(prompts)} prompts with n={body.n} are more than {MOST_ANSWERS} answers: "
            "send them in several requests, or use mlxrunner batch",
        )
    if body.echo and (body.logprobs is not None or not isinstance(prompts[0], str)):
        raise field_error("echo", "it is not supported with logprobs, or with a prompt of tokens")
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


class CompletionWriter(ChunkWriter):
    """Writes answers as completions, or as the stream of their chunks."""

    kinds = ("text_completion", "text_completion")
    heartbeat: Mapping[str, Any] = {"text": ""}

    def __init__(self, body: CompletionRequest, several: Sequence[ServerRequest]) -> None:
        super().__init__(body, several, unread(body.model_extra or {}))
        self._echoed = [str(one.prompt) if body.echo else "" for one in several]
        """The prompts that come before the answers; empty if they are not wanted."""
        self._offsets = list(map(len, self._echoed))

    def said(self, index: int, answer: WholeAnswer) -> dict[str, Any]:
        """Return a text. Nothing in raw text is thinking."""
        texts = (one.text for one in answer.parts if not isinstance(one, ToolCallEvent))
        return {"text": self._echoed[index] + "".join(texts)}

    def begin(self) -> Iterator[bytes]:
        """Yield the prompts, if they are wanted."""
        for number, text in enumerate(self._echoed):
            if text:
                yield self.chunk(number, {"text": text})

    def write(self, index: int, event: AnswerEvent) -> Iterator[bytes]:
        if isinstance(event, TextDelta | ThinkingDelta):
            tokens = event.tokens if isinstance(event, TextDelta) else ()
            yield self.chunk(index, {"text": event.text}, tokens)
        else:
            yield from super().write(index, event)

    def usage(self, ends: Sequence[AnswerEnd]) -> dict[str, Any]:
        """Return the usage of all answers. Each prompt is counted once."""
        each = ends[:: self._body.n]
        return completion_usage(
            sum(end.usage.prompt_tokens for end in each),
            sum(end.usage.cached_tokens for end in each),
            sum(end.usage.completion_tokens for end in ends),
        )

    def logprobs(self, index: int, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return them as completions have them, with the places of the tokens in the text."""
        ends = [*accumulate((len(one.text) for one in tokens), initial=self._offsets[index])]
        self._offsets[index] = ends[-1]
        return text_logprobs(tokens) | {"text_offset": ends[:-1]}


def completions_router(answers: ModelManager) -> APIRouter:
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
