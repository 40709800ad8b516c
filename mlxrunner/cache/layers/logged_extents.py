"""Read the extents of layers from the lines of a token log, which may come from a stranger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxrunner.cache.layers.extents import EXTENTS, Everything, Extent, LastPass, Several, Window
from mlxrunner.cache.layers.stock_extents import Chunk, Stay

DEEPEST = 8
"""Levels of composite layers that a token log may nest."""


def read_extent(line: Mapping[str, Any], context: int, slack: int | None = None) -> Extent:
    """Make the empty extent of a layer that a token log describes (see docs/profiling.md).

    `line`: a line that `is_layer` has checked. `context`: tokens of the context. `slack`: the
    rewind slack of windows in tokens, in place of the logged one; None: the logged one.
    """
    if parts := line.get("parts"):
        return Several.of([read_extent(part, context, slack) for part in parts])
    return EXTENTS[_extent_name(line)].read(line, context, slack)


def is_layer(line: Any, depth: int = 0) -> bool:
    """Return True if `line`, which may come from a stranger, describes a layer for `read_extent`.

    `depth`: the number of composite layers around it, less than DEEPEST.
    """
    optional = [line[name] for name in ("window", "slack", "room") if line[name] is not None]
    sizes = [line[name] for name in ("row_bytes", "checkpoint_rows", "checkpoint_fixed")]
    known = EXTENTS.get(_extent_name(line))
    return (
        isinstance(line["kind"], str)
        and isinstance(line["needs_checkpoints"], bool)
        and known is not None
        and (known is Several) == bool(line.get("parts"))
        and all(map(_is_size, [*sizes, *optional, line.get("count", 1)]))
        and all(_is_size(line[name]) for name in known.parameters)
        and line["window"] != 0
        and depth < DEEPEST
        and all(is_layer(part, depth + 1) for part in line.get("parts", []))
    )


def _extent_name(line: Mapping[str, Any]) -> str:
    """Return the name of a layer's extent. Logs of version 0.2 give only the kind of layer."""
    if line.get("parts"):
        return Several.name
    if isinstance(line.get("extent"), str):
        return str(line["extent"])
    if not line["needs_checkpoints"]:
        return Everything.name
    if line["kind"] == "sliding" and line["room"] is not None:
        return Window.name
    if line["kind"] == "chunked" and line["window"] is not None:
        return Chunk.name
    return LastPass.name if line["kind"] == "recurrent" else Stay.name


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= 2**53
