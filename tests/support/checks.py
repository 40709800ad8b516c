"""Assertions that say in one line what they expect, and files of JSON lines."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from click.testing import Result


def has(found: Any, **wanted: Any) -> None:
    """Assert that the items, or the attributes, with these names have these values."""
    of = found.__getitem__ if isinstance(found, Mapping) else found.__getattribute__
    assert {name: of(name) for name in wanted} == wanted


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the JSON lines of a file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def write_lines(file: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def ends(result: Result, code: int, *texts: str) -> None:
    """Assert that a command ended with this exit code, and said these texts on standard error."""
    assert result.exit_code == code, result.output
    for text in texts:
        assert text in result.stderr


def refused(result: Result, text: str) -> None:
    """Assert that a command ended with code 2 and said one line, which has `text`, on stderr."""
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert text in result.stderr
    assert result.stderr.count("\n") == 1, result.stderr


def output_of(program: str, *arguments: str) -> str:
    """Return what a program of Python writes on standard output in a process of its own."""
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def raising(error: BaseException | type[BaseException]) -> Callable[..., NoReturn]:
    """Return a function that raises this error whatever it is called with."""

    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    return fail


def rows(text: str) -> list[tuple[str, str]]:
    """Return the rows `left -> right` of a table. A line that begins with a space continues."""
    lines = text.strip("\n").replace("\n ", " ").splitlines()
    return [(left, right) for left, _, right in (line.partition(" -> ") for line in lines)]


def json_rows(text: str) -> list[tuple[Any, Any]]:
    """Return the rows of a table of which each left side is JSON, and each right one, if it is."""
    return [(json.loads(left), _value(right)) for left, right in rows(text)]


def _value(text: str) -> Any:
    return json.loads(text) if text[:1] in '{["' else text
