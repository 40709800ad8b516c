"""Reach workers over Dask's `distributed`. No other module knows Dask.

A thread of its own runs Dask's event loop. Each call is a task that is bound to its worker.
"""

from __future__ import annotations

import asyncio
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future as Waiting
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from multiprocessing import active_children, resource_tracker
from queue import Empty, SimpleQueue
from typing import Any

from mlxrunner.cluster import dask_cluster
from mlxrunner.cluster.dask_cluster import SIGN, check_installed, connected
from mlxrunner.cluster.keeping import Keeper
from mlxrunner.cluster.machines import Reply
from mlxrunner.cluster.options import ClusterOptions
from mlxrunner.errors import CutOffError

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
        async with asyncio.timeout(dask_cluster.CONNECT_S):
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
                silent += LOOK_EVERY_S + min(self._loop.time() - began, dask_cluster.CONNECT_S)
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
