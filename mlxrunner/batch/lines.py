"""Read a stream of prompts line by line: prompts, options and ids, or the error of a line.

The stream is JSON lines, or CSV whose rows become prompts. One line is in memory at a time, and
none longer than LONGEST. Knows nothing about models.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from mlxrunner.batch.fields import checked_id, format_of, read_fields
from mlxrunner.batch.openai_format import kind
from mlxrunner.batch.options import BatchOptions
from mlxrunner.batch.records import Format, Place, place_of
from mlxrunner.batch.table import Columns, Template, read_table
from mlxrunner.errors import BrokenLineError, OptionError, PromptError
from mlxrunner.terminal.text import one_line
from mlxrunner.tokenizer.prompt import Prompt

LONGEST = 2**24
"""The size in bytes of the longest line, or row of a CSV file."""
BOM = b"\xef\xbb\xbf"
Record = bytes | Mapping[str, Any] | Exception | None
"""The bytes of a line, the fields of a row, or the error of either; None if it is too long."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class Line:
    """A line of the input that is not empty."""

    index: int
    """The number of the line among those that are not empty, from 0."""
    number: Place
    """The number of the line in the file, from 1, or a text that says where it is."""
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
        columns: Columns | None = None,
        delimiter: str = ",",
        longest: int = LONGEST,
    ) -> None:
        """Read `stream`, with lines of at most `longest` bytes.

        The options of each line are checked together with `options`, those of the batch. With
        `columns`, or a `template` with `{column}`s, the stream is CSV. Raise OptionError for a
        template without columns. The first step of the iteration raises OptionError if the file
        lacks one of the columns.
        """
        self._stream, self._longest = stream, longest
        self._options = options or BatchOptions()
        self._columns = columns if template is None else Columns(Template(template))
        self._delimiter = delimiter
        self._hash = hashlib.sha256()

    @property
    def digest(self) -> str:
        """The SHA-256 of the bytes read so far, in hexadecimal; at the end, that of the input."""
        return self._hash.hexdigest()

    def __iter__(self) -> Iterator[Line]:
        return lines_of_records(self.records(), self._options, self._longest)

    def records(self) -> Iterator[tuple[int, Record]]:
        """Yield the number and the record of each line that is not empty."""
        if self._columns is not None:
            return read_table(self._physical(), self._columns, self._longest, self._delimiter)
        return (
            (number, line)
            for number, line in enumerate(self._physical(), 1)
            if line is None or line.strip()
        )

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


def lines_of_records(
    records: Iterable[tuple[Place, Record]], options: BatchOptions, longest: int = LONGEST
) -> Iterator[Line]:
    """Yield the lines of records, each with its place."""
    index = 0
    for place, record in records:
        for line in _lines(index, place, record, options, longest):
            yield line
            index += 1


def _lines(
    index: int, place: Place, record: Record, options: BatchOptions, longest: int
) -> Iterator[Line]:
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
        yield Line(index, place, id=name, format=form, error=f"{place_of(place)}: {text}")
        return
    for part, prompt in enumerate(prompts):
        called = name if name is None or len(prompts) == 1 else f"{name}/{part}"
        yield Line(index + part, place, prompt, called, form, own)


def _parsed(record: Record, longest: int) -> Mapping[str, Any]:
    """Return the object on a line. Raise PromptError if there is none."""
    if isinstance(record, Exception):
        raise record
    if record is None:
        raise PromptError(f"is longer than {longest} bytes")
    if isinstance(record, Mapping):
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
