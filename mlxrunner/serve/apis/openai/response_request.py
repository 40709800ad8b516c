"""The body of a request for a response, and the `Asked` that it means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator

from mlxrunner.batch.responses import INCLUDED, RESPONSE_FIELDS, read_response
from mlxrunner.batch.translate import READ
from mlxrunner.config.request_fields import held
from mlxrunner.serve.apis.fields import Body, present, shown_messages, unread
from mlxrunner.serve.apis.openai.kept import Item, KeptResponse, KeptResponses
from mlxrunner.serve.apis.openai.options import Common, checked_effort, choice_of, options_of
from mlxrunner.serve.asked import Asked, Client
from mlxrunner.serve.events import RefusedError

ROLES = ("system", "developer", "user", "assistant", "tool")
"""The roles of messages."""


class Tool(Body):
    """A tool: a function, a namespace of functions, or one that only their server has."""

    type: str
    name: str | None = None
    tools: list[dict[str, Any]] | None = None


class Reasoning(Body):
    """The wishes about thinking. Summaries are not made."""

    effort: str | None = None


class ResponseRequest(Common):
    """The body of a request for a response."""

    input: Annotated[str | list[dict[str, Any]], BeforeValidator(present)] = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    include: list[str] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    truncation: str | None = None
    metadata: dict[str, Any] | None = None

    @property
    def is_kept(self) -> bool:
        """True if the response is to be kept, as it is unless the client says no."""
        return self.store is not False

    @property
    def seals_thinking(self) -> bool:
        """True if the client wants thinking in a form that it can give back."""
        return "reasoning.encrypted_content" in (self.include or ())


@dataclass(frozen=True)
class Conversation:
    """The request in our form, and the conversation that it goes on from."""

    asked: Asked
    items: list[Item]
    """The items of this request."""
    before: KeptResponse | None
    namespaces: Mapping[str, tuple[str, str]]
    """The namespace and the name of each function in one, by its full name."""
    left_out: tuple[str, ...]
    """The tools that the model is not told of, and the fields that are ignored."""


def read(
    body: ResponseRequest, client: Client, request_id: str, kept: KeptResponses
) -> Conversation:
    """Return what a body asks for. Raise RefusedError, OptionError or PromptError."""
    extra = dict(body.model_extra or {})
    name = body.previous_response_id
    before = kept.previous(name) if name else None
    items = [_found(item, kept) for item in _items(body.input)]
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
    asked = Asked(
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
    return Conversation(asked, items, before, namespaces, left_out)


def _items(given: str | list[dict[str, Any]]) -> list[Item]:
    if isinstance(given, str):
        part = {"type": "input_text", "text": given}
        return [{"type": "message", "role": "user", "content": [part]}] if given else []
    return list(given)


def _found(item: Item, kept: KeptResponses) -> Item:
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
    given: list[Tool],
) -> tuple[list[dict[str, Any]], dict[str, tuple[str, str]], tuple[str, ...]]:
    """Return the functions, the namespaces of some, and the types that are left out."""
    functions: list[dict[str, Any]] = []
    namespaces: dict[str, tuple[str, str]] = {}
    left_out: list[str] = []
    for number, tool in enumerate(given):
        where = f"tools.{number}"
        if tool.type == "function":
            functions.append(_function(where, tool.model_dump(exclude_unset=True)))
        elif tool.type == "namespace" and tool.name:
            for place, inner in enumerate(tool.tools or ()):
                if inner.get("type") != "function":
                    left_out.append(f"tool {inner.get('type')}")
                    continue
                made = _function(f"{where}.tools.{place}", inner)
                full = full_name(tool.name, made["function"]["name"])
                namespaces[full] = (tool.name, made["function"]["name"])
                made["function"]["name"] = full
                functions.append(made)
        else:
            left_out.append(f"tool {tool.type}")
    return functions, namespaces, tuple(left_out)


def _function(where: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool as a chat has it, where the function is an object of its own."""
    if not isinstance(tool.get("name"), str):
        raise RefusedError(400, f"{where}.name: a function needs a name", param=f"{where}.name")
    known = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in known if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _check_roles(messages: list[dict[str, Any]]) -> None:
    for message in messages:
        if message["role"] == "function":
            message["role"] = "tool"  # as it was called before there were tools
        if message["role"] not in ROLES:
            raise RefusedError(
                400,
                f"input: role {message['role']!r:.80} is not known, it has to be one of "
                f"{', '.join(ROLES)}",
                param="input",
            )
