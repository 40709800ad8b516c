"""Append lines to a file that other processes append to as well.

A failure never fails a request. A line is one `write` to a file opened for appending, under a lock,
so each line stays whole, also behind one that was cut off. Only the owner can read the file, since
it tells what somebody asked. No tensors.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mlxrunner.errors import OptionError
from mlxrunner.results import logger
from mlxrunner.system.writing import check_own, is_stream, open_own, open_stream, write_all

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
        try:
            self._descriptor = self._open()
        except OSError as error:
            raise OptionError(
                f"{self._file}: can't be written: {error.strerror or error}"
            ) from error

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
        names = [
            self._file,
            *(self._file.with_name(f"{self._file.name}.{number}") for number in range(1, KEPT + 1)),
        ]
        for name in names:  # nothing is renamed unless all files are ours
            with suppress(FileNotFoundError):
                check_own(name, replaced=True)
        for older, younger in zip(names[:0:-1], names[-2::-1], strict=True):
            with suppress(FileNotFoundError):
                os.replace(younger, older)


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
