"""Describe an option once, for every way in which it can be given.

An option is the field of a dataclass. Its metadata holds its type, bounds and help text. Keyword
arguments in Python, options of the command line, fields of batch lines and the chat's `/set` are
made from it. This knows no option (`mlxrunner.options` has those of a request and of a runner).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from mlxrunner.config.arguments import (
    as_whole,
    check_above,
    check_flag,
    check_range,
    check_text,
    check_whole,
)
from mlxrunner.errors import OptionError

NO_FORMER_NAMES = "0.4"
"""The version that drops the former names of options."""


@dataclass(frozen=True)
class Option:
    """The description of one option."""

    kind: type = int
    """Type of the value: `int`, `float`, `str` or `bool`."""
    help: str = ""
    """The text of `--help`. A flag that is on by default says what its `--no-` form does."""
    low: float | None = None
    """The smallest value, or None."""
    above: float | None = None
    """A number that the value has to exceed, or None."""
    high: float | None = None
    """The largest value, or None."""
    among: tuple[Any, ...] = ()
    """The allowed values, if there are few."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Why a value that one may look for is not allowed. A value counts up to its first colon."""
    metavar: str | None = None
    """The name of the value in `--help`."""
    is_list: bool = False
    """True if the option holds several values."""
    shows_default: bool = False
    """True if `--help` shows the default."""
    in_chat: bool = True
    """True if the chat's `/set` knows it."""
    was: tuple[str, ...] = ()
    """Former names. Each is read until version NO_FORMER_NAMES, with a note."""

    def check(self, name: str, value: Any) -> None:
        """Raise OptionError if `value` is of the wrong type or out of range."""
        if self.kind is int:
            check_whole(name, value)
        if self.among and value not in self.among:
            if (why := self.why_not(value)) is not None:
                raise OptionError(f"{name}: {why}")
            if self.kind is str:
                known = ", ".join(self.among)
                raise OptionError(f"{name}: {value!r} is not known, it has to be one of {known}")
            known = " or ".join(map(str, self.among))
            raise OptionError(f"{name}: {value} is out of range, it has to be {known}")
        if self.kind is str:
            check_text(name, value)
        if self.kind is bool:
            check_flag(name, value)
        if self.above is not None:
            check_above(name, value, self.above)
        if self.low is not None:
            check_range(name, value, self.low, self.high)

    def why_not(self, value: Any) -> str | None:
        """Return why `value` is refused; None if there is no particular reason."""
        return self.refused.get(str(value).partition(":")[0])

    def parse(self, name: str, text: str) -> Any:
        """Return the value that `text` holds. Raise OptionError if it cannot be read.

        The text of a list is JSON, or its only element.
        """
        if self.is_list:
            return _list_of(name, text)
        try:
            return self.kind(text)
        except ValueError as error:
            whole = "whole " if self.kind is int else ""
            raise OptionError(f"{name}: {text!r} is not a {whole}number") from error


def option(default: Any, kind: type, help: str, **about: Any) -> Any:
    """Return a dataclass field that describes an option. `about` are fields of `Option`."""
    return field(default=default, metadata={"option": Option(kind, help, **about)})


def about(one: Field[Any]) -> Option:
    """Return the description of a field that `option` made."""
    found: Option = one.metadata["option"]
    return found


def read_json(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields that came as JSON or TOML, with whole floats as integers where options are.

    `kind` is the dataclass of the options. Other fields stay as they are.
    """
    whole = {
        one.name for one in fields(kind) if "option" in one.metadata and about(one).kind is int
    }
    return {
        name: value if name not in whole else _each_whole(value) for name, value in given.items()
    }


def _each_whole(value: Any) -> Any:
    return list(map(as_whole, value)) if isinstance(value, list) else as_whole(value)


def names(kind: type) -> tuple[str, ...]:
    """Return the names of all options that are fields of the dataclass `kind`."""
    return tuple(one.name for one in fields(kind) if "option" in one.metadata)


def former_names(kind: type) -> dict[str, str]:
    """Return the name of an option of the dataclass `kind` by each of its former names."""
    return {
        old: one.name for one in fields(kind) if "option" in one.metadata for old in about(one).was
    }


def renamed(old: str, new: str) -> str:
    """Return the note about a former name."""
    return f"{old} is called {new} now; the old name is read until version {NO_FORMER_NAMES}"


def warn_of_renamed(old: str, new: str, level: int = 4) -> None:
    """Warn a Python program that uses a former name, `level` calls above this module's `warn`."""
    warnings.warn(renamed(old, new), DeprecationWarning, stacklevel=level)


def with_current_names(
    kind: type, given: Mapping[str, Any], note: Callable[[str, str], None] = warn_of_renamed
) -> dict[str, Any]:
    """Return options by their names today. Call `note` with each former name and the one of today.

    `kind` is the dataclass of the options. Raise OptionError if an option is given by both names.
    """
    former, current = former_names(kind), dict(given)
    for old in sorted(former.keys() & given.keys()):
        if (new := former[old]) in current:
            raise OptionError(f"{old}, {new}: they are the same, use {new}")
        current[new] = current.pop(old)
        note(old, new)
    return current


def check_fields(options: Any) -> None:
    """Check all fields of a dataclass that `option` made. Raise OptionError if one is wrong."""
    for one in fields(options):
        if "option" not in one.metadata:
            continue
        described, value = about(one), getattr(options, one.name)
        if value is not one.default and not described.is_list:
            described.check(one.name, value)


def _list_of(name: str, text: str) -> tuple[Any, ...]:
    if text[:1] not in ('"', "["):
        return (text,)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise OptionError(
            f'{name}: {text} is not readable as JSON; it can be a bare text, "a\\n" or ["a", "b"]'
        ) from error
    return tuple(value) if isinstance(value, list) else (value,)
