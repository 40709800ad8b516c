"""Reach workers over Dask's `distributed`. No other module knows Dask.

A thread of its own runs Dask's event loop. Each call is a task that is bound to its worker.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import signal
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future as Waiting
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from multiprocessing import active_children, resource_tracker
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from mlxrunner.cluster.answering import sign
from mlxrunner.cluster.options import ClusterOptions, Connection
from mlxrunner.errors import CutOffError, OptionError
from mlxrunner.terminal.text import one_line


@dataclass(frozen=True)
class Reply:
    """The end of a call: a value or an error."""

    call: int
    """The number of the call, as `Machines.call` returned it."""
    value: Any = None
    """The value that the function returned."""
    error: BaseException | None = None
    """The exception that ended the function or kept it from running; None if it returned."""


class Machines(Protocol):
    """Workers that come and go, and calls of functions on them."""

    @property
    def signs(self) -> Mapping[str, Any]:
        """The last sign of life of each worker, by name: a value that changes while it lives."""

    def call(self, worker: str, function: Callable[..., Any], *arguments: Any) -> int:
        """Call a module's function with plain data on a worker. Return the number of the call.

        A call to a worker that has gone may never end.
        """

    def forget(self, call: int) -> None:
        """Drop a call: `replies` does not return it any more."""

    def replies(self, timeout: float) -> list[Reply]:
        """Return the calls that have ended; wait up to `timeout` seconds for the first.

        Raise CutOffError if the workers can't be reached any more.
        """


MOST_STARTS = 4
"""The processes for each worker that may end in turn while no worker takes part."""
GONE_S = 300.0
"""Seconds without any worker after which they are given up, whatever keeps them."""


class Keeper:
    """Counts the processes that were started since a worker last took part."""

    def __init__(self, workers: int) -> None:
        """Keep this number of workers."""
        self._workers = workers
        self._started: set[int] = set()
        self._gone_s = 0.0

    def look(self, processes: Iterable[int], taking_part: int, seconds: float) -> str | None:
        """Note the processes that live, and how many of them take part, `seconds` after last time.

        Return why the workers are given up; None while they are not.
        """
        if taking_part:
            self._started.clear()
            self._gone_s = 0.0
            return None
        living = set(processes)
        self._started |= living
        self._gone_s += seconds
        ended = len(self._started - living)
        if ended >= MOST_STARTS * self._workers:
            return (
                f"no worker is left: {ended} processes ended in turn while they started: is there "
                "enough memory for all of them?"
            )
        if self._gone_s >= GONE_S:
            return f"no worker is left, and none has come for {GONE_S:g} s"
        return None


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


LOOK_EVERY_S = 0.5
"""Seconds between two looks at the workers."""
LOST_S = 30
"""Seconds without an answer of the scheduler after which the cluster is given up."""
CONNECTION_LOST = "the connection to the scheduler of the cluster is lost"


class DaskMachines:
    """The workers of a Dask cluster. Make it with `opened_dask`."""

    def __init__(self, client: Any, local: int | None) -> None:
        """Use the workers of a client's cluster, of which `local` are kept on this machine."""
        self._client, self._local = client, local or 0
        self._keeper = Keeper(self._local)
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._numbers = count()
        self._replies: SimpleQueue[Reply] = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._lost: str | None = None
        self.signs: Mapping[str, Any] = {}

    def call(self, worker: str, function: Callable[..., Any], *arguments: Any) -> int:
        """Call a function on a worker; see `Machines.call`."""
        number = next(self._numbers)
        self._loop.call_soon_threadsafe(self._begin, number, worker, function, arguments)
        return number

    def forget(self, call: int) -> None:
        """Expect no end of this call; see `Machines.forget`."""
        self._loop.call_soon_threadsafe(self._cancel, call)

    def replies(self, timeout: float) -> list[Reply]:
        """Return the calls that have ended; see `Machines.replies`."""
        if self._lost is not None:
            raise CutOffError(self._lost)
        found = list[Reply]()
        try:
            found.append(self._replies.get(timeout=timeout))
            while True:
                found.append(self._replies.get_nowait())
        except Empty:
            return found

    def _begin(self, number: int, worker: str, function: Any, arguments: Any) -> None:
        self._calls[number] = self._loop.create_task(
            self._follow(number, worker, function, arguments)
        )

    def _cancel(self, number: int) -> None:
        if (task := self._calls.pop(number, None)) is not None:
            task.cancel()

    async def _follow(self, number: int, worker: str, function: Any, arguments: Any) -> None:
        """Run a call, and put its end to the replies. Its task ends with it."""
        future = self._client.submit(
            _caught,
            function,
            *arguments,
            workers=[worker],
            allow_other_workers=False,
            pure=False,
            retries=0,
        )
        try:
            value = await self._value(future)
            is_error = isinstance(value, _Caught)
            reply = Reply(number, error=value.error) if is_error else Reply(number, value)
        except asyncio.CancelledError as error:
            if self._calls.get(number) is not asyncio.current_task():
                return
            reply = Reply(number, error=error)
        except Exception as error:
            reply = Reply(number, error=error)
        finally:
            future.release()
        if reply.error is not None and self._client.status != "running":
            self._lost = CONNECTION_LOST
            return
        self._calls.pop(number, None)
        self._replies.put(reply)

    async def _value(self, future: Any) -> Any:
        """Return the value of a call. Raise what ended it.

        `await future` would fetch the values of all workers together, and wait for all of them.
        """
        while (error := await future.exception()) is None:
            found = await (await self._scheduler()).gather(keys=[future.key])
            if found["status"] == "OK":
                return found["data"][future.key]
            await asyncio.sleep(LOOK_EVERY_S)  # its worker has ended, or can't be reached
        raise error

    async def look(self) -> None:
        """Look at the workers once."""
        async with asyncio.timeout(CONNECT_S):
            found = await (await self._scheduler()).identity(n_workers=-1)
        self.signs = {
            name: (one["last_seen"], one["metrics"].get(SIGN))
            for name, one in found["workers"].items()
        }

    async def _scheduler(self) -> Any:
        """Return the connection to the scheduler."""
        while (scheduler := self._client.scheduler) is None:  # it is being connected, or again
            await asyncio.sleep(0.05)
        return scheduler

    async def keep_looking(self) -> None:
        """Look at the workers until cancelled, or until the scheduler is silent for too long."""
        silent = 0.0
        while silent < LOST_S:
            await asyncio.sleep(LOOK_EVERY_S)
            began = self._loop.time()
            try:
                await self.look()
                silent = 0.0
            except (OSError, TimeoutError):
                silent += LOOK_EVERY_S + min(self._loop.time() - began, CONNECT_S)
            except RuntimeError:  # the client has closed its connections
                self._lost = CONNECTION_LOST
                return
            if self._local and (why := self._keep()) is not None:
                self._lost = why
                return
        self._lost = f"the scheduler of the cluster has not answered for {LOST_S} s"

    def _keep(self) -> str | None:
        """Give local workers that have none a supervisor. Return why the workers are given up."""
        cluster = self._client.cluster
        supervisors = dict(cluster.workers)
        for name, one in supervisors.items():
            if one.status.name in ("failed", "closed"):
                del cluster.workers[name]
        if len(cluster.workers) < self._local:
            cluster.scale(self._local)
        processes = {one.pid for one in supervisors.values() if one.pid is not None}
        return self._keeper.look(processes, len(self.signs), LOOK_EVERY_S)

    def stop(self) -> None:
        """Expect no end of any call any more."""
        for number in list(self._calls):
            self._cancel(number)


@dataclass(frozen=True)
class _Caught:
    """The error that a call raised."""

    error: Exception


def _caught(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a call returns, or its error as a value.

    Dask's client waits for ever for a call that failed if it can't read the traceback.
    """
    try:
        return function(*arguments)
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return _Caught(RuntimeError(f"{type(error).__name__}: {error}"))
        return _Caught(error.with_traceback(None))


@contextmanager
def opened_dask(options: ClusterOptions) -> Iterator[DaskMachines]:
    """Start workers in processes of this machine, or connect to a cluster.

    Raise OptionError if Dask is not installed or no scheduler answers.
    """
    check_installed()
    opened: Waiting[tuple[DaskMachines, Callable[[], object]]] = Waiting()
    others = set(active_children())
    with _deaf_children():
        thread = threading.Thread(
            target=lambda: asyncio.run(_serve(options, opened)), name="mlxrunner-dask", daemon=True
        )
        thread.start()
    try:
        machines, close = opened.result()
    except BaseException:
        for one in set(active_children()) - others:  # they are deaf to what ends others at exit
            one.kill()
        raise
    try:
        yield machines
    finally:
        close()
        thread.join()


@contextmanager
def _deaf_children() -> Iterator[None]:
    """Let the threads that are started here, and their processes, hear neither Ctrl-C nor kill.

    A terminal and most schedulers send these to a whole group of processes. The driver hears them,
    lets its workers finish their lines, and ends them.
    """
    resource_tracker.ensure_running()  # the first process would start it, and hear both again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def _serve(
    options: ClusterOptions, opened: Waiting[tuple[DaskMachines, Callable[[], object]]]
) -> None:
    """Hold the connection until the function that `opened` gives is called."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    try:
        async with connected(options) as client:
            machines = DaskMachines(client, options.workers)
            await machines.look()
            looking = asyncio.create_task(machines.keep_looking())
            opened.set_result((machines, partial(loop.call_soon_threadsafe, ended.set)))
            await ended.wait()
            looking.cancel()
            machines.stop()
    except BaseException as error:
        if not opened.done():
            opened.set_exception(error)
