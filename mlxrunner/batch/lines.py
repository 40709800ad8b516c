"""Read a file of prompts line by line: prompts, options and ids, or the error of a line.

The file is JSON lines, or CSV whose rows a template turns into prompts. One line is in memory at a
time, and none longer than LONGEST. Knows nothing about models.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from mlxrunner.batch.fields import checked_id, format_of, kind, read_fields
from mlxrunner.batch.options import BatchOptions
from mlxrunner.batch.store import Format
from mlxrunner.errors import BrokenLineError, OptionError, PromptError
from mlxrunner.terminal.text import one_line
from mlxrunner.tokenizer.prompt import Prompt

LONGEST = 2**24
"""The size in bytes of the longest line, or row of a CSV file."""
BOM = b"\xef\xbb\xbf"
ID = "id"
"""The name of the optional column of ids in a CSV file."""
Record = bytes | dict[str, Any] | Exception | None
"""The bytes of a line, the fields of a row, or the error of either; None if it is too long."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


@dataclass(frozen=True)
class Line:
    """A line of the input that is not empty."""

    index: int
    """The number of the line among those that are not empty, from 0."""
    number: int
    """The number of the line in the file, from 1."""
    prompt: Prompt = ""
    """The text, messages or tokens of the prompt; empty if there is an error."""
    id: str | int | None = None
    """The id that the line gives; None if it gives none."""
    format: Format = "plain"
    """The format of the answer."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of `GenerateOptions` that the line itself gives."""
    error: str | None = None
    """The reason why the line can't be run, in one line; in a file the line number comes first."""


class LineReader:
    """An iterable over the lines of a stream, to be used once.

    A bad line is a `Line` with an error and never stops the rest.
    """

    def __init__(
        self,
        stream: BinaryIO,
        options: BatchOptions | None = None,
        *,
        template: str | None = None,
        longest: int = LONGEST,
    ) -> None:
        """Read `stream`, with lines of at most `longest` bytes.

        The options of each line are checked together with `options`, those of the batch. With a
        `template` the stream is CSV, and this text with `{column}`s makes the prompts. Raise
        OptionError for a template without columns. The first step of the iteration raises
        OptionError if the file lacks one of the columns.
        """
        self._stream, self._longest = stream, longest
        self._options = options or BatchOptions()
        self._template = None if template is None else Template(template)
        self._hash = hashlib.sha256()

    @property
    def digest(self) -> str:
        """The SHA-256 of the bytes read so far, in hexadecimal; at the end, that of the input."""
        return self._hash.hexdigest()

    def __iter__(self) -> Iterator[Line]:
        if self._template is None:
            records: Iterator[tuple[int, Record]] = (
                (number, line)
                for number, line in enumerate(self._physical(), 1)
                if line is None or line.strip()
            )
        else:
            records = read_table(self._physical(), self._template, self._longest)
        index = 0
        for number, record in records:
            for line in self._lines(index, number, record):
                yield line
                index += 1

    def _lines(self, index: int, number: int, record: Record) -> Iterator[Line]:
        """Yield a line for each prompt of a record, from `index` on, or one with its error.

        Several prompts get the id of their record with their number from 0 behind it.
        """
        form: Format = "unknown" if self._template is None else "plain"
        name = problem = None
        try:
            try:
                fields: Mapping[str, Any] = _parsed(record, self._longest)
            except BrokenLineError as error:
                fields, problem = error.fields, error
            form = format_of(fields)
            key = "id" if form == "plain" else "custom_id"
            name = checked_id(key, fields.get(key))
            if problem is not None:
                raise problem
            prompts, options = read_fields(fields, self._options)
        except (PromptError, OptionError, RecursionError) as error:
            text = one_line(str(error))
            if isinstance(error, RecursionError):
                text = "nested too deeply"
            yield Line(index, number, id=name, format=form, error=f"line {number}: {text}")
            return
        for part, prompt in enumerate(prompts):
            own = name if name is None or len(prompts) == 1 else f"{name}/{part}"
            yield Line(index + part, number, prompt, own, form, options)

    def _physical(self) -> Iterator[bytes | None]:
        """Yield the lines with their ends, and None in the place of one that is too long."""
        first = True
        while line := self._read():
            whole = len(line) <= self._longest or line.endswith(b"\n")
            rest = line
            while not rest.endswith(b"\n") and (rest := self._read()):
                whole = False
            yield line.removeprefix(BOM if first else b"") if whole else None
            first = False

    def _read(self) -> bytes:
        """Read one line, or the part of it that fits."""
        part = self._stream.readline(self._longest + 1)
        self._hash.update(part)
        return part


def _parsed(record: Record, longest: int) -> dict[str, Any]:
    """Return the object on a line. Raise PromptError if there is none."""
    if isinstance(record, Exception):
        raise record
    if record is None:
        raise PromptError(f"is longer than {longest} bytes")
    if isinstance(record, dict):
        return record
    try:
        twice = _Twice()
        value = json.loads(
            record.rstrip().decode(), parse_constant=_refuse, object_pairs_hook=twice
        )
        if _SURROGATE.search(record):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise PromptError(f"not UTF-8: {error.reason} at byte {error.start + 1}") from error
    except UnicodeEncodeError as error:
        raise PromptError("has half a character (a lone surrogate) in it") from error
    except json.JSONDecodeError as error:
        raise PromptError(f"not JSON: {error.msg} at character {error.pos + 1}") from error
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


class _Twice:
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


def _refuse(constant: str) -> None:
    """Raise ValueError for NaN and infinities, which JSON does not have."""
    raise ValueError(f"{constant} is not a number of JSON")


class Template:
    """A text with `{column}`s, in which `{{` and `}}` stand for braces.

    Creating it raises OptionError for any other brace, and for a text without columns.
    """

    def __init__(self, text: str) -> None:
        parts = list(_PART.finditer(text))
        wrong = next((part for part in parts if part[0] in ("{", "}", "{}")), None)
        if wrong is not None:
            raise OptionError(
                f"the prompt template has a {wrong[0]!r} at character {wrong.start()}: write "
                "{column}, or {{ for a brace"
            )
        self._names = [part[1] for part in parts if part[1] is not None]
        self.columns = list(dict.fromkeys(self._names))
        if not self.columns:
            raise OptionError(f"the prompt template has no {{column}} in it: {text!r:.80}")
        self._text = text

    def size(self, row: dict[str, str]) -> int:
        """Return the number of characters that `fill` makes of a row, or slightly more."""
        return len(self._text) + sum(len(row[name]) for name in self._names)

    def fill(self, row: dict[str, str]) -> str:
        """Return the template with the row's values. Braces in the values mean nothing."""
        return _PART.sub(
            lambda match: match[0][0] if match[1] is None else row[match[1]], self._text
        )

    def check(self, header: list[str]) -> None:
        """Raise OptionError for a column that the header lacks or has twice.

        The column of ids may be missing.
        """
        missing = [repr(name) for name in self.columns if name not in header]
        if missing:
            problem = f"the CSV file has no column {', '.join(missing)}"
            raise OptionError(f"{problem}: it has {', '.join(map(repr, header))}"[:1000])
        for name in (*self.columns, ID):
            places = [str(place) for place, column in enumerate(header, 1) if column == name]
            if len(places) > 1:
                raise OptionError(
                    f"the CSV file has more than one column {name!r}: number {' and '.join(places)}"
                )


class _CsvSource:
    """An iterator that gives lines to csv.reader and limits the size of a row.

    A row takes several lines if its values contain line ends.
    """

    def __init__(self, lines: Iterable[bytes | None], longest: int) -> None:
        self._lines, self._longest = iter(lines), longest
        self.number = self._taken = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.number += 1
        self._taken += self._longest + 1 if line is None else len(line)
        if line is None or self._taken > self._longest:
            raise csv.Error(f"a row is longer than {self._longest} bytes (is a quote missing?)")
        if b"\0" in line:
            raise csv.Error("there is a NUL byte in it: is it a text file?")
        return line.decode("utf-8", "surrogateescape")

    def begin(self) -> int:
        """Begin the next row and return the number of its first line."""
        self._taken = 0
        return self.number + 1


def read_table(
    lines: Iterable[bytes | None], template: Template, longest: int
) -> Iterator[tuple[int, dict[str, Any] | PromptError]]:
    """Yield for each row the number of its first line, and its fields or its error.

    The fields are `prompt` and, if there is such a column, `id`. Python's csv module reads the rows
    in its strict mode. A row takes at most `longest` bytes. The first step raises OptionError if
    the header is missing or broken, or lacks a column of the template.
    """
    source = _CsvSource(lines, longest)
    reader = csv.reader(source, strict=True)
    header = _header(reader, longest)
    template.check(header)
    count = 0
    while True:
        number = source.begin()
        try:
            row = _next_row(reader, longest)
        except (csv.Error, ValueError) as error:
            count += 1
            yield number, PromptError(f"not a CSV row: {error}")
            continue
        if row is None:
            return
        if row:
            count += 1
            yield number, _row_fields(count, row, header, template, longest)


def _header(reader: Any, longest: int) -> list[str]:
    """Return the names of the columns. Raise OptionError if the header is missing or broken."""
    try:
        while (header := _next_row(reader, longest)) == []:  # an empty line
            pass
    except (csv.Error, ValueError) as error:
        raise OptionError(f"the CSV file's header can't be read: {error}") from error
    if not header:
        raise OptionError("the CSV file has no header: its first line has to name the columns")
    return [name.strip() for name in header]


def _next_row(reader: Any, longest: int) -> list[str] | None:
    """Return the next row, or None at the end.

    Raise csv.Error for a broken row, and ValueError for one that is not UTF-8.
    """
    before = csv.field_size_limit(longest)  # a limit of the whole module
    try:
        row: list[str] | None = next(reader, None)
    except csv.Error as error:
        if str(error).startswith("new-line character"):
            raise csv.Error(
                "there is a carriage return in it that ends no line: lines have to end with LF or "
                "CRLF"
            ) from error
        raise
    finally:
        csv.field_size_limit(before)
    try:
        "".join(row or ()).encode()
    except UnicodeEncodeError as error:
        raise ValueError("it is not UTF-8") from error
    return row


def _row_fields(
    number: int, row: list[str], header: list[str], template: Template, longest: int
) -> dict[str, Any] | PromptError:
    """Return the fields of row `number` (from 1), or its error.

    A row with too few or too many values, or with too long a prompt, keeps the id in its column.
    """
    values = dict(zip(header, row, strict=False))
    known = {"id": values.get(ID) or None}
    if len(row) != len(header):
        problem = f"row {number} has {len(row)} values and the header {len(header)} columns: "
        if len(row) < len(header):
            missing = ", ".join(map(repr, header[len(row) :]))
            return BrokenLineError(f"{problem}none for {missing:.200} (is a comma missing?)", known)
        beyond = f"{', '.join(map(repr, row[len(header) :])):.200} is behind the last"
        return BrokenLineError(
            f"{problem}{beyond}, {header[-1]!r:.80} (are quotes missing?)", known
        )
    if (size := template.size(values)) > longest:
        problem = f"row {number} makes a prompt of {size:,} characters"
        return BrokenLineError(f"{problem}, and {longest:,} are the most", known)
    return {"prompt": template.fill(values), **known}
