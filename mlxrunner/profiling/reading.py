"""Read lines that somebody else wrote, maybe long ago: what can't be used is counted, never an error. No tensors.

A file is read as bytes and line by line: a last line that was cut off, an older version, another tool's log or plain garbage are
skipped with a count by kind.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from mlxrunner.reading import ReadError, open_given, say_if_waiting

Check = Callable[[Any], bool]
SLOWEST = 0.05
"""Tokens per second, but for 0."""
LONGEST_LINE = 64 * 2**20
"""Bytes; no line of ours comes near it."""


class Lines:
    """The JSON objects of `files` that have this `schema` and `version`; `skipped` counts the others while it is iterated.

    `skipped`: "unreadable" (no JSON object, cut off, not UTF-8), "foreign" (another schema), "version" (another version of it),
    "invalid" (a field is missing, of the wrong type, or of no possible value, as `check` finds).
    """

    def __init__(
        self,
        files: Iterable[str | Path],
        schema: str,
        version: int,
        check: Check = lambda line: True,
    ) -> None:
        self._files, self._schema, self._version, self._check = list(files), schema, version, check
        self.skipped: Counter[str] = Counter()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.skipped.clear()
        for file in self._files:
            for raw in _raw_lines(Path(file)):
                if not raw.strip():
                    continue
                line, why = self._parse(raw)
                if why:
                    self.skipped[why] += 1
                else:
                    yield line

    def _parse(self, raw: bytes) -> tuple[dict[str, Any], str]:
        try:
            line = json.loads(raw, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return {}, "unreadable"
        if not isinstance(line, dict):
            return {}, "unreadable"
        if line.get("schema") != self._schema:
            return {}, "foreign"
        if line.get("version") != self._version:
            return {}, "version"
        return (line, "") if self._check(line) else ({}, "invalid")


def read_events(files: Iterable[str | Path]) -> Lines:
    """The events of `files`, in the order in which they were written; each has all fields of schema.json, of the right types.

    ReadError, while iterating, for a file that can't be read.
    """
    return Lines(files, "mlxrunner/events", 1, _event_check())


def with_rotated(file: str | Path) -> list[Path]:
    """`file` and those that it was rotated to (FILE.1 is the youngest of them), the oldest first."""
    older: list[Path] = []
    while os.path.exists(one := f"{file}.{len(older) + 1}"):  # False for what can't be a name, too
        older.append(Path(one))
    return [*reversed(older), Path(file)]


def event_schema() -> dict[str, Any]:
    """schema.json, which is part of the package."""
    schema: dict[str, Any] = json.loads(
        Path(__file__).with_name("schema.json").read_text(encoding="utf-8")
    )
    return schema


def _raw_lines(file: Path) -> Iterator[bytes]:
    try:
        with open_given(file) as stream:
            say_if_waiting(stream, str(file))
            while raw := stream.readline(LONGEST_LINE):
                yield raw
    except OSError as error:
        raise ReadError(f"{file}: can't be read: {error.strerror or error}") from error


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


@cache
def _event_check() -> Check:
    schema = event_schema()
    has_fields = _compile(schema, schema["$defs"])
    return lambda event: has_fields(event) and _adds_up(event)


def _adds_up(event: Mapping[str, Any]) -> bool:
    """Whether the counts can be those of one prompt, and its rate one that was measured (they are rounded to tenths)."""
    prompt, cached, ahead, saved, evaluated, lost = (
        event[f"{name}_tokens"]
        for name in ("prompt", "cached", "ahead", "saved", "evaluated", "lost")
    )
    is_slow = 0 < (event["prefill_rate"] or 0) < SLOWEST
    return bool(
        saved + ahead == cached
        and cached + evaluated <= prompt
        and lost <= evaluated + ahead
        and not is_slow
    )


_TYPES: Mapping[str, Check] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    # Beyond 2**53 is no count, and arithmetic with floats would overflow.
    "integer": lambda value: (
        isinstance(value, int) and not isinstance(value, bool) and abs(value) <= 2**53
    ),
    "number": lambda value: (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 2**53
    ),
}


def _compile(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Check:
    """A check for the part of JSON Schema that schema.json uses; fields that it does not know are allowed."""
    if "$ref" in schema:
        return _compile(definitions[schema["$ref"].removeprefix("#/$defs/")], definitions)
    if "const" in schema:
        return lambda value: bool(value == schema["const"])
    if "enum" in schema:
        return lambda value: isinstance(value, str | None) and value in schema["enum"]
    kinds = [
        _TYPES[kind]
        for kind in ([schema["type"]] if isinstance(schema["type"], str) else schema["type"])
    ]
    checks: list[Check] = []
    if "minimum" in schema:
        checks.append(
            lambda value: not isinstance(value, int | float) or value >= schema["minimum"]
        )
    if "pattern" in schema:
        matches = re.compile(
            schema["pattern"].removesuffix("$") + r"\Z"
            if schema["pattern"].endswith("$")
            else schema["pattern"]
        ).search
        checks.append(lambda value: not isinstance(value, str) or bool(matches(value)))
    if "properties" in schema:
        fields = {
            name: _compile(field, definitions) for name, field in schema["properties"].items()
        }
        required = frozenset(schema["required"])
        checks.append(
            lambda value: (
                not isinstance(value, dict)
                or (
                    required <= value.keys()
                    and all(fields[name](value[name]) for name in fields.keys() & value.keys())
                )
            )
        )
    if "items" in schema:
        item = _compile(schema["items"], definitions)
        checks.append(lambda value: not isinstance(value, list) or all(map(item, value)))
    return lambda value: (
        any(kind(value) for kind in kinds) and all(check(value) for check in checks)
    )
