"""Check the options whose values are JSON: schemas, variables of the chat template, and tools.

Each is given as text or as an object, and kept as text. Each check raises OptionError, which shows
the value. Knows nothing about what a schema or a template means.
"""

from __future__ import annotations

import json
import re
from typing import Any

from mlxrunner.config.arguments import shown
from mlxrunner.errors import OptionError

RESERVED = tuple(
    "messages tools add_generation_prompt chat_template tokenize return_dict self".split()
)
"""Names that a variable of the chat template cannot have."""
MAX_SCHEMA = 2**17
"""Most characters of a JSON schema. Compiling a longer one takes too long."""
VARIABLES = 'a JSON object of variables, such as {"enable_thinking": false}'
TOOLS = 'a list of JSON objects, such as [{"type": "function", "function": {"name": "f"}}]'
SCHEMA = 'a JSON object, such as {"type": "object"}'


def json_text(name: str, value: Any, *kinds: type) -> Any:
    """Return a value of the types `kinds` as JSON text, and any other value as it is.

    The check of the option refuses other types. Raise OptionError if JSON cannot hold the value.
    """
    if not isinstance(value, kinds):
        return value
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(
            f"{name}: it can't be written as JSON: {error}, in {shown(value)}"
        ) from error


def parsed_json(text: str) -> Any:
    """Return the value of a JSON text. Raise ValueError, also for NaN and numbers beyond floats."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value


_SURROGATE = re.compile(
    r"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?P<rest>\\u[dD][c-fC-F][0-9a-fA-F]{2})?|[c-fC-F]..)"
)
"""Half of a character as an escape, or a whole one of two escapes."""


def with_whole_characters(text: str) -> str:
    """Return a JSON text with U+FFFD in place of each half of a character.

    Programs and models cut texts within an emoji, and no template can write what is left.
    """
    parts, at = list[str](), 0
    while found := _SURROGATE.search(text, at):
        before = text[at : found.start()]
        is_text = (len(before) - len(before.rstrip("\\"))) % 2  # the backslash itself is escaped
        at = found.start() + 2 if is_text else found.end()
        whole = text[found.start() : at] if is_text or found["rest"] else "\\ufffd"
        parts += [before, whole]
    return "".join([*parts, text[at:]])


def check_template(template: str | None) -> None:
    """Refuse anything but an object of variables that a chat template can have."""
    if template is None:
        return
    variables = _parsed("template", template, VARIABLES)
    if not isinstance(variables, dict):
        raise OptionError(f"template: it has to be {VARIABLES}, not {template.strip()[:40]}")
    for name in variables:
        if name in RESERVED:
            raise OptionError(
                f"template: {name!r} is not free for a variable; reserved are "
                f"{', '.join(sorted(RESERVED))}"
            )
        if not name.isidentifier():
            raise OptionError(
                f"template: {name!r:.60} is not a name; it has to be letters, digits and _"
            )


def check_tools(tools: str | None) -> None:
    """Refuse anything but a list of objects."""
    if tools is None:
        return
    tools_given = _parsed("tools", tools, TOOLS)
    if not isinstance(tools_given, list):
        raise OptionError(f"tools: it has to be {TOOLS}, not {tools.strip()[:40]}")
    for number, tool in enumerate(tools_given):
        if not isinstance(tool, dict) or not tool:
            raise OptionError(
                f"tools: number {number} has to be a JSON object, not {shown(tool)}; give {TOOLS}"
            )


def check_schema(schema: str | None) -> None:
    """Refuse anything but an object that is short enough to be compiled."""
    if schema is None:
        return
    if isinstance(schema, str) and len(schema) > MAX_SCHEMA:
        raise OptionError(
            f"schema: {len(schema)} characters are too many, it may have at most {MAX_SCHEMA}"
        )
    if not isinstance(_parsed("schema", schema, SCHEMA), dict):
        raise OptionError(f"schema: it has to be {SCHEMA}, not {schema.strip()[:40]}")


def _parsed(name: str, text: Any, kind: str) -> Any:
    if not isinstance(text, str):
        raise OptionError(f"{name}: it has to be {kind}, or its text, not {text!r:.80}")
    try:
        return parsed_json(text)
    except ValueError as error:
        raise OptionError(
            f"{name}: not valid JSON: {error}, in {text[:60]!r}; it has to be {kind}"
        ) from error
