"""`mlxrunner launch`: start a coding agent that uses a running server."""

from __future__ import annotations

import os
import shutil

import click

from mlxrunner.cli.options import debug_option
from mlxrunner.cli.program import visible_text

NAMES = ("claude", "codex", "opencode")


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("client", type=click.Choice(NAMES))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--url",
    default="http://127.0.0.1:8080",
    show_default=True,
    help="The server's address.",
)
@click.option("--model", help="The model to use. [default: the server's first]")
@click.option("--api-key", envvar="MLXRUNNER_API_KEY", help="The server's key, if it asks for one.")
@click.option("--print", "prints", is_flag=True, help="Print the settings, and start nothing.")
@debug_option
def launch(
    client: str,
    arguments: tuple[str, ...],
    url: str,
    model: str | None,
    api_key: str | None,
    prints: bool,
) -> None:
    """Start CLIENT (claude, codex or opencode) on the models of a running `mlxrunner serve`.

    Options come before CLIENT; what follows it is for the client itself. The client gets its
    settings from the environment and its arguments: no file is written.

    \b
    mlxrunner launch claude
    mlxrunner launch --print codex
    mlxrunner launch opencode run "What does this project do?"
    """
    from mlxrunner.errors import LaunchError
    from mlxrunner.serve.launch import CLIENTS, find_server

    found = CLIENTS[client](find_server(url, api_key, model))
    if prints:
        click.echo(visible_text(found.script(arguments)))
        return
    program = shutil.which(found.program)
    if program is None:
        raise LaunchError(f"{found.program} is not installed: {found.install}")
    os.execve(
        program,
        [found.program, *found.arguments, *arguments],
        {**os.environ, **found.environment},
    )
