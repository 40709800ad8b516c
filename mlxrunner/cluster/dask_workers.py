"""Reach workers over Dask's `distributed`. No other module knows Dask.

A thread of its own runs Dask's event loop. Dask supervises the processes of workers (`Nanny`,
`LocalCluster`), connects to them, with TLS where that is asked for, and tells who is there.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import signal
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import active_children, resource_tracker
from multiprocessing.process import BaseProcess
from queue import Empty, SimpleQueue
from typing import Any

import dask
from distributed import Client, LocalCluster, Nanny
from distributed.comm import connect as opened_connection
from distributed.security import Security
from distributed.utils import get_ip

from mlxrunner.cluster.options import ClusterOptions, Connection
from mlxrunner.cluster.worker import sign
from mlxrunner.errors import CutOffError, OptionError
from mlxrunner.system import openblas
from mlxrunner.terminal.output import one_line

MOST_STARTS = 4
"""The processes for each worker that may end in turn while no worker takes part."""
GONE_S = 300.0
"""Seconds without any worker after which they are given up, whatever keeps them."""
SIGN = "mlxrunner"
"""The name of a worker's sign of life among Dask's metrics."""
CONNECT_S = 10
"""Seconds in which a scheduler has to answer."""
LOOK_EVERY_S = 0.5
"""Seconds between two looks at the workers."""
ENDING_LOOKS = 50
"""Looks, 0.1 s apart, at workers that are killed."""
LOST_S = 30
"""Seconds without an answer of the scheduler after which the cluster is given up."""
CONNECTION_LOST = "the connection to the scheduler of the cluster is lost"


class LostCallError(Exception):
    """The connection to a worker broke during a call."""


class DaskWorkers:
    """The workers of a Dask cluster, which come and go. Make it with `opened_dask`.

    A line is a call of a function on a worker, not a task: Dask's scheduler does not know prefixes,
    and its client fetches the results of all workers together, so that a worker that is stopped
    would hold back those of the others.
    """

    def __init__(self, client: Any, local: int | None) -> None:
        """Use the workers of a client's cluster, of which `local` are kept on this machine."""
        self._client, self._local = client, local or 0
        self._limit = RestartLimit(self._local)
        self._ended: SimpleQueue[Future[Any]] = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._lost: str | None = None
        self.signs: Mapping[str, Any] = {}
        """The last sign of life of each worker, by name: a value that changes while it lives."""

    def call(self, worker: str, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call a module's function on a worker, and return its future value.

        The future raises what the function raises, and LostCallError if the worker can't be
        reached any more. The call continues on the worker if it is cancelled.
        """
        call = self._call(worker, function, arguments)
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        future.add_done_callback(self._ended.put)
        return future

    async def _call(self, worker: str, function: Any, arguments: tuple[Any, ...]) -> Any:
        try:
            await self._scheduler()
            found = await self._client.run(
                _caught, function, arguments, workers=[worker], on_error="return"
            )
        except (OSError, RuntimeError):  # the scheduler is away
            self._lost = CONNECTION_LOST
            raise
        match found[worker]:
            case OSError() as error:
                raise LostCallError(worker) from error
            case _RemoteError(error) | (BaseException() as error):
                raise error
            case value:
                return value

    def ended(self, timeout: float) -> list[Future[Any]]:
        """Return the calls that have ended; wait up to `timeout` seconds for the first.

        Raise CutOffError if the workers can't be reached any more.
        """
        found = list[Future[Any]]()
        with suppress(Empty):
            found.append(self._ended.get(timeout=timeout))
            while True:
                found.append(self._ended.get_nowait())
        if self._lost is not None:
            raise CutOffError(self._lost)
        return found

    async def look(self) -> None:
        """Look at the workers once."""
        async with asyncio.timeout(CONNECT_S):
            found = await (await self._scheduler()).identity(n_workers=-1)
        self.signs = {
            name: (one["last_seen"], one["metrics"].get(SIGN))
            for name, one in found["workers"].items()
        }

    async def _scheduler(self) -> Any:
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
        return self._limit.look(processes, len(self.signs), LOOK_EVERY_S)


@dataclass(frozen=True)
class _RemoteError:
    error: Exception


async def _caught(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Return what a call returns, or its error as a value, which every process can read.

    A function that is not a coroutine may take long: it runs on a thread, and the worker's signs of
    life continue.
    """
    try:
        if asyncio.iscoroutinefunction(function):
            return await function(*arguments)
        return await asyncio.to_thread(function, *arguments)
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return _RemoteError(RuntimeError(f"{type(error).__name__}: {error}"))
        return _RemoteError(error.with_traceback(None))


class RestartLimit:
    """Counts the processes that were started since a worker last took part.

    Dask starts a process again without end.
    """

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


@contextmanager
def opened_dask(options: ClusterOptions) -> Iterator[DaskWorkers]:
    """Start workers in processes of this machine, or connect to a cluster.

    Raise OptionError if no scheduler answers.
    """
    opened: Future[tuple[DaskWorkers, Callable[[], object]]] = Future()
    others = set(active_children())
    with _deaf_children():
        thread = threading.Thread(
            target=lambda: asyncio.run(_serve(options, opened)), name="mlxrunner-dask", daemon=True
        )
        thread.start()
    try:
        workers, close = opened.result()
    except BaseException:
        opened.cancel()
        _kill_children(others, thread)
        raise
    try:
        yield workers
    finally:
        close()
        try:
            thread.join()
        except BaseException:
            _kill_children(others, thread)
            raise


def _kill_children(others: Set[BaseProcess], thread: threading.Thread) -> None:
    """Kill all children but `others` until the `thread` that starts them has ended, or too long.

    They are deaf to what ends them at exit. One that is still starting then prints a traceback.
    """
    for _ in range(ENDING_LOOKS):
        for one in set(active_children()) - others:
            one.kill()
        thread.join(0.1)
        if not thread.is_alive():
            return


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
    options: ClusterOptions, opened: Future[tuple[DaskWorkers, Callable[[], object]]]
) -> None:
    """Hold the connection until the function that `opened` gives is called."""
    be_quiet()
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    try:
        async with AsyncExitStack() as stack:
            where = options.check_address(options.dask) if options.dask is not None else None
            local = None
            if where is None:
                local = await _local_cluster(stack, options.workers or 1, opened.cancelled)
            try:
                client = Client(
                    where or local,
                    security=_security(options),
                    timeout=CONNECT_S,
                    asynchronous=True,
                    set_as_default=False,
                )
                workers = DaskWorkers(await stack.enter_async_context(client), options.workers)
                await workers.look()
            except (OSError, TimeoutError) as error:
                raise _nobody_at(options.dask, error) from error
            looking = asyncio.create_task(workers.keep_looking())
            opened.set_result((workers, partial(loop.call_soon_threadsafe, ended.set)))
            await ended.wait()
            looking.cancel()
    except BaseException as error:
        if not opened.done():
            opened.set_exception(error)


async def _local_cluster(
    stack: AsyncExitStack, workers: int, is_given_up: Callable[[], bool]
) -> Any:
    """Return a new cluster on this machine, which is started again if a worker ends meanwhile."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mlxrunner-"))
    for left in reversed(range(MOST_STARTS)):
        local = LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            host="127.0.0.1",
            protocol="tcp",
            dashboard_address="127.0.0.1:0",
            silence_logs=logging.CRITICAL,
            local_directory=folder,
            asynchronous=True,
            **worker_settings(),
        )
        # Dask's own hook at exit asks a loop that may have ended, and prints a traceback then.
        local.shutdown_on_close = False
        try:
            return await stack.enter_async_context(local)
        except Exception as error:
            with suppress(Exception):
                await local.close()
            if not left or is_given_up():
                raise CutOffError(f"the workers did not start: {one_line(str(error))}") from error
    raise AssertionError  # the last start raises


def worker_settings() -> dict[str, Any]:
    """Return the settings of a worker: no limits of memory, which the model's plan has."""
    return {"memory_limit": 0, "metrics": {SIGN: sign}}


def _security(options: Connection) -> Any:
    if not options.has_tls:
        return None
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
    Workers get OpenBLAS if this process has it.
    """
    before = "distributed.nanny.pre-spawn-environ"
    dask.config.set({before: {**dask.config.get(before, {}), **openblas.for_children()}})
    dask.config.set({"distributed.deploy.lost-worker-timeout": "1 day"})
    dask.config.set({f"distributed.{one}.http.routes": [] for one in ("scheduler", "worker")})
    for name in list(logging.root.manager.loggerDict):  # some of them have a level of their own
        if name.partition(".")[0] in ("distributed", "bokeh", "tornado"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _nobody_at(address: str | None, error: Exception) -> OptionError:
    why = one_line(str(error))
    return OptionError(
        f"{address}: no scheduler answers there: is `dask scheduler` running, and are its "
        f"certificates from the same authority? ({why})"
    )


async def work(address: str, options: Connection, say: Callable[[str], None]) -> None:
    """Be a worker of the cluster at `address` until it is cancelled, and again after a crash.

    Raise OptionError if no scheduler answers there.
    """
    be_quiet()
    await _check_scheduler(address, options)
    host = address.split("://")[1].rpartition(":")[0].strip("[]")
    with tempfile.TemporaryDirectory(prefix="mlxrunner-") as folder:
        nanny = Nanny(
            address,
            nthreads=1,
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
    security = _security(options)
    arguments = {} if security is None else security.get_connection_args("worker")
    try:
        found = await opened_connection(address, timeout=CONNECT_S, **arguments)
    except (OSError, TimeoutError) as error:
        raise _nobody_at(address, error) from error
    await found.close()
