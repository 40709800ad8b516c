"""A file of prompts, line by line: to prompts, options and ids, or to what is wrong with a line. Knows nothing about models.

JSON lines: our own fields (`mlxrunner.batch.fields`) or OpenAI batch requests (`mlxrunner.batch.openai`). With a template: CSV
(`mlxrunner.batch.table`). One line is in memory at a time, and none that is longer than LONGEST.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from mlxrunner.batch.fields import BrokenLineError, Rules, checked_id, kind, read_plain
from mlxrunner.batch.openai import format_of, read_openai
from mlxrunner.batch.store import Format
from mlxrunner.batch.table import Template, read_table
from mlxrunner.errors import OptionError, PromptError
from mlxrunner.terminal import one_line
from mlxrunner.tokenizer.prompt import Prompt

LONGEST = 2**24
"""Bytes of the longest line (or row of a CSV file)."""
BOM = b"\xef\xbb\xbf"
Record = bytes | dict[str, Any] | Exception | None
"""A line, or fields, or what was wrong with them; None: it was too long."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class Line:
    """A line that is not empty. `index`: from 0; `number`: its place in the file, from 1. `error`: one line; of a file it begins with the number."""

    index: int
    number: int
    prompt: Prompt = ""
    id: str | int | None = None
    format: Format = "plain"
    options: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


class LineReader:
    """Iterate it, once, for the lines of `stream`. A bad line is a `Line` with an error and never stops the rest.

    `defaults`: options of lines that don't say otherwise; a line's options are checked together with them. `system`: the system prompt
    of lines that bring none. `raw`: a `prompt` is plain text to be continued. `template`: the stream is CSV, and this text with
    `{column}`s the prompt; a column that is not there is an OptionError when the iteration begins.
    """

    def __init__(
        self,
        stream: BinaryIO,
        *,
        defaults: Mapping[str, Any] | None = None,
        system: str | None = None,
        raw: bool = False,
        template: str | None = None,
        longest: int = LONGEST,
    ) -> None:
        self._stream, self._longest = stream, longest
        self._rules = Rules(defaults or {}, system, raw)
        self._template = None if template is None else Template(template)
        self._hash = hashlib.sha256()

    @property
    def digest(self) -> str:
        """SHA-256 of what was read so far, in hexadecimal: at the end, of the input."""
        return self._hash.hexdigest()

    def __iter__(self) -> Iterator[Line]:
        if self._template is not None:
            records: Iterator[tuple[int, Record]] = read_table(
                self._physical(), self._template, self._longest
            )
        else:
            records = (
                (number, line)
                for number, line in enumerate(self._physical(), 1)
                if line is None or line.strip()
            )
        for index, (number, record) in enumerate(records):
            yield self._line(index, number, record)

    def _line(self, index: int, number: int, record: Record) -> Line:
        form: Format = "unknown" if self._template is None else "plain"
        name = None
        try:
            problem = None
            try:
                fields: Mapping[str, Any] = _parsed(record, self._longest)
            except BrokenLineError as error:
                fields, problem = error.fields, error
            form = format_of(fields)
            key, read = ("id", read_plain) if form == "plain" else ("custom_id", read_openai)
            name = checked_id(key, fields.get(key))
            if problem is not None:
                raise problem
            prompt, options = read(fields, self._rules)
        except (PromptError, OptionError, RecursionError) as error:
            text = (
                "nested too deeply" if isinstance(error, RecursionError) else one_line(str(error))
            )
            return Line(index, number, id=name, format=form, error=f"line {number}: {text}")
        return Line(index, number, prompt, name, form, options)

    def _physical(self) -> Iterator[bytes | None]:
        """The lines with their ends; None in the place of one that is too long."""
        first = True
        while line := self._read():
            whole = len(line) <= self._longest or line.endswith(b"\n")
            rest = line
            while not rest.endswith(b"\n") and (rest := self._read()):
                whole = False
            yield line.removeprefix(BOM if first else b"") if whole else None
            first = False

    def _read(self) -> bytes:
        part = self._stream.readline(self._longest + 1)
        self._hash.update(part)
        return part


def _parsed(record: Record, longest: int) -> dict[str, Any]:
    """The object on a line; PromptError where there is none."""
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
    except ValueError as error:  # a number of thousands of digits, NaN
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
    """Make the objects of a line; `name` is the first key that one of them has twice."""

    name: str | None = None

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs) and self.name is None:
            seen: set[str] = set()
            self.name = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        return made


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number of JSON")
