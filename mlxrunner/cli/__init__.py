"""The command line: it parses, calls and prints, and computes nothing.

A file holds one command, or a few small ones.
"""

from __future__ import annotations

import sys

import click

from mlxrunner.cli.batch import batch, worker
from mlxrunner.cli.chat import chat, run
from mlxrunner.cli.describe import completion, config, doctor, models, plan, show
from mlxrunner.cli.generate import generate
from mlxrunner.cli.launch import launch
from mlxrunner.cli.options import debug_option
from mlxrunner.cli.profile import bench, explain, report, simulate, verify
from mlxrunner.cli.program import Program
from mlxrunner.cli.serve import serve
from mlxrunner.cli.sessions import cache, sessions


def _print_version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    """Print the versions of this program, mlx and mlx-lm, which are read without importing them."""
    if not value or ctx.resilient_parsing:
        return
    from importlib.metadata import PackageNotFoundError, version

    def of(package: str) -> str:
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            return f"{package} is not installed"

    click.echo(f"{of('mlxrunner')} ({of('mlx')}, {of('mlx-lm')})")
    ctx.exit()


@click.group(
    cls=Program, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the versions of mlxrunner, mlx and mlx-lm.",
)
@debug_option
def main() -> None:
    """Run language models on Apple silicon (MLX), with prompt caching: only new tokens of a prompt
    are evaluated.

    \b
    mlxrunner chat llama3.2:1b                    talk with a model (0.7 GB)
    mlxrunner generate -m llama3.2:1b "Hello!"    answer one prompt
    mlxrunner serve llama3.2:1b                   serve other programs
    mlxrunner COMMAND --help                      show the options of a command
    """
    for stream, errors in (
        (sys.stdout, "backslashreplace"),
        (sys.stderr, "backslashreplace"),
        (sys.stdin, "surrogateescape"),
    ):
        # A model may print characters that the terminal's encoding lacks. Bytes on standard input
        # that are not text are refused where they are used.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=errors)


for command in (
    chat,
    run,
    generate,
    batch,
    serve,
    launch,
    worker,
    models,
    show,
    plan,
    sessions,
    cache,
    report,
    explain,
    simulate,
    verify,
    bench,
    doctor,
    config,
    completion,
):
    main.add_command(command)
