"""Check single arguments that a program or a user gives.

Each check raises OptionError, which names the argument, shows its value, and says what to give
instead. Knows nothing about what the arguments are for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from os import PathLike
from typing import Any

from mlxrunner.errors import OptionError


def shown(value: Any) -> str:
    """Return the beginning of how Python writes `value`, whatever it is."""
    try:
        return f"{value!r:.80}"
    except Exception:  # a number of too many digits, lists that are nested too deeply
        return f"<{type(value).__name__}>"


def as_whole(value: Any) -> Any:
    """Return a float without a fraction as an integer, as JSON means it, and others as they are."""
    return int(value) if type(value) is float and value.is_integer() else value


def without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an object of JSON that are given: null means that one is not."""
    return {name: value for name, value in fields.items() if value is not None}


def check_whole(name: str, value: Any) -> None:
    """Refuse anything but a whole number."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise OptionError(f"{name}: {shown(value)} is not a whole number")


def check_number(name: str, value: Any) -> None:
    """Refuse anything but a number that a float can hold, or infinity."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise OptionError(f"{name}: {shown(value)} is not a number")
    try:
        float(value)
    except OverflowError as error:
        raise OptionError(
            f"{name}: {shown(value)} is out of range, it has to be less than 1.8e308"
        ) from error


def check_above(name: str, value: Any, above: float) -> None:
    """Refuse anything but a number greater than `above`."""
    check_number(name, value)
    if not value > above:
        raise OptionError(f"{name}: {shown(value)} is out of range, it has to be more than {above}")


def check_range(name: str, value: Any, low: float, high: float | None) -> None:
    """Refuse anything but a number from `low` to `high`, or of at least `low` if that is None."""
    check_number(name, value)
    if not value >= low or (high is not None and not value <= high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise OptionError(f"{name}: {shown(value)} is out of range, it has to be {bounds}")


def check_flag(name: str, value: Any) -> None:
    """Refuse anything but True and False, such as the text "no", which Python takes for true."""
    if not isinstance(value, bool):
        raise OptionError(f"{name}: {shown(value)} has to be True or False")


def check_text(name: str, value: Any) -> None:
    """Refuse anything but a text."""
    if not isinstance(value, str):
        raise OptionError(f"{name}: {shown(value)} is not a text")


def check_path(name: str, value: Any) -> None:
    """Refuse anything but the name of a file: a text or a path."""
    if not isinstance(value, str | PathLike):
        raise OptionError(f"{name}: {shown(value)} names no file; give a text or a Path")


def check_callable(name: str, value: Any, takes: str) -> None:
    """Refuse anything that can't be called. `takes` describes the arguments of a call."""
    if not callable(value):
        raise OptionError(f"{name}: {shown(value)} can't be called; give a function of {takes}")


def check_kind(name: str, value: Any, kind: type | tuple[type, ...], remedy: str) -> None:
    """Refuse a value that is not of a class in `kind`."""
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        known = " or ".join(one.__name__ for one in kinds)
        raise OptionError(f"{name}: {shown(value)} is not a {known}; {remedy}")


def listed(name: str, values: Any, example: str) -> Iterable[Any]:
    """Return `values` if it is iterable, but neither a text nor a mapping."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise OptionError(f"{name}: {shown(values)} is not a list; give one, such as {example}")
    return values
