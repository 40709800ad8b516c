"""Read the user's config file: models, options, system prompts and prompt templates.

Every key is checked when the file is read. An error is one line with the number of the line in the
file. This knows nothing about the commands but their names.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlxrunner.config.names import did_you_mean, hub_id_of
from mlxrunner.config.option import (
    Option,
    Setting,
    former_names,
    names,
    read_json,
    renamed,
    settled,
)
from mlxrunner.errors import MissingFileError, OptionError
from mlxrunner.options import (
    EMBEDDED,
    WIRE,
    GenerateOptions,
    RunnerSettings,
    ServeSettings,
    chat_options,
)
from mlxrunner.system.reading import is_there, read_trusted

_QUOTES = ('"' * 3, "'" * 3)


def line_of(text: str, key: tuple[str, ...]) -> int:
    """Return the number of the line, from 1, that sets `key` or the table closest above it."""
    best, depth = 1, 0
    for number, path in _keys(text):
        pairs = zip(path, key, strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if shared > depth:
            best, depth = number, shared
    return best


def _keys(text: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield each header and each key of a readable file with its line and its whole path."""
    import tomllib

    section: tuple[str, ...] = ()
    begin, statement, quotes = 1, "", ""
    for number, line in enumerate(text.split("\n"), 1):
        statement += f"{line}\n"
        if quotes and quotes not in line:
            continue
        quotes = "" if quotes else next((q for q in _QUOTES if line.count(q) == 1), "")
        try:
            path = _path(tomllib.loads(statement))
        except tomllib.TOMLDecodeError:  # it continues in the next line
            continue
        if statement.lstrip().startswith("["):
            section, path = path, ()
        if section or path:
            yield begin, (*section, *path)
        begin, statement = number + 1, ""


def _path(found: Any) -> tuple[str, ...]:
    """Return the path that a parsed header or key names."""
    path = []
    while isinstance(found, dict | list) and found:
        if isinstance(found, dict):
            path.append(next(iter(found)))
            found = found[path[-1]]
        else:
            found = found[0]
    return tuple(path)


VARIABLE = "MLXRUNNER_CONFIG"
LARGEST = 2**20
"""Most bytes of the file."""
COMMANDS = ("chat", "generate", "batch", "serve")
"""The commands that have a section of their own."""
OPTIONS = "options"
"""The section for all of COMMANDS."""
REQUEST = (*(name for name, _ in chat_options()), "template")
"""The options of a request that the file may set. The others belong to one request."""
SETTINGS = names(RunnerSettings)
EVERYWHERE = frozenset((*REQUEST, *SETTINGS, "system", "reserve", "wire"))
"""The keys of every section with options."""
OTHERS = {
    "wire": Option(str, among=tuple(WIRE)),
    "history": Option(str, among=("exact", "template")),
    "session_kv_bits": Option(int, among=(4, 8)),
}
"""The keys that neither a request, a runner nor the server has, and that are not switches."""
SWITCHES = ("plain", "no_type_ahead", "no_input_history", "keep_thinking", "no_cache_file")
"""The switches of `chat` that the file may set."""
LISTS = ("allow_origin", "disable_rewrite")
"""The settings of the server that are lists; one text is a list of one."""
KEYS: dict[str, frozenset[str]] = {
    "": frozenset(("model", "aliases", OPTIONS, *COMMANDS, "models", "prompts", "templates")),
    OPTIONS: EVERYWHERE,
    "chat": EVERYWHERE | {*SWITCHES, "history", "session_kv_bits"},
    "generate": EVERYWHERE,
    "batch": EVERYWHERE,
    "serve": frozenset((*REQUEST, *SETTINGS, "wire", *names(ServeSettings))) - {"no_key"},
}
"""The keys of each section."""
FORMER = {"serve": former_names(ServeSettings), "chat": {"no_history": "no_input_history"}}
"""The former names of keys of a section, each with the one of today."""
ASSIGNED = "--set"
"""The option that sets a key for one command."""
NAMED = "@"
"""The character before the name of a system prompt."""


@dataclass(frozen=True)
class PromptTemplate:
    """A prompt with places for the input and for variables."""

    prompt: str
    system: str | None = None


@dataclass(frozen=True)
class Config:
    """The content of the config file. It is empty if there is none."""

    path: Path | None = None
    model: Setting | None = None
    """The model of every command that is given none."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    sections: Mapping[str, Mapping[str, Setting]] = field(default_factory=dict)
    """The options by section: OPTIONS and COMMANDS."""
    models: Mapping[str, Mapping[str, Setting]] = field(default_factory=dict)
    """The options by model, under the names that the file gives them."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    templates: Mapping[str, PromptTemplate] = field(default_factory=dict)

    def name_of(self, model: str) -> str:
        """Return the name that an alias or a short name stands for, or `model`."""
        return hub_id_of(self.aliases.get(model, model))

    def options(self, command: str, model: str) -> dict[str, Setting]:
        """Return the options that hold for `command` with `model`, which is not an alias."""
        own = [found for name, found in self.models.items() if self.name_of(name) == model]
        return settled(self.sections.get(OPTIONS, {}), self.sections.get(command, {}), *own)

    def system(self, text: str) -> str:
        """Return the system prompt that `@NAME` names, or any other `text` as it is.

        Raise OptionError if there is no prompt of that name.
        """
        name = text.removeprefix(NAMED)
        if name == text or not name or " " in name or "\n" in name:
            return text
        if name not in self.prompts:
            raise self._unknown("prompts", self.prompts, name, "system prompt")
        return self.prompts[name]

    def template(self, name: str) -> PromptTemplate:
        """Return a prompt template. Raise OptionError if there is none of that name."""
        if name not in self.templates:
            raise self._unknown("templates", self.templates, name, "prompt template")
        return self.templates[name]

    def _unknown(self, section: str, known: Mapping[str, Any], name: str, what: str) -> OptionError:
        file = self.path or config_path() or f"the config file, which {VARIABLE} turns off"
        there = f"there are {', '.join(known)}" if known else "it has none"
        return OptionError(
            f"there is no {what} {name!r:.60} under [{section}] in {file}: "
            f"{did_you_mean(name, known)}{there}"
        )


def config_path() -> Path | None:
    """Return the path of the config file, which may be missing. None: it is switched off.

    It is $MLXRUNNER_CONFIG if that is set, and off if that is empty; else
    $XDG_CONFIG_HOME/mlxrunner/config.toml (~/.config/mlxrunner/config.toml).
    """
    chosen = os.environ.get("MLXRUNNER_CONFIG")
    if chosen is not None:
        return Path(os.path.expanduser(chosen)) if chosen else None  # never raises
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return folder / "mlxrunner" / "config.toml"


def read_config_file() -> Config:
    """Return the checked content of the user's config file.

    Raise OptionError for a wrong key or value, and ReadError for a file that cannot be read, that
    others may write to, or that MLXRUNNER_CONFIG names and that is missing.
    """
    path = config_path()
    if path is None or (os.environ.get("MLXRUNNER_CONFIG") is None and not is_there(path)):
        return Config()
    try:
        text = read_trusted(path, LARGEST)
    except MissingFileError as error:
        if os.environ.get("MLXRUNNER_CONFIG") is None:
            raise
        raise MissingFileError(f"{error} ({VARIABLE} names it)") from error
    return _Reader(path, text).config()


def read_assignments(command: str, given: Iterable[str]) -> dict[str, Setting]:
    """Return the keys of the section `command` that texts of the form NAME=VALUE set.

    VALUE is as in the file, or a text without quotes. Raise OptionError for a wrong one.
    """
    reader, found = _Reader(None, ""), dict[str, Any]()
    for one in given:
        name, equals, value = one.partition("=")
        if not equals:
            raise OptionError(
                f"{ASSIGNED} {one:.80}: it has to be NAME=VALUE; `mlxrunner config --keys` lists "
                "the names"
            )
        found[name] = reader.assigned((command,), name, value)
    return reader.options((command,), found)


class _Reader:
    """Checks keys, and knows the line of each in the file; without a path, they are typed."""

    def __init__(self, path: Path | None, text: str) -> None:
        self._path, self._text = path, text

    def config(self) -> Config:
        import tomllib

        try:
            found = tomllib.loads(self._text)
        except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
            hint = '; a text is in quotes, as in model = "demo"' if "value" in str(error) else ""
            raise OptionError(f"{self._path}: not readable as TOML: {error}{hint}") from error
        self.check_numbers(found)
        self._check_keys((), found, KEYS[""])
        model = found.get("model")
        if model is not None:
            self._text_at(("model",), model)
        sections = {one: self.options((one,), found.get(one, {})) for one in (OPTIONS, *COMMANDS)}
        models = self._tables(("models",), found.get("models", {}))
        return Config(
            path=self._path,
            model=None if model is None else Setting(model, self._place(("model",))),
            aliases=self._aliases(found.get("aliases", {})),
            sections=sections,
            models={name: self.options(("models", name), one) for name, one in models.items()},
            prompts=self._texts("prompts", found.get("prompts", {})),
            templates=self._templates(found.get("templates", {})),
        )

    def check_numbers(self, found: Any) -> None:
        """Raise OptionError for a whole number that TOML does not have. Python can't print some."""
        left = [found]
        while left:
            value = left.pop()
            if isinstance(value, dict | list):
                left += value.values() if isinstance(value, dict) else value
            elif isinstance(value, int) and value.bit_length() > 64:
                raise OptionError(
                    f"{self._path or ASSIGNED}: a whole number in it has {value.bit_length():,} "
                    "bits, and 64 are the most: write a smaller one"
                )

    def assigned(self, section: tuple[str, ...], name: str, text: str) -> Any:
        """Return the value that `text` holds: `true` is a text where the key takes texts."""
        import tomllib

        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except (tomllib.TOMLDecodeError, RecursionError, ValueError):
            return text
        self.check_numbers(value)
        if isinstance(value, str | list | dict):
            return value
        try:
            self.options(section, {name: value})
        except OptionError:
            with suppress(OptionError):
                self.options(section, {name: text})
                return text
        return value

    def options(self, section: tuple[str, ...], found: Any) -> dict[str, Setting]:
        """Return the options of a section. Raise OptionError if one is wrong."""
        known, former = KEYS.get(section[0], EVERYWHERE), FORMER.get(section[0], {})
        self._table(section, found)
        self._check_keys(section, found, known, former)
        settings = {}
        for key, value in found.items():
            old, place = _plain(key), self._place((*section, key))
            name = former.get(old, old)
            note = f"{place}: {renamed(old, name)}" if name != old else None
            settings[name] = Setting(self._value((*section, key), name, value), place, note)
        return settings

    def _value(self, key: tuple[str, ...], name: str, value: Any) -> Any:
        """Return the value of an option as the program holds it. Raise OptionError if wrong."""
        try:
            if name in REQUEST:
                checked = GenerateOptions.of(**read_json(GenerateOptions, {name: value}))
                return checked.variables if name == "template" else getattr(checked, name)
            if name in SETTINGS:
                given = read_json(RunnerSettings, {name: value})
                return getattr(RunnerSettings.of(**given), name)
            if name in OTHERS:
                OTHERS[name].check(name, value)
                return value
        except OptionError as error:
            raise self._error(key, str(error)) from error
        except TypeError as error:
            raise self._error(key, f"{name}: {value!r:.60} is not usable") from error
        if name == "system":
            return self._text_at(key, value)
        if name in names(ServeSettings):
            return self._of_server(key, name, value)
        if not isinstance(value, bool):
            raise self._error(key, f"{name}: {value!r:.60} has to be true or false")
        return value

    def _of_server(self, key: tuple[str, ...], name: str, value: Any) -> Any:
        """Return the value of a setting of the server. A list may be one text."""
        listed = (value,) if name in LISTS and isinstance(value, str) else value
        try:
            given: Any = tuple(listed) if isinstance(listed, list | tuple) else listed
            return getattr(ServeSettings(**read_json(ServeSettings, {name: given})), name)
        except (OptionError, TypeError) as error:
            raise self._error(key, str(error)) from error

    def _aliases(self, found: Any) -> dict[str, str]:
        aliases = self._texts("aliases", found)
        for name, model in aliases.items():
            if name in EMBEDDED or "/" in name:
                raise self._error(
                    ("aliases", name), f"{name!r:.60} is the name of a model: choose another alias"
                )
            if model in aliases:
                raise self._error(
                    ("aliases", name), f"{name!r:.60} names the alias {model!r:.60}: name the model"
                )
        return aliases

    def _texts(self, section: str, found: Any) -> dict[str, str]:
        self._table((section,), found)
        return {name: self._text_at((section, name), value) for name, value in found.items()}

    def _templates(self, found: Any) -> dict[str, PromptTemplate]:
        self._table(("templates",), found)
        return {name: self._template(("templates", name), one) for name, one in found.items()}

    def _template(self, key: tuple[str, ...], found: Any) -> PromptTemplate:
        if isinstance(found, str):
            return PromptTemplate(self._text_at(key, found))
        self._table(key, found)
        self._check_keys(key, found, ("prompt", "system"))
        if "prompt" not in found:
            raise self._error(key, f"the template {key[-1]!r:.60} has no prompt")
        texts = {name: self._text_at((*key, name), value) for name, value in found.items()}
        return PromptTemplate(**texts)

    def _tables(self, key: tuple[str, ...], found: Any) -> dict[str, Any]:
        self._table(key, found)
        for name, value in found.items():
            self._table((*key, name), value)
        tables: dict[str, Any] = found
        return tables

    def _table(self, key: tuple[str, ...], found: Any) -> None:
        if not isinstance(found, dict):
            name = key[-1]
            raise self._error(
                key, f"{name:.60}: {found!r:.60} has to be a table: [{'.'.join(key)}]"
            )

    def _text_at(self, key: tuple[str, ...], value: Any) -> str:
        if not isinstance(value, str) or not value.strip():
            raise self._error(key, f"{key[-1]:.60}: {value!r:.60} has to be a text")
        return value

    def _check_keys(
        self,
        section: tuple[str, ...],
        found: Mapping[str, Any],
        known: Iterable[str],
        former: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        known, seen = sorted(known), set[str]()
        for name in found:
            plain = former.get(_plain(name), _plain(name))
            if plain not in known:
                where = f" in [{'.'.join(section)}]" if section else ""
                holders = [one for one, keys in KEYS.items() if one and plain in keys]
                if not section and holders:
                    others = ", or that of a command, such as [chat]" if len(holders) > 1 else ""
                    told = f"the key {name!r:.60} belongs below [{holders[0]}]{others}"
                    raise self._error((name,), told)
                raise self._error(
                    (*section, name),
                    f"there is no key {name!r:.60}{where}: {did_you_mean(name, known)}"
                    f"known are {', '.join(known)}",
                )
            if plain in seen:
                raise self._error((*section, name), f"{plain} is there twice: keep one of them")
            seen.add(plain)

    def _place(self, key: tuple[str, ...]) -> str:
        if self._path is None:
            return ASSIGNED
        return f"{self._path.name} line {line_of(self._text, key)}"

    def _error(self, key: tuple[str, ...], problem: str) -> OptionError:
        place = ASSIGNED if self._path is None else f"{self._path} line {line_of(self._text, key)}"
        return OptionError(f"{place}: {problem}")


def _plain(name: str) -> str:
    """Return a key as options are called in Python: `top-p` is `top_p`."""
    return name.replace("-", "_")
