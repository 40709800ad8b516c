"""The program around the commands: it turns each library error into one line and an exit code.

Standard output that is closed or full is such an error. Standard error that is closed or full is
ignored.
"""

from __future__ import annotations

import errno
import io
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TextIO, TypeVar

import click

from mlxrunner.cli.help import KEYS_ONLY, HelpGroup, write_commands
from mlxrunner.errors import MlxrunnerError, OutputClosedError
from mlxrunner.terminal import early
from mlxrunner.terminal.early import INTERRUPTED

F = TypeVar("F", bound=Callable[..., Any])


class Program(HelpGroup):
    """A click group that prints each error as one line; `--debug` adds the traceback."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_commands(formatter)
        click.Command.format_options(self, ctx, formatter)

    def main(self, *arguments: Any, **extra: Any) -> Any:
        guard_streams()
        try:
            return super().main(*arguments, **extra)
        except OutputClosedError as error:  # raised by --help, while click reads the arguments
            click.echo(f"mlxrunner: {error}", err=True)
            sys.exit(error.exit_code)
        finally:
            give_up_output()

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise with_our_name(error) from error

    def invoke(self, ctx: click.Context) -> Any:
        is_early = early.hand_over()
        try:
            return self._invoke(ctx)
        finally:
            if is_early:
                early.begin()

    def _invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except click.NoSuchOption as error:
            raise with_our_name(error) from error
        except click.NoSuchCommand as error:
            raise with_our_command(error) from error
        except click.MissingParameter as error:
            raise with_its_meaning(error) from error
        except click.BadParameter as error:
            raise with_our_number(error) from error
        except click.UsageError as error:
            raise with_our_way(error) from error
        except (
            click.ClickException,
            click.exceptions.Exit,
            click.Abort,
            BrokenPipeError,
            SystemExit,
        ):
            raise
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
        except MlxrunnerError as error:
            _report(ctx, visible_text(str(error)) if error.is_table else line_text(str(error)))
            sys.exit(error.exit_code)
        except Exception as error:
            _end_if_told(error)
            _report(
                ctx,
                line_text(
                    f"internal error: {type(error).__name__}: {' '.join(str(error).split())} "
                    "(--debug shows where)"
                ),
            )
            sys.exit(1)


def with_our_name(error: click.NoSuchOption) -> click.NoSuchOption:
    """Return the error about an unknown option with the option of ours that may be meant."""
    from mlxrunner.config.names import FLAGS, LETTERS, MEANT, SAME, WAYS, plain

    if error.ctx is None:
        return error
    options = [one for one in error.ctx.command.params if isinstance(one, click.Option)]
    options = [one for one in options if not one.hidden]
    flags = {str(one.name): max(one.opts, key=len) for one in options}
    flags |= {flag.lstrip("-").replace("-", "_"): flag for one in options for flag in one.opts}
    command = str(error.ctx.command.name)
    flags |= {key: f"--set {key}=VALUE" for key in KEYS_ONLY.get(command, "").split()}
    option = error.option_name
    names = LETTERS.get(option[1:], ()) if len(option) == 2 else (option,)
    ways = [WAYS[plain(name)] for name in names if plain(name) in WAYS]
    meant = dict.fromkeys(_our_flag(FLAGS.get(plain(name), name), flags) for name in names)
    ours = " or ".join(repr(flag) for flag in meant if flag is not None)
    hint = ways[0] if ways else f"Did you mean {ours}?" if ours else ""
    known = {*SAME, *MEANT, *FLAGS, *LETTERS}
    if not ways and plain(option) not in known:
        hint = _place_of(option, error.ctx) or hint
    if not hint:
        return error
    return click.NoSuchOption(option, f"No such option {option!r}. {hint}", ctx=error.ctx)


def _place_of(option: str, ctx: click.Context) -> str:
    """Return which commands have an option that the one of `ctx` lacks; empty if none has it."""
    commands = getattr(ctx.find_root().command, "commands", {})
    having = [
        name
        for name, command in commands.items()
        if any(option in one.opts and not getattr(one, "hidden", False) for one in command.params)
    ]
    if having and ctx.parent is None:
        return f"It comes after a command that has it: mlxrunner {having[0]} {option} ..."
    if len(having) > 4:
        having = [*having[:3], "other commands"]
    *most, last = having or [""]
    return f"{', '.join(most)} and {last} have it." if most else f"{last} has it." if last else ""


def _our_flag(name: str, flags: Mapping[str, str]) -> str | None:
    """Return our flag that somebody who wrote `name` may have meant, with its value if it has one.

    `flags` are those of the command by name.
    """
    from mlxrunner.config.names import nearest

    ours, _, value = (nearest(name, flags) or "").partition(": ")
    if not ours:
        return None
    return flags[ours] + (f" {_as_pair(value)}" if value else "")


def with_our_command(error: click.NoSuchCommand) -> click.UsageError:
    """Return the error about an unknown command with what may be meant: ours, or a prompt."""
    from mlxrunner.config.names import ADVICE, COMMANDS, known_models
    from mlxrunner.options import EMBEDDED

    name, group = error.command_name, error.ctx and error.ctx.parent and error.ctx.info_name
    ours = COMMANDS.get(f"{group} {name}" if group else name)
    if not group and name in ADVICE:
        meant = ADVICE[name]
    elif ours is not None:
        meant = f"Did you mean 'mlxrunner {ours}'?"
    elif group and not error.possibilities:
        *most, last = getattr(error.ctx and error.ctx.command, "commands", ()) or ("nothing",)
        meant = f"{group} has {', '.join(most)} and {last}."
    elif name in EMBEDDED or name in known_models():
        meant = f"{name} is a model: mlxrunner chat {name}"
    elif name.strip() and not error.possibilities:
        meant = f"To ask that, type mlxrunner generate {shlex.quote(line_text(name[:60]))}"
    else:
        return error
    return click.UsageError(f"{error.message} {meant}", ctx=error.ctx)


_COUNT = re.compile(r"'(\d+(?:\.\d+)?)([km])i?b?' ", re.IGNORECASE)


def with_our_number(error: click.BadParameter) -> click.BadParameter:
    """Return an error about a number in our words; one such as 8k says what to write instead."""
    message = error.message.replace("is not a valid integer", "is not a whole number")
    message = message.replace("is not a valid float", "is not a number")
    if (found := _COUNT.match(message)) is not None:
        number = float(found[1]) * 1024 ** " km".index(found[2].lower())
        message = f"{message.rstrip('.')}: write {int(number)}."
    hint = error.param_hint
    return click.BadParameter(message, ctx=error.ctx, param=error.param, param_hint=hint)


MEANINGS = {
    "EVENTS": "a file that chat, generate, batch or serve wrote with --events FILE",
    "LOG": "a file that chat, generate or batch wrote with --log-tokens FILE",
    "INPUT": "a file of prompts: lines of JSON, a table, or a folder of texts",
    "ID": "a short name (`mlxrunner models --known` lists them) or a hub id OWNER/NAME",
    "ADDRESS": "that of the cluster's scheduler, such as tls://HOST:8786",
    "CLIENT": "claude, codex or opencode",
    "NAME": "a saved chat: `mlxrunner sessions list` lists them",
    "SESSION": "a saved chat: `mlxrunner sessions list` lists them",
    "FILE": "the file to write, or to read",
}
"""The meaning of each argument, for the error about one that is missing."""


def with_its_meaning(error: click.MissingParameter) -> click.UsageError:
    """Return the error about a missing argument with what it may be."""
    name = "" if error.param is None else (error.param.metavar or str(error.param.name))
    name = name.strip("[].").upper() if isinstance(error.param, click.Argument) else ""
    if name not in MEANINGS:
        return error
    return click.UsageError(f"Missing {name}: {MEANINGS[name]}.", ctx=error.ctx)


def with_our_way(error: click.UsageError) -> click.UsageError:
    """Return the error about a prompt after `chat MODEL` with the command that takes one."""
    if error.ctx is None or error.ctx.info_name != "chat" or "extra argument" not in error.message:
        return error
    hint = "mlxrunner run MODEL PROMPT answers one prompt."
    return click.UsageError(f"{error.message}. {hint}", ctx=error.ctx)


def _as_pair(value: str) -> str:
    """Return a JSON object of one variable as the command line takes it: NAME=VALUE."""
    import json

    (name, found), *_ = json.loads(value).items()
    return f"{name}={json.dumps(found)}"


def _end_if_told(error: BaseException | None) -> None:
    """Exit if Ctrl-C or `kill` is the cause of `error`.

    Python wraps them in a RuntimeError if they come in the middle of an import.
    """
    while (error := error and error.__cause__) is not None:
        if isinstance(error, KeyboardInterrupt):
            sys.exit(INTERRUPTED)
        if isinstance(error, SystemExit):
            sys.exit(error.code)


class StandardOutput(io.TextIOWrapper):
    """Standard output that raises OutputClosedError, or BrokenPipeError if its reader is gone."""

    def write(self, text: str) -> int:
        with self._explained():
            return super().write(text)

    def flush(self) -> None:
        with self._explained():
            super().flush()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            why = (
                "is closed"
                if error.errno == errno.EBADF
                else f"can't be written: {error.strerror or error}"
            )
            raise OutputClosedError(f"standard output {why}") from error


class StandardError(io.TextIOWrapper):
    """Standard error that ignores failures, such as a terminal that has gone away."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


def guard_streams() -> None:
    """Replace the standard streams by StandardOutput and StandardError.

    A closed stream is opened on /dev/null, so that no other file gets its number.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY)  # noqa: TID251  # the lowest number that is free
    if sys.stdout is None or sys.stdout is sys.__stdout__:
        sys.stdout = _guarded(StandardOutput, sys.stdout, 1)
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        sys.stderr = _guarded(StandardError, sys.stderr, 2)


def give_up_output() -> None:
    """Drop output that could not be written, so that Python does not retry at exit."""
    try:
        sys.stdout.flush()
    except (OutputClosedError, OSError, ValueError):
        with suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)  # noqa: TID251  # the null device
            os.dup2(null, sys.stdout.fileno())


def _guarded(guard: type[io.TextIOWrapper], stream: TextIO | None, number: int) -> TextIO:
    if stream is None:
        return guard(
            io.FileIO(number, "w", closefd=False), "utf-8", "backslashreplace", line_buffering=True
        )
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    return guard(
        stream.buffer,
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _report(ctx: click.Context, text: str) -> None:
    if ctx.meta.get("debug"):
        click.echo(visible_text(traceback.format_exc().rstrip()), err=True)
    click.echo(f"mlxrunner: {text}", err=True)


def line_text(text: str) -> str:
    """Return `text` as one safe line: see `one_line`, which is imported late."""
    from mlxrunner.terminal.text import one_line

    return one_line(text)


def visible_text(text: str) -> str:
    """Return `text` without control characters: see `visible`, which is imported late."""
    from mlxrunner.terminal.text import visible

    return visible(text)


def set_debug(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    """Note that --debug was given, before or after the command."""
    ctx.meta["debug"] = ctx.meta.get("debug") or value
