"""Write a safetensors file from buffers, and read it array by array, each with its checksum.

This knows bytes, types and shapes, and no tensors. The format is read here and not by a library,
because a file may be damaged or malicious. The header is bounded, and checked against the size of
the file before anything is allocated. Everything is read from the descriptor that was opened.
"""

from __future__ import annotations

import json
import os
import struct
import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxrunner.errors import SessionError
from mlxrunner.system.tensorfile import HeaderError, Place, read_header
from mlxrunner.system.writing import write_all

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


@dataclass(frozen=True)
class Buffer:
    """An array to write."""

    dtype: str
    shape: Sequence[int]
    data: memoryview
    """The bytes of the array in C order, little-endian."""


def write(fd: int, arrays: Mapping[str, Buffer], metadata: Mapping[str, str]) -> None:
    """Write the arrays and the metadata to the descriptor `fd`. Raise OSError if that fails."""
    sums = {name: zlib.crc32(buffer.data) for name, buffer in arrays.items()}
    header: dict[str, Any] = {"__metadata__": {**metadata, CHECKSUMS: json.dumps(sums)}}
    end = 0
    for name, buffer in arrays.items():
        begin, end = end, end + buffer.data.nbytes
        header[name] = {
            "dtype": TYPES[buffer.dtype],
            "shape": list(buffer.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    write_all(fd, struct.pack("<Q", len(text)) + text)
    for buffer in arrays.values():
        write_all(fd, buffer.data)


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
        done, view = 0, memoryview(data)
        while done < self.nbytes:
            count = os.preadv(self.file.fd, [view[done:]], self.begin + done)
            if count == 0:
                raise SessionError(
                    f"the cache is truncated: {self.name!r} ends after {done} of "
                    f"{self.nbytes} bytes"
                )
            done += count
        if self.file.sums.get(self.name, None) != zlib.crc32(data):
            raise SessionError(
                f"the cache is damaged: the checksum of {self.name!r} is another one"
            )
        return data


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
            self.arrays = {name: self._array(name, place) for name, place in header.tensors.items()}
        except HeaderError as error:
            close()
            raise SessionError(f"the cache is {error}") from error
        except BaseException:
            close()
            raise

    def _array(self, name: str, place: Place) -> StoredArray:
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
