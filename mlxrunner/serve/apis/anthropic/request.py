"""The body of a request for a message, and the `Asked` that it means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mlxrunner.serve.apis.fields import Body, SentContent, plain, present, shown_messages, unread
from mlxrunner.serve.apis.openai.options import options_of
from mlxrunner.serve.asked import Asked, Client, ToolChoice
from mlxrunner.serve.events import RefusedError
from mlxrunner.serve.shapes import THREAD_NOT_FOUND
from mlxrunner.templates.parts import Parts, item_text, parts_of

BETWEEN = "\n"
"""The text between the blocks of a system prompt, of a user's message, of a result."""


class Tool(Body):
    """A tool: the client's own, or one of Anthropic's, which `type` names."""

    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class Choice(Body):
    """The use of tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Body):
    """The use of thinking. A budget of tokens is a wish, which is not enforced."""

    type: Literal["enabled", "adaptive", "disabled"]


class Form(Body):
    """The form of the answer."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class Output(Body):
    """Wishes about the answer."""

    effort: str | None = None
    format: Form | None = None


class Metadata(Body):
    """The client's own data about the request."""

    user_id: str | None = None


class Message(Body):
    """A message of the conversation. Messages of the system may stand anywhere."""

    role: Literal["user", "assistant", "system"]
    content: SentContent = None


class CountRequest(Body):
    """The body of a request for the number of tokens of a prompt."""

    model: str = ""
    messages: Annotated[list[Message], BeforeValidator(present)] = Field(min_length=1)
    system: SentContent = None
    tools: list[Tool] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: Output | None = None


class MessageRequest(CountRequest):
    """The body of a request for a message."""

    max_tokens: int | None = Field(default=None, ge=1)
    stream: bool = False
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    stop_sequences: list[str] | None = None
    metadata: Metadata | None = None
    output_format: Form | None = None


def read(body: CountRequest, client: Client, request_id: str) -> Asked:
    """Return what a body asks for. Raise RefusedError for what is not supported."""
    more, variables = options_of(body.model_extra or {})
    _refuse_thread(body)
    tools = [_tool(number, tool) for number, tool in enumerate(body.tools or ()) if is_own(tool)]
    choice = body.tool_choice
    output = body.output_config or Output()
    messages, replaced = shown_messages(list(_messages(body)))
    is_new = more.get("continue_final_message") is False
    if isinstance(body, MessageRequest) and not is_new:
        _refuse_space(len(body.messages) - 1, messages[-1])
    return Asked(
        protocol="anthropic",
        model=body.model,
        messages=messages,
        replaced=replaced,
        tools=tools,
        tool_choice=_choice(choice, {tool["function"]["name"] for tool in tools}),
        parallel_calls=not (choice and choice.disable_parallel_tool_use),
        thinking=_thinking(body.thinking),
        effort=output.effort,
        options=more | _options(body, output) if isinstance(body, MessageRequest) else {},
        variables=variables,
        client=client,
        id=request_id,
    )


def _refuse_thread(body: CountRequest) -> None:
    """Raise RefusedError if a request goes on from an answer without the messages before it.

    Its client then sends the whole conversation.
    """
    match (body.model_extra or {}).get("thread"):
        case {"type": "continue", "previous_message_id": previous}:
            raise RefusedError(
                404,
                f"thread: {previous!r:.80} is not kept here, as no thread is: send the whole "
                'conversation, with {"type": "create"} or without a thread',
                code=THREAD_NOT_FOUND,
                param="thread",
            )


def _refuse_space(number: int, last: Mapping[str, Any]) -> None:
    """Raise RefusedError for words to be continued that end with white space, as Anthropic does.

    The next word brings its own space: behind another one the model would write something else.
    """
    content = last["content"]
    if not isinstance(content, str):
        content = content[-1].get("text", "")
    if last["role"] == "assistant" and not last.get("tool_calls") and content != content.rstrip():
        where = f"messages.{number}.content"
        raise RefusedError(
            400,
            f"{where}: final assistant content cannot end with trailing whitespace, and it ends "
            f"with {content[-12:]!r}: leave the white space at its end out",
            param=where,
        )


def is_own(tool: Tool) -> bool:
    """Return True if a tool is the client's own. Anthropic's have a type that bears a date."""
    return tool.type in (None, "custom")


def left_out(body: CountRequest) -> tuple[str, ...]:
    """Return the tools that the model is not told of, and the fields that are ignored."""
    tools = [f"tool {tool.type}" for tool in body.tools or () if not is_own(tool)]
    return (*tools, *unread(body.model_extra or {}))


def marks_cache(body: CountRequest) -> bool:
    """Return True if the body has a mark `cache_control` anywhere."""
    contents = [body.system, *(message.content for message in body.messages)]
    parts = (part for content in contents if isinstance(content, list) for part in content)
    marked = [one.model_extra or {} for one in (body, *(body.tools or ()))]
    marked += [part for part in parts if isinstance(part, dict)]
    return any(one.get("cache_control") for one in marked)


def _tool(number: int, tool: Tool) -> dict[str, Any]:
    """Return a tool in OpenAI's form. Its schema keeps the order of its keys."""
    if not tool.name:
        where = f"tools.{number}.name"
        raise RefusedError(400, f"{where}: a tool needs a name", param=where)
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema or {"type": "object", "properties": {}}
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _choice(choice: Choice | None, known: set[str]) -> ToolChoice:
    if choice is None or choice.type == "auto":
        return ToolChoice()
    if choice.type == "none":
        return ToolChoice("none")
    if not known:
        raise RefusedError(400, "tool_choice: there are no tools to choose", param="tool_choice")
    if choice.type == "any":
        return ToolChoice("required")
    if choice.name not in known:
        raise RefusedError(
            400,
            f"tool_choice.name: {choice.name!r:.80} is not among the tools",
            param="tool_choice.name",
        )
    return ToolChoice("named", choice.name)


def _thinking(thinking: Thinking | None) -> bool | None:
    """Return whether to think first. With "adaptive" the model decides."""
    known = {"enabled": True, "disabled": False}
    return None if thinking is None else known.get(thinking.type)


def _options(body: MessageRequest, output: Output) -> dict[str, Any]:
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


def _messages(body: CountRequest) -> Iterator[dict[str, Any]]:
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
            raise RefusedError(400, f"{name}: it has to be the id of a tool_use block", param=name)
        call = ""
    content = parts_of(f"{where}.content", block.get("content"), BETWEEN)
    if block.get("is_error") and not any(content):
        content = Parts(["error"])
    return {"role": "tool", "tool_call_id": call, "content": content}
