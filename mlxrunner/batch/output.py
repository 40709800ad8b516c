"""The file of answers: only ever a beginning of what the store has, byte for byte, so that any broken end of it can be mended.

Knows nothing about what a line means.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TextIO

from mlxrunner.errors import MlxrunnerError
from mlxrunner.writing import is_writable, open_own, open_stream, whole_sync

if TYPE_CHECKING:
    from mlxrunner.batch.store import Body


class OutputError(MlxrunnerError):
    """The file of answers can't be written, or is not what this run wrote."""

    exit_code = 2


def _is_open(stream: TextIO) -> bool:
    """A stream without a descriptor is one of a test, or of a program."""
    try:
        return is_writable(stream.fileno())
    except (OSError, ValueError):
        return not stream.closed


class Output:
    """Lines that are appended to a file (made with mode 0600), or sent down a stream. `place`: the last `Body.place` that is in it.

    OutputError from any method, in one line.
    """

    def __init__(self, stream: BinaryIO, name: str, *, is_file: bool) -> None:
        self._stream, self.name, self.is_file = stream, name, is_file
        self.place = -1
        self._end = 0  # of the last whole line
        self._hash = hashlib.sha256()  # of all whole lines

    @property
    def digest(self) -> str:
        """SHA-256 of what this run has written, or found there to be its own, in hexadecimal."""
        return self._hash.hexdigest()

    @classmethod
    def open(cls, path: Path) -> Output:
        """The file `path`, made if it is not there. Call `mend` before anything is appended to one that has something in it."""
        try:
            return cls(os.fdopen(open_own(path), "r+b", buffering=0), str(path), is_file=True)
        except OSError as error:
            raise OutputError(f"{path}: can't be written: {error.strerror}") from error

    @classmethod
    def streaming(cls, path: Path | None) -> Output:
        """Standard output (None), or another stream: what was sent can't be taken back, or be gone on with."""
        if path is None:
            if sys.stdout is None or not _is_open(sys.stdout):
                raise OutputError("standard output is closed")
            return cls(sys.stdout.buffer, "standard output", is_file=False)
        try:
            return cls(os.fdopen(open_stream(path), "wb", buffering=0), str(path), is_file=False)
        except OSError as error:
            raise OutputError(f"{path}: can't be written: {error.strerror}") from error

    @property
    def size(self) -> int:
        """Bytes of it."""
        return self._end

    def mend(self, bodies: Iterable[Body]) -> None:
        """Hold what is there against the store's lines, cut off an end that is torn, and stand behind the last whole line.

        OutputError, with nothing changed, if something else is in it: somebody wrote to it.
        """
        end = 0
        self._stream.seek(0)
        with open(os.dup(self._stream.fileno()), "rb") as reader:
            for number, body in enumerate(bodies, 1):
                line = body.body + b"\n"
                found = reader.read(len(line))
                if found != line:
                    self._check_torn(found, line, number)
                    break
                end, self.place = end + len(line), body.place
                self._hash.update(line)
            else:
                self._check_torn(reader.read(1), b"", number=-1)
        self._cut(end)

    def _check_torn(self, found: bytes, line: bytes, number: int) -> None:
        """A line that a broken write left: its beginning, and what a file system puts behind it after a power cut."""
        if not line.startswith(found.rstrip(b"\0")):
            where = f"line {number} is" if number > 0 else "its last lines are"
            raise OutputError(
                f"{self.name}: {where} not what this run wrote: move it away, and --resume writes it again without running anything twice"
            )

    def _cut(self, end: int) -> None:
        try:
            self._stream.truncate(end)
        except OSError as error:
            raise OutputError(f"{self.name}: can't be written: {error.strerror}") from error
        self._end = end

    def append(self, bodies: Iterable[Body]) -> None:
        """Write these lines behind the others; to a file, onto the disk. A line that was interrupted half-way is written over."""
        try:
            if self.is_file:
                self._stream.seek(self._end)
            for body in bodies:
                line = body.body + b"\n"
                self._write(line)
                self.place, self._end = body.place, self._end + len(line)
                self._hash.update(line)
            self._stream.flush()
            if self.is_file:
                os.fsync(self._stream.fileno())
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(f"{self.name}: can't be written: {error.strerror}") from error

    def _write(self, line: bytes) -> None:
        """All of it: an unbuffered write may take a part only."""
        left = memoryview(line)
        while left:
            left = left[self._stream.write(left) :]

    def seal(self) -> None:
        """All that was written stays, whatever happens: the file and its name."""
        if not self.is_file:
            return
        try:
            whole_sync(self._stream.fileno())
        except OSError as error:
            raise OutputError(f"{self.name}: can't be written: {error.strerror}") from error
        with contextlib.suppress(OSError):  # not every file system can do that
            folder = os.open(Path(self.name).resolve().parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def close(self) -> None:
        if self._stream is not getattr(sys.stdout, "buffer", None):
            with contextlib.suppress(OSError):
                self._stream.close()
