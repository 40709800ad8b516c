"""The program around the commands: each library error becomes one line on stderr and an exit code.

Standard output that is closed or full is such an error; standard error that is so is done without.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, TypeVar

import click

from mlxrunner.errors import MlxrunnerError

INTERRUPTED = 130
F = TypeVar("F", bound=Callable[..., Any])


class Program(click.Group):
    """Turns errors into one line; `--debug` anywhere shows the traceback, too."""

    def main(self, *arguments: Any, **extra: Any) -> Any:
        guard_streams()
        try:
            return super().main(*arguments, **extra)
        except OutputClosedError as error:  # while the arguments were read: by --help
            click.echo(f"mlxrunner: {error}", err=True)
            sys.exit(error.exit_code)
        finally:
            give_up_output()

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
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
                    f"internal error: {type(error).__name__}: {' '.join(str(error).split())} (--debug shows where)"
                ),
            )
            sys.exit(1)


def _end_if_told(error: BaseException | None) -> None:
    """Ctrl-C or `kill` in the middle of an import may come out of Python as the cause of a RuntimeError."""
    while (error := error and error.__cause__) is not None:
        if isinstance(error, KeyboardInterrupt):
            sys.exit(INTERRUPTED)
        if isinstance(error, SystemExit):
            sys.exit(error.code)


class OutputClosedError(MlxrunnerError):
    """Nothing can be written to standard output."""

    exit_code = 2


class StandardOutput(io.TextIOWrapper):
    """Standard output whose errors are ours; a reader that has gone away stays a BrokenPipeError."""

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
    """Standard error, if there is one: a terminal that has gone away stops nothing."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


def guard_streams() -> None:
    """Put them in the place of the process's own; what is closed is taken up, so that no file that is opened gets its number."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY)  # the lowest number that is free
    if sys.stdout is None or sys.stdout is sys.__stdout__:
        sys.stdout = _guarded(StandardOutput, sys.stdout, 1)
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        sys.stderr = _guarded(StandardError, sys.stderr, 2)


def give_up_output() -> None:
    """Drop output that could not be written, so that it is not tried again when the process ends."""
    try:
        sys.stdout.flush()
    except (OutputClosedError, OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
    from mlxrunner.terminal import one_line

    return one_line(text)


def visible_text(text: str) -> str:
    from mlxrunner.terminal import visible

    return visible(text)


def set_debug(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    ctx.meta["debug"] = ctx.meta.get("debug") or value
