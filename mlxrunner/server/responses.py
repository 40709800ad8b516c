"""OpenAI's Responses API: the body of a request, stored responses, the answer, the stream."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BeforeValidator

from mlxrunner.batch.openai_format import (
    INCLUDED,
    READ,
    RESPONSE_FIELDS,
    TokenLogprob,
    chat_logprobs,
    message_item,
    read_response,
    response_object,
    response_usage,
    sealed,
)
from mlxrunner.config.request_fields import held
from mlxrunner.server.events import (
    AnswerEnd,
    AnswerEvent,
    ApiError,
    Client,
    ServerRequest,
    TextDelta,
    ThinkingDelta,
    ToolCallEvent,
    field_error,
)
from mlxrunner.server.manager import ModelManager
from mlxrunner.server.openai import OpenAIRequest, checked_effort, choice_of, options_of
from mlxrunner.server.protocol import (
    EventWriter,
    RequestBody,
    WholeAnswer,
    client_of,
    deliver,
    present,
    report,
    route_class,
    shown_messages,
    unread,
    while_connected,
)

ROLES = ("system", "developer", "user", "assistant", "tool")
"""The roles of messages."""


class ResponseTool(RequestBody):
    """A tool: a function, a namespace of functions, or one that only their server has."""

    type: str
    name: str | None = None
    tools: list[dict[str, Any]] | None = None


class ResponseReasoning(RequestBody):
    """The wishes about thinking. Summaries are not made."""

    effort: str | None = None


class ResponseRequest(OpenAIRequest):
    """The body of a request for a response."""

    input: Annotated[str | list[dict[str, Any]], BeforeValidator(present)] = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    include: list[str] | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ResponseReasoning | None = None
    truncation: str | None = None
    metadata: dict[str, Any] | None = None


def read(
    body: ResponseRequest, client: Client, request_id: str, kept: ResponseStore
) -> ResponseWriter:
    """Return the writer of the answer to a body. Raise ApiError, OptionError or PromptError."""
    extra = dict(body.model_extra or {})
    name = body.previous_response_id
    before = kept.previous(name) if name else None
    given_items: Any = body.input
    if isinstance(body.input, str):
        part = {"type": "input_text", "text": body.input}
        given_items = [{"type": "message", "role": "user", "content": [part]}] if body.input else []
    items = [_found(item, kept) for item in given_items]
    history = [*before.history, *items] if before else items
    include = [one for one in body.include or () if one in INCLUDED]
    given = {**extra, "instructions": body.instructions, "include": include}
    given["input"] = [_plain(item) for item in history]
    messages, fields = read_response(held(given, READ | RESPONSE_FIELDS), is_served=True)
    _check_roles(messages)
    messages, replaced = shown_messages(messages)
    options, variables = options_of(fields)
    functions, namespaces, left_out = _tools(body.tools or [])
    choice, tools = choice_of(body.tool_choice, functions)
    wanted = body.reasoning.effort if body.reasoning else None
    effort = checked_effort(wanted, "reasoning.effort")
    asked = ServerRequest(
        protocol="responses",
        model=body.model,
        messages=messages,
        replaced=replaced,
        tools=tools,
        tool_choice=choice,
        parallel_calls=body.parallel_tool_calls is not False,
        thinking=False if effort == "none" else None,
        effort=effort,
        options=options,
        variables=variables,
        client=client,
        id=request_id,
    )
    left_out = (*left_out, *unread(extra, RESPONSE_FIELDS))
    return ResponseWriter(body, asked, items, before, namespaces, left_out, kept)


def _found(item: Item, kept: ResponseStore) -> Item:
    """Return an item that is only named, in full. One that is not kept stays as it is."""
    if item.get("type") != "item_reference":
        return item
    return kept.item(str(item.get("id"))) or item


def _plain(item: Item) -> Item:
    """Return an item with the full name of its function."""
    match item:
        case {"type": "function_call", "namespace": str(space), "name": str(name)}:
            return {**item, "name": full_name(space, name)}
    return item


def full_name(space: str, name: str) -> str:
    """Return the name by which the model knows a function of a namespace."""
    return f"{space}{name}" if space.endswith("_") else f"{space}__{name}"


def _tools(
    given: list[ResponseTool],
) -> tuple[list[dict[str, Any]], dict[str, tuple[str, str]], tuple[str, ...]]:
    """Return the functions, the namespaces of some, and the types that are left out."""
    functions, left_out = list[dict[str, Any]](), list[str]()
    namespaces: dict[str, tuple[str, str]] = {}
    for where, space, tool in _each_tool(given):
        if tool.get("type") != "function":
            left_out.append(f"tool {tool.get('type')}")
            continue
        made = _function(where, tool)
        functions.append(made)
        if space is not None:
            name = made["function"]["name"]
            made["function"]["name"] = full_name(space, name)
            namespaces[made["function"]["name"]] = (space, name)
    return functions, namespaces, tuple(left_out)


def _each_tool(given: list[ResponseTool]) -> Iterator[tuple[str, str | None, Mapping[str, Any]]]:
    """Yield the place of each tool, its namespace, if it is in one, and the tool."""
    for number, tool in enumerate(given):
        if tool.type == "namespace" and tool.name:
            for place, inner in enumerate(tool.tools or ()):
                yield f"tools.{number}.tools.{place}", tool.name, inner
        else:
            yield f"tools.{number}", None, tool.model_dump(exclude_unset=True) | {"type": tool.type}


def _function(where: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool as a chat has it, where the function is an object of its own."""
    if not isinstance(tool.get("name"), str):
        raise field_error(f"{where}.name", "a function needs a name")
    known = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in known if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _check_roles(messages: list[dict[str, Any]]) -> None:
    for message in messages:
        if message["role"] == "function":
            message["role"] = "tool"  # as it was called before there were tools
        if message["role"] not in ROLES:
            raise field_error(
                "input",
                f"role {message['role']!r:.80} is not known, it has to be one of "
                f"{', '.join(ROLES)}",
            )


MOST_RESPONSES, MOST_BYTES = 1024, 2**26
"""The most responses that are kept, and the most bytes of JSON that they have together."""
Item = Mapping[str, Any]


@dataclass(frozen=True)
class StoredResponse:
    """A response, and what it answered."""

    body: dict[str, Any]
    items: Sequence[Item]
    """The items of its own request."""
    before: StoredResponse | None
    """The response that it continued from."""
    nbytes: int = 0

    @property
    def history(self) -> list[Item]:
        """All items of the conversation, with this answer at the end."""
        found = list[Sequence[Item]]()
        link: StoredResponse | None = self
        while link is not None:
            found += (link.body["output"], link.items)
            link = link.before
        return [item for items in reversed(found) for item in items]


class ResponseStore:
    """Keeps the latest responses. Those that were used longest ago are forgotten first."""

    def __init__(self, most: int = MOST_RESPONSES, most_bytes: int = MOST_BYTES) -> None:
        """Keep at most `most` responses, and `most_bytes` of them."""
        self._most, self._most_bytes = most, most_bytes
        self._by_id: OrderedDict[str, StoredResponse] = OrderedDict()
        self._nbytes = 0

    def add(
        self, body: dict[str, Any], items: Sequence[Item], before: StoredResponse | None
    ) -> None:
        """Keep a response and the items that it answered."""
        nbytes = len(msgspec.json.encode([body, items]))
        self._by_id[body["id"]] = StoredResponse(body, items, before, nbytes)
        self._nbytes += nbytes
        while len(self._by_id) > self._most or self._nbytes > self._most_bytes:
            self._nbytes -= self._by_id.popitem(last=False)[1].nbytes

    def find(self, name: str) -> StoredResponse | None:
        """Return the response with this id; None if it is not kept."""
        if name in self._by_id:
            self._by_id.move_to_end(name)
        return self._by_id.get(name)

    def stored(self, name: str) -> StoredResponse:
        """Return the response with this id. Raise ApiError if it is not kept."""
        found = self.find(name)
        if found is None:
            raise ApiError(404, f"the response {name!r:.80} is not kept", code="not_found")
        return found

    def previous(self, name: str) -> StoredResponse:
        """Return the response to continue from. Raise ApiError if it is not kept."""
        found = self.find(name)
        if found is None:
            raise field_error(
                "previous_response_id",
                f"{name!r:.80} is not kept: it was never stored, or "
                "forgotten since; send the whole conversation as input",
                code="previous_response_not_found",
            )
        return found

    def item(self, name: str) -> Item | None:
        """Return the item of an answer with this id; None if it is not kept."""
        outputs = (item for kept in reversed(self._by_id.values()) for item in kept.body["output"])
        return next((item for item in outputs if item.get("id") == name), None)

    def remove(self, name: str) -> bool:
        """Forget a response. Return False if it is not kept."""
        found = self._by_id.pop(name, None)
        self._nbytes -= found.nbytes if found else 0
        return found is not None


def _usage(ended: AnswerEnd) -> dict[str, Any]:
    used = ended.usage
    body = response_usage(
        used.prompt_tokens, used.cached_tokens, used.completion_tokens, ended.thinking_tokens
    )
    body["input_tokens_details"]["cache_write_tokens"] = used.prompt_tokens - used.cached_tokens
    return body


_KINDS = {
    "message": ("msg", "output_text"),
    "reasoning": ("rs", "reasoning_text"),
    "function_call": ("fc", "function_call_arguments"),
}
"""The beginning of the ids of items of each type, and the name of the events about their text."""


@dataclass(eq=False)
class ResponseWriter(EventWriter):
    """Writes one answer as a response, or its events as theirs."""

    body: ResponseRequest
    asked: ServerRequest
    """The request in our form, with the whole conversation."""
    items: list[Item]
    """The items of this request."""
    before: StoredResponse | None
    """The response that it continues from."""
    namespaces: Mapping[str, tuple[str, str]]
    """The namespace and the name of each function in one, by its full name."""
    left_out: tuple[str, ...]
    """The tools that the model is not told of, and the fields that are ignored."""
    kept: ResponseStore
    """The responses to which the answer is added, unless the client says no."""

    def __post_init__(self) -> None:
        self._created = int(time.time())
        self._output: list[dict[str, Any]] = []
        """The items that are complete."""
        self._response: dict[str, Any] = {}
        self._sequence = 0
        self._kind = ""
        """The type of the item that is open."""
        self._text = ""
        """The text, thought or arguments of that item so far."""
        self._tokens: list[TokenLogprob] = []
        self._call = ToolCallEvent(0, "", "", "")

    def whole(self, answers: Sequence[WholeAnswer]) -> dict[str, Any]:
        """Return the response of a whole answer. The frames are of no use."""
        for event in answers[0].events:
            for _ in self.write(0, event):
                pass
        return self._response

    def begin(self) -> Iterator[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._object("in_progress"))

    def write(self, index: int, event: AnswerEvent) -> Iterator[bytes]:
        """Yield the events of an event of ours. A heartbeat is one more `response.in_progress`."""
        match event:
            case TextDelta(text, tokens):
                yield from self._grow("message", text, tokens)
            case ThinkingDelta(text):
                yield from self._grow("reasoning", text)
            case ToolCallEvent():
                yield from self._close()
                self._call = event
                yield from self._grow("function_call", event.arguments)
                yield from self._close()
            case AnswerEnd():
                yield from self._end(event)
            case _:
                response = self._object("in_progress")
                yield self._event("response.in_progress", response=response)

    def error(self, refused: ApiError) -> bytes:
        failed = self._object("failed")
        failed["error"] = {"code": _code(refused), "message": refused.message}
        return self._event("response.failed", response=failed)

    def _object(self, status: str, ended: AnswerEnd | None = None) -> dict[str, Any]:
        """Return the Response object, with the usage if the answer has ended."""
        body, asked = self.body, self.asked
        found = response_object(
            asked.id,
            status,
            created=self._created,
            model=asked.model,
            output=self._output,
            options=asked.options,
            effort=asked.effort,
            tools=[tool.model_dump(exclude_unset=True) for tool in body.tools or ()],
        )
        found |= {
            "instructions": body.instructions,
            "metadata": body.metadata or {},
            "parallel_tool_calls": asked.parallel_calls,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "store": body.store is not False,
            "tool_choice": body.tool_choice or "auto",
            "truncation": body.truncation or "disabled",
            "usage": None,
        }
        if ended is not None:
            found["usage"] = _usage(ended)
            found["mlxrunner"] = report(ended, self.left_out)
        return found

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode(event))

    @property
    def _item_id(self) -> str:
        own = self.asked.id.removeprefix("resp_")
        return f"{_KINDS[self._kind][0]}_{own}_{len(self._output)}"

    def _part(self, kind: str, **fields: Any) -> bytes:
        """Return an event about the item that is open, or about its content, if it has one."""
        place: dict[str, Any] = {"item_id": self._item_id, "output_index": len(self._output)}
        place |= {} if self._kind == "function_call" else {"content_index": 0}
        return self._event(kind, **place, **fields)

    def _said(self, what: str, field: str, text: str, tokens: Sequence[TokenLogprob] = ()) -> bytes:
        """Return an event about the text of the item that is open, which is in `field`."""
        more = {"logprobs": chat_logprobs(tokens)} if self._kind == "message" else {}
        return self._part(f"response.{_KINDS[self._kind][1]}.{what}", **{field: text}, **more)

    def _item(self, status: str) -> dict[str, Any]:
        if self._kind == "message":
            logprobs = chat_logprobs(self._tokens)
            return message_item(self._item_id, self._text, status=status, logprobs=logprobs)
        item: dict[str, Any] = {"id": self._item_id, "type": self._kind}
        if self._kind == "reasoning":
            item |= {"summary": [], "content": [self._content(status)] if self._text else []}
            if "reasoning.encrypted_content" in (self.body.include or ()):
                item["encrypted_content"] = sealed(self._text)
            return item | {"status": status}
        call = self._call
        item |= {"status": status, "call_id": call.id, "name": call.name, "arguments": self._text}
        if call.name in self.namespaces:  # it is named as the client did
            item["namespace"], item["name"] = self.namespaces[call.name]
        return item

    def _content(self, status: str) -> dict[str, Any]:
        if self._kind == "reasoning":
            return {"type": "reasoning_text", "text": self._text}
        content: dict[str, Any] = self._item(status)["content"][0]
        return content

    def _grow(self, kind: str, text: str, tokens: Sequence[TokenLogprob] = ()) -> Iterator[bytes]:
        """Append a text to the item of a type, which is opened if none is."""
        if self._kind != kind:
            yield from self._close()
            self._kind, self._text, self._tokens = kind, "", []
            item, place = self._item("in_progress"), len(self._output)
            more: dict[str, Any] = {} if kind == "function_call" else {"content": []}
            added = "response.output_item.added"
            yield self._event(added, output_index=place, item=item | more)
            if kind != "function_call":
                yield self._part("response.content_part.added", part=self._content("in_progress"))
        self._text += text
        self._tokens.extend(tokens)
        yield self._said("delta", "delta", text, tokens)

    def _close(self, status: str = "completed") -> Iterator[bytes]:
        if not self._kind:
            return
        field = "arguments" if self._kind == "function_call" else "text"
        yield self._said("done", field, self._text, self._tokens)
        if self._kind != "function_call":
            yield self._part("response.content_part.done", part=self._content(status))
        item, place = self._item(status), len(self._output)
        self._output.append(item)
        self._kind = ""
        yield self._event("response.output_item.done", output_index=place, item=item)

    def _end(self, ended: AnswerEnd) -> Iterator[bytes]:
        status = "incomplete" if ended.reason == "length" else "completed"
        yield from self._close(status)
        self._response = response = self._object(status, ended)
        if self.body.store is not False:
            self.kept.add(response, self.items, self.before)
        yield self._event(f"response.{status}", response=response)


def _code(refused: ApiError) -> str:
    if refused.code == "context_length_exceeded":
        return refused.code
    known = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
    return known.get(refused.status, "server_error")


def router(answers: ModelManager) -> APIRouter:
    """Return the routes. They share the responses that are kept."""
    kept = ResponseStore()
    routes = APIRouter(route_class=route_class("resp_"), tags=["openai"])

    def writer_of(body: ResponseRequest, request: Request) -> ResponseWriter:
        client = client_of(request, body.prompt_cache_key or body.user)
        return read(body, client, request.state.id, kept)

    @routes.post("/v1/responses")
    async def create_response(body: ResponseRequest, request: Request) -> Response:
        """Answer a conversation, as a response or as a stream of events."""
        body.model = body.model or answers.card("").name
        writer = writer_of(body, request)
        return await deliver(request, answers, [writer.asked], writer, streams=body.stream)

    @routes.post("/v1/responses/input_tokens")
    async def count_input_tokens(body: ResponseRequest, request: Request) -> Response:
        """Count the tokens of a prompt."""
        count = await while_connected(request, answers.count(writer_of(body, request).asked))
        return JSONResponse({"object": "response.input_tokens", "input_tokens": count})

    @routes.get("/v1/responses/{name}")
    async def retrieve_response(name: str) -> Response:
        """Return a response that is kept."""
        return JSONResponse(kept.stored(name).body)

    @routes.get("/v1/responses/{name}/input_items")
    async def list_input_items(name: str) -> Response:
        """List the items of the request for a response that is kept, the latest first."""
        items = kept.stored(name).items
        named = [{"id": f"{name}_in_{number}", **item} for number, item in enumerate(items)][::-1]
        ends = {"first_id": named[0]["id"], "last_id": named[-1]["id"]} if named else {}
        return JSONResponse({"object": "list", "data": named, "has_more": False, **ends})

    @routes.delete("/v1/responses/{name}")
    async def delete_response(name: str) -> Response:
        """Forget a response."""
        kept.stored(name)
        kept.remove(name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    return routes
