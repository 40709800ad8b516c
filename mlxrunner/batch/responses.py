"""OpenAI's Responses API: its requests as ours, our answers as its own.

In the lines of a batch, conversations are in the line itself. What needs a server that keeps them
(`previous_response_id`, `conversation`, stored prompts) is refused by name, as are its own tools.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from mlxrunner.config.arguments import without_nulls
from mlxrunner.errors import OptionError, PromptError
from mlxrunner.options import GenerateOptions
from mlxrunner.templates.parts import (
    Parts,
    StandIn,
    item_text,
    parts_of,
    settled,
)

LOGPROBS = "message.output_text.logprobs"
"""The member of `include` that asks for log-probabilities."""
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")
"""The members of `include` that are accepted. The second one has nothing to include here."""
RESPONSE_FIELDS = frozenset(("input", "instructions", "text", "reasoning", "include"))
"""The fields of a request that a chat does not have."""
_NAMED_CALLS = {
    "custom_tool_call": "input",
    "local_shell_call": "action",
    "shell_call": "action",
    "apply_patch_call": "operation",
    "computer_call": "action",
}
"""Calls that a client answers itself, by their types, with the field of their arguments."""
_OUTPUTS = ("function_call_output", *(f"{name}_output" for name in _NAMED_CALLS))
_ONLY_MESSAGES = (
    "{!r:.80} is not supported; an item is a message with role and content, a function_call or a "
    "function_call_output"
)


def read_response(
    body: Mapping[str, Any], *, is_served: bool = False
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the messages of a request and its other fields, as a chat has them.

    With `is_served`, messages of the assistant have the `reasoning_content` that came before them,
    and contents are `Parts`, with a stand-in for each item and part that is not supported.
    Otherwise these raise PromptError. Raise OptionError for a field that is not supported.
    """
    fields = dict(body)
    messages = _messages(fields.pop("input", None), is_served)
    instructions = fields.pop("instructions", None)
    if instructions is not None:
        if not isinstance(instructions, str):
            raise PromptError("instructions has to be a text")
        messages.insert(0, {"role": "system", "content": instructions})
    _translate_text(fields)
    _translate_reasoning(fields)
    _translate_include(fields)
    if isinstance(fields.get("tools"), list):
        fields["tools"] = [_tool(number, tool) for number, tool in enumerate(fields["tools"])]
    return messages, fields


def _messages(given: Any, is_served: bool) -> list[dict[str, Any]]:
    """Return the input as messages: a text, or a list of items."""
    if isinstance(given, str) and given:
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise PromptError("input has to be a text or a list of at least one item")
    reader = _ItemReader(is_served)
    for number, item in enumerate(given):
        reader.add(number, without_nulls(item) if isinstance(item, dict) else item)
    if is_served:
        return reader.messages
    for part in (part for one in reader.messages for part in one["content"]):
        if isinstance(part, StandIn):
            raise PromptError(part.error)
    return settled(reader.messages)[0]


class _ItemReader:
    """Makes messages of the items of an input, with `Parts` as their contents."""

    def __init__(self, is_served: bool) -> None:
        self.messages: list[dict[str, Any]] = []
        self._is_served = is_served
        self._names: dict[str, str] = {}
        """The functions of the calls so far."""
        self._thought = ""
        """The thinking that belongs to the next message of the assistant."""

    def add(self, number: int, item: Any) -> None:
        """Add item `number` of the input: as a message, or with a text in its place."""
        match item:
            case {"type": "function_call", "call_id": str(call), "name": str(name), **rest}:
                self._add_call(call, name, rest.get("arguments", "{}"))
            case {"type": kind} if kind in _NAMED_CALLS:
                self._add_named(number, item)
            case {"type": kind} if kind in _OUTPUTS:
                self._add_output(number, item)
            case {"type": "reasoning"}:
                if self._is_served:
                    self._thought += thinking_of(item)
            case {"role": "thinking", "content": thought}:
                self._thought += thought if isinstance(thought, str) else ""
            case {"role": role, **rest} if rest.get("type") in (None, "message"):
                self._add_message(role, _content(number, rest.get("content")))
            case _:
                why = _ONLY_MESSAGES.format(item)
                self._add_message("assistant", Parts([item_text(f"input {number}", item, why)]))

    def _add_message(self, role: Any, content: Parts) -> None:
        message = {"role": role, "content": content}
        if role == "assistant" and self._thought:
            message["reasoning_content"] = self._thought
        self._thought = ""
        self.messages.append(message)

    def _add_call(self, call: str, name: str, arguments: Any) -> None:
        """Add a call to the message of the assistant before it, or to a new one."""
        self._names[call] = name
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self._add_message("assistant", Parts())
        elif self._thought:
            last = self.messages[-1]
            last["reasoning_content"] = last.get("reasoning_content", "") + self._thought
            self._thought = ""
        self.messages[-1].setdefault("tool_calls", []).append(
            {"type": "function", "id": call, "function": {"name": name, "arguments": arguments}}
        )

    def _add_named(self, number: int, item: Mapping[str, Any]) -> None:
        """Add a call of a tool that is no function, such as Codex's apply_patch."""
        kind, call = item["type"], _id_of(item)
        if not call or not self._is_served:
            why = _ONLY_MESSAGES.format(item)
            self._add_message("assistant", Parts([item_text(f"input {number}", item, why)]))
            return
        field = _NAMED_CALLS[kind]
        given, name = item.get(field), item.get("name")
        arguments = given if isinstance(given, Mapping) else {field: given}
        self._add_call(call, name if isinstance(name, str) else kind[: -len("_call")], arguments)

    def _add_output(self, number: int, item: Mapping[str, Any]) -> None:
        call = _id_of(item)
        if call not in self._names and not self._is_served:
            why = f"there is no function_call with the call_id {call!r:.80} before it"
            raise PromptError(f"input {number}: {why}")
        content = _content(number, item.get("output"))
        message = {"role": "tool", "tool_call_id": call, "content": content}
        if call in self._names:
            message["name"] = self._names[call]
        self.messages.append(message)


def _id_of(item: Mapping[str, Any]) -> str:
    """Return the id of a call. Outputs of `local_shell_call` have it in `id`."""
    found = item.get("call_id") or item.get("id")
    return found if isinstance(found, str) else ""


SEALED = "mlxrunner:"
"""The beginning of an `encrypted_content` of ours."""


def sealed(thought: str) -> str:
    """Return the `encrypted_content` of a thought, for clients that give back nothing else."""
    return SEALED + base64.b64encode(thought.encode()).decode("ascii")


def thinking_of(item: Mapping[str, Any]) -> str:
    """Return the thinking in a reasoning item; empty if only another server could read it."""
    content = item.get("content")
    texts = [
        part["text"]
        for part in (content if isinstance(content, list) else ())
        if isinstance(part, dict) and isinstance(part.get("text"), str)
    ]
    code = item.get("encrypted_content")
    if texts or not isinstance(code, str) or not code.startswith(SEALED):
        return "".join(texts)
    try:
        return base64.b64decode(code.removeprefix(SEALED), validate=True).decode()
    except ValueError:
        return ""


def _content(number: int, content: Any) -> Parts:
    """Return the texts and pictures of an item, with a stand-in for each part that is neither."""
    found = Parts()
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type", part) if isinstance(part, Mapping) else part
        why = (
            f"content of type {kind!r:.80} is not supported, only text and pictures with an "
            "image_url"
        )
        found += [
            one._replace(where=f"input {number}", why=why) if isinstance(one, StandIn) else one
            for one in parts_of("", part)
        ]
    return found


def _translate_text(fields: dict[str, Any]) -> None:
    """Replace `text` by the `response_format` in it. Its `verbosity` is a wish."""
    text = fields.pop("text", None)
    if text is None:
        return
    if not isinstance(text, dict):
        raise OptionError(f"text: {text!r:.80} is not an object")
    text = without_nulls(text)
    if not text.keys() <= {"format", "verbosity"}:
        raise OptionError(f"text: {text!r:.80} is not supported, only format in it")
    match text.get("format"):
        case None:
            return
        case {"type": "json_schema", "schema": dict(schema)}:
            form: Any = {"type": "json_schema", "json_schema": {"schema": schema}}
        case {"type": "json_schema"}:
            raise OptionError("text.format: json_schema has no schema, which has to be an object")
        case other:
            form = other
    fields["response_format"] = form


def _translate_reasoning(fields: dict[str, Any]) -> None:
    """Replace `reasoning` by the `reasoning_effort` in it."""
    reasoning = fields.pop("reasoning", None)
    if reasoning is None:
        return
    if not isinstance(reasoning, dict):
        raise OptionError(f"reasoning: {reasoning!r:.80} is not an object")
    for name, value in reasoning.items():
        if name == "effort":
            if value is not None:
                fields["reasoning_effort"] = value
        elif value not in (None, "auto"):
            raise OptionError(f"reasoning: {name} {value!r:.80} is not supported, only effort")


def _translate_include(fields: dict[str, Any]) -> None:
    """Replace `include` by `logprobs` if it asks for them."""
    included = fields.pop("include", None) or []
    if not isinstance(included, list):
        raise OptionError(f"include: {included!r:.80} is not a list")
    wrong = next((one for one in included if one not in INCLUDED), None)
    if wrong is not None:
        raise OptionError(f"include: {wrong!r:.80} is not supported, only {LOGPROBS!r}")
    if LOGPROBS in included:
        fields["logprobs"] = True
    else:
        fields.pop("top_logprobs", None)  # as the API does


def _tool(number: int, tool: Any) -> dict[str, Any]:
    """Return a tool as a chat has it, where the function is an object of its own."""
    match tool:
        case {"type": "function", "name": str(), **_rest}:
            function = without_nulls({name: tool[name] for name in tool if name != "type"})
            return {"type": "function", "function": function}
    raise OptionError(
        f'tools: number {number} has to be {{"type": "function", "name": text, ...}}, not '
        f"{tool!r:.80}"
    )


def response_body(
    index: int,
    options: Mapping[str, Any],
    text: str,
    *,
    is_cut: bool,
    logprobs: Sequence[Any] | None,
    created: int,
    model: str,
) -> dict[str, Any]:
    """Return OpenAI's Response object for the answer of line `index`, but for its usage.

    `options` are those of the line. `is_cut` says that a limit ended the answer, and `logprobs` are
    those of a chat.
    """
    variables = GenerateOptions.of(**options).variables
    status = "incomplete" if is_cut else "completed"
    message = message_item(f"msg_{index}", text, status=status, logprobs=logprobs)
    return response_object(
        f"resp_{index}",
        status,
        created=created,
        model=model,
        output=[message],
        options=options,
        effort=variables.get("reasoning_effort"),
        tools=[{"type": "function", **tool["function"]} for tool in variables.get("tools", ())],
    )


def message_item(
    name: str, text: str, *, status: str, logprobs: Sequence[Any] | None = None
) -> dict[str, Any]:
    """Return the item of a message with the id `name`."""
    content = {"type": "output_text", "text": text, "annotations": []}
    if logprobs is not None:
        content["logprobs"] = list(logprobs)
    head = {"id": name, "type": "message", "role": "assistant", "status": status}
    return {**head, "content": [content]}


def response_object(
    name: str,
    status: str,
    *,
    created: int,
    model: str,
    output: list[dict[str, Any]],
    options: Mapping[str, Any],
    effort: Any,
    tools: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return a Response object with the id `name`, but for its usage."""
    is_cut = status == "incomplete"
    return {
        "id": name,
        "object": "response",
        "created_at": created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "model": model,
        "output": output,
        "max_output_tokens": options.get("max_tokens"),
        "temperature": options.get("temperature"),
        "top_p": options.get("top_p"),
        "reasoning": {"effort": effort, "summary": None},
        "tools": tools,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "truncation": "disabled",
    }


def response_usage(prompt: int, cached: int, answer: int, thinking: int = 0) -> dict[str, Any]:
    """Return the usage of a Response object.

    `thinking` are the tokens of the answer that are not part of its text.
    """
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": answer,
        "output_tokens_details": {"reasoning_tokens": thinking},
        "total_tokens": prompt + answer,
    }
