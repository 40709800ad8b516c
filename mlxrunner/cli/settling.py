"""Put together the options that hold for a command: what was typed, the model's, the defaults."""

from __future__ import annotations

from typing import Any

import click
from click.core import ParameterSource

from mlxrunner.config.layering import MODEL, Setting, layer, settled, values
from mlxrunner.errors import OptionError
from mlxrunner.options import GREEDY, GenerateOptions, names

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


def usual_options(command: str, model: str) -> dict[str, Setting]:
    """Return what holds for requests of `command` to `model` unless the user says otherwise.

    The model is downloaded if it is not there. Raise ModelError if there is no such model.
    """
    from mlxrunner.models.resolve import resolve
    from mlxrunner.models.suggested import suggestion_of

    return settled(layer(suggestion_of(resolve(model)).options, MODEL))


def options_that_hold(
    command: str, model: str, options: dict[str, Any], typed: dict[str, Any]
) -> dict[str, Any]:
    """Return `options` with the values that hold: typed ones, then the usual ones of `model`."""
    return options | values(usual_options(command, model)) | typed
