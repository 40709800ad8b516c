"""The program around the commands: each library error becomes one line on stderr and an exit code."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import click

from mlxrunner.errors import MlxrunnerError

INTERRUPTED = 130
F = TypeVar("F", bound=Callable[..., Any])


class Program(click.Group):
    """Turns errors into one line; `--debug` anywhere shows the traceback, too."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError, SystemExit):
            raise
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
        except MlxrunnerError as error:
            _report(ctx, str(error))
            sys.exit(error.exit_code)
        except Exception as error:
            _report(ctx, f"internal error: {type(error).__name__}: {' '.join(str(error).split())} (--debug shows where)")
            sys.exit(1)


def _report(ctx: click.Context, line: str) -> None:
    if ctx.meta.get("debug"):
        click.echo(visible_text(traceback.format_exc().rstrip()), err=True)
    click.echo(f"mlxrunner: {visible_text(line)}", err=True)


def visible_text(text: str) -> str:
    from mlxrunner.terminal import visible

    return visible(text)


def set_debug(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    ctx.meta["debug"] = ctx.meta.get("debug") or value
