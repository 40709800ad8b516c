"""Append lines to a file that others append to as well, and never let that fail a request. No tensors.

A line is one `write` to a file opened for appending, under a lock that is held for that long: several processes can share a file, and each
line stays whole, also behind one that was cut off. Only its owner can read the file, which says what somebody asked.
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
from mlxrunner.events import logger
from mlxrunner.writing import check_own, is_stream, open_own, open_stream, write_all

LIMIT = 64 * 10**6
"""Bytes of a file before it is rotated."""
KEPT = 4
"""Rotated files that are kept: FILE.1 is the youngest."""


class LineWriter:
    """Appends to `file`, which is rotated to FILE.1 ... FILE.4 when it would grow beyond `limit` bytes.

    Whether somebody else has rotated the file is looked at when `patience` seconds have gone by since the last time.

    OptionError at once where the file can't be opened; what goes wrong later (a full disk) is one warning, and the lines are dropped until
    writing works again. `first`: a line that comes before this writer's others in each file that it writes to.
    """

    def __init__(
        self,
        file: str | Path,
        *,
        limit: int = LIMIT,
        first: Callable[[], str] | None = None,
        patience: float = 1.0,
    ) -> None:
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
        """Put `first`, which has changed, before the next line."""
        self._told = False

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _append(self, line: str) -> None:
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
                    pass  # somebody else has rotated it, or taken it away
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
        """Whether the name still means the file that is open."""
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
        """Whether the file's last line has no end: what is appended would be lost with it."""
        try:
            return os.pread(self._descriptor, 1, size - 1) != b"\n"
        except OSError:
            return False

    def _rotate(self) -> None:
        names = [
            self._file,
            *(self._file.with_name(f"{self._file.name}.{number}") for number in range(1, KEPT + 1)),
        ]
        for name in names:  # none of them is moved or replaced unless all are ours
            with suppress(FileNotFoundError):
                check_own(name, replaced=True)
        for older, younger in zip(names[:0:-1], names[-2::-1], strict=True):
            with suppress(FileNotFoundError):
                os.replace(younger, older)


def _write_whole(descriptor: int, data: bytes, size: int) -> None:
    """All of it, or nothing: what a full disk has cut off is taken back."""
    written = 0
    try:
        written = os.write(descriptor, data)
    finally:
        if 0 < written < len(data):
            os.ftruncate(descriptor, size)
    if written < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
