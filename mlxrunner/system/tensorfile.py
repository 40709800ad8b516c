"""Check the header of a safetensors file before anything it describes is allocated. No tensors.

The tensors of a correct file lie one behind the other, without gaps or overlaps, from the end of
the header to the end of the file. The size of each follows from its type and shape. Source:
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
import reprlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip  # a table, read by rows
"""Bits of one element, by type."""
MOST_SIDE, MOST_SIDES = 2**48, 32
"""Largest side of a shape and largest number of sides. No larger product is ever computed."""
METADATA = "__metadata__"


class HeaderError(ValueError):
    """The error of a file that is damaged or not a safetensors file. It does not name the file."""


@dataclass(frozen=True)
class Place:
    """The place of a tensor in its file."""

    dtype: str
    """A name in BITS."""
    shape: tuple[int, ...]
    begin: int
    """Offset in the file, in bytes."""
    nbytes: int


@dataclass(frozen=True)
class Header:
    """The checked header of a safetensors file."""

    entries: dict[str, Any]
    """The JSON of the header, unchanged."""
    tensors: dict[str, Place]
    """Type, shape and place of each tensor, checked."""
    metadata: dict[str, str]


def read_header(fd: int, size: int, most: int) -> Header:
    """Return the header of the open file `fd` of `size` bytes.

    Raise HeaderError if it has more than `most` bytes or describes another file.
    """
    entries, begin = _read_json(fd, size, most)
    metadata = entries.get(METADATA)
    metadata = {} if metadata is None else metadata  # MLX writes null where there is none
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise HeaderError("damaged: the metadata of its header are no texts")
    tensors = {
        name: _place(name, entry, begin) for name, entry in entries.items() if name != METADATA
    }
    _check_places(tensors, begin, size)
    return Header(entries, tensors, metadata)


def _read_json(fd: int, size: int, most: int) -> tuple[dict[str, Any], int]:
    prefix = os.pread(fd, 8, 0)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
    if length + 8 > size:
        raise HeaderError(f"truncated, or not a safetensors file ({size} bytes)")
    if length > most:
        raise HeaderError(
            f"not a safetensors file, or damaged: a header of {length:,} bytes, and {most:,} are "
            "the most"
        )
    try:
        entries = json.loads(
            os.pread(fd, length, 8), object_pairs_hook=_once, parse_constant=_refuse
        )
    except (ValueError, RecursionError) as error:
        raise HeaderError(
            f"damaged: its header is no JSON ({' '.join(str(error).split())[:100]})"
        ) from error
    if not isinstance(entries, dict):
        raise HeaderError("damaged: its header is no object")
    return entries, 8 + length


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is there twice")
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _place(name: str, entry: Any, begin: int) -> Place:
    try:
        dtype, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        bits = BITS[dtype]
        is_whole = all(type(number) is int and number >= 0 for number in (*shape, first, last))
    except (KeyError, TypeError, ValueError) as error:
        raise HeaderError(
            f"damaged: its header describes {name[:80]!r} as {reprlib.repr(entry)[:100]}"
        ) from error
    if (
        not is_whole
        or len(shape) > MOST_SIDES
        or max(shape, default=0) > MOST_SIDE
        or (last - first) * 8 != math.prod(shape) * bits
    ):
        raise HeaderError(
            f"truncated or damaged: {name[:80]!r} can't be {reprlib.repr(entry)[:100]}"
        )
    return Place(dtype, shape, begin + first, last - first)


def _check_places(tensors: Mapping[str, Place], begin: int, size: int) -> None:
    end, before = begin, "the header"
    for name, place in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].nbytes)):
        if place.begin != end:
            what = (
                "overlap" if place.begin < end else f"have {place.begin - end} bytes between them"
            )
            raise HeaderError(f"truncated or damaged: {before} and {name[:80]!r} {what}")
        end, before = end + place.nbytes, repr(name[:80])
    if end != size:
        raise HeaderError(f"truncated or damaged: {size} bytes, but its header describes {end}")
