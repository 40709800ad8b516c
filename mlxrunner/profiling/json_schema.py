"""Publish the fields of an event: as a JSON schema, and as the rows of a table for the docs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from mlxrunner.profiling.schema import SCHEMA, VERSION, Event


def event_schema() -> dict[str, Any]:
    """Return the JSON schema of an event (draft 2020-12).

    It allows no unknown fields, although readers of events do.
    """
    _, parts = msgspec.json.schema_components([Event], ref_template="#/$defs/{name}")
    for part in parts.values():
        part["additionalProperties"] = False
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": SCHEMA,
        "title": "mlxrunner event",
        "description": f"One line of an events file. Version {VERSION}.",
    }
    event = parts.pop("Event")
    return {**event, **head, "$defs": parts}


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
