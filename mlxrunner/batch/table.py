"""CSV: a header, and rows whose columns are put into a template to make the prompts. Python's csv module reads it, in its strict way."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from typing import Any

from mlxrunner.batch.fields import BrokenLineError
from mlxrunner.errors import OptionError, PromptError

ID = "id"
"""The name of a column that may be there."""
_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


class Template:
    """A text with `{column}`s; `{{` and `}}` stand for braces. OptionError for braces that are neither, and for a text without columns."""

    def __init__(self, text: str) -> None:
        wrong = next(
            (match for match in _PART.finditer(text) if match[0] in "{}" or match[0] == "{}"), None
        )
        if wrong is not None:
            raise OptionError(
                f"the prompt template has a {wrong[0]!r} at character {wrong.start()}: write {{column}}, or {{{{ for a brace"
            )
        self.columns = list(
            dict.fromkeys(match[1] for match in _PART.finditer(text) if match[1] is not None)
        )
        if not self.columns:
            raise OptionError(f"the prompt template has no {{column}} in it: {text!r:.80}")
        self._text = text

    def size(self, row: dict[str, str]) -> int:
        """About how many characters `fill` makes."""
        return len(self._text) + sum(
            len(row[match[1]]) for match in _PART.finditer(self._text) if match[1] is not None
        )

    def fill(self, row: dict[str, str]) -> str:
        """The template with the row's values; what they contain is not looked at."""
        return _PART.sub(
            lambda match: match[0][0] if match[1] is None else row[match[1]], self._text
        )

    def check(self, header: list[str]) -> None:
        """OptionError for a column that the header does not have, or has twice; that of the ids may be missing."""
        missing = [repr(name) for name in self.columns if name not in header]
        if missing:
            raise OptionError(
                f"the CSV file has no column {', '.join(missing)}: it has {', '.join(map(repr, header))}"[
                    :1000
                ]
            )
        for name in (*self.columns, ID):
            places = [str(place) for place, column in enumerate(header, 1) if column == name]
            if len(places) > 1:
                raise OptionError(
                    f"the CSV file has more than one column {name!r}: number {' and '.join(places)}"
                )


class _Rows:
    """Lines for csv.reader, which takes several for a row whose values have line ends in them. `number`: of the last one taken."""

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
        """The next row begins: its number."""
        self._taken = 0
        return self.number + 1


def read_table(
    lines: Iterable[bytes | None], template: Template, longest: int
) -> Iterator[tuple[int, dict[str, Any] | PromptError]]:
    """Each row's first line number, and its fields `prompt` and (if there is such a column) `id`, or what is wrong with it.

    OptionError at the first step if the header is not there, broken, or lacks a column of the template.
    """
    source = _Rows(lines, longest)
    reader = csv.reader(source, strict=True)
    header = _header(reader, longest)
    template.check(header)
    count = 0
    while True:
        number = source.begin()
        try:
            row = _next(reader, longest)
        except (csv.Error, ValueError) as error:
            count += 1
            yield number, PromptError(f"not a CSV row: {error}")
            continue
        if row is None:
            return
        if row:
            count += 1
            yield number, _fields(count, row, header, template, longest)


def _header(reader: Any, longest: int) -> list[str]:
    try:
        while (header := _next(reader, longest)) == []:  # an empty line
            pass
    except (csv.Error, ValueError) as error:
        raise OptionError(f"the CSV file's header can't be read: {error}") from error
    if not header:
        raise OptionError("the CSV file has no header: its first line has to name the columns")
    return [name.strip() for name in header]


def _next(reader: Any, longest: int) -> list[str] | None:
    """The next row, None at the end; csv.Error, or ValueError if it is not UTF-8."""
    before = csv.field_size_limit(longest)  # of the whole module: others keep theirs
    try:
        row: list[str] | None = next(reader, None)
    except csv.Error as error:
        if str(error).startswith("new-line character"):
            raise csv.Error(
                "there is a carriage return in it that ends no line: lines have to end with LF or CRLF"
            ) from error
        raise
    finally:
        csv.field_size_limit(before)
    try:
        "".join(row or ()).encode()
    except UnicodeEncodeError as error:
        raise ValueError("it is not UTF-8") from error
    return row


def _fields(
    number: int, row: list[str], header: list[str], template: Template, longest: int
) -> dict[str, Any] | PromptError:
    """Of a row with too few or too many values the id is what stands in its column, and of one whose prompt would be too long."""
    values = dict(zip(header, row, strict=False))
    name = {"id": values.get(ID) or None}
    if len(row) == len(header) and (size := template.size(values)) > longest:
        return BrokenLineError(
            f"row {number} makes a prompt of {size:,} characters, and {longest:,} are the most",
            name,
        )
    if len(row) == len(header):
        return {"prompt": template.fill(values), **name}
    problem = f"row {number} has {len(row)} values and the header {len(header)} columns: "
    if len(row) < len(header):
        missing = ", ".join(map(repr, header[len(row) :]))
        return BrokenLineError(f"{problem}none for {missing:.200} (is a comma missing?)", name)
    beyond = ", ".join(map(repr, row[len(header) :]))
    return BrokenLineError(
        f"{problem}{beyond:.200} is behind the last, {header[-1]!r:.80} (are quotes missing?)", name
    )
