"""Read logs that another program, version or process wrote.

Lines that can't be used never raise an error. A file is read as bytes, line by line, and such lines
are counted by kind: a last line that was cut off, an older version, another tool's log, or plain
garbage. No tensors.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from mlxrunner.errors import ReadError
from mlxrunner.profiling.schema import SCHEMA, VERSION, Event
from mlxrunner.system.reading import open_given, say_if_waiting

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

    def __iter__(self) -> Iterator[T]:
        self.skipped.clear()
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
            line = json.loads(raw, parse_constant=_refuse)
        if not isinstance(line, dict):
            self.skipped["unreadable"] += 1
        elif line.get("schema") != self._schema:
            self.skipped["foreign"] += 1
        elif line.get("version") != self._version:
            self.skipped["version"] += 1
        else:
            try:
                return self._convert(line)
            except (ValueError, RecursionError):
                self.skipped["invalid"] += 1
        return None


def read_events(files: Iterable[str | Path]) -> LogLines[Event]:
    """Read the events of `files`, in the order in which they were written.

    The iteration raises ReadError if a file can't be read.
    """
    return LogLines(files, SCHEMA, VERSION, Event.of, _decode_event)


def _decode_event(raw: bytes) -> Event:
    return _decoder().decode(raw).checked()


@cache
def _decoder() -> msgspec.json.Decoder[Event]:
    return msgspec.json.Decoder(Event)


def with_rotated(file: str | Path) -> list[Path]:
    """List the files that `file` was rotated to, and then `file`.

    The oldest comes first; FILE.1 is the youngest of the rotated files.
    """
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


def _refuse(constant: str) -> Any:
    """Raise ValueError for NaN and infinities, which JSON does not have."""
    raise ValueError(f"{constant} is not JSON")
