"""OpenAI's bodies, for batches and the server: fields of requests as ours, answers as theirs.

`translate` gives fields of OpenAI's and vLLM's APIs our names, `read_response` makes messages of
the Responses API's items. In the lines of a batch, conversations are in the line itself. What needs
a server that stores them (`previous_response_id`, `conversation`, stored prompts) is refused there.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxrunner.config.names import SAME, did_you_mean, nearest
from mlxrunner.config.option import as_whole, names, read_json, without_nulls
from mlxrunner.config.request_fields import is_neutral
from mlxrunner.errors import OptionError, PromptError
from mlxrunner.options import NO_STOP, GenerateOptions, RunnerSettings
from mlxrunner.templates.messages import (
    Parts,
    StandIn,
    item_text,
    parts_of,
    settled,
)

WHOLE = frozenset((*names(RunnerSettings), "parallel", "timeout", "retries", "resume"))
"""The names of options that are for the whole batch."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True,),
}
"""Fields that only the server supports, with the values that are accepted and change nothing."""
TURN = frozenset(("add_generation_prompt", "continue_final_message"))
"""The fields that tell if an answer continues the last message."""
READ = frozenset((
    "documents", "ignore_eos", "logprobs", "reasoning_effort", "response_format",
    "structured_outputs", "template", "tools", "top_logprobs", *TURN, *NEUTRAL,
))  # fmt: skip  # one name a line would be nine lines
"""The fields of other programs that `translate` reads, beside those that only have other names."""
ANY_OBJECT = '{"type": "object"}'
"""The JSON schema for the `response_format` `json_object`."""
IMPOSSIBLE = -9999.0
"""The log-probability of an impossible token, as OpenAI's API writes it: JSON has no infinity."""


def translate(
    given: Mapping[str, Any], defaults: Mapping[str, Any], *, counts_logprobs: bool
) -> dict[str, Any]:
    """Return the fields of a line under our names. `response_format` stays for `checked_options`.

    `defaults` are the options of the batch. `counts_logprobs` says that `logprobs` may be a number,
    as everywhere but in OpenAI's chats. Raise OptionError for a value that is not supported. Fields
    that are not known stay as they are.
    """
    fields = read_json(GenerateOptions, _renamed(given))
    _translate_ends(fields)
    _translate_logprobs(fields, counts_logprobs)
    _translate_turn(fields)
    _translate_form(fields)
    _translate_variables(fields, defaults)
    _translate_tools(fields, defaults)
    for name, accepted in NEUTRAL.items():
        if name in fields and not is_neutral(fields.pop(name), accepted):
            least = json.dumps(accepted[0] if accepted else False)
            raise OptionError(f"{name}: {given[name]!r:.80} is not supported, only {least}")
    return fields


def unknown(name: str, known: frozenset[str]) -> OptionError:
    """Return the error for a field that is not known, with the nearest name that is."""
    likely = did_you_mean(name, known)
    whole = nearest(name, WHOLE)
    if not likely and whole is not None:
        flag = whole.replace("_", "-")
        return OptionError(f"{name!r:.80} is not for one line: --{flag} is for the whole batch")
    return OptionError(f"unknown field {name!r:.80}: {likely}known are {', '.join(sorted(known))}")


def _renamed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with our names for those that mean the same."""
    fields: dict[str, Any] = {}
    for name, value in given.items():
        ours = SAME.get(name, name)
        if ours in fields or (ours != name and ours in given):
            first = ours if ours in given else next(n for n in given if SAME.get(n) == ours)
            raise OptionError(f"{first} and {name} say the same thing: give one of them")
        fields[ours] = value
    return fields


def _translate_ends(fields: dict[str, Any]) -> None:
    """Replace `ignore_eos: true` by no stop tokens, not even the model's own."""
    if (ignored := fields.pop("ignore_eos", False)) is False:
        return
    if ignored is not True:
        raise OptionError(f"ignore_eos: {ignored!r:.80} is neither true nor false")
    if NO_STOP.keys() & fields.keys():
        raise OptionError("ignore_eos and stop_tokens say which tokens end: give one of them")
    fields.update(NO_STOP)


def _translate_logprobs(fields: dict[str, Any], counts: bool) -> None:
    """Replace the `logprobs: true, top_logprobs: k` of a chat by `logprobs: k`."""
    wanted = fields.get("logprobs", False)
    if counts and not isinstance(wanted, bool) and "top_logprobs" not in fields:
        return
    wanted, top = fields.pop("logprobs", False), fields.pop("top_logprobs", None)
    if not isinstance(wanted, bool):
        raise OptionError(f"logprobs: {wanted!r:.80} is neither true nor false")
    if top and not wanted:
        raise OptionError("top_logprobs needs logprobs to be true")
    if wanted:
        fields["logprobs"] = 0 if top is None else as_whole(top)


def _translate_turn(fields: dict[str, Any]) -> None:
    """Replace `add_generation_prompt` by `continue_final_message`, its opposite."""
    begins, goes_on = (
        fields.pop("add_generation_prompt", None),
        fields.get("continue_final_message"),
    )
    for name, value in (("add_generation_prompt", begins), ("continue_final_message", goes_on)):
        if value is not None and not isinstance(value, bool):
            raise OptionError(f"{name}: {value!r:.80} is neither true nor false")
    if begins is not None and begins is goes_on:
        raise OptionError(
            "add_generation_prompt and continue_final_message are opposites: an answer begins a "
            f"new message or continues the last one; both are {json.dumps(begins)}"
        )
    if begins is not None:
        fields["continue_final_message"] = not begins


def _translate_form(fields: dict[str, Any]) -> None:
    """Replace vLLM's `structured_outputs` by `schema` or `choices`."""
    asked = fields.pop("structured_outputs", None)
    if asked is None:
        return
    if not isinstance(asked, dict):
        raise OptionError(f"structured_outputs: {asked!r:.80} is not an object")
    given = {name: value for name, value in asked.items() if value not in (None, "", False)}
    if not given:
        return  # as vLLM's client writes an object of which nothing is set
    match given:
        case {"json": schema, **rest} if not rest:
            found = {"schema": schema}
        case {"choice": choices, **rest} if not rest:
            found = {"choices": choices}
        case {"json_object": True, **rest} if not rest:
            found = {"response_format": {"type": "json_object"}}
        case other:
            raise OptionError(
                f"structured_outputs: {other!r:.80} is not supported, only json, json_object or "
                "choice"
            )
    for name in ("schema", "choices", "response_format"):
        if name in fields:
            raise OptionError(f"{name} and structured_outputs say the same thing: give one of them")
    fields |= found


def _translate_variables(fields: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    """Make variables of the chat template of `reasoning_effort` and `documents`.

    The effort "none" also sets `enable_thinking` to false, unless the line says otherwise.
    """
    own: dict[str, Any] = {
        name: fields.pop(name) for name in ("reasoning_effort", "documents") if name in fields
    }
    if not own:
        return
    effort = own.get("reasoning_effort")
    if effort is not None and effort not in EFFORTS:
        known = ", ".join(EFFORTS)
        raise OptionError(f"reasoning_effort: {effort!r:.80} is not known: it is one of {known}")
    template = fields.get("template", defaults.get("template"))
    if isinstance(template, str):
        template = json.loads(template)
    if not isinstance(template, dict | None):
        return  # the check of the option refuses it
    for name in own:
        if "template" in fields and name in (template or {}):
            raise OptionError(f"{name} is in template, too: give it once")
    if effort == "none":
        own = {"enable_thinking": False, **(template or {}), **own}
    fields["template"] = {**(template or {}), **own}


def _translate_tools(fields: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    """Leave the tools out where the model must not use any, because `tool_choice` is "none"."""
    if fields.get("tool_choice") == "none":
        fields["tools"] = []
    if isinstance(fields.get("tools"), list):
        fields["tools"] = list(map(_plain_tool, fields["tools"]))
    if fields.get("tools") == [] and not defaults.get("tools"):
        del fields["tools"]
    if not fields.get("tools"):
        fields.pop("parallel_tool_calls", None)


def _plain_tool(tool: Any) -> Any:
    if not isinstance(tool, dict):
        return tool
    plain = without_nulls(tool)
    if isinstance(plain.get("function"), dict):
        plain["function"] = without_nulls(plain["function"])
    return plain


def check_functions(tools: Any) -> None:
    """Raise OptionError if one of the tools of a chat is not a function."""
    for number, tool in enumerate(tools if isinstance(tools, list) else ()):
        match tool:
            case {"type": "function", "function": {"name": str()}}:
                continue
        raise OptionError(
            f'tools: number {number} has to be {{"type": "function", "function": '
            f'{{"name": text, ...}}}}, not {tool!r:.80}'
        )


def form_of(
    options: Mapping[str, Any], response_format: Any, defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options that say which form an answer must have.

    `schema` becomes the text of a JSON schema. Raise OptionError if the form is given twice or is
    not known.
    """
    if response_format is None:
        schema = options.get("schema")
        return {"schema": _schema_text(schema)} if schema is not None else {}
    if "schema" in options:
        raise OptionError("schema and response_format say the same thing: give one of them")
    match response_format:
        case {"type": "text"}:
            return {name: None for name in ("schema", "choices") if defaults.get(name)}
        case {"type": "json_object"}:
            return {"schema": ANY_OBJECT}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return {"schema": _schema_text(schema)}
        case {"type": "json_schema"}:
            raise OptionError(
                "response_format: json_schema has no schema, which has to be an object"
            )
    raise OptionError(
        f"response_format: {response_format!r:.80} is not known; its type has to be text, "
        "json_object or json_schema"
    )


def _schema_text(schema: Any) -> str:
    if isinstance(schema, str):
        return schema
    if not isinstance(schema, dict):
        raise OptionError(f"schema has to be a JSON schema (an object), not {kind(schema)}")
    return json.dumps(schema)


def kind(value: Any) -> str:
    """Return the kind of a JSON value, in words for an error."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "true or false",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), "null")


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
_BYTES = re.compile(r"bytes:((?:\\x[0-9a-f]{2})+)")
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
        """Add a call of a tool that is not a function, such as Codex's apply_patch."""
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


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of an answer with its log-probabilities."""

    text: str
    """Its text, or its bytes if they are part of a character: see `token_text`."""
    token: int
    logprob: float
    top: tuple[tuple[str, int, float], ...] = ()
    """The likeliest tokens: text, id, log-probability."""


def token_text(content: bytes) -> str:
    """Return a token as OpenAI's API writes it: its text, or its bytes if they are not a text."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can write."""
    return max(logprob, IMPOSSIBLE)


def chat_logprobs(tokens: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """Return the log-probabilities of tokens as chats and responses have them."""
    return [
        {
            **_logprob(token.text, token.logprob),
            "top_logprobs": [_logprob(text, logprob) for text, _, logprob in token.top],
        }
        for token in tokens
    ]


def _logprob(text: str, logprob: float) -> dict[str, Any]:
    found = _BYTES.fullmatch(text)
    content = bytes.fromhex(found[1].replace("\\x", "")) if found else text.encode()
    return {"token": text, "logprob": finite(logprob), "bytes": list(content)}


def text_logprobs(tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
    """Return the log-probabilities of tokens as completions have them, but for `text_offset`."""
    tokens, tops = list(tokens), list[dict[str, float]]()
    for token in tokens:
        by_text: dict[str, float] = {}
        for text, _, logprob in token.top:
            # Of tokens that are spelled alike, the first counts, which is the likeliest.
            by_text.setdefault(text, finite(logprob))
        tops.append(by_text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [finite(token.logprob) for token in tokens],
        "top_logprobs": tops,
    }


def completion_usage(prompt: int, cached: int, answer: int) -> dict[str, Any]:
    """Return the usage of chat completions and completions, in tokens."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def error_object(
    message: str, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return the object that describes an error of type `kind`."""
    return {"message": message, "type": kind, "param": param, "code": code}
