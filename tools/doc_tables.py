"""Tables of the pages that are made from the program: commands, fields, errors and options."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlxrunner.config.request_fields import RequestField

TABLE = re.compile(r"(<!-- table: ([\w ]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def with_tables(text: str) -> str:
    """Make the tables of a page again."""
    makers: dict[str, Callable[[str], str]] = {
        "chat commands": _chat_commands,
        "event fields": _event_fields,
        "errors": _errors,
        "field names": lambda before: _field_names(),
        "ignored fields": lambda before: _ignored_fields(),
        "refused fields": lambda before: _refused_fields(),
        "options": lambda before: _request_options(),
        "settings": lambda before: _settings(),
        "settings of many": lambda before: _settings_of_many(),
    }
    return TABLE.sub(lambda match: match[1] + makers[match[2]](match[3]) + match[4], text)


def _chat_commands(before: str) -> str:
    """List the commands of the chat, and after them the keys that `before` lists."""
    from mlxrunner.chat.repl import commands
    from mlxrunner.chat.session_commands import Saving

    found = commands(*Saving().commands)
    rows = [f"| {_code(command.usage)} | {_escaped(command.help)} |" for command in found]
    keys = re.findall(r"(?m)^\| (?!`/|<code>/|-|command).*", before)
    return _table("command or key | what it does", [*rows, *keys])


def _event_fields(before: str) -> str:
    """List the fields of an event with their units."""
    from event_schema import field_rows

    rows = [f"| `{name}` | {unit} | {_escaped(text)} |" for name, unit, text in field_rows()]
    return _table("field | unit | what it is", rows)


def _errors(before: str) -> str:
    """Return the tree of errors from the docstring of their module."""
    from mlxrunner import errors

    tree = re.findall(r"(?m)^(?:[├└│ ]|Mlxrunner).*", errors.__doc__ or "")
    return "\n".join(["```text", *tree, "```", ""])


def _field_names() -> str:
    """List the names of other programs for options of ours, but those of batch lines only."""
    from mlxrunner.config.names import SAME
    from mlxrunner.config.request_fields import REFUSED

    names = {name: ours for name, ours in sorted(SAME.items()) if name not in REFUSED}
    rows = [f"| `{name}` | `{ours}` |" for name, ours in names.items()]
    return _table("field | option", rows)


def _refused_fields() -> str:
    """List the fields that would change an answer by what to send instead."""
    from mlxrunner.config.request_fields import REFUSED

    return _grouped("instead", REFUSED)


def _ignored_fields() -> str:
    """List the fields that change no answer, by the reason."""
    from mlxrunner.config.request_fields import IGNORED

    return _grouped("why", IGNORED)


def _grouped(title: str, table: Mapping[str, RequestField]) -> str:
    """List fields with equal texts in one row, each with the values that pass in brackets."""
    groups: dict[str, list[str]] = {}
    for name, one in sorted(table.items()):
        passes = ", ".join(_code(json.dumps(value)) for value in one.neutral)
        groups.setdefault(one.why, []).append(f"`{name}`" + f" ({passes})" * bool(passes))
    rows = [f"| {', '.join(names)} | {_escaped(why)} |" for why, names in groups.items()]
    return _table(f"field | {title}", rows)


def _request_options() -> str:
    from mlxrunner.options import GenerateOptions

    return _options(fields(GenerateOptions))


def _settings() -> str:
    from mlxrunner.options import RunnerSettings

    return _options(fields(RunnerSettings))


def _settings_of_many() -> str:
    """List the settings of a runner of many requests that differ from those of a runner."""
    from mlxrunner.config.option import about
    from mlxrunner.options import OpenSettings, RunnerSettings

    known = {one.name: about(one) for one in fields(RunnerSettings)}
    return _options([one for one in fields(OpenSettings) if about(one) != known.get(one.name)])


def _options(given: Iterable[Field[Any]]) -> str:
    """List options: fields that `mlxrunner.config.option` describes."""
    from mlxrunner.config.option import about

    rows = []
    for one in given:
        found = about(one)
        bounds = [f"{bound:,}" for bound in (found.low, found.high) if bound is not None]
        allowed = ", ".join(map(str, found.among)) or " to ".join(bounds)
        if len(bounds) == 1:
            allowed += " or more"
        default = "" if one.default is MISSING else f"`{one.default!r}`"
        is_on = one.default is True
        help = f"False: {found.help[0].lower()}{found.help[1:]}" if is_on else found.help
        rows.append(f"| `{one.name}` | {default} | {allowed} | {_escaped(help)} |")
    return _table("name | default | values | what it does", rows)


def _table(head: str, rows: list[str]) -> str:
    rule = "|---" * (head.count("|") + 1) + "|"
    return "\n".join([f"| {head} |", rule, *rows, ""])


def _code(text: str) -> str:
    """Write code into a cell of a table, where backticks can't hold a `|`."""
    return f"<code>{_escaped(text)}</code>" if "|" in text else f"`{text}`"


def _escaped(text: str) -> str:
    return text.replace("|", "&#124;")
