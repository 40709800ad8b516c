"""Read an input as a stream of bytes, hashed as it is stored, and decompress gzip and zstd.

The first bytes tell the compression, not the name. A stream is never read as a whole, so a small
file that decompresses to a large one costs no memory. zstd is pyarrow's: the extra `data` needs it
for Parquet anyway, it tells a file that was cut off, and it refuses windows of more than 128 MiB.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO

from mlxrunner.errors import PromptError

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
LOOKED_AT = 8
"""The number of first bytes that tell the kind of a file."""


class Hashed(io.RawIOBase):
    """A stream that hashes what is read from it, and whose first bytes can be looked at."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._read: Callable[[int], bytes] = getattr(stream, "read1", stream.read)
        self._hash = hashlib.sha256()
        self.head = stream.read(LOOKED_AT) or b""
        """The first bytes, fewer if the stream is shorter. They are read as well."""
        self._left = self.head

    @property
    def digest(self) -> str:
        """The SHA-256 of the bytes read so far, in hexadecimal."""
        return self._hash.hexdigest()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        part = self._left[: len(buffer)]
        self._left = self._left[len(part) :]
        if not part:
            part = self._read(len(buffer)) or b""
        buffer[: len(part)] = part
        self._hash.update(part)
        return len(part)


class _Decompressed(io.RawIOBase):
    """A decompressing stream whose errors are a PromptError that names the file."""

    def __init__(self, read: Callable[[int], bytes], name: str, kind: str) -> None:
        self._read, self._name, self._kind = read, name, kind

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            part = self._read(len(buffer))
        except (EOFError, OSError, zlib.error) as error:
            is_cut = isinstance(error, EOFError) or "truncated" in str(error).lower()
            why = "it is cut off" if is_cut else " ".join(str(error).split())
            raise PromptError(
                f"{self._name}: can't be read to its end as {self._kind}: {why}: copy or download "
                "it again"
            ) from error
        buffer[: len(part)] = part
        return len(part)


def decompressed(stream: Hashed, name: str) -> io.BufferedReader:
    """Return the stream, decompressed if it is gzip or zstd. `name` is for errors.

    Reading raises PromptError if the stream is cut off or damaged. Raise PromptError if it is zstd
    and pyarrow is missing.
    """
    if stream.head.startswith(GZIP):
        opened = gzip.GzipFile(fileobj=io.BufferedReader(stream), mode="rb")
        return io.BufferedReader(_Decompressed(opened.read1, name, "gzip"))
    if stream.head.startswith(ZSTD):
        pyarrow = needed("zstd", name)
        source = pyarrow.PythonFile(io.BufferedReader(stream), mode="r")
        codec = pyarrow.CompressedInputStream(source, "zstd")
        return io.BufferedReader(_Decompressed(codec.read, name, "zstd"))
    return io.BufferedReader(stream)


def needed(kind: str, name: str) -> Any:
    """Return pyarrow, which reads files of this kind. Raise PromptError if it is not installed."""
    try:
        import pyarrow
    except ImportError as error:
        raise PromptError(f"{name}: is {kind}, which needs pyarrow: pip install pyarrow") from error
    return pyarrow
