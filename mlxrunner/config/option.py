"""Describe an option once, for every way in which it can be given.

An option is the field of a dataclass. Its metadata holds its type, bounds and help text. Keyword
arguments in Python, options of the command line, fields of batch lines and the chat's `/set` are
made from it. This knows no option (`mlxrunner.options` has those of a request and of a runner).
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from numbers import Integral, Real
from os import PathLike
from typing import Any

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
    is_size: bool = False
    """True for a number of bytes, which may be given as a text such as 8GB."""
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
        if self.is_size:
            return parse_size(name, text)
        if self.is_list:
            return _list_of(name, text)
        try:
            return self.kind(text)
        except ValueError as error:
            whole = "whole " if self.kind is int else ""
            raise OptionError(f"{name}: {text!r} is not a {whole}number") from error


UNITS: dict[str, int] = {unit: 1000**power for power, unit in enumerate(["", "k", "m", "g", "t"])}
UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("kmgt", 1)}
"""The bytes of each unit of a size."""
_SIZE = re.compile(r"(-?\d+(?:\.\d+)?) ?((?:[kmgt]i?)?)b?", re.IGNORECASE)


def parse_size(name: str, text: str) -> int:
    """Return the bytes of a size such as 8GB, 500 MB, 2GiB or 1000000. Raise OptionError."""
    found = _SIZE.fullmatch(text.strip()) if len(text) < 40 else None
    if found is None:
        raise OptionError(f"{name}: {text!r:.60} is not a size, such as 8GB, 500MB or 2GiB")
    return int(float(found[1]) * UNITS[found[2].lower()])


def size_text(nbytes: int) -> str:
    """Return bytes as `parse_size` reads them, such as 8GiB or 500MB."""
    whole = (one for one in UNITS if nbytes and nbytes % UNITS[one] == 0)
    unit = max(whole, key=UNITS.__getitem__, default="")
    return f"{nbytes // UNITS[unit]}{unit.capitalize()}B" if unit else str(nbytes)


def option(default: Any, kind: type, help: str, **about: Any) -> Any:
    """Return a dataclass field that describes an option. `about` are fields of `Option`."""
    return field(default=default, metadata={"option": Option(kind, help, **about)})


def about(one: Field[Any]) -> Option:
    """Return the description of a field that `option` made."""
    found: Option = one.metadata["option"]
    return found


def described(kind: type) -> dict[str, Option]:
    """Return the descriptions of all options that are fields of the dataclass `kind`, by name."""
    return {one.name: about(one) for one in fields(kind) if "option" in one.metadata}


def read_json(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields that came as JSON or TOML, with whole floats as integers where options are.

    Texts of sizes become bytes. `kind` is the dataclass of the options. Other fields stay as they
    are.
    """
    options = described(kind)

    def read(name: str, value: Any) -> Any:
        if name not in options or options[name].kind is not int:
            return value
        if options[name].is_size and isinstance(value, str):
            return parse_size(name, value)
        return list(map(as_whole, value)) if isinstance(value, list) else as_whole(value)

    return {name: read(name, value) for name, value in given.items()}


def names(kind: type) -> tuple[str, ...]:
    """Return the names of all options that are fields of the dataclass `kind`."""
    return tuple(described(kind))


def former_names(kind: type) -> dict[str, str]:
    """Return the name of an option of the dataclass `kind` by each of its former names."""
    return {old: name for name, one in described(kind).items() for old in one.was}


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
        value = getattr(options, one.name)
        if value is one.default or "option" not in one.metadata:
            continue
        if not about(one).is_list:
            about(one).check(one.name, value)


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


RESERVED = tuple(
    "messages tools add_generation_prompt chat_template tokenize return_dict self".split()
)
"""Names that a variable of the chat template cannot have."""
MAX_SCHEMA = 2**17
"""Most characters of a JSON schema. Compiling a longer one takes too long."""
VARIABLES = 'a JSON object of variables, such as {"enable_thinking": false}'
TOOLS = 'a list of JSON objects, such as [{"type": "function", "function": {"name": "f"}}]'
SCHEMA = 'a JSON object, such as {"type": "object"}'


def json_text(name: str, value: Any, *kinds: type) -> Any:
    """Return a value of the types `kinds` as JSON text, and any other value as it is.

    The check of the option refuses other types. Raise OptionError if JSON cannot hold the value.
    """
    if not isinstance(value, kinds):
        return value
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(
            f"{name}: it can't be written as JSON: {error}, in {shown(value)}"
        ) from error


def parsed_json(text: str) -> Any:
    """Return the value of a JSON text. Raise ValueError, also for NaN and numbers beyond floats."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value


_SURROGATE = re.compile(
    r"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?P<rest>\\u[dD][c-fC-F][0-9a-fA-F]{2})?|[c-fC-F]..)"
)
"""Half of a character as an escape, or a whole one of two escapes."""


def with_whole_characters(text: str) -> str:
    """Return a JSON text with U+FFFD in place of each half of a character.

    Programs and models cut texts within an emoji, and no template can write what is left.
    """
    parts, at = list[str](), 0
    while found := _SURROGATE.search(text, at):
        before = text[at : found.start()]
        is_text = (len(before) - len(before.rstrip("\\"))) % 2  # the backslash itself is escaped
        at = found.start() + 2 if is_text else found.end()
        whole = text[found.start() : at] if is_text or found["rest"] else "\\ufffd"
        parts += [before, whole]
    return "".join([*parts, text[at:]])


def check_template(template: str | None) -> None:
    """Refuse anything but an object of variables that a chat template can have."""
    if template is None:
        return
    variables = _parsed("template", template, VARIABLES)
    if not isinstance(variables, dict):
        raise OptionError(f"template: it has to be {VARIABLES}, not {template.strip()[:40]}")
    for name in variables:
        if name in RESERVED:
            raise OptionError(
                f"template: {name!r} is not free for a variable; reserved are "
                f"{', '.join(sorted(RESERVED))}"
            )
        if not name.isidentifier():
            raise OptionError(
                f"template: {name!r:.60} is not a name; it has to be letters, digits and _"
            )


def check_tools(tools: str | None) -> None:
    """Refuse anything but a list of objects."""
    if tools is None:
        return
    tools_given = _parsed("tools", tools, TOOLS)
    if not isinstance(tools_given, list):
        raise OptionError(f"tools: it has to be {TOOLS}, not {tools.strip()[:40]}")
    for number, tool in enumerate(tools_given):
        if not isinstance(tool, dict) or not tool:
            raise OptionError(
                f"tools: number {number} has to be a JSON object, not {shown(tool)}; give {TOOLS}"
            )


def check_schema(schema: str | None) -> None:
    """Refuse anything but an object that is short enough to be compiled."""
    if schema is None:
        return
    if isinstance(schema, str) and len(schema) > MAX_SCHEMA:
        raise OptionError(
            f"schema: {len(schema)} characters are too many, it may have at most {MAX_SCHEMA}"
        )
    if not isinstance(_parsed("schema", schema, SCHEMA), dict):
        raise OptionError(f"schema: it has to be {SCHEMA}, not {schema.strip()[:40]}")


def _parsed(name: str, text: Any, kind: str) -> Any:
    if not isinstance(text, str):
        raise OptionError(f"{name}: it has to be {kind}, or its text, not {text!r:.80}")
    try:
        return parsed_json(text)
    except ValueError as error:
        raise OptionError(
            f"{name}: not valid JSON: {error}, in {text[:60]!r}; it has to be {kind}"
        ) from error


def as_texts(name: str, given: Any) -> tuple[str, ...]:
    """Return one text, or several, as a tuple."""
    if isinstance(given, str):
        return (given,)
    return () if given is None else tuple(listed(name, given, '["a", "b"]'))


def as_choices(given: Any) -> tuple[str, ...]:
    """Return one choice, or several, as a tuple. Refuse an empty list."""
    choices = as_texts("choices", given)
    if given is not None and not choices:
        raise OptionError(
            "choices: the list is empty, it has to have at least one text "
            "(leave the option out for a free answer)"
        )
    return choices


def check_stop(stop: tuple[str, ...]) -> None:
    """Refuse anything but texts of at least one character."""
    for text in stop:
        _check_text("stop: each stop string", text)


def check_choices(choices: tuple[str, ...]) -> None:
    """Refuse anything but texts of at least one character that UTF-8 can hold.

    Together they may have as many characters as a schema: they are compiled as one is.
    """
    for text in choices:
        _check_text("choices: each one", text)
    size = sum(map(len, choices))
    if size > MAX_SCHEMA:
        raise OptionError(
            f"choices: {size} characters are too many, they may have at most {MAX_SCHEMA} together"
        )
    for text in choices:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise OptionError(
                f"choices: {text!r:.60} is not valid Unicode; replace character {error.start}"
            ) from error


def _check_text(what: str, text: Any) -> None:
    if not isinstance(text, str) or not text:
        raise OptionError(
            f"{what} has to be a text of at least one character, not {text!r:.60}; leave it out"
        )


DEFAULT = "default"
MODEL = "model"
HERE = "here"
"""The source of what the user typed: on the command line, with `/set`, or in a session."""


@dataclass(frozen=True)
class Setting:
    """A value and its source."""

    value: Any
    source: str = HERE
    """DEFAULT, MODEL, HERE, or the place in the config file."""
    note: str | None = None
    """A note for the user about the name that it has at its source."""


Settings = Mapping[str, Setting]


def layer(options: Mapping[str, Any], source: str) -> dict[str, Setting]:
    """Return a layer whose values all come from one source."""
    return {name: Setting(value, source) for name, value in options.items()}


def settled(*layers: Settings) -> dict[str, Setting]:
    """Return the settings that hold. The weakest layer comes first."""
    return {name: setting for one in layers for name, setting in one.items()}


def values(settings: Settings) -> dict[str, Any]:
    """Return the values without their sources."""
    return {name: setting.value for name, setting in settings.items()}
