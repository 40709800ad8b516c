"""`mlxrunner worker`: answer lines of the batches of a Dask cluster."""

from __future__ import annotations

from typing import Any

import click

from mlxrunner.cli.options import debug_option, option_of, together
from mlxrunner.cluster.options import Connection

CONNECTION = ("tls_ca", "tls_cert", "tls_key", "insecure")
"""The options for a cluster on other hosts."""


@click.command()
@click.argument("address", metavar="ADDRESS")
@together(tuple(option_of(Connection, name) for name in CONNECTION))
@debug_option
def worker(address: str, **options: Any) -> None:
    """Answer lines of batches that `mlxrunner batch --dask ADDRESS` runs.

    ADDRESS is that of the cluster's scheduler, such as tls://HOST:8786; `dask scheduler` starts
    one. The model of a batch has to be on this machine: no files are copied. Ctrl-C ends the
    worker, and its unfinished lines run on others.
    """
    import asyncio

    from mlxrunner.cluster.dask_workers import check_installed, work
    from mlxrunner.terminal.signals import orderly_end

    connection = Connection(**options)
    where = connection.check_address(address)
    check_installed()
    with orderly_end():
        asyncio.run(work(where, connection, lambda text: click.echo(text, err=True)))
