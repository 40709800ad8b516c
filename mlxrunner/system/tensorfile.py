"""Check the header of a safetensors file before anything it describes is allocated. No tensors.

The tensors of a correct file lie one after the other, without gaps or overlaps, from the end of
the header to the end of the file. The size of each follows from its type and shape. Source:
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
import reprlib
import struct
import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mlxrunner.errors import SessionError, reason
from mlxrunner.system.reading import no_constant
from mlxrunner.system.writing import write_all

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
class TensorPlace:
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
    tensors: dict[str, TensorPlace]
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
        raise HeaderError("damaged: the metadata of its header are not texts")
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
            os.pread(fd, length, 8), object_pairs_hook=_once, parse_constant=no_constant
        )
    except (ValueError, RecursionError) as error:
        raise HeaderError(f"damaged: its header is no JSON ({reason(error, 100)})") from error
    if not isinstance(entries, dict):
        raise HeaderError("damaged: its header is not an object")
    return entries, 8 + length


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is there twice")
    return found


def _place(name: str, entry: Any, begin: int) -> TensorPlace:
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
    return TensorPlace(dtype, shape, begin + first, last - first)


def _check_places(tensors: Mapping[str, TensorPlace], begin: int, size: int) -> None:
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


TYPES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float64": "F64",
    "complex64": "C64",
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
}
"""The name of each type in a safetensors file."""
NAMES = {name: dtype for dtype, name in TYPES.items()}
MOST_HEADER = 16 * 2**20
"""Most bytes of a file's header."""
CHECKSUMS = "crc32"
"""Name of the text in the metadata that holds the checksums, as JSON."""


SEAL = "header_crc32"
"""Name of the text in the metadata that is the checksum of the rest of the header."""


class ArraySource(Protocol):
    """An array to write."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def data(self) -> memoryview:
        """The bytes of the array in C order, little-endian."""


@dataclass(frozen=True)
class Buffer:
    """An array to write, in host memory."""

    dtype: str
    shape: Sequence[int]
    data: memoryview

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


def write(fd: int, arrays: Mapping[str, ArraySource], metadata: Mapping[str, str]) -> None:
    """Write the arrays and the metadata to the descriptor `fd`. Raise OSError if that fails.

    One array is asked for its bytes at a time. The header, which has the checksums, comes last.
    """
    header, room, _ = _planned(arrays, metadata)
    sums: dict[str, int] = {}
    os.lseek(fd, 8 + room, os.SEEK_SET)
    for name, array in arrays.items():
        data = array.data
        sums[name] = zlib.crc32(data)
        write_all(fd, data)
        del data
    os.lseek(fd, 0, os.SEEK_SET)
    write_all(fd, struct.pack("<Q", room) + _sealed(header, sums).ljust(room))


def file_size(arrays: Mapping[str, ArraySource], metadata: Mapping[str, str]) -> int:
    """Return the bytes that `write` would write."""
    _, room, end = _planned(arrays, metadata)
    return 8 + room + end


def _planned(
    arrays: Mapping[str, ArraySource], metadata: Mapping[str, str]
) -> tuple[dict[str, Any], int, int]:
    """Return the header without checksums, the bytes to keep for it, and those of all arrays."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, array in arrays.items():
        begin, end = end, end + array.nbytes
        header[name] = {
            "dtype": TYPES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [begin, end],
        }
    room = len(_sealed(header, dict.fromkeys(arrays, 2**32 - 1))) + 10
    return header, room + -room % 8, end


def _sealed(header: Mapping[str, Any], sums: Mapping[str, int]) -> bytes:
    """Return the header with the checksums of the arrays and its own."""
    metadata = {**header["__metadata__"], CHECKSUMS: json.dumps(sums)}
    seal = _seal({**header, "__metadata__": metadata})
    return json.dumps({**header, "__metadata__": {**metadata, SEAL: str(seal)}}).encode()


def _seal(entries: Mapping[str, Any]) -> int:
    """Return the CRC-32 of a header, without the one that it has."""
    metadata = {name: text for name, text in entries["__metadata__"].items() if name != SEAL}
    return zlib.crc32(json.dumps({**entries, "__metadata__": metadata}, sort_keys=True).encode())


@dataclass(frozen=True)
class StoredArray:
    """An array in a file; only `read` reads its bytes."""

    file: TensorFile
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Offset of the first byte in the file."""
    nbytes: int

    def read(self) -> bytearray:
        """Return the bytes of the array.

        Raise SessionError if they are cut off or do not match their checksum.
        """
        data = bytearray(self.nbytes)
        self.read_into([memoryview(data)])
        return data

    def read_into(self, views: Sequence[memoryview]) -> None:
        """Read the array into `views`, one after the other, which take all its bytes.

        Raise SessionError as `read` does.
        """
        done, found = 0, 0
        for view in views:
            found = zlib.crc32(self._read(view, done), found)
            done += view.nbytes
        if done != self.nbytes or self.file.sums.get(self.name, None) != found:
            raise SessionError(
                f"the cache is damaged: the checksum of {self.name!r} is another one"
            )

    def _read(self, view: memoryview, begin: int) -> memoryview:
        """Fill `view` with the bytes from `begin` on."""
        done = 0
        while done < view.nbytes:
            count = os.preadv(self.file.fd, [view[done:]], self.begin + begin + done)
            if count == 0:
                raise SessionError(
                    f"the cache is truncated: {self.name!r} ends after {begin + done} of "
                    f"{self.nbytes} bytes"
                )
            done += count
        return view


class TensorFile:
    """An open safetensors file, which is closed when this object is dropped.

    Raise SessionError if the file is truncated, damaged or of another format.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        close = weakref.finalize(self, os.close, fd)
        try:
            header = read_header(fd, os.fstat(fd).st_size, MOST_HEADER)
            self.metadata = header.metadata
            """The texts in the header, by name."""
            self.sums = _sums(self.metadata)
            """The CRC-32 of each array, by name."""
            self.is_sealed = SEAL in self.metadata
            """True if the header has a checksum of its own. Files of version 0.2 have none."""
            if self.is_sealed and self.metadata[SEAL] != str(_seal(header.entries)):
                raise SessionError(
                    "the cache is damaged: the checksum of its header is another one"
                )
            self.arrays = {name: self._array(name, place) for name, place in header.tensors.items()}
        except HeaderError as error:
            close()
            raise SessionError(f"the cache is {error}") from error
        except BaseException:
            close()
            raise

    def _array(self, name: str, place: TensorPlace) -> StoredArray:
        if place.dtype not in NAMES:
            raise SessionError(
                f"the cache is damaged: {name[:50]!r} is of type {place.dtype}, which no cache has"
            )
        return StoredArray(self, name, NAMES[place.dtype], place.shape, place.begin, place.nbytes)


def _sums(metadata: Mapping[str, str]) -> dict[str, int]:
    try:
        found = json.loads(metadata.get(CHECKSUMS, "{}"))
    except (ValueError, RecursionError) as error:
        raise SessionError("the cache is damaged: its checksums are not JSON") from error
    return found if isinstance(found, dict) else {}
