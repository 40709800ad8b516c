"""Put together the options that hold for a command.

They come from what was typed, the config file, the model, and the defaults.
"""

from __future__ import annotations

from typing import Any

import click
from click.core import ParameterSource

from mlxrunner.cli.program import visible_text
from mlxrunner.config.file import NAMED, read_config_file
from mlxrunner.config.layering import MODEL, Setting, layer, settled, values
from mlxrunner.config.option import names
from mlxrunner.errors import OptionError
from mlxrunner.options import GREEDY, GenerateOptions

OF_REQUESTS = frozenset(names(GenerateOptions))


def typed_names(ctx: click.Context) -> set[str]:
    """Return the names of the options on the command line."""
    typed = ParameterSource.COMMANDLINE
    return {name for name in ctx.params if ctx.get_parameter_source(name) is typed}


def typed_options(ctx: click.Context, options: dict[str, Any], *, greedy: bool) -> dict[str, Any]:
    """Return the options of a request that the user gave. Raise OptionError if they contradict.

    `greedy` stands for the options of GREEDY.
    """
    given = typed_names(ctx) & OF_REQUESTS
    typed = {name: value for name, value in options.items() if name in given}
    if not greedy:
        return typed
    for name in GREEDY:
        if typed.get(name):
            raise OptionError(
                f"--greedy takes the most likely token, and --{name.replace('_', '-')} "
                f"{typed[name]} may not: use one of them"
            )
    return typed | GREEDY


class Configured(click.Command):
    """A command whose options the config file may set."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        if not ctx.resilient_parsing:
            configure(ctx)
        return rest


def configure(ctx: click.Context) -> None:
    """Give the options that were not typed the values of the config file.

    Options of a request are left to `usual_options`, because their model may be another one: that
    of a session.
    """
    config, params = read_config_file(), ctx.params
    model = params.get("named") or params["model"]
    for name, setting in config.options(str(ctx.command.name), model).items():
        if setting.note is not None:
            click.echo(visible_text(setting.note), err=True)
        if params.get("raw") and name in ("system", "template"):
            continue
        if name == "template":
            params[name] = {**setting.value, **(params.get(name) or {})}
        elif name in params.keys() - OF_REQUESTS and _is_default(ctx, name):
            params[name] = config.system(setting.value) if name == "system" else setting.value


def _is_default(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) is ParameterSource.DEFAULT


def usual_options(command: str, model: str) -> dict[str, Setting]:
    """Return what holds for requests of `command` to `model` unless the user says otherwise.

    The variables of the chat template are not among it. The model is downloaded if it is not there.
    Raise ModelError if there is no such model.
    """
    from mlxrunner.models.resolve import resolve
    from mlxrunner.models.suggested import suggestion_of

    of_file = read_config_file().options(command, model)
    chosen = {name: one for name, one in of_file.items() if name in OF_REQUESTS - {"template"}}
    return settled(layer(suggestion_of(resolve(model)).options, MODEL), chosen)


def options_that_hold(
    command: str, model: str, options: dict[str, Any], typed: dict[str, Any]
) -> dict[str, Any]:
    """Return `options` with the values that hold: typed ones, then the usual ones of `model`."""
    variables = {"template": options["template"]}
    return options | values(usual_options(command, model)) | typed | variables


def named_model(ctx: click.Context, parameter: click.Parameter, model: str | None) -> str | None:
    """Return the model that is meant: behind an alias, or that of the config file for none."""
    if model is None or ctx.resilient_parsing:
        return model
    config = read_config_file()
    if config.model is not None and _is_default(ctx, str(parameter.name)):
        model = str(config.model.value)
    return config.name_of(model)


def named_system(ctx: click.Context, parameter: click.Parameter, system: str | None) -> str | None:
    """Return the system prompt that `@NAME` stands for, or the text as it is."""
    return read_config_file().system(system) if system and system.startswith(NAMED) else system
