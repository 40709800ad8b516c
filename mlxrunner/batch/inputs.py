"""Open the inputs of a batch, whatever they are, and yield their lines one after the other.

An input is a file, standard input, a folder of texts, or a data set: a folder of Parquet or Arrow
files, or one on the hub. The first bytes of a file tell its kind, and its name tells JSON lines
from tables. One line is in memory at a time, and none longer than LONGEST. No tensors.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mlxrunner.batch.fields import checked_id, format_of, read_fields
from mlxrunner.batch.openai_format import kind
from mlxrunner.batch.options import BatchOptions
from mlxrunner.batch.store import Format, InputLine, Place, place_of
from mlxrunner.batch.tables import (
    FEATHER,
    HUB,
    PARQUET,
    Columns,
    HashedStream,
    arrow_rows,
    dataset_files,
    decompressed,
    from_hub,
    parquet_rows,
    read_table,
)
from mlxrunner.errors import BrokenLineError, OptionError, PromptError, ReadError
from mlxrunner.system.reading import no_constant, open_given, read_text, say_if_waiting
from mlxrunner.terminal.output import one_line

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


LONGEST = 2**24
"""The size in bytes of the longest line, or row of a CSV file."""
BOM = b"\xef\xbb\xbf"
Record = bytes | Mapping[str, Any] | Exception | None
"""The bytes of a line, the fields of a row, or the error of either; None if it is too long."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class InputFile:
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

    A bad line is a `InputLine` with an error and never stops the rest.
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
                "--row-template, --delimiter and the options of columns are for tables (CSV, "
                f"TSV, Parquet, data sets, folders), and {names[0]} is JSON lines"
            )

    @property
    def digest(self) -> str:
        """The SHA-256 of the inputs as they are stored, in hexadecimal, after the last line."""
        return _together(self._digests)

    def __iter__(self) -> Iterator[InputLine]:
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

    def _text(self, part: InputFile) -> Record:
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

    def _records_of(self, part: InputFile) -> Iterator[tuple[Place, Record]]:
        """Yield the place and the record of each line or row of a stream."""
        with opened(part) as stream:
            hashed, name = HashedStream(stream), part.shown or part.path
            name = "standard input" if name == STANDARD else name
            is_arrow = hashed.head[:4] == ARROW or hashed.head.startswith(FEATHER)
            if is_arrow or hashed.head.startswith(PARQUET):
                _read_to_end(hashed)
                _rewind(stream, name)
                read = arrow_rows if is_arrow else parquet_rows
                for number, record in read(stream, name, self._columns, LONGEST):
                    yield f"row {number}", record
            else:
                with decompressed(hashed, name) as content:
                    yield from self._lines_of(part, content)
                _read_to_end(hashed)
        self._digests.append(hashed.digest)

    def _lines_of(self, part: InputFile, stream: BinaryIO) -> Iterator[tuple[Place, Record]]:
        """Yield the number and the record of each line or row of a text."""
        end = _end(part.path)
        is_table = end in TABLES or (self._is_table and end not in JSON_LINES)
        delimiter = self._delimiter or ("\t" if end in TABS else ",")
        return read_records(stream, self._columns if is_table else None, delimiter)


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
            hashed = HashedStream(stream)
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


def all_parts(names: Sequence[str]) -> Iterator[InputFile]:
    """Yield the files of all inputs, in order.

    Raise PromptError for an input that is not there, or for a folder without files.
    """
    for name in names:
        if name.startswith(HUB):
            for file in from_hub(name):
                yield InputFile(str(file), file.name)
        elif name != STANDARD and os.path.isdir(name):
            files = dataset_files(Path(name))
            if files is not None:
                for file in files:
                    yield InputFile(str(file), str(file) if len(names) > 1 else file.name)
                continue
            count = 0
            for part in _texts(Path(name), len(names) > 1):
                count += 1
                yield part
            if not count:
                raise PromptError(f"{name}: the folder has no files")
        else:
            shown = "standard input" if name == STANDARD else name
            yield InputFile(name, shown if len(names) > 1 else "")


def _texts(folder: Path, is_one_of_many: bool) -> Iterator[InputFile]:
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
            yield InputFile(path, text_id=path if is_one_of_many else own, problem=problem)


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


def _text_of(part: InputFile) -> tuple[str, str]:
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
def opened(part: InputFile) -> Iterator[BinaryIO]:
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


def _read_to_end(stream: HashedStream) -> None:
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


def read_records(
    stream: BinaryIO, columns: Columns | None = None, delimiter: str = ",", longest: int = LONGEST
) -> Iterator[tuple[int, Record]]:
    """Yield the number and the record of each line of a stream that is not empty.

    With `columns` the stream is a table of text. Its first step raises OptionError if it lacks one
    of the columns.
    """
    if columns is not None:
        return read_table(_whole_lines(stream, longest), columns, longest, delimiter)
    lines = enumerate(_whole_lines(stream, longest), 1)
    return ((number, line) for number, line in lines if line is None or line.strip())


def _whole_lines(stream: BinaryIO, longest: int) -> Iterator[bytes | None]:
    """Yield the lines with their ends, and None in the place of one that is too long."""
    mark = BOM
    while line := stream.readline(longest + 1):
        is_whole = len(line) <= longest or line.endswith(b"\n")
        rest = line
        while not rest.endswith(b"\n") and (rest := stream.readline(longest + 1)):
            is_whole = False
        yield line.removeprefix(mark) if is_whole else None
        mark = b""


def lines_of_records(
    records: Iterable[tuple[Place, Record]], options: BatchOptions, longest: int = LONGEST
) -> Iterator[InputLine]:
    """Yield the lines of records, each with its place."""
    index = 0
    for place, record in records:
        for line in _lines(index, place, record, options, longest):
            yield line
            index += 1


def _lines(
    index: int, place: Place, record: Record, options: BatchOptions, longest: int
) -> Iterator[InputLine]:
    """Yield a line for each prompt of a record, from `index` on, or one with its error.

    Several prompts get the id of their record with their number from 0 behind it.
    """
    form: Format = "unknown" if record is None or isinstance(record, bytes) else "plain"
    name = problem = None
    try:
        try:
            fields: Mapping[str, Any] = _parsed(record, longest)
        except BrokenLineError as error:
            fields, problem = error.fields, error
        form = format_of(fields)
        key = "id" if form == "plain" else "custom_id"
        name = checked_id(key, fields.get(key))
        if problem is not None:
            raise problem
        prompts, own = read_fields(fields, options)
    except (PromptError, OptionError, RecursionError) as error:
        text = "nested too deeply" if isinstance(error, RecursionError) else one_line(str(error))
        yield InputLine(index, place, id=name, format=form, error=f"{place_of(place)}: {text}")
        return
    for part, prompt in enumerate(prompts):
        called = name if name is None or len(prompts) == 1 else f"{name}/{part}"
        yield InputLine(index + part, place, prompt, called, form, own)


def _parsed(record: Record, longest: int) -> Mapping[str, Any]:
    """Return the object on a line. Raise PromptError if there is none."""
    if isinstance(record, Exception):
        raise record
    if record is None:
        raise PromptError(f"is longer than {longest} bytes")
    if isinstance(record, Mapping):
        return record
    try:
        twice = _DuplicateKeys()
        value = json.loads(
            record.rstrip().decode(), parse_constant=no_constant, object_pairs_hook=twice
        )
        if _SURROGATE.search(record):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise PromptError(f"not UTF-8: {error.reason} at byte {error.start + 1}") from error
    except UnicodeEncodeError as error:
        raise PromptError("has half a character (a lone surrogate) in it") from error
    except json.JSONDecodeError as error:
        hint = "" if error.pos else '; a line is an object such as {"prompt": "Hi"}'
        raise PromptError(f"not JSON: {error.msg} at character {error.pos + 1}{hint}") from error
    except ValueError as error:  # NaN, or a number of thousands of digits
        raise PromptError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise PromptError(f"has to be a JSON object, not {kind(value)}")
    if twice.name is not None:
        known = {name: field for name, field in value.items() if name != twice.name}
        raise BrokenLineError(
            f"the key {twice.name!r:.80} is there twice in one object: which value counts?", known
        )
    return value


class _DuplicateKeys:
    """A hook that makes the objects of a line and finds a key that stands twice in one of them."""

    name: str | None = None
    """The first such key; None if there is none."""

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs) and self.name is None:
            seen: set[str] = set()
            for name, _ in pairs:
                if name in seen:
                    self.name = name
                    break
                seen.add(name)
        return made
