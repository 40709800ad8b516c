"""Open the inputs of a batch, whatever they are, and yield their lines one after the other.

An input is a file, standard input, a folder of texts, or a data set: a folder of Parquet or Arrow
files, or one on the hub. The first bytes of a file tell its kind, and its name tells JSON lines
from tables. Nothing is read as a whole but a file of a folder, which has a bounded size.
"""

from __future__ import annotations

import hashlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mlxrunner.batch.arrow import (
    FEATHER,
    HUB,
    PARQUET,
    Hashed,
    arrow_rows,
    dataset_files,
    decompressed,
    from_hub,
    parquet_rows,
)
from mlxrunner.batch.lines import LONGEST, Line, LineReader, Record, lines_of_records
from mlxrunner.batch.options import BatchOptions
from mlxrunner.batch.records import Place
from mlxrunner.batch.table import Columns
from mlxrunner.errors import BrokenLineError, OptionError, PromptError, ReadError
from mlxrunner.system.reading import open_given, read_text, say_if_waiting

STANDARD = "-"
"""The name for standard input or standard output."""
ARROW = b"\xff\xff\xff\xff"
"""The first bytes of an Arrow stream."""
PACKED = (".gz", ".zst", ".zstd")
"""The ends of names that say how a file is compressed. The first bytes decide."""
TABS, TABLES, JSON_LINES = (
    (".tsv", ".tab"),
    (".csv", ".tsv", ".tab"),
    (".jsonl", ".ndjson", ".json"),
)
TEXT = ("id", "path", "text")
"""The columns of a folder: each file is a row, and its path is its id."""
PIECE = 2**18
"""Bytes per read of a stream."""


@dataclass(frozen=True)
class Part:
    """A stream of an input, or a file of a folder."""

    path: str
    """The path to open, or "-"."""
    shown: str = ""
    """The name in front of a place; empty for the only file."""
    text_id: str | None = None
    """The path within its folder, for a file that is one prompt."""
    problem: str | None = None
    """The reason why the file is not read."""


class Inputs:
    """An iterable over the lines of all inputs, to be used once.

    A bad line is a `Line` with an error and never stops the rest.
    """

    def __init__(
        self,
        names: Sequence[str],
        options: BatchOptions,
        columns: Columns | None = None,
        delimiter: str | None = None,
    ) -> None:
        """Read the inputs with these names. `delimiter` is that of tables, None for the usual one.

        Raise OptionError if `columns` or a `delimiter` are given and no input can be a table.
        """
        self._names, self._options = names, options
        self._columns = columns or Columns()
        self._delimiter = _delimiter(delimiter)
        self._is_table = self._columns.is_given or delimiter is not None
        self._digests: list[str] = []
        if self._is_table and all(_end(name) in JSON_LINES for name in names):
            raise OptionError(
                "--prompt-template, --delimiter and the options of columns are for tables (CSV, "
                f"TSV, Parquet, data sets, folders), and {names[0]} is JSON lines"
            )

    @property
    def digest(self) -> str:
        """The SHA-256 of the inputs as they are stored, in hexadecimal, after the last line."""
        return _together(self._digests)

    def __iter__(self) -> Iterator[Line]:
        return lines_of_records(self._records(), self._options)

    def _records(self) -> Iterator[tuple[Place, Record]]:
        for part in all_parts(self._names):
            if part.text_id is not None:
                yield f"file {part.text_id}", self._text(part)
                continue
            for place, record in self._records_of(part):
                if part.shown or isinstance(place, str):
                    unit = place if isinstance(place, str) else f"line {place}"
                    place = f"{part.shown} {unit}".strip()
                yield place, record

    def _text(self, part: Part) -> Record:
        """Return the fields of a file of a folder, or its error."""
        assert part.text_id is not None
        values = {"id": part.text_id, "path": part.text_id}
        columns = self._columns if self._columns.is_given else Columns(prompt="text")
        rows = columns.within(TEXT, "folder")
        try:
            values["text"], digest = _text_of(part)
        except PromptError as error:
            self._digests.append(f"{part.text_id}\0{error}")
            return BrokenLineError(str(error), rows.known(values))
        self._digests.append(f"{part.text_id}\0{digest}")
        return rows.fields(f"file {part.text_id}", values, LONGEST)

    def _records_of(self, part: Part) -> Iterator[tuple[Place, Record]]:
        """Yield the place and the record of each line or row of a stream."""
        with opened(part) as stream:
            hashed, name = Hashed(stream), part.shown or part.path
            name = "standard input" if name == STANDARD else name
            is_arrow = hashed.head[:4] == ARROW or hashed.head.startswith(FEATHER)
            if is_arrow or hashed.head.startswith(PARQUET):
                _read_to_end(hashed)
                _rewind(stream, name)
                read = arrow_rows if is_arrow else parquet_rows
                for number, record in read(stream, name, self._columns, LONGEST):
                    yield f"row {number}", record
            else:
                yield from self._lines_of(part, decompressed(hashed, name))
                _read_to_end(hashed)
        self._digests.append(hashed.digest)

    def _lines_of(self, part: Part, stream: BinaryIO) -> Iterator[tuple[Place, Record]]:
        """Yield the number and the record of each line or row of a text."""
        end = _end(part.path)
        is_table = end in TABLES or (self._is_table and end not in JSON_LINES)
        yield from LineReader(
            stream,
            columns=self._columns if is_table else None,
            delimiter=self._delimiter or ("\t" if end in TABS else ","),
        ).records()


def digest_of(names: Sequence[str]) -> str | None:
    """Return the SHA-256 of the inputs as they are now, in hexadecimal.

    Return None for a standard input that gives nothing: a store has read it already.
    """
    if STANDARD in names and (sys.stdin is None or sys.stdin.isatty()):
        return None
    digests = []
    for part in all_parts(names):
        if part.text_id is not None:
            try:
                digests.append(f"{part.text_id}\0{_text_of(part)[1]}")
            except PromptError as error:
                digests.append(f"{part.text_id}\0{error}")
            continue
        with opened(part) as stream:
            hashed = Hashed(stream)
            if part.path == STANDARD and not hashed.head:
                return None
            _read_to_end(hashed)
            digests.append(hashed.digest)
    return _together(digests)


def _delimiter(given: str | None) -> str | None:
    """Return the character that is given, or named "tab". Raise OptionError for anything else."""
    found = "\t" if given in ("tab", "\\t") else given
    if found is not None and (len(found) != 1 or found in '"\r\n\0' or not found.isascii()):
        raise OptionError(
            f"delimiter: {given!r:.80} is not one ASCII character that can separate values, or tab"
        )
    return found


def _together(digests: Sequence[str]) -> str:
    """Return the digest of one file as it is, and one of the digests of several."""
    if len(digests) == 1 and "\0" not in digests[0]:
        return digests[0]
    return hashlib.sha256("\n".join(digests).encode("utf-8", "surrogateescape")).hexdigest()


def _end(name: str) -> str:
    """Return the end of a name that tells the kind of a file, without that of its compression."""
    path = Path(name.lower())
    return (path.with_suffix("") if path.suffix in PACKED else path).suffix


def is_same_or_within(output: str, name: str) -> bool:
    """Return True if the output is the input `name`, or in the folder with that name."""
    try:
        if os.path.isdir(name):
            return Path(output).resolve().is_relative_to(Path(name).resolve())
        return os.path.samefile(name, output)
    except (OSError, ValueError, RuntimeError):  # one of them is not there; a NUL in a name
        return False


def all_parts(names: Sequence[str]) -> Iterator[Part]:
    """Yield the files of all inputs, in order.

    Raise PromptError for an input that is not there, or for a folder without files.
    """
    for name in names:
        if name.startswith(HUB):
            for file in from_hub(name):
                yield Part(str(file), file.name)
        elif name != STANDARD and os.path.isdir(name):
            files = dataset_files(Path(name))
            if files is not None:
                for file in files:
                    yield Part(str(file), str(file) if len(names) > 1 else file.name)
                continue
            count = 0
            for part in _texts(Path(name), len(names) > 1):
                count += 1
                yield part
            if not count:
                raise PromptError(f"{name}: the folder has no files")
        else:
            shown = "standard input" if name == STANDARD else name
            yield Part(name, shown if len(names) > 1 else "")


def _texts(folder: Path, is_one_of_many: bool) -> Iterator[Part]:
    """Yield the files of a folder and of the folders in it, sorted. Hidden ones are left out."""
    root = folder.resolve()
    for place, folders, files in os.walk(folder, onerror=_raise):
        linked = [name for name in folders if os.path.islink(os.path.join(place, name))]
        folders[:] = sorted(set(folders) - {*linked, *(n for n in folders if n.startswith("."))})
        for name in sorted([*files, *linked]):
            if name.startswith("."):
                continue
            path = os.path.join(place, name)
            own = os.path.relpath(path, folder)
            problem = None
            if os.path.islink(path):
                problem = _wrong_link(Path(path), root)
            yield Part(path, text_id=path if is_one_of_many else own, problem=problem)


def _wrong_link(path: Path, root: Path) -> str | None:
    """Return the reason why a link is not followed, or None if it leads to a file in `root`."""
    try:
        target = path.resolve()
    except (OSError, RuntimeError):
        return "is a link that leads nowhere"
    if not target.is_relative_to(root):
        return "is a link that leads out of the folder: copy the file"
    return "is a link to a folder" if target.is_dir() else None


def _raise(error: OSError) -> None:
    raise PromptError(f"{error.filename}: can't be read: {error.strerror}") from error


def _text_of(part: Part) -> tuple[str, str]:
    """Return the text of a file without the line ends at its end, and its SHA-256.

    Raise PromptError if the file is not read, is too large, or is no text.
    """
    if part.problem is not None:
        raise PromptError(part.problem)
    try:
        text = read_text(part.path, LONGEST)
    except ReadError as error:
        raise PromptError(str(error).removeprefix(f"{part.path}: ")) from error
    if "\0" in text:
        raise PromptError("there is a NUL byte in it: is it a text file?")
    return text.rstrip("\r\n"), hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def opened(part: Part) -> Iterator[BinaryIO]:
    """Open a file or standard input. Raise PromptError if it can't be read."""
    if part.path == STANDARD:
        if sys.stdin is None:
            raise PromptError("standard input is closed")
        say_if_waiting(sys.stdin.buffer, "standard input")
        yield sys.stdin.buffer
        return
    try:
        with open_given(part.path) as stream:
            say_if_waiting(stream, part.path)
            yield stream
    except ReadError as error:
        raise PromptError(str(error)) from error
    except OSError as error:
        raise PromptError(f"{part.path}: can't be read: {error.strerror or error}") from error


def _read_to_end(stream: Hashed) -> None:
    """Read the rest of a stream, for its hash."""
    while stream.read(PIECE):
        pass


def _rewind(stream: BinaryIO, name: str) -> None:
    """Go back to the beginning. Raise PromptError if the stream can't."""
    try:
        stream.seek(0)
    except (OSError, io.UnsupportedOperation) as error:
        raise PromptError(
            f"{name}: is Parquet or Arrow, which can't be read from a stream: name a file"
        ) from error
