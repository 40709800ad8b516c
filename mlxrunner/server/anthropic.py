"""Anthropic's Messages API: the body of a request, the answer, the stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BeforeValidator, Field

from mlxrunner.server.events import (
    THREAD_NOT_FOUND,
    AnswerEnd,
    AnswerEvent,
    ApiError,
    Client,
    ServerRequest,
    TextDelta,
    ThinkingDelta,
    ToolCallEvent,
    ToolChoice,
    anthropic_error,
    field_error,
)
from mlxrunner.server.manager import ModelManager
from mlxrunner.server.openai import options_of
from mlxrunner.server.protocol import (
    EventWriter,
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
    unread,
    while_connected,
)
from mlxrunner.templates.messages import Parts, item_text, parts_of

OWN = (None, "custom")
"""The types of a client's own tools. Anthropic's have a type that bears a date."""
BETWEEN = "\n"
"""The text between the blocks of a system prompt, of a user's message, of a result."""


class AnthropicTool(RequestBody):
    """A tool: the client's own, or one of Anthropic's, which `type` names."""

    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class AnthropicToolChoice(RequestBody):
    """The use of tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class AnthropicThinking(RequestBody):
    """The use of thinking. A budget of tokens is a wish, which is not enforced."""

    type: Literal["enabled", "adaptive", "disabled"]


class OutputFormat(RequestBody):
    """The form of the answer."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestBody):
    """Wishes about the answer."""

    effort: str | None = None
    format: OutputFormat | None = None


class RequestMetadata(RequestBody):
    """The client's own data about the request."""

    user_id: str | None = None


class AnthropicMessage(RequestBody):
    """A message of the conversation. Messages of the system may stand anywhere."""

    role: Literal["user", "assistant", "system"]
    content: SentContent = None


class CountTokensRequest(RequestBody):
    """The body of a request for the number of tokens of a prompt."""

    model: str = ""
    messages: Annotated[list[AnthropicMessage], BeforeValidator(present)] = Field(min_length=1)
    system: SentContent = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: AnthropicThinking | None = None
    output_config: OutputConfig | None = None


class MessageRequest(CountTokensRequest):
    """The body of a request for a message."""

    max_tokens: int | None = Field(default=None, ge=1)
    stream: bool = False
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    stop_sequences: list[str] | None = None
    metadata: RequestMetadata | None = None
    output_format: OutputFormat | None = None


def read(body: CountTokensRequest, client: Client, request_id: str) -> ServerRequest:
    """Return what a body asks for. Raise ApiError for what is not supported."""
    options, variables = options_of(body.model_extra or {})
    _refuse_thread(body)
    tools = [_tool(n, tool) for n, tool in enumerate(body.tools or ()) if tool.type in OWN]
    choice = body.tool_choice
    output = body.output_config or OutputConfig()
    messages, replaced = shown_messages(list(_messages(body)))
    if not isinstance(body, MessageRequest):
        options = {}
    else:
        if options.get("continue_final_message") is not False:
            _refuse_space(len(body.messages) - 1, messages[-1])
        options |= _options(body, output)
    return ServerRequest(
        protocol="anthropic",
        model=body.model,
        messages=messages,
        replaced=replaced,
        tools=tools,
        tool_choice=_choice(choice, {tool["function"]["name"] for tool in tools}),
        parallel_calls=not (choice and choice.disable_parallel_tool_use),
        # With "adaptive" the model decides.
        thinking={"enabled": True, "disabled": False}.get(body.thinking.type)
        if body.thinking
        else None,
        effort=output.effort,
        options=options,
        variables=variables,
        client=client,
        id=request_id,
    )


def _refuse_thread(body: CountTokensRequest) -> None:
    """Raise ApiError if a request continues from an answer without the messages before it.

    Its client then sends the whole conversation.
    """
    match (body.model_extra or {}).get("thread"):
        case {"type": "continue", "previous_message_id": previous}:
            why = (
                f"{previous!r:.80} is not kept here, as no thread is: send the whole "
                'conversation, with {"type": "create"} or without a thread'
            )
            raise field_error("thread", why, status=404, code=THREAD_NOT_FOUND)


def _refuse_space(number: int, last: Mapping[str, Any]) -> None:
    """Raise ApiError for words to be continued that end with white space, as Anthropic does.

    The next word brings its own space: behind another one the model would write something else.
    """
    content = last["content"]
    if not isinstance(content, str):
        content = content[-1].get("text", "")
    if last["role"] == "assistant" and not last.get("tool_calls") and content != content.rstrip():
        why = (
            f"final assistant content cannot end with trailing whitespace, and it ends "
            f"with {content[-12:]!r}: leave the white space at its end out"
        )
        raise field_error(f"messages.{number}.content", why)


def left_out(body: CountTokensRequest) -> tuple[str, ...]:
    """Return the tools that the model is not told of, and the fields that are ignored."""
    tools = [f"tool {tool.type}" for tool in body.tools or () if tool.type not in OWN]
    return (*tools, *unread(body.model_extra or {}))


def marks_cache(body: CountTokensRequest) -> bool:
    """Return True if the body has a mark `cache_control` anywhere."""
    contents = [body.system, *(message.content for message in body.messages)]
    parts = (part for content in contents if isinstance(content, list) for part in content)
    marked = [one.model_extra or {} for one in (body, *(body.tools or ()))]
    marked += [part for part in parts if isinstance(part, dict)]
    return any(one.get("cache_control") for one in marked)


def _tool(number: int, tool: AnthropicTool) -> dict[str, Any]:
    """Return a tool in OpenAI's form. Its schema keeps the order of its keys."""
    if not tool.name:
        raise field_error(f"tools.{number}.name", "a tool needs a name")
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema or {"type": "object", "properties": {}}
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _choice(choice: AnthropicToolChoice | None, known: set[str]) -> ToolChoice:
    if choice is None or choice.type == "auto":
        return ToolChoice()
    if choice.type == "none":
        return ToolChoice("none")
    if not known:
        raise field_error("tool_choice", "there are no tools to choose")
    if choice.type == "any":
        return ToolChoice("required")
    if choice.name not in known:
        raise field_error("tool_choice.name", f"{choice.name!r:.80} is not among the tools")
    return ToolChoice("named", choice.name)


def _options(body: MessageRequest, output: OutputConfig) -> dict[str, Any]:
    form = output.format or body.output_format
    options = {
        "max_tokens": body.max_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": [text for text in body.stop_sequences or () if text] or None,
        "schema": form and form.json_schema,
    }
    return {name: value for name, value in options.items() if value is not None}


def _messages(body: CountTokensRequest) -> Iterator[dict[str, Any]]:
    """Yield the messages in OpenAI's form with `Parts` as contents, in their order."""
    if body.system:
        yield {"role": "system", "content": parts_of("system", plain(body.system), BETWEEN)}
    for number, message in enumerate(body.messages):
        where, content = f"messages.{number}.content", plain(message.content)
        is_last = number == len(body.messages) - 1
        if not isinstance(content, list) or message.role == "system":
            yield {"role": message.role, "content": parts_of(where, content, BETWEEN)}
        elif message.role == "assistant":
            yield _answer(where, content)
        else:
            yield from _user(where, content, is_last=is_last)


def _answer(where: str, blocks: list[Any]) -> dict[str, Any]:
    """Return the message of an earlier answer: its texts, its thinking, its calls."""
    content, thoughts, calls = Parts(), list[str](), list[dict[str, Any]]()
    for number, block in enumerate(blocks):
        match block:
            case {"type": "thinking"}:
                if isinstance(thought := block.get("thinking"), str):
                    thoughts.append(thought)
            case {"type": "redacted_thinking"}:
                pass  # another server's thinking, which nobody here can read
            case {"type": "tool_use", "id": str(call), "name": str(name), **rest}:
                function = {"name": name, "arguments": rest.get("input")}
                calls.append({"id": call, "type": "function", "function": function})
            case {"type": "image"}:
                content.append(item_text(f"{where}.{number}", {"type": "picture"}))
            case _:
                content += parts_of(f"{where}.{number}", block)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _user(where: str, blocks: list[Any], *, is_last: bool) -> Iterator[dict[str, Any]]:
    """Yield the messages of a user's blocks: results of tools are messages of their own."""
    own = Parts(by=BETWEEN)
    for number, block in enumerate(blocks):
        place = f"{where}.{number}"
        if not isinstance(block, dict) or block.get("type") != "tool_result":
            own += parts_of(place, block, BETWEEN)
            continue
        if own:
            yield {"role": "user", "content": own}
            own = Parts(by=BETWEEN)
        yield _result(place, block, is_last=is_last)
    if own or not blocks:
        yield {"role": "user", "content": own}


def _result(where: str, block: dict[str, Any], *, is_last: bool) -> dict[str, Any]:
    """Return the message of a tool's result. One that says nothing says at least that it failed."""
    call = block.get("tool_use_id")
    if not isinstance(call, str):
        name = f"{where}.tool_use_id"
        if is_last:
            raise field_error(name, "it has to be the id of a tool_use block")
        call = ""
    content = parts_of(f"{where}.content", block.get("content"), BETWEEN)
    if block.get("is_error") and not any(content):
        content = Parts(["error"])
    return {"role": "tool", "tool_call_id": call, "content": content}


STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""Their word for each reason of an end that has another one."""


def usage_body(ended: AnswerEnd, *, is_marked: bool) -> dict[str, Any]:
    """Return the usage. Tokens that were evaluated are kept in the cache, all of them.

    They count as written to it if the client marked anything with `cache_control`, as it is used
    to, and as input otherwise.
    """
    usage = ended.usage
    new = usage.prompt_tokens - usage.cached_tokens
    return {
        "input_tokens": 0 if is_marked else new,
        "cache_creation_input_tokens": new if is_marked else 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": ended.thinking_tokens},
    }


def _block(asked: ServerRequest, part: TextDelta | ThinkingDelta | ToolCallEvent) -> dict[str, Any]:
    match part:
        case TextDelta(text):
            return {"type": "text", "text": text}
        case ThinkingDelta(text):
            return {"type": "thinking", "thinking": text, "signature": asked.id}
        case ToolCallEvent():
            given = json.loads(part.arguments or "{}")
            return {"type": "tool_use", "id": part.id, "name": part.name, "input": given}


def frame(event: Mapping[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), msgspec.json.encode(event))


class MessageWriter(EventWriter):
    """Writes one answer as a message, or its events as frames."""

    def __init__(self, asked: ServerRequest, *, is_marked: bool, left_out: tuple[str, ...]) -> None:
        """Write the answer to `asked`. `is_marked`: see `usage_body`."""
        self._asked, self._is_marked, self._left_out = asked, is_marked, left_out
        self._index = -1
        self._open: str | None = None
        """The type of the block that is open."""

    def whole(self, answers: Sequence[WholeAnswer]) -> dict[str, Any]:
        ended = answers[0].end
        content = [_block(self._asked, part) for part in answers[0].parts]
        usage = usage_body(ended, is_marked=self._is_marked)
        found = self._message(content, self._reason(ended), usage)
        return found | {"mlxrunner": report(ended, self._left_out)}

    def _message(
        self, content: Sequence[Any], reason: Mapping[str, Any], usage: Mapping[str, Any]
    ) -> dict[str, Any]:
        asked = self._asked
        head = {"id": asked.id, "type": "message", "role": "assistant", "model": asked.model}
        return {**head, "content": content, **reason, "usage": usage}

    def _reason(self, ended: AnswerEnd | None) -> dict[str, str | None]:
        """Return the fields that say why the answer has ended, if it has."""
        if ended is None:
            return {"stop_reason": None, "stop_sequence": None}
        reason = STOP_REASONS.get(ended.reason, ended.reason)
        return {"stop_reason": reason, "stop_sequence": ended.stop_sequence}

    def begin(self) -> Iterator[bytes]:
        """Yield the first frame. What was reused is known only at the end."""
        counts = ("input", "output", "cache_creation_input", "cache_read_input")
        usage = dict.fromkeys((f"{name}_tokens" for name in counts), 0)
        yield frame(
            {"type": "message_start", "message": self._message([], self._reason(None), usage)}
        )

    def write(self, index: int, event: AnswerEvent) -> Iterator[bytes]:
        match event:
            case TextDelta(text):
                if text:  # there may be tokens alone
                    yield from self._piece("text", {"text": ""}, text)
            case ThinkingDelta(text):
                yield from self._piece("thinking", {"thinking": "", "signature": ""}, text)
            case ToolCallEvent(_, call_id, name, arguments):
                yield from self._close()
                yield self._begin("tool_use", {"id": call_id, "name": name, "input": {}})
                yield self._delta("input_json_delta", {"partial_json": arguments})
                yield from self._close()
            case AnswerEnd():
                yield from self._end(event)
            case _:
                yield frame({"type": "ping"})

    def error(self, refused: ApiError) -> bytes:
        return frame(anthropic_error(refused, self._asked.id))

    def _piece(self, kind: str, empty: Mapping[str, str], text: str) -> Iterator[bytes]:
        if self._open != kind:
            yield from self._close()
            yield self._begin(kind, empty)
        yield self._delta(f"{kind}_delta", {kind: text})

    def _begin(self, kind: str, block: Mapping[str, Any]) -> bytes:
        self._open = kind
        self._index += 1
        return self._block("start", content_block={"type": kind, **block})

    def _delta(self, kind: str, delta: Mapping[str, str]) -> bytes:
        return self._block("delta", delta={"type": kind, **delta})

    def _block(self, what: str, **fields: Any) -> bytes:
        return frame({"type": f"content_block_{what}", "index": self._index, **fields})

    def _close(self) -> Iterator[bytes]:
        if self._open == "thinking":
            yield self._delta("signature_delta", {"signature": self._asked.id})
        if self._open is not None:
            yield self._block("stop")
        self._open = None

    def _end(self, ended: AnswerEnd) -> Iterator[bytes]:
        yield from self._close()
        usage = usage_body(ended, is_marked=self._is_marked)
        yield frame({"type": "message_delta", "delta": self._reason(ended), "usage": usage})
        yield frame({"type": "message_stop", "mlxrunner": report(ended, self._left_out)})


def router(answers: ModelManager) -> APIRouter:
    routes = APIRouter(route_class=route_class("msg_"), tags=["anthropic"])

    @routes.post("/v1/messages")
    async def create_message(body: MessageRequest, request: Request) -> Response:
        """Answer a conversation, as a message or as a stream of events."""
        body.model = body.model or answers.card("").name
        user = body.metadata and body.metadata.user_id
        asked = read(body, client_of(request, user), request.state.id)
        writer = MessageWriter(asked, is_marked=marks_cache(body), left_out=left_out(body))
        return await deliver(request, answers, [asked], writer, streams=body.stream)

    @routes.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
        """Count the tokens of a prompt."""
        asked = read(body, client_of(request), request.state.id)
        count = await while_connected(request, answers.count(asked))
        return JSONResponse({"input_tokens": count})

    @routes.head("/v1/messages", include_in_schema=False)
    async def probe() -> Response:
        """Say that the server is there."""
        return Response()

    @routes.get("/v1/messages", include_in_schema=False)
    async def refuse_get() -> Response:
        """Say how the address is used."""
        raise ApiError(405, "use POST: this address answers conversations")

    return routes
