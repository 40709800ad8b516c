"""Hold an answer to a call of a tool.

If the model writes calls as JSON, the prompt opens a call in the model's own form, and a schema
holds the answer to its JSON. In other forms the answer is the JSON alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxrunner.engine.constrain import check_form
from mlxrunner.errors import OptionError
from mlxrunner.options import GenerateOptions
from mlxrunner.serve.asked import ToolChoice
from mlxrunner.serve.events import RefusedError
from mlxrunner.serve.prompts.arguments import ANY, arguments_of, is_strict, name_of
from mlxrunner.serve.prompts.formats import HERMES, CallFormat, Tools
from mlxrunner.templates.thinking import THINKING_TAGS

CHANNEL = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"
"""The header of a call of gpt-oss."""


@dataclass(frozen=True)
class Forced:
    """A call that an answer is held to."""

    schema: str
    """The JSON schema of the answer."""
    opening: str
    """The text at the end of the prompt that begins the call."""
    closed: str
    """The part of `opening` that ends the thinking; empty if the prompt has opened none."""
    before: str
    """The text that a reader of `form` is given before the answer."""
    after: str
    """The text that it is given after the answer."""
    form: CallFormat
    is_own: bool
    """True if prompt and answer together are the model's own form of a call."""


def forced(choice: ToolChoice, tools: Tools, form: CallFormat, text: str) -> Forced | None:
    """Return the call that `choice` asks for, or None if it asks for none.

    `text`: the prompt. Raise RefusedError for a tool that is not there.
    """
    if choice.mode not in ("required", "named"):
        return None
    named = [tool for tool in tools if choice.mode == "required" or name_of(tool) == choice.name]
    if not named:
        what = "no tools are given" if not tools else f"no tool is called {choice.name!r:.80}"
        raise RefusedError(400, f"tool_choice: a call is required, and {what}", param="tool_choice")
    closed = closed_thinking(text)
    if form.kind == "channels" and len(named) == 1:
        header = (
            f"<|channel|>commentary to=functions.{name_of(named[0])} <|constrain|>json<|message|>"
        )
        schema = _checked([named[0]], lambda tools: arguments_of(tools[0]))
        return Forced(schema, header, "", header, "", form, True)
    is_own = form.opening is not None
    own = form if is_own else HERMES
    schema = _checked(named, lambda tools: _calls(tools, own.arguments))
    opening = own.opening or ""
    after = "\n" + own.end if own.end else ""
    whole = closed + (opening if is_own else "")
    return Forced(schema, whole, closed, opening, after, own, is_own)


def closed_thinking(text: str) -> str:
    """Return the text that ends the thinking that a prompt has opened, or nothing."""
    ends = text.rstrip()
    opened = (tags for tags in THINKING_TAGS if ends.endswith(tags.begin))
    return next((f"\n{tags.end}{tags.header}\n\n" for tags in opened), "")


def _checked(tools: Sequence[Mapping[str, Any]], schema_of: Any) -> str:
    """Return a schema of calls, with free arguments for tools that llguidance has no grammar for.

    Raise OptionError if a tool is `strict` and its schema can't be held to.
    """
    text = json.dumps(schema_of(tools))
    try:
        check_form(GenerateOptions(schema=text))
    except OptionError:
        if any(map(is_strict, tools)):
            raise
        free = [{"function": {"name": name_of(tool), "parameters": ANY}} for tool in tools]
        text = json.dumps(schema_of(free))
        check_form(GenerateOptions(schema=text))
    return text


def _calls(tools: Sequence[Mapping[str, Any]], arguments: str) -> dict[str, Any]:
    """Return the schema of a call of any of `tools`."""
    calls, definitions = [], {}
    for number, tool in enumerate(tools):
        schema = arguments_of(tool)
        for key in ("$defs", "definitions"):  # references begin at the root of the whole schema
            known = json.dumps(schema).replace(f'"#/{key}/', f'"#/$defs/{number}.{key}.')
            schema = json.loads(known)
            found = schema.pop(key, {})
            definitions.update({f"{number}.{key}.{name}": one for name, one in found.items()})
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name_of(tool)}, arguments: schema},
                "required": ["name", arguments],
                "additionalProperties": False,
            }
        )
    whole = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return whole | ({"$defs": definitions} if definitions else {})
