"""Files in and out: inputs are looked at before the work begins, outputs are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from mlxrunner.errors import MlxrunnerError, OptionError
from mlxrunner.profiling.reading import with_rotated
from mlxrunner.reading import ReadError, open_given
from mlxrunner.writing import is_stream, open_stream, written

ERRORS = "backslashreplace"
"""JSON can name half characters, which no file can hold."""


class WriteError(MlxrunnerError):
    """A report that can't be written; the message names the file."""

    exit_code = 2

    @classmethod
    def of(cls, file: str, error: OSError) -> WriteError:
        return cls(f"{file}: can't be written: {error.strerror or error}")


class Output:
    """What is written goes to `stream`; what goes wrong with it names `file`, whatever else is being written."""

    def __init__(self, file: str, stream: IO[str]) -> None:
        self._file, self._stream = file, stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            raise WriteError.of(self._file, error) from error


def must_differ(files: Mapping[str, str | None]) -> None:
    """OptionError if two of the options write to the same file."""
    seen: dict[str, str] = {}
    for option, file in files.items():
        if file is None or is_stream(file):
            continue  # it takes several
        other = seen.setdefault(os.path.realpath(file), option)
        if other != option:
            raise OptionError(f"{other} and {option} are the same file, {file}: give each its own")


def sources(files: Iterable[str]) -> list[Path]:
    """The files to read, each with those it was rotated to, none of them twice. ReadError for one that can't be."""
    found: dict[tuple[int, int], Path] = {}
    for file in files:
        for path in with_rotated(file):
            try:
                with open_given(path) as stream:
                    if path.is_file() and stream.read(2) == b"\x1f\x8b":
                        raise ReadError(f"{path} is compressed: unpack it first, gzip -dk {path}")
                    status = os.fstat(stream.fileno())
            except OSError as error:
                raise ReadError(f"{path}: can't be read: {error.strerror or error}") from error
            found.setdefault((status.st_dev, status.st_ino), path)
    return list(found.values())


@contextmanager
def replaced(
    file: str, inputs: Iterable[Path] = (), *, newline: str | None = None
) -> Iterator[Output]:
    """A stream whose text takes the place of `file` (0600) when the block has ended well; a stream (`is_stream`) is written to directly.

    WriteError for what can't be written, and where `file` is one of `inputs`.
    """
    path = Path(file)
    try:
        if path.exists() and any(path.samefile(one) for one in inputs):
            raise WriteError(f"{file} is what is being read: give the result another name")
        if is_stream(path):
            with os.fdopen(
                open_stream(path), "w", encoding="utf-8", errors=ERRORS, newline=newline
            ) as stream:
                yield Output(file, stream)
            return
        with written(path, newline=newline) as stream:
            yield Output(file, stream)
    except OSError as error:
        raise WriteError.of(file, error) from error
