"""The body of a chat completion, and the requests for answers that it means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mlxrunner.config.arguments import shown, without_nulls
from mlxrunner.config.request_fields import is_neutral
from mlxrunner.serve.apis.fields import (
    Body,
    HistoryText,
    SentContent,
    plain,
    present,
    shown_messages,
    text_of,
    unread,
)
from mlxrunner.serve.apis.openai.options import (
    Sampled,
    checked_effort,
    choice_of,
    options_of,
    with_seed,
)
from mlxrunner.serve.asked import Asked, Client
from mlxrunner.serve.events import RefusedError
from mlxrunner.templates.parts import Parts, item_text, parts_of


class Function(Body):
    """A function: what it is called, and with what."""

    name: HistoryText = None
    arguments: Any = None
    """The JSON text of an object. Another value, of an answer that was cut off, is taken, too."""


class ToolCall(Body):
    """A call in an earlier answer. One of a type that is not known becomes a text."""

    id: HistoryText = None
    type: HistoryText = None
    function: Function | None = None


class ChatMessage(Body):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function", "thinking"]
    """"function" is the older name of "tool"; the content of "thinking" is that of the answer
    behind it.
    """
    content: SentContent = None
    tool_calls: Annotated[list[ToolCall] | None, BeforeValidator(present)] = None
    tool_call_id: HistoryText = None
    function_call: Function | None = None
    """The older form of `tool_calls`."""
    name: HistoryText = None
    refusal: HistoryText = None
    reasoning_content: HistoryText = None
    reasoning: HistoryText = None


class Tool(Body):
    """A tool, of any type."""

    type: str = "function"
    function: dict[str, Any] | None = None


class ChatRequest(Sampled):
    """The body of a request for a chat completion."""

    messages: Annotated[list[ChatMessage], BeforeValidator(present)] = Field(min_length=1)
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
    messages, replaced = shown_messages(_messages(body.messages))
    return [
        Asked(
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


def _messages(given: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages as `Asked` has them, with `Parts` as contents."""
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

    Raise RefusedError if there is none, and the message is the last.
    """
    given = message.tool_call_id
    if given is None and not waiting and number == count - 1:
        name = f"messages.{number}.tool_call_id"
        raise RefusedError(400, f"{name}: it has to be the id of a tool call", param=name)
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
        calls.append(ToolCall(id=f"call_{number}", function=message.function_call))
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
    if role == "tool" and message.name:
        found["name"] = message.name
    return found


def _call(call: ToolCall, where: str, content: Parts) -> dict[str, Any] | None:
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
