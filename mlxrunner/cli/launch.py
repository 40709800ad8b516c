"""`mlxrunner launch`: start a coding agent on a server, or a command on several hosts."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

import click
from click.shell_completion import CompletionItem

from mlxrunner.cli.chat import chat
from mlxrunner.cli.generate import generate
from mlxrunner.cli.options import debug_option, flag, former_option, is_given
from mlxrunner.cli.profile import bench, verify
from mlxrunner.cli.program import HelpCommand, visible_text
from mlxrunner.cli.serve import serve
from mlxrunner.errors import LaunchError, OptionError

if TYPE_CHECKING:
    from socket import socket

    from mlxrunner.models.files import ShardingWay
    from mlxrunner.ranks.guard import Hosts


NAMES = ("claude", "codex", "opencode")
MISPLACED = {
    "claude": ("--url", "--api-key"),
    "codex": ("--print",),
    "opencode": ("--print", "--url", "--api-key"),
}
"""Options of `launch` that a client does not have, so that they come before its name."""
FIRST_PORT = 32322


def _offer(ctx: click.Context, parameter: click.Parameter, begin: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in NAMES if name.startswith(begin)]


@click.command(
    cls=HelpCommand,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
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
    help="The server's key, if it needs one.",
)
@flag("--print", "prints", help="Print the settings, and start nothing.")
@click.option(
    "--hosts",
    metavar="FILE",
    help="Run generate, chat, serve, bench or verify on a model shared by the hosts of FILE "
    "(in the format of mlx.launch).",
)
@click.option(
    "--rank",
    type=click.IntRange(1),
    metavar="N",
    help="With --hosts: follow rank 0 as this rank. Ranks with a loopback address need no start.",
)
@click.option(
    "--rank-port",
    type=click.IntRange(1024, 65535),
    metavar="PORT",
    default=FIRST_PORT,
    show_default=True,
    help="With --hosts: the first port between the ranks; one more for each rank follows.",
)
@former_option("--port", "--rank-port", "rank_port")
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
    rank_port: int,
) -> None:
    """Start CLIENT (claude, codex or opencode) with a running `mlxrunner serve`, or a command on a
    model that several hosts share.

    Options come before CLIENT; the client gets the rest. Settings are passed as environment
    variables and arguments: no file is written.

    With --hosts, the command takes --tensor-parallel (each host has a part of every layer) or
    --pipeline (each host has some of the layers).

    \b
    mlxrunner launch claude
    mlxrunner launch --print codex
    mlxrunner launch opencode run "What does this project do?"
    mlxrunner launch --hosts hosts.json -- chat MODEL --tensor-parallel
    mlxrunner launch --hosts hosts.json -- serve MODEL --tensor-parallel
    """
    if hosts is not None:
        if rank is not None:
            follow(hosts, rank_port, rank)
            return
        if client is None:
            raise click.UsageError("Missing the command to run on the hosts, such as generate.")
        run(ctx, hosts, rank_port, (client, *arguments))
        return
    if rank is not None or is_given("rank_port"):
        raise click.UsageError("--rank and --rank-port go with --hosts.")
    if client is None:
        raise click.UsageError("Missing CLIENT: claude, codex or opencode.")
    if client not in NAMES:
        names = f"{', '.join(NAMES[:-1])} or {NAMES[-1]}"
        raise click.UsageError(
            f"{client!r:.80} is not {names}: give another program the server's address, "
            f"{url}/v1; a command of mlxrunner needs --hosts."
        )
    for word in arguments[: arguments.index("--") if "--" in arguments else None]:
        if (flag := word.partition("=")[0]) in MISPLACED[client]:
            raise click.UsageError(
                f"{flag} after {client} is given to {client}, which has no such option: "
                f"type mlxrunner launch {flag} ... {client}"
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
    from mlxrunner.server.launch import CLIENTS, find_server

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


WAYS: dict[str, ShardingWay] = {"--tensor-parallel": "tensor-parallel", "--pipeline": "pipeline"}
"""The options that say how the hosts share a model."""
COMMANDS: dict[str, click.Command] = {
    "generate": generate,
    "chat": chat,
    "serve": serve,
    "bench": bench,
    "verify": verify,
}
REFUSED = (
    *("--n", "--draft-model", "--verify-cache", "--trust-remote-code", "--kv-bits", "--vs"),
    *("--disk-cache-bytes", "--wire", "--pictures", "--picture-folder", "--unit"),
)
"""Options of a command that only a model of one rank takes."""


def run(ctx: click.Context, hosts: str, port: int, words: tuple[str, ...]) -> None:
    """Run the command line `words` on `hosts`: as their guard, or as rank 0, which it starts."""
    inner, way = _command(ctx, words)
    from mlxrunner.ranks.guard import guard, inherited, read_hosts

    found, connection = read_hosts(hosts, port), inherited()
    if connection is not None:
        _lead(ctx, inner, way, found, connection)
        return
    debug = ["--debug"] if ctx.meta.get("debug") else []
    launch = ["launch", *debug, "--hosts", hosts, "--rank-port", str(port)]
    python = [sys.executable, "-m", "mlxrunner", *launch]
    try:
        code = guard(found, lambda rank: [*python, *(["--rank", str(rank)] if rank else words)])
    except LaunchError as error:
        _end(f"mlxrunner: {error}", error.exit_code)
    ctx.exit(code)


def _end(line: str, code: int) -> NoReturn:
    """Write `line` and end this process at once, also if nobody reads its standard error."""
    signal.signal(signal.SIGALRM, lambda *_: os._exit(code))
    signal.alarm(1)
    click.echo(line, err=True)
    os._exit(code)


def _lead(
    ctx: click.Context, inner: click.Context, way: ShardingWay, hosts: Hosts, connection: socket
) -> None:
    """Run the command `inner` as rank 0."""
    from mlxrunner.ranks.ranks import Ranks

    with Ranks(hosts, connection, way) as ranks:
        ctx.meta["ranks"] = ranks
        try:
            with inner:
                inner.command.invoke(inner)
        except RuntimeError as error:
            if "[ring]" in str(error):
                ranks.wait_for_the_guard()
            raise


def follow(hosts: str, port: int, rank: int) -> None:
    """Follow rank 0 of `hosts` as rank `rank`."""
    from mlxrunner.ranks.guard import read_hosts
    from mlxrunner.ranks.ranks import follow as follow_it

    found = read_hosts(hosts, port)
    if rank >= len(found.addresses):
        raise OptionError(f"--rank {rank}: {hosts} names ranks 0 to {len(found.addresses) - 1}")
    follow_it(found, rank)


def _command(ctx: click.Context, words: tuple[str, ...]) -> tuple[click.Context, ShardingWay]:
    """Return the command `words` ready to run, and how the hosts share its model.

    Raise OptionError for what ranks do not do.
    """
    command = COMMANDS.get(words[0])
    if command is None:
        *most, last = COMMANDS
        able = f"{', '.join(most)} and {last}"
        raise OptionError(f"{words[0]} does not run with --hosts: {able} do")
    given_ways = [flag for flag in WAYS if flag in words]
    if len(given_ways) > 1:
        raise OptionError(f"{' and '.join(WAYS)} contradict each other: use one of them")
    own = [word for word in words[1:] if word not in WAYS]
    inner = command.make_context(words[0], own, parent=ctx)
    if not given_ways:
        raise OptionError(f"say how the hosts share the model: add {' or '.join(WAYS)}")
    for option in command.params:
        flag, value = option.opts[0], inner.params.get(option.name or "")
        if flag in REFUSED and value not in (None, False, option.default):
            raise OptionError(f"{flag} is for a model on one machine: leave it out with --hosts")
    return inner, WAYS[given_ways[0]]
