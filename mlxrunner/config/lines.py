"""Find the line of a key in the text of a TOML file that is known to be readable."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_HEADER = re.compile(r"\s*(\[\[?.*?\]\]?)\s*(?:#.*)?")
_KEY = re.compile(r"""\s*((?:"(?:\\.|[^"\\])*"|'[^']*'|[\w\s.-])+?)\s*=""")
_ENDS = frozenset(" \t=,{}[]#")
"""Characters that are in no part of a dotted key, unless it is quoted."""
_QUOTES = ('"' * 3, "'" * 3)


MOST_PARTS = 100
"""The most parts of a dotted key: the time to parse one grows with their square."""


def line_of_long_key(text: str) -> int | None:
    """Return the number of the first line with a key of more than MOST_PARTS parts, or None.

    `text` need not be readable.
    """
    for number, line in enumerate(text.split("\n"), 1):
        parts = 0
        for piece in line.split(".") if line.count(".") >= MOST_PARTS else ():
            is_part = bool(piece.strip()) and not _ENDS.intersection(piece.strip())
            parts = parts + 1 if is_part else 0
            if parts >= MOST_PARTS:
                return number
    return None


def line_of(text: str, key: tuple[str, ...]) -> int:
    """Return the number of the line, from 1, that sets `key` or the table closest above it."""
    best, depth = 1, 0
    for number, path in _keys(text):
        shared = next((i for i, (a, b) in enumerate(zip(path, key, strict=False)) if a != b), None)
        shared = min(len(path), len(key)) if shared is None else shared
        if shared > depth and shared == min(len(path), len(key)):
            best, depth = number, shared
    return best


def _keys(text: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield each header and each key with its line and its whole path."""
    section: tuple[str, ...] = ()
    inside = ""
    for number, line in enumerate(text.split("\n"), 1):
        if inside:
            inside = "" if inside in line else inside
            continue
        header, found = _HEADER.fullmatch(line.rstrip("\r")), _KEY.match(line)
        if header is not None:
            section = _path(header[1] + "\n")
            yield number, section
        elif found is not None:
            yield number, (*section, *_path(f"{found[1]} = 0\n"))
            value = line[found.end() :]
            inside = next((q for q in _QUOTES if value.count(q) == 1), "")


def _path(line: str) -> tuple[str, ...]:
    """Return the path that a header or a key names, or () if it is neither."""
    import tomllib

    try:
        found: Any = tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return ()
    path = []
    while isinstance(found, dict | list) and found:
        if isinstance(found, list):
            found = found[0]
            continue
        name = next(iter(found))
        path.append(name)
        found = found[name]
    return tuple(path)
