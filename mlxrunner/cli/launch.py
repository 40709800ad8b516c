"""`mlxrunner launch`: start a coding agent on a server, or a command on several hosts."""

from __future__ import annotations

import os
import shutil

import click
from click.shell_completion import CompletionItem

from mlxrunner.cli.options import debug_option, is_given
from mlxrunner.cli.program import visible_text

NAMES = ("claude", "codex", "opencode")
FIRST_PORT = 32322


def _offer(ctx: click.Context, parameter: click.Parameter, begin: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in NAMES if name.startswith(begin)]


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("client", required=False, shell_complete=_offer)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--url",
    default="http://127.0.0.1:8080",
    show_default=True,
    help="The server's address.",
)
@click.option("-m", "--model", help="The model to use. [default: the server's first]")
@click.option(
    "--api-key",
    envvar="MLXRUNNER_API_KEY",
    show_envvar=True,
    help="The server's key, if it asks for one.",
)
@click.option("--print", "prints", is_flag=True, help="Print the settings, and start nothing.")
@click.option(
    "--hosts",
    metavar="FILE",
    help="Run generate, chat, serve, bench or verify on a model that the hosts of FILE share. FILE "
    "is as mlx.launch has it.",
)
@click.option(
    "--rank",
    type=click.IntRange(1),
    help="With --hosts: follow rank 0 as this rank. Ranks with a loopback address need no start.",
)
@click.option(
    "--port",
    type=click.IntRange(1024, 65535),
    default=FIRST_PORT,
    show_default=True,
    help="With --hosts: the first port between the ranks; one more for each rank follows. The port "
    "of a server is an option of serve.",
)
@debug_option
@click.pass_context
def launch(
    ctx: click.Context,
    client: str | None,
    arguments: tuple[str, ...],
    url: str,
    model: str | None,
    api_key: str | None,
    prints: bool,
    hosts: str | None,
    rank: int | None,
    port: int,
) -> None:
    """Start CLIENT (claude, codex or opencode) on the models of a running `mlxrunner serve`, or
    generate, chat, serve, bench or verify on a model that several hosts share.

    Options come before CLIENT; what follows it is for the client itself. The client gets its
    settings from the environment and its arguments: no file is written.

    With --hosts, the command takes --tensor-parallel (each host has a part of every layer) or
    --pipeline (each host has some of the layers).

    \b
    mlxrunner launch claude
    mlxrunner launch --print codex
    mlxrunner launch opencode run "What does this project do?"
    mlxrunner launch --hosts hosts.json -- generate -m MODEL --tensor-parallel "Hello"
    mlxrunner launch --hosts hosts.json -- serve MODEL --tensor-parallel --port 8080
    """
    if hosts is not None:
        from mlxrunner.cli.over_hosts import follow, run

        if rank is not None:
            follow(hosts, port, rank)
            return
        if client is None:
            raise click.UsageError("Missing the command to run on the hosts, such as generate.")
        run(ctx, hosts, port, (client, *arguments))
        return
    if rank is not None or is_given("port"):
        raise click.UsageError("--rank and --port go with --hosts.")
    if client is None:
        raise click.UsageError("Missing argument 'CLIENT'.")
    if client not in NAMES:
        names = f"{', '.join(NAMES[:-1])} or {NAMES[-1]}"
        raise click.UsageError(
            f"{client!r:.80} is not {names}; a command of mlxrunner needs --hosts."
        )
    _start(client, arguments, url, model, api_key, prints)


def _start(
    client: str,
    arguments: tuple[str, ...],
    url: str,
    model: str | None,
    api_key: str | None,
    prints: bool,
) -> None:
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
