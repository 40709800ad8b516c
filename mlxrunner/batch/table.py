"""Turn the rows of a table into prompts: CSV with any delimiter, Parquet, or the files of a folder.

`Columns` says which column is the prompt, the messages or the id, or which text is made of several.
Knows nothing about files.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxrunner.errors import BrokenLineError, OptionError, PromptError

ID, PROMPT, MESSAGES = "id", "prompt", "messages"
"""The names of the columns that are used where no option names another."""
_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


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

    def size(self, row: Mapping[str, Any]) -> int:
        """Return the number of characters that `fill` makes of a row, or slightly more."""
        return len(self._text) + sum(len(shown(row[name])) for name in self._names)

    def fill(self, row: Mapping[str, Any]) -> str:
        """Return the template with the row's values. Braces in the values mean nothing."""
        return _PART.sub(
            lambda match: match[0][0] if match[1] is None else shown(row[match[1]]), self._text
        )


def shown(value: Any) -> str:
    """Return a value of a row as text: a text as it is, nothing for null, and else JSON."""
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False, default=str)


@dataclass(frozen=True)
class Columns:
    """The columns of a table that make a line. Creating it raises OptionError if two are prompts.

    Without a template, and without a column of prompts or messages, a column `prompt` or `messages`
    is taken.
    """

    template: Template | None = None
    """The text that makes a prompt of the values of a row."""
    prompt: str | None = None
    """The name of the column of prompts."""
    messages: str | None = None
    """The name of the column of conversations."""
    id: str | None = None
    """The name of the column of ids; None for `id`, if there is one."""

    def __post_init__(self) -> None:
        given = {
            "--prompt-template": self.template,
            "--prompt-column": self.prompt,
            "--messages-column": self.messages,
        }
        both = [flag for flag, value in given.items() if value is not None]
        if len(both) > 1:
            raise OptionError(f"{both[0]} and {both[1]} both say what a prompt is: use one of them")

    @property
    def is_given(self) -> bool:
        """True if an option names a column."""
        return self != Columns()

    def within(self, header: Sequence[str], kind: str) -> Rows:
        """Return the columns as they are in a table with this header.

        `kind` names the table in an error. Raise OptionError if a column is missing or there twice.
        """
        prompt, messages = self.prompt, self.messages
        if self.template is None and prompt is None and messages is None:
            found = [name for name in (PROMPT, MESSAGES) if name in header]
            if len(found) != 1:
                problem = "both" if found else "neither"
                raise OptionError(
                    f"the {kind} has {problem} a column 'prompt' {'and' if found else 'nor'} one "
                    "'messages': say with --prompt-template, --prompt-column or --messages-column "
                    f"what to ask; it has {', '.join(map(repr, header))}"[:1000]
                )
            prompt, messages = (PROMPT, None) if found == [PROMPT] else (None, MESSAGES)
        names = list(self.template.columns) if self.template else []
        names += [name for name in (prompt, messages, self.id) if name is not None]
        missing = [repr(name) for name in names if name not in header]
        if missing:
            problem = f"the {kind} has no column {', '.join(missing)}"
            raise OptionError(f"{problem}: it has {', '.join(map(repr, header))}"[:1000])
        for name in (*names, self.id or ID):
            places = [str(place) for place, column in enumerate(header, 1) if column == name]
            if len(places) > 1:
                raise OptionError(
                    f"the {kind} has more than one column {name!r}: number {' and '.join(places)}"
                )
        own = self.id or (ID if ID in header else None)
        return Rows(self.template, prompt, messages, own)


@dataclass(frozen=True)
class Rows:
    """The columns of one table, all of them there. Made by `Columns.within`."""

    template: Template | None
    prompt: str | None
    messages: str | None
    id: str | None

    @property
    def names(self) -> list[str]:
        """The names of the columns that are read."""
        names = list(self.template.columns) if self.template else []
        names += [name for name in (self.prompt, self.messages, self.id) if name is not None]
        return list(dict.fromkeys(names))

    def known(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the id of a row, for a row that can't be read as well."""
        name = None if self.id is None else values.get(self.id)
        return {"id": None if name == "" else name}

    def fields(
        self, row: str, values: Mapping[str, Any], longest: int
    ) -> dict[str, Any] | PromptError:
        """Return the fields of a row, or its error. `row` names it in the error."""
        known = self.known(values)
        if self.messages is not None:
            return self._conversation(values[self.messages], known)
        if self.template is None:
            return {"prompt": values[self.prompt or PROMPT], **known}
        if (size := self.template.size(values)) > longest:
            problem = f"{row} makes a prompt of {size:,} characters"
            return BrokenLineError(f"{problem}, and {longest:,} are the most", known)
        return {"prompt": self.template.fill(values), **known}

    def _conversation(self, value: Any, known: dict[str, Any]) -> dict[str, Any] | PromptError:
        """Return the messages in a column: a list, or JSON text of one."""
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                return BrokenLineError(f"column {self.messages!r:.80} is not JSON: {error}", known)
        return {"messages": [] if value is None else value, **known}


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


KINDS = {",": "CSV file", "\t": "TSV file"}
"""The name of a table in an error, by its delimiter."""
DELIMITERS = {",": "a comma", "\t": "a tab"}
"""The name of a delimiter in an error."""


def read_table(
    lines: Iterable[bytes | None], columns: Columns, longest: int, delimiter: str = ","
) -> Iterator[tuple[int, dict[str, Any] | PromptError]]:
    """Yield for each row the number of its first line, and its fields or its error.

    Python's csv module reads the rows in its strict mode. A row takes at most `longest` bytes. The
    first step raises OptionError if the header is missing or broken, or lacks a column.
    """
    source = _CsvSource(lines, longest)
    reader = csv.reader(source, strict=True, delimiter=delimiter)
    header = _header(reader, longest)
    rows = columns.within(header, KINDS.get(delimiter, "table"))
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
            yield number, _row_fields(count, row, header, rows, longest, delimiter)


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
    number: int, row: list[str], header: list[str], rows: Rows, longest: int, delimiter: str
) -> dict[str, Any] | PromptError:
    """Return the fields of row `number` (from 1), or its error.

    A row with too few or too many values, or with too long a prompt, keeps the id in its column.
    """
    values = dict(zip(header, row, strict=False))
    if len(row) == len(header):
        return rows.fields(f"row {number}", values, longest)
    known = rows.known(values)
    problem = f"row {number} has {len(row)} values and the header {len(header)} columns: "
    if len(row) < len(header):
        missing = ", ".join(map(repr, header[len(row) :]))
        hint = f"(is {DELIMITERS.get(delimiter, repr(delimiter))} missing?)"
        return BrokenLineError(f"{problem}none for {missing:.200} {hint}", known)
    beyond = f"{', '.join(map(repr, row[len(header) :])):.200} is behind the last"
    return BrokenLineError(f"{problem}{beyond}, {header[-1]!r:.80} (are quotes missing?)", known)
