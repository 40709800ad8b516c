"""The formats in which models write tool calls, the parser of each, and schemas of arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from mlxrunner.engine.constrain import JSON_STYLE, literal
from mlxrunner.server.events import ApiError, field_error
from mlxrunner.system.mlx_lm_internals import tool_parser, tool_parser_name
from mlxrunner.tokenizer import Tokenizer

Tools = Sequence[Mapping[str, Any]]
Kind = Literal["tags", "bare", "open", "channels"]


class ParsedCall(NamedTuple):
    """A call of a tool, as a model wrote it."""

    name: str
    arguments: str
    """The JSON text of an object."""
    id: str | None = None
    """The id that the model gave it, if its form has ids."""

    @property
    def meaning(self) -> tuple[str, str, str | None]:
        """A value that is equal for calls that mean the same, however their JSON is written."""
        return self.name, json.dumps(json.loads(self.arguments), sort_keys=True), self.id


@dataclass(frozen=True)
class CallFormat:
    """A form in which a model writes tool calls."""

    name: str
    kind: Kind
    """"tags": between two tags; "open": after a tag, to the end of the answer; "bare": JSON that
    the answer begins with; "channels": messages to a tool, as of gpt-oss."""
    start: str = ""
    """The text before a call."""
    end: str = ""
    """The text after a call."""
    parse: Callable[[str, Tools], Any] = lambda text, tools: json.loads(text)
    """The function from the text between the tags to a call, or to a list of them."""
    is_in_value: Callable[[str, Tools], bool] = lambda text, tools: (
        text.lstrip()[:1] in ("{", "[") and is_in_string(text)
    )
    """The function that tells if the beginning of a call ends within a text of its arguments, so
    that the end tag after it belongs to that text."""
    opening: str | None = None
    """The text before a JSON object of a call; None if its calls are not such objects."""
    arguments: str = "arguments"
    """The name of the arguments in that object."""

    def calls(self, text: str, tools: Tools) -> list[ParsedCall]:
        """Return the calls in `text`. Raise ValueError, with the reason, if it has none."""
        try:
            found = self.parse(text, tools)
            return [_call(one) for one in (found if isinstance(found, list) else [found])]
        except ValueError:
            raise
        except Exception as error:  # mlx-lm's parsers raise anything for text that is not a call
            raise ValueError(f"{type(error).__name__}: {error}") from error


def _call(found: Any) -> ParsedCall:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str) or not found["name"]:
        raise ValueError("it has no name")
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}")
    if not isinstance(arguments, dict) or (found["name"] == "unknown" and "raw" in arguments):
        raise ValueError("its arguments are not an object")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    identity = found.get("id")
    return ParsedCall(found["name"], text, identity if isinstance(identity, str) else None)


_DEEPSEEK = re.compile(
    "<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?([^<\n]+?)(?:<｜tool▁sep｜>)?\\s*"
    "(?:```json\n)?({.*?})\\s*(?:```)?<｜tool▁call▁end｜>",
    re.DOTALL,
)


_DEEPSEEK_TAGS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")


def _parse_deepseek(text: str, tools: Tools) -> list[dict[str, Any]]:
    calls = [{"name": name, "arguments": json.loads(one)} for name, one in _DEEPSEEK.findall(text)]
    if not calls:
        raise ValueError("no call is in it")
    return calls


OWN = (
    CallFormat("channels", "channels", "<|channel|>", "<|message|>"),
    CallFormat("deepseek", "tags", *_DEEPSEEK_TAGS, _parse_deepseek),
    CallFormat("phi", "tags", "<|tool_call|>", "<|/tool_call|>"),
)
"""Formats that mlx-lm has no parser for; a template that names both tags uses them."""
BARE = CallFormat("bare_json", "bare", "<|python_tag|>", opening="", arguments="parameters")
HERMES = CallFormat("json_tools", "tags", "<tool_call>", "</tool_call>", opening="<tool_call>\n")


class _Vocabulary:
    """The tokens of a tokenizer, for questions with `in`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __contains__(self, text: str) -> bool:
        return len(self._tokenizer.encode_more(text)) == 1


def format_of(template: str, tokenizer: Tokenizer, parser: str | None = None) -> CallFormat:
    """Return the format of a model's tool calls.

    `parser`: the name of mlx-lm's parser, if the model's files name one. It counts if mlx-lm has
    it. A template that mlx-lm does not know is one of those in `OWN`, or has calls as JSON.
    """
    for name in (parser, tool_parser_name(template, _Vocabulary(tokenizer))):
        if name == HERMES.name:
            return HERMES
        if name is not None and (found := parsed_by_mlx_lm(name)) is not None:
            return found
    own = (one for one in OWN if one.start in template and one.end in template)
    return next(own, HERMES if "<tool_call>" in template or "tools" not in template else BARE)


def parsed_by_mlx_lm(name: str) -> CallFormat | None:
    """Return the format of mlx-lm's parser `name`; None if it has no such parser."""
    found = tool_parser(name)
    if found is None:
        return None
    parse, start, end = found
    form = CallFormat(name, "tags" if end else "open", start, end, parse)
    if name != NAME:
        return form
    return replace(form, parse=typed(parse), is_in_value=is_in_value)


ANY: dict[str, Any] = {"type": "object", "additionalProperties": True}
"""The schema of arguments that may be any object."""
NONE: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of the arguments of a tool that takes none."""
_SAYS_NOTHING = frozenset(("type", "title", "description", "$id", "$comment", "examples"))
"""Keys of a schema that say of an object neither what it has nor that it may have anything."""
ROOTS = frozenset(("type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"))
"""Keys of a schema that say by themselves that it is one of objects."""
_JOINED = frozenset(("$ref", "anyOf", "oneOf", "patternProperties", "unevaluatedProperties"))
"""Keys that may add to the properties beside them."""
_NAMED_SCHEMAS, _LISTED = ("properties", "$defs", "definitions"), ("prefixItems", "anyOf", "oneOf")


def name_of(tool: Mapping[str, Any]) -> str:
    """Return the name of a tool; empty if its description has none."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""


def arguments_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool's arguments; `NONE` if its description names none.

    Objects that list their properties have no others, unless the schema asks for them. A model that
    may write others does not always come to an end.
    """
    function = tool.get("function")
    schema = function.get("parameters") if isinstance(function, Mapping) else None
    if not isinstance(schema, Mapping):
        return NONE
    if schema == ANY:
        return {"type": "object"}
    lists = ("properties", "required")
    kept = {key: one for key, one in schema.items() if one is not None or key not in lists}
    kept.pop("$schema", None)
    said = {key for key, one in kept.items() if one or key not in lists}
    if said <= _SAYS_NOTHING and kept.get("type") in (None, "object"):
        return NONE
    kept = kept if kept.keys() & ROOTS else {"type": "object"} | kept
    return kept if any(map(_is_joined, _schemas(kept))) else _closed(kept)


def is_strict(tool: Mapping[str, Any]) -> bool:
    """Return True if the arguments of a tool have to fit its schema."""
    function = tool.get("function")
    return isinstance(function, Mapping) and bool(function.get("strict"))


def _is_joined(schema: Mapping[str, Any]) -> bool:
    """Return True if the properties of an object stand in several schemas."""
    return "allOf" in schema or ("properties" in schema and bool(schema.keys() & _JOINED))


def _schemas(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and all that are in it."""
    found: list[Any] = []
    _within(schema, found.append)
    yield schema
    for one in found:
        if isinstance(one, Mapping):
            yield from _schemas(one)


def _within(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a schema with the result of `change` for each one that stands directly in it."""
    changed = dict(schema)
    for key, value in schema.items():
        if key in _NAMED_SCHEMAS and isinstance(value, Mapping):
            changed[key] = {name: change(one) for name, one in value.items()}
        elif key in _LISTED and isinstance(value, list):
            changed[key] = [change(one) for one in value]
        elif key in ("items", "additionalProperties"):
            changed[key] = change(value)
    return changed


def _closed(schema: Any) -> Any:
    """Return a schema whose objects have only the properties that they list."""
    if not isinstance(schema, Mapping):
        return schema
    closed = _within(schema, _closed)
    if isinstance(schema.get("properties"), Mapping):
        closed.setdefault("additionalProperties", False)
    return closed


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
            path, schema = schema["$ref"].removeprefix("#").strip("/"), root
            for part in path.split("/"):
                schema = schema.get(part) if isinstance(schema, Mapping) else None
        else:
            break
    types = schema.get("type")
    left = [one for one in types if one != "null"] if isinstance(types, list) else []
    return {**schema, "type": left[0]} if len(left) == 1 else schema


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

    The first is `arguments_{number}`. Raise ApiError if the schema can't be held to.
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
        if not _NAMED.fullmatch(name):
            raise _refused(tool, f"the name {name!r:.60} has white space or brackets")
        rule = f"value_{number}_{place}"
        mark = "" if name in required else "?"
        parts.append(f"(/{literal(f'<parameter={name}>')}\\n/ {rule}){mark}")
        yield from _value(tool, rule, name, schema, root)
    yield f"arguments_{number}", " ".join(parts)


def _value(
    tool: Mapping[str, Any], rule: str, name: str, schema: Any, root: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield the rules of a value, with the tag after it."""
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


def _refused(tool: Mapping[str, Any], why: str) -> ApiError:
    said = "its arguments can't be held to its schema in this model's form of calls"
    return strict_error(tool, f"{said}: {why}: change it, or leave out strict")


def strict_error(tool: Mapping[str, Any], why: str) -> ApiError:
    """Return the refusal of a strict tool."""
    return field_error("tools", f"{name_of(tool)!r:.80} is strict, and {why}")


ANY_TEXT: Sequence[tuple[str, str]] = (
    ("any_text", r"free_text /\n/"),
    ('free_text[suffix="\\n</parameter>"]', "FREE"),
    ("FREE", f"/(?s:.*)/ {_FREE}"),
)
"""The rules of any value."""
