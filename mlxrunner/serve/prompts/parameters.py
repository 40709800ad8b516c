"""Calls whose arguments are texts between tags, as Qwen3-Coder writes them.

A text has no quotes, any other value is JSON; so the type of a value is known from the schema only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mlxrunner.engine.constrain import JSON_STYLE, literal
from mlxrunner.serve.events import RefusedError
from mlxrunner.serve.prompts.arguments import arguments_of, is_strict, name_of

NAME = "qwen3_coder"
"""The name of mlx-lm's parser of this form."""
NULL = {"type": "null"}
END = "\n</parameter>"
_NAMED = re.compile(r"[^\s<>]+")
_FREE = r"& ~/(?s:.*<\/(parameter|tool_call)>.*)/ & ~/(?i:null)/"
"""The texts that a reader takes for the end of the value, or for no text."""
_UNHELD = {"string": ("pattern", "format"), "object": ("anyOf", "oneOf", "allOf", "not", "$ref")}
"""Keys of a text's schema, and of all arguments, that this form can't be held to."""
_FUNCTION = re.compile(r"\s*<function=([^\s<>]+)>")
_PARAMETER = re.compile(r"<parameter=([^\s<>]+)>\s*([{\[])?")
_BEHIND = re.compile(r"\s*</parameter>")
_TAG = "</parameter>"
_JSON = json.JSONDecoder(strict=False)
_DEFINITIONS = ("$defs", "definitions")
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array"}
MOST_STEPS = 8
"""Most references that lead from one to the next."""


def typed(parse: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    """Return mlx-lm's parser of the form, told the type of each parameter in a word.

    The parser ends each value at the first `</parameter>`; therefore it gets the JSON of objects
    and lists without brackets of tags.
    """

    def parsed(text: str, tools: Sequence[Mapping[str, Any]]) -> Any:
        described = list(map(_in_words, tools))
        return parse("".join(_without_tags(text, described)), described)

    return parsed


def is_in_value(text: str, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if the beginning of a call ends within a text of a JSON value."""
    return any(one.end is None for one in _json_values(text, list(map(_in_words, tools))))


def is_in_string(text: str) -> bool:
    """Return True if a JSON text ends within a string."""
    return re.sub(r"\\.", "", text, flags=re.DOTALL).count('"') % 2 == 1


class _Value(NamedTuple):
    """The place of a JSON object or list in a call."""

    begin: int
    end: int | None
    """None: the text ends within it."""


def _json_values(text: str, tools: Sequence[Mapping[str, Any]]) -> Iterator[_Value]:
    """Yield the objects and lists among the parameters of a call that are read to their end."""
    called = _FUNCTION.match(text)
    name = called[1] if called else ""
    known: Mapping[str, Any] = next(
        (one["function"]["parameters"]["properties"] for one in tools if name_of(one) == name), {}
    )
    at = called.end() if called else len(text)
    while found := _PARAMETER.search(text, at):
        at = found.end()
        schema = known.get(found[1])
        kind = type_of(schema) if schema and isinstance(schema, Mapping) else "string"
        if not found[2] or kind not in (None, "object", "array"):
            at = max(text.find(_TAG, at), at)
            continue
        begin = at - 1
        try:
            at = _JSON.raw_decode(text, begin)[1]
        except (ValueError, RecursionError):
            if is_in_string(text[begin:]):
                yield _Value(begin, None)
                return
            continue
        if _BEHIND.match(text, at):
            yield _Value(begin, at)


def _without_tags(text: str, tools: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the parts of a call, with the `<` in its JSON values written as an escape."""
    at = 0
    for begin, end in _json_values(text, tools):
        if end is not None:
            yield text[at:begin] + text[begin:end].replace("<", "\\u003c")
            at = end
    yield text[at:]


def _in_words(tool: Mapping[str, Any]) -> dict[str, Any]:
    schema = arguments_of(tool)
    found = schema.get("properties")
    properties = dict(found) if isinstance(found, Mapping) else {}
    for name, one in properties.items():
        kind = type_of(value_of(one, schema))
        properties[name] = one if kind is None else {"type": kind}
    return {"function": {"name": name_of(tool), "parameters": {"properties": properties}}}


def value_of(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of a value, without references and without null."""
    for _ in range(MOST_STEPS):
        if not isinstance(schema, Mapping):
            return {}
        options = [one for one in schema.get("anyOf", schema.get("oneOf", ())) if one != NULL]
        if len(options) == 1:
            schema = options[0]
        elif isinstance(schema.get("$ref"), str):
            schema = _found(schema["$ref"], root)
        else:
            break
    types = schema.get("type")
    left = [one for one in types if one != "null"] if isinstance(types, list) else []
    return {**schema, "type": left[0]} if len(left) == 1 else schema


def _found(reference: str, root: Any) -> Any:
    """Return the schema that a reference names; None if it names none."""
    for part in reference.removeprefix("#").strip("/").split("/"):
        root = root.get(part) if isinstance(root, Mapping) else None
    return root


def type_of(schema: Mapping[str, Any]) -> str | None:
    """Return the type of all values of a schema, or None if it is not known."""
    kind = schema.get("type")
    if isinstance(kind, str):
        return kind
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    types = {_TYPES.get(type(value)) for value in values}
    return types.pop() if len(types) == 1 else None


def rules_of(tool: Mapping[str, Any], number: int) -> Iterator[tuple[str, str]]:
    """Yield the rules of a tool's arguments in llguidance's Lark: names and texts.

    The first is `arguments_{number}`. Raise RefusedError if the schema can't be held to.
    """
    root = arguments_of(tool) if is_strict(tool) else {}
    properties: Mapping[str, Any] = root.get("properties") or {}
    if any(key in root for key in _UNHELD["object"]):
        raise _refused(tool, "its properties have to stand in one list")
    if not properties:
        yield f"arguments_{number}", r"(/<parameter=[^\s<>]+>\n/ any_text)*"
        return
    required, parts = root.get("required", ()), []
    for place, (name, schema) in enumerate(properties.items()):
        _check_name(tool, name)
        rule = f"value_{number}_{place}"
        mark = "" if name in required else "?"
        parts.append(f"(/{literal(f'<parameter={name}>')}\\n/ {rule}){mark}")
        yield from _value(tool, rule, name, schema, root)
    yield f"arguments_{number}", " ".join(parts)


def _value(
    tool: Mapping[str, Any], rule: str, name: str, schema: Any, root: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield the rules of a value, with the tag behind it."""
    inner = value_of(schema, root)
    kind, end = type_of(inner), f"/{literal(END)}\\n/"
    if kind is None or kind == "null":
        raise _refused(tool, f"{name!r:.60} has to have one type, and may be null beside it")
    if kind != "string":
        more = {key: root[key] for key in _DEFINITIONS if key in root}
        written = json.dumps({**schema, **more, "x-guidance": JSON_STYLE})
        yield rule, f"{rule}_json {end}"
        yield f"{rule}_json", f"%json {written}"
        return
    values = inner.get("enum", [inner["const"]] if "const" in inner else None)
    if schema is not inner and _may_be_null(schema):
        yield rule, rf"/null{literal(END)}/ /\n/"
    if values is not None:
        yield rule, f"/{'|'.join(literal(_spelled(tool, one)) for one in values)}/ {end}"
        return
    if odd := next((key for key in _UNHELD["string"] if key in inner), None):
        raise _refused(tool, f"{name!r:.60} is a text, which can't be held to {odd!r}")
    least, most = inner.get("minLength", 0), inner.get("maxLength", "")
    yield rule, rf"{rule}_text /\n/"
    yield f'{rule}_text[suffix="\\n</parameter>"]', f"{rule.upper()}"
    yield rule.upper(), f"/(?s:.{{{least},{most}}})/ {_FREE}"


def _may_be_null(schema: Mapping[str, Any]) -> bool:
    options = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    types = schema.get("type")
    return NULL in options or (isinstance(types, list) and "null" in types)


def _spelled(tool: Mapping[str, Any], value: str) -> str:
    if "</parameter>" in value or "</tool_call>" in value or value.lower() == "null":
        raise _refused(tool, f"{value!r:.60} can't be written as a text")
    return value


def _check_name(tool: Mapping[str, Any], name: str) -> None:
    if not _NAMED.fullmatch(name):
        raise _refused(tool, f"the name {name!r:.60} has white space or brackets")


def _refused(tool: Mapping[str, Any], why: str) -> RefusedError:
    message = (
        f"tools: {name_of(tool)!r:.80} is strict, and its arguments can't be held to its schema in "
        f"this model's form of calls: {why}: change it, or leave out strict"
    )
    return RefusedError(400, message, param="tools")


ANY_TEXT: Sequence[tuple[str, str]] = (
    ("any_text", r"free_text /\n/"),
    ('free_text[suffix="\\n</parameter>"]', "FREE"),
    ("FREE", f"/(?s:.*)/ {_FREE}"),
)
"""The rules of any value."""
