"""The body of a chat completion, and the requests for answers that it means."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from mlxrunner.config.arguments import shown, without_nulls
from mlxrunner.config.request_fields import is_neutral
from mlxrunner.serve.apis.fields import Body, Part, content_with, openai_picture, unread
from mlxrunner.serve.apis.openai.options import (
    Sampled,
    checked_effort,
    choice_of,
    options_of,
    with_seed,
)
from mlxrunner.serve.asked import Asked, Client
from mlxrunner.serve.events import RefusedError

TEXTS = ("text", "input_text", "output_text", "refusal")
"""The types of parts that are texts."""


class Function(Body):
    """A function: what it is called, and with what."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(Body):
    """A call in an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: Function


class ChatMessage(Body):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Tool(Body):
    """A tool, of any type."""

    type: str = "function"
    function: dict[str, Any] | None = None


class ChatRequest(Sampled):
    """The body of a request for a chat completion."""

    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None


def read(body: ChatRequest, client: Client, request_id: str) -> list[Asked]:
    """Return what a body asks for, one request for each answer. Raise RefusedError."""
    extra = dict(body.model_extra or {})
    thinking, level = _thinking(extra)
    options, variables = options_of(extra)
    given = [_tool(number, tool) for number, tool in enumerate(body.tools or ()) if is_own(tool)]
    choice, tools = choice_of(body.tool_choice, given)
    effort = checked_effort(body.reasoning_effort or level, "reasoning_effort")
    messages = [_message(number, message) for number, message in enumerate(body.messages)]
    return [
        Asked(
            protocol="chat",
            model=body.model,
            messages=messages,
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
                raise RefusedError(
                    400, f"{name}: {shown(value)} is not known; send reasoning_effort", param=name
                )
    return said, level


def is_own(tool: Tool) -> bool:
    """Return True if a tool is a function."""
    return tool.type == "function"


def left_out(body: ChatRequest) -> tuple[str, ...]:
    """Return the tools that the model is not told of, and the fields that are ignored."""
    tools = [f"tool {tool.type}" for tool in body.tools or () if not is_own(tool)]
    return (*tools, *unread(body.model_extra or {}))


def _tool(number: int, tool: Tool) -> dict[str, Any]:
    if tool.function is None or not isinstance(tool.function.get("name"), str):
        where = f"tools.{number}.function"
        raise RefusedError(400, f"{where}: it has to be an object with a name", param=where)
    return {"type": "function", "function": without_nulls(tool.function)}


def _message(number: int, message: ChatMessage) -> dict[str, Any]:
    """Return a message as `Asked` has it."""
    where = f"messages.{number}"
    content = content_with(f"{where}.content", message.content, TEXTS, "", openai_picture)
    found: dict[str, Any] = {"role": message.role, "content": content}
    thought = message.reasoning_content or message.reasoning
    if message.role == "assistant":
        if thought:
            found["reasoning_content"] = thought
        if message.tool_calls:
            found["tool_calls"] = [_call(call) for call in message.tool_calls]
    elif message.tool_calls:
        raise RefusedError(400, f"{where}: only an assistant has tool_calls", param=where)
    if message.role == "tool":
        if message.tool_call_id is None:
            name = f"{where}.tool_call_id"
            raise RefusedError(400, f"{name}: it has to be the id of a tool call", param=name)
        found["tool_call_id"] = message.tool_call_id
        if message.name:
            found["name"] = message.name
    return found


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    own = {"id": call.id} if call.id is not None else {}
    return {**own, "type": "function", "function": function}
