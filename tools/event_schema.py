"""Make the JSON schema of an event, and its rows for the docs, from the one list of its fields."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import msgspec

from mlxrunner.profiling import schema as profiling
from mlxrunner.profiling.schema import SCHEMA, VERSION, Event

ENDS = {"_tokens": "tokens", "_s": "seconds", "_bytes": "bytes", "_rate": "tokens/s"}
"""The units of quantities, by the ends of their names."""
UNITS = {
    **dict.fromkeys("tokens drafted accepted checkpoint entry_tokens_after".split(), "tokens"),
    **dict.fromkeys(("lines", "refused"), "lines"),
    "seconds": "seconds",
    "messages": "messages",
    "max_sequences": "requests",
}
"""The units of other quantities."""


def event_schema() -> dict[str, Any]:
    """Return the JSON schema of an event (draft 2020-12).

    It allows no unknown fields, although readers of events do.
    """
    _, parts = msgspec.json.schema_components([Event], ref_template="#/$defs/{name}")
    for kind, part in parts.items():
        part["additionalProperties"] = False
        for name, text in _descriptions(getattr(profiling, kind)).items():
            field = part["properties"][name]
            field["description"] = text
            if field.get("type") != "array" and (unit := _unit(name)):
                field["unit"] = unit
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": SCHEMA,
        "title": "mlxrunner event",
        "description": f"One line of an events file. Version {VERSION}.",
    }
    event = parts.pop("Event")
    return {**event, **head, "$defs": parts}


def _descriptions(kind: type) -> dict[str, str]:
    """Return the text below each field of a class, by name."""
    body = ast.parse(inspect.getsource(kind)).body[0].body  # type: ignore[attr-defined]
    return {
        ast.unparse(one.target): " ".join(text.value.value.split())
        for one, text in pairwise(body)
        if isinstance(one, ast.AnnAssign)
    }


def _unit(name: str) -> str | None:
    """Return the unit of a quantity with this name; None for another field."""
    return UNITS.get(name) or next((unit for end, unit in ENDS.items() if name.endswith(end)), None)


def field_rows() -> list[tuple[str, str, str]]:
    """List (name, unit, description) of each field for the docs.

    The fields of a nested object follow it once: `divergence.index`, `spans[].name`.
    """
    schema = event_schema()
    parts = schema["$defs"]

    def rows(path: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
        for name, about_it in fields.items():
            yield f"{path}{name}", about_it.get("unit", ""), about_it["description"]
            dot = "[]." if about_it.get("type") == "array" else "."
            for one in (about_it, about_it.get("items", {}), *about_it.get("anyOf", ())):
                part = parts.pop(one.get("$ref", "").removeprefix("#/$defs/"), None)
                if part is not None:
                    yield from rows(f"{path}{name}{dot}", part["properties"])

    return list(rows("", schema["properties"]))
