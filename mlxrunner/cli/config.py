"""`mlxrunner config`: show the values that hold, and where they come from."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import click

from mlxrunner.cli.options import debug_option, json_option, model_argument
from mlxrunner.cli.program import visible_text
from mlxrunner.config.file import COMMANDS, Config, config_path, read_config_file
from mlxrunner.config.layering import MODEL, Setting, layer, settled

WIDTH = 20
HIDDEN = "***"
"""The value that is shown for a key."""


@click.command()
@model_argument
@json_option
@debug_option
def config(model: str, as_json: bool) -> None:
    """Show the config file, and which options hold for MODEL: those of the file and of the model.

    MODEL is by default the one that a command without -m takes. A model that is not on this machine
    is not downloaded, and suggests nothing yet.
    """
    found = read_config_file()
    suggested, note = _suggested(model)
    holding = {
        command: _shown(settled(layer(suggested, MODEL), found.options(command, model)))
        for command in COMMANDS
    }
    if as_json:
        click.echo(json.dumps(_as_dict(found, model, holding)))
        return
    rows = {
        "file": _file(found),
        "model": f"{model}{note}",
        "aliases": ", ".join(f"{name} = {model}" for name, model in found.aliases.items()),
        "system prompts": ", ".join(f"@{name}" for name in found.prompts),
        "prompt templates": ", ".join(found.templates),
    }
    for name, value in rows.items():
        if value:
            click.echo(visible_text(f"{name:{WIDTH}}{' '.join(value.split())}"))
    for line in _lines(holding):
        click.echo(visible_text(line))


def _suggested(model: str) -> tuple[dict[str, Any], str]:
    """Return what the model suggests, and a note about it."""
    from mlxrunner.models.resolve import HUB_ID, folder_if_here
    from mlxrunner.models.suggested import suggestion_of

    folder = folder_if_here(model)
    if folder is None:
        is_on_hub = HUB_ID.fullmatch(model) is not None
        return {}, " (not on this machine yet)" if is_on_hub else " (there is no such model)"
    found = suggestion_of(folder)
    return found.options, "" if found.problem is None else f" ({found.problem})"


def _shown(settings: dict[str, Setting]) -> dict[str, Setting]:
    """Return the settings without the key, which others may see over a shoulder or in a log."""
    hidden = (
        {"api_key": replace(settings["api_key"], value=HIDDEN)} if "api_key" in settings else {}
    )
    return settings | hidden


def _file(found: Config) -> str:
    path = config_path()
    if path is None:
        return "(none: MLXRUNNER_CONFIG is empty)"
    return str(path) if found.path is not None else f"{path} (there is none yet)"


def _lines(holding: dict[str, dict[str, Setting]]) -> list[str]:
    """Return a line for each value and the commands for which it holds."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for command, settings in holding.items():
        for name, setting in settings.items():
            key = name, json.dumps(setting.value), setting.source
            rows.setdefault(key, []).append(command)
    return [
        f"{name:{WIDTH}}{value[:60]:16} ({source}) for {', '.join(commands)}"
        for (name, value, source), commands in rows.items()
    ] or ["every option has its built-in default"]


def _as_dict(found: Config, model: str, holding: dict[str, dict[str, Setting]]) -> dict[str, Any]:
    path = config_path()
    return {
        "file": None if path is None else str(path),
        "is_there": found.path is not None,
        "model": model,
        "aliases": dict(found.aliases),
        "prompts": dict(found.prompts),
        "templates": {name: vars(template) for name, template in found.templates.items()},
        "options": {
            command: {
                name: {"value": one.value, "source": one.source} for name, one in settings.items()
            }
            for command, settings in holding.items()
        },
    }
