"""`mlxrunner batch merge`: put the outputs of all shards of a batch together."""

from __future__ import annotations

import sys

import click

from mlxrunner.cli.program import line_text

SOME_FAILED = 3
"""The exit code of a batch that is done, with failed lines."""


@click.command()
@click.argument("outputs", metavar="OUTPUT...", nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    required=True,
    help="Write all answers to FILE, which may not be there; FILE.parquet is made of them.",
)
@click.option("-q", "--quiet", is_flag=True, help="Print nothing on stderr but errors.")
def merge(outputs: tuple[str, ...], output: str, quiet: bool) -> None:
    """Put the outputs of all shards of a batch together, in the order of the input.

    Each OUTPUT is that of `mlxrunner batch --shard I/N`, with its OUTPUT.done beside it. Nothing is
    written if a shard is missing, there twice, not ended, changed, or of another batch. Without
    counts and times (--no-usage) FILE equals that of one machine byte for byte, and
    `mlxrunner batch` without --shard takes it with --resume and --retry-failed. Exit code 0 if
    every line was answered, 3 if some failed, 2 if nothing was written.
    """
    from mlxrunner.batch.merge import merge as merged
    from mlxrunner.batch.output import PARQUET, check_parquet, lines_path, write_parquet

    table = output if output.lower().endswith(PARQUET) else None
    if table is not None:
        check_parquet(table, goes_on=False)
    whole = merged(outputs, output if table is None else lines_path(table))
    if table is not None:
        write_parquet(table)
    if not quiet:
        failed = f", {whole.failed} of them failed" if whole.failed else ""
        click.echo(
            f"{line_text(output)}: {whole.lines:,} lines of {len(outputs)} shards{failed}", err=True
        )
    sys.exit(SOME_FAILED if whole.failed else 0)
