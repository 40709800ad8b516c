"""A safetensors file by hand: written from buffers, and read array by array, each with its checksum. No tensors: bytes, types, shapes.

By hand, because what is read may be damaged or made to do harm: the header is bounded and checked against the size of the file before
anything is allocated, and the file that was opened is the one that is read, whatever its name means by then.
"""

from __future__ import annotations

import json
import math
import os
import struct
import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxrunner.errors import SessionError
from mlxrunner.writing import write_all

TYPES = {
    "float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2), "float64": ("F64", 8), "bool": ("BOOL", 1),
    "int8": ("I8", 1), "int16": ("I16", 2), "int32": ("I32", 4), "int64": ("I64", 8),
    "uint8": ("U8", 1), "uint16": ("U16", 2), "uint32": ("U32", 4), "uint64": ("U64", 8), "complex64": ("C64", 8),
}  # fmt: skip
"""Their names in a safetensors file, and bytes each."""
NAMES = {name: dtype for dtype, (name, _) in TYPES.items()}
MOST_HEADER = 16 * 2**20
CHECKSUMS = "crc32"


@dataclass(frozen=True)
class Buffer:
    """An array to be written: `data` are its bytes in C order, little-endian."""

    dtype: str
    shape: Sequence[int]
    data: memoryview


def write(fd: int, arrays: Mapping[str, Buffer], metadata: Mapping[str, str]) -> None:
    """All arrays and texts, in the order given. OSError where the disk won't take them."""
    sums = {name: zlib.crc32(buffer.data) for name, buffer in arrays.items()}
    header: dict[str, Any] = {"__metadata__": {**metadata, CHECKSUMS: json.dumps(sums)}}
    end = 0
    for name, buffer in arrays.items():
        begin, end = end, end + buffer.data.nbytes
        header[name] = {"dtype": TYPES[buffer.dtype][0], "shape": list(buffer.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    write_all(fd, struct.pack("<Q", len(text)) + text)
    for buffer in arrays.values():
        write_all(fd, buffer.data)


@dataclass(frozen=True)
class StoredArray:
    """One that lies in a file. `dtype` and `shape` are known, its bytes are read when asked for."""

    file: TensorFile
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int

    def read(self) -> bytearray:
        """Its bytes. SessionError where they are not those that were written."""
        data = bytearray(self.nbytes)
        done, view = 0, memoryview(data)
        while done < self.nbytes:
            count = os.preadv(self.file.fd, [view[done:]], self.begin + done)
            if count == 0:
                raise SessionError(f"the cache is truncated: {self.name!r} ends after {done} of {self.nbytes} bytes")
            done += count
        if self.file.sums.get(self.name, None) != zlib.crc32(data):
            raise SessionError(f"the cache is damaged: the checksum of {self.name!r} is another one")
        return data


class TensorFile:
    """An open safetensors file, which it closes. SessionError where it is truncated, damaged, or none.

    `arrays`: those in it, by name. `metadata`: the texts in its header. `sums`: the checksums of the arrays.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        close = weakref.finalize(self, os.close, fd)
        try:
            size = os.fstat(fd).st_size
            header, begin = _read_header(fd, size)
            self.metadata = _metadata(header)
            self.sums = _sums(self.metadata)
            self.arrays = {
                name: self._array(name, entry, begin, size) for name, entry in header.items() if name != "__metadata__"
            }
            for array in sorted(self.arrays.values(), key=lambda array: (array.begin, array.nbytes)):
                begin = begin + array.nbytes if array.begin == begin else size + 1
            if begin != size:
                raise SessionError(f"the cache is truncated or damaged: its {size} bytes are not those that its header describes")
        except BaseException:
            close()
            raise

    def _array(self, name: str, entry: Any, begin: int, size: int) -> StoredArray:
        try:
            dtype, shape, (first, last) = NAMES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
            whole = all(type(number) is int and number >= 0 for number in (*shape, first, last))
        except (KeyError, TypeError, ValueError) as error:
            raise SessionError(f"the cache is damaged: its header describes {name[:50]!r} as {repr(entry)[:80]}") from error
        if not whole or last - first != math.prod(shape) * TYPES[dtype][1] or begin + last > size:
            raise SessionError(f"the cache is truncated or damaged: {name[:50]!r} should be {repr(entry)[:80]} of {size} bytes")
        return StoredArray(self, name, dtype, shape, begin + first, last - first)


def _read_header(fd: int, size: int) -> tuple[dict[str, Any], int]:
    prefix = os.pread(fd, 8, 0)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
    if length + 8 > size or length > MOST_HEADER:
        raise SessionError(f"the cache is truncated, or no safetensors file ({size} bytes)")
    try:
        header = json.loads(os.pread(fd, length, 8))
    except (ValueError, RecursionError) as error:
        raise SessionError(f"the cache is damaged: its header is no JSON ({' '.join(str(error).split())[:100]})") from error
    if not isinstance(header, dict):
        raise SessionError("the cache is damaged: its header is no object")
    return header, 8 + length


def _metadata(header: dict[str, Any]) -> dict[str, str]:
    found = header.get("__metadata__", {})
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise SessionError("the cache is damaged: its header has no texts")
    return found


def _sums(metadata: Mapping[str, str]) -> dict[str, int]:
    try:
        found = json.loads(metadata.get(CHECKSUMS, "{}"))
    except (ValueError, RecursionError) as error:
        raise SessionError("the cache is damaged: its checksums are no JSON") from error
    return found if isinstance(found, dict) else {}
