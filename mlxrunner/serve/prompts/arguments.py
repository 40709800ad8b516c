"""The schemas of tools' arguments, as calls are held to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

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
_NAMED, _LISTED = ("properties", "$defs", "definitions"), ("prefixItems", "anyOf", "oneOf")


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
    kept = {
        key: one
        for key, one in schema.items()
        if key != "$schema" and not (one is None and key in lists)
    }
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
    _within(schema, lambda one: found.append(one))
    yield schema
    for one in found:
        if isinstance(one, Mapping):
            yield from _schemas(one)


def _within(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a schema with the result of `change` for each one that stands directly in it."""
    changed = dict(schema)
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
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
