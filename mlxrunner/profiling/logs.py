"""Append lines to a log file that other processes write to, and read lines that others wrote.

A failed write never fails a request, and a line that can't be used never raises an error: such
lines are counted by kind. No tensors.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from mlxrunner.errors import OptionError, ReadError
from mlxrunner.profiling.schema import SCHEMA, VERSION, Event
from mlxrunner.results import is_counted, logger
from mlxrunner.system.reading import no_constant, open_given, say_if_waiting
from mlxrunner.system.writing import (
    check_own,
    is_stream,
    open_own,
    open_stream,
    write_all,
    write_errors_as,
)

LIMIT = 64 * 10**6
"""The bytes of a file before it is rotated."""
KEPT = 4
"""The number of rotated files that are kept; FILE.1 is the youngest."""


class LineWriter:
    """A writer that appends to a file, and rotates it before it exceeds a limit.

    The file moves to FILE.1, FILE.1 to FILE.2, up to FILE.4. A failure after the first opening,
    such as a full disk, logs one warning; lines are dropped until writing works again.
    """

    def __init__(
        self,
        file: str | Path,
        *,
        limit: int = LIMIT,
        first: Callable[[], str] | None = None,
        patience: float = 1.0,
    ) -> None:
        """Open `file`, which is rotated before it exceeds `limit` bytes.

        `first` makes a line that precedes this writer's other lines in each file that it writes to.
        Every `patience` seconds the writer checks that no other process has rotated the file. Raise
        OptionError if the file can't be opened.
        """
        self._file, self._limit, self._first, self._patience = Path(file), limit, first, patience
        self._is_stream = is_stream(file)
        self._looked = 0.0
        self._warned = self._told = False
        with write_errors_as(OptionError, self._file):
            self._descriptor = self._open()

    def write(self, line: str) -> None:
        """Append `line` and a newline."""
        try:
            self._append(line)
            self._warned = False
        except OSError as error:
            if not self._warned:
                logger.warning("%s: not written: %s", self._file, error.strerror or error)
            self._warned = True

    def begin_again(self) -> None:
        """Write `first` again before the next line, since it has changed."""
        self._told = False

    def close(self) -> None:
        """Close the file. Safe to repeat."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _append(self, line: str) -> None:
        """Append a line to the current file, after rotating it if it is full."""
        if self._descriptor < 0:
            self._descriptor = self._open()
        if self._is_stream:
            write_all(self._descriptor, self._lines(line))
            self._told = True
            return
        while True:
            data = self._lines(line)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            try:
                size = os.fstat(self._descriptor).st_size
                is_full = size > 0 and size + len(data) > self._limit
                if not self._is_current(at_once=is_full):
                    pass  # another process has rotated or removed it
                elif is_full:
                    self._rotate()
                else:
                    if size and not self._told and self._is_cut_off(size):
                        data = b"\n" + data
                    _write_whole(self._descriptor, data, size)
                    self._told = True
                    return
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self.close()
            self._descriptor, self._told = self._open(), False

    def _lines(self, line: str) -> bytes:
        first = f"{self._first()}\n" if self._first is not None and not self._told else ""
        return f"{first}{line}\n".encode("utf-8", "backslashreplace")

    def _open(self) -> int:
        return open_stream(self._file) if self._is_stream else open_own(self._file, append=True)

    def _is_current(self, *, at_once: bool) -> bool:
        """Return True if the name still means the open file."""
        now = time.monotonic()
        if now < self._looked + self._patience and not at_once:
            return True
        self._looked = now
        try:
            there = os.lstat(self._file)
        except FileNotFoundError:
            return False
        opened = os.fstat(self._descriptor)
        return (there.st_dev, there.st_ino) == (opened.st_dev, opened.st_ino)

    def _is_cut_off(self, size: int) -> bool:
        """Return True if the last line has no end: a line appended to it would be lost."""
        try:
            return os.pread(self._descriptor, 1, size - 1) != b"\n"
        except OSError:
            return False

    def _rotate(self) -> None:
        """Rename the file and its older ones. Nothing is renamed unless all are ours."""
        older = (f"{self._file.name}.{number}" for number in range(1, KEPT + 1))
        names = [self._file, *map(self._file.with_name, older)]
        for name in names:
            with suppress(FileNotFoundError):
                check_own(name, replaced=True)
        for target, younger in zip(names[:0:-1], names[-2::-1], strict=True):
            with suppress(FileNotFoundError):
                os.replace(younger, target)


def _write_whole(descriptor: int, data: bytes, size: int) -> None:
    """Write all of `data`, or nothing: take back what a full disk has cut off."""
    written = 0
    try:
        written = os.write(descriptor, data)
    finally:
        if 0 < written < len(data):
            os.ftruncate(descriptor, size)
    if written < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


LONGEST_LINE = 64 * 2**20
"""The most bytes of a line; our own lines stay far below."""
T = TypeVar("T")


class LogLines(Generic[T]):
    """An iterable over the lines of files, each converted to a value."""

    def __init__(
        self,
        files: Iterable[str | Path],
        schema: str,
        version: int,
        convert: Callable[[dict[str, Any]], T],
        decode: Callable[[bytes], T] | None = None,
    ) -> None:
        """Read the lines of `files` that have this `schema` and `version`.

        `convert` makes a value of a parsed line, and raises ValueError for a missing field or an
        impossible value. `decode` does the same for the bytes of a line, and is tried first because
        it is faster. The iteration raises ReadError if a file can't be read.
        """
        self._files, self._schema, self._version = list(files), schema, version
        self._convert, self._decode = convert, decode
        self.skipped: Counter[str] = Counter()
        """The number of lines that the last iteration skipped, by kind.

        The kinds are "unreadable" (no JSON object, cut off, not UTF-8), "foreign" (another schema),
        "version" (another version of it) and "invalid" (`convert` refused it).
        """
        self.bounded = 0
        """The number of lines of the last iteration whose lost tokens are the bounds of 0.2."""

    def __iter__(self) -> Iterator[T]:
        self.skipped.clear()
        self.bounded = 0
        for file in self._files:
            for raw in _raw_lines(Path(file)):
                if raw.strip() and (value := self._parse(raw)) is not None:
                    yield value

    def _parse(self, raw: bytes) -> T | None:
        """Return the value of the line `raw`. If it can't be used, count it and return None."""
        with suppress(ValueError, RecursionError):
            if self._decode is not None:
                return self._decode(raw)
        line: Any = None
        with suppress(ValueError, RecursionError):
            line = json.loads(raw, parse_constant=no_constant)
        if not isinstance(line, dict):
            why = "unreadable"
        elif line.get("schema") != self._schema:
            why = "foreign"
        elif line.get("version") != self._version:
            why = "version"
        else:
            why = "invalid"
            with suppress(ValueError, RecursionError):
                value = self._convert(line)
                self.bounded += bool(line.get("lost_tokens")) and not is_counted(line)
                return value
        self.skipped[why] += 1
        return None


def read_events(files: Iterable[str | Path]) -> LogLines[Event]:
    """Read the events of `files`. The iteration raises ReadError if a file can't be read."""
    decode = msgspec.json.Decoder(Event).decode
    return LogLines(files, SCHEMA, VERSION, Event.of, lambda raw: decode(raw).checked())


def with_rotated(file: str | Path) -> list[Path]:
    """List the files that `file` was rotated to, the oldest first, and then `file`."""
    older: list[Path] = []
    while os.path.exists(one := f"{file}.{len(older) + 1}"):  # also False for an impossible name
        older.append(Path(one))
    return [*reversed(older), Path(file)]


def _raw_lines(file: Path) -> Iterator[bytes]:
    """Yield the lines of a file. Raise ReadError if it can't be read."""
    try:
        with open_given(file) as stream:
            say_if_waiting(stream, str(file))
            while raw := stream.readline(LONGEST_LINE):
                yield raw
    except OSError as error:
        raise ReadError(f"{file}: can't be read: {error.strerror or error}") from error
