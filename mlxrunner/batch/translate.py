"""Translate the fields that OpenAI's and vLLM's APIs have into ours.

A field that means the same gets our name, one that asks for nothing is left out, and any other is
refused by name. Lines of this project and the bodies of OpenAI's batch files go through it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mlxrunner.config.arguments import as_whole, without_nulls
from mlxrunner.config.names import SAME, did_you_mean, nearest
from mlxrunner.config.option import names, read_json
from mlxrunner.config.request_fields import is_neutral
from mlxrunner.errors import OptionError
from mlxrunner.options import NO_STOP, GenerateOptions, RunnerSettings

WHOLE = frozenset((*names(RunnerSettings), "parallel", "timeout", "retries", "resume"))
"""The names of options that are for the whole batch."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""The values of `reasoning_effort`."""
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
    """Return a tool without the fields that are null."""
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
