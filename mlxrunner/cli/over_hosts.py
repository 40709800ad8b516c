"""A command on a model that several hosts share, for `mlxrunner launch --hosts`."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

import click

from mlxrunner.cli.bench import bench
from mlxrunner.cli.chat import chat
from mlxrunner.cli.generate import generate
from mlxrunner.cli.serve import serve
from mlxrunner.cli.verify import verify
from mlxrunner.errors import LaunchError, OptionError

if TYPE_CHECKING:
    from socket import socket

    from mlxrunner.models.part import Way
    from mlxrunner.ranks.hosts import Hosts

WAYS: dict[str, Way] = {"--tensor-parallel": "tensor-parallel", "--pipeline": "pipeline"}
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
    *("--disk-cache-bytes", "--pictures", "--picture-folder", "--unit"),
)
"""Options of a command that only a model of one rank takes."""


def run(ctx: click.Context, hosts: str, port: int, words: tuple[str, ...]) -> None:
    """Run the command line `words` on `hosts`: as their guard, or as rank 0, which it starts."""
    inner, way = _command(ctx, words)
    from mlxrunner.ranks.hosts import read_hosts
    from mlxrunner.ranks.processes import inherited

    found, connection = read_hosts(hosts, port), inherited()
    if connection is not None:
        _lead(ctx, inner, way, found, connection)
        return
    from mlxrunner.ranks.guard import guard

    debug = ["--debug"] if ctx.meta.get("debug") else []
    launch = ["launch", *debug, "--hosts", hosts, "--port", str(port)]
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
    ctx: click.Context, inner: click.Context, way: Way, hosts: Hosts, connection: socket
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
    from mlxrunner.ranks.following import follow as follow_it
    from mlxrunner.ranks.hosts import read_hosts

    found = read_hosts(hosts, port)
    if rank >= len(found.addresses):
        raise OptionError(f"--rank {rank}: {hosts} names ranks 0 to {len(found.addresses) - 1}")
    follow_it(found, rank)


def _command(ctx: click.Context, words: tuple[str, ...]) -> tuple[click.Context, Way]:
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
