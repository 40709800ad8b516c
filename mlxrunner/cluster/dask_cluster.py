"""A cluster of Dask: connect to one, start one on this machine, or be a worker of one."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

from mlxrunner.cluster.answering import sign
from mlxrunner.cluster.keeping import MOST_STARTS
from mlxrunner.cluster.options import ClusterOptions, Connection
from mlxrunner.errors import CutOffError, OptionError
from mlxrunner.terminal.text import one_line

THREADS = 256
"""The calls that a worker takes at a time. They wait for its one model."""
SIGN = "mlxrunner"
"""The name of a worker's sign of life among Dask's metrics."""
CONNECT_S = 10
"""Seconds in which a scheduler has to answer."""


@asynccontextmanager
async def connected(options: ClusterOptions) -> AsyncIterator[Any]:
    """Yield a client of the cluster that the options name, or of a new one on this machine."""
    from distributed import Client

    be_quiet()
    async with AsyncExitStack() as stack:
        if options.dask is not None:
            where: Any = options.check_address(options.dask)
        else:
            where = await stack.enter_async_context(_local_cluster(options.workers or 1))
        try:
            client = Client(
                where,
                security=_security(options),
                timeout=CONNECT_S,
                asynchronous=True,
                set_as_default=False,
            )
            yield await stack.enter_async_context(client)
        except (OSError, TimeoutError) as error:
            raise _nobody_at(options.dask, error) from error


@asynccontextmanager
async def _local_cluster(workers: int) -> AsyncIterator[Any]:
    """Yield a new cluster on this machine, which is started again if a worker ends meanwhile."""
    from distributed import LocalCluster

    with tempfile.TemporaryDirectory(prefix="mlxrunner-") as folder:
        for left in reversed(range(MOST_STARTS)):
            local = LocalCluster(
                n_workers=workers,
                threads_per_worker=THREADS,
                host="127.0.0.1",
                protocol="tcp",
                dashboard_address="127.0.0.1:0",
                silence_logs=logging.CRITICAL,
                local_directory=folder,
                asynchronous=True,
                **worker_settings(),
            )
            try:
                await local
                break
            except Exception as error:
                with suppress(Exception):
                    await local.close()
                if not left:
                    why = one_line(str(error))
                    raise CutOffError(f"the workers did not start: {why}") from error
        async with local:
            yield local


def _nobody_at(address: str | None, error: Exception) -> OptionError:
    why = one_line(str(error))
    return OptionError(
        f"{address}: no scheduler answers there: is `dask scheduler` running, and are its "
        f"certificates from the same authority? ({why})"
    )


def worker_settings() -> dict[str, Any]:
    """Return the settings of a worker: no limits of memory, which the model's plan has."""
    return {"memory_limit": 0, "metrics": {SIGN: sign}}


def _security(options: Connection) -> Any:
    """Return Dask's description of the certificates; None without any."""
    if not options.has_tls:
        return None
    from distributed.security import Security

    own = (options.tls_cert, options.tls_key)
    return Security(
        tls_ca_file=options.tls_ca,
        tls_client_cert=own[0],
        tls_client_key=own[1],
        tls_worker_cert=own[0],
        tls_worker_key=own[1],
        require_encryption=True,
    )


def be_quiet() -> None:
    """Keep Dask's remarks off the terminal, and its pages off the network.

    Let a supervisor start its worker again, however long that takes: Dask ends it after 15 s.
    """
    import dask
    import distributed  # noqa: F401  # it makes its loggers

    dask.config.set({"distributed.deploy.lost-worker-timeout": "1 day"})
    dask.config.set({f"distributed.{one}.http.routes": [] for one in ("scheduler", "worker")})
    for name in list(logging.root.manager.loggerDict):  # some of them have a level of their own
        if name.partition(".")[0] in ("distributed", "bokeh", "tornado"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def check_installed() -> None:
    """Raise OptionError if Dask is not installed."""
    try:
        import distributed  # noqa: F401
    except ImportError as error:
        raise OptionError(
            "batches over several workers need Dask: pip install 'mlxrunner[dask]'"
        ) from error


async def work(address: str, options: Connection, say: Callable[[str], None]) -> None:
    """Be a worker of the cluster at `address` until it is cancelled, and again after a crash.

    Raise OptionError if no scheduler answers there.
    """
    from distributed import Nanny
    from distributed.utils import get_ip

    be_quiet()
    await _check_scheduler(address, options)
    host = address.split("://")[1].rpartition(":")[0].strip("[]")
    with tempfile.TemporaryDirectory(prefix="mlxrunner-") as folder:
        nanny = Nanny(
            address,
            nthreads=THREADS,
            host=get_ip(host),
            security=_security(options),
            local_directory=folder,
            silence_logs=logging.CRITICAL,
            **worker_settings(),
        )
        async with nanny:
            say(f"a worker of {address}: Ctrl-C ends it")
            await nanny.finished()


async def _check_scheduler(address: str, options: Connection) -> None:
    """Raise OptionError if none answers: the process of a worker would only fail to start."""
    from distributed.comm import connect as opened_connection

    security = _security(options)
    arguments = {} if security is None else security.get_connection_args("worker")
    try:
        found = await opened_connection(address, timeout=CONNECT_S, **arguments)
    except (OSError, TimeoutError) as error:
        raise _nobody_at(address, error) from error
    await found.close()
