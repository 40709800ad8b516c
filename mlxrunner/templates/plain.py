"""Copy what a template is given, so that it sees plain data only.

The copies of messages and tools are remembered, because they come back with each request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxrunner.templates.remembered import Remembered, sign

MOST_BYTES = 32_000_000
"""Most bytes of values and of their copies that are remembered."""


@dataclass(frozen=True)
class Plain:
    """A copy of a value, made of JSON's types. Nobody may change it."""

    value: Any
    characters: int
    """The number of characters of all texts in it, names included."""
    sign: bytes | None
    """The sign of `value`: see `mlxrunner.templates.remembered`; None if it has none."""
    signs: Mapping[int, bytes] = field(default_factory=dict)
    """For a list: the signs of its items, by their identity."""


def plain(value: Any) -> Plain:
    """Return a copy of a variable of a template, so that it calls no methods of other objects.

    An object of any other type is replaced by the name of its type.
    """
    if not isinstance(value, list):
        return _remembered(value)
    parts = [_remembered(one) for one in value]
    signs = {id(one.value): one.sign for one in parts if one.sign is not None}
    return Plain([one.value for one in parts], sum(one.characters for one in parts), None, signs)


def _copied(value: Any) -> Plain:
    copied = _copy(value)
    try:
        return Plain(copied, _characters(copied), sign(copied))
    except ValueError:  # nested too deeply
        return Plain(copied, _characters(copied), None)


_remembered = Remembered(_copied, MOST_BYTES)


def _copy(value: Any) -> Any:
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_copy(name): _copy(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(one) for one in value]
    simple = next((kind for kind in (str, int, float) if isinstance(value, kind)), None)
    return f"<{type(value).__name__}>" if simple is None else simple(value)


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_characters, value)) + sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else 0
