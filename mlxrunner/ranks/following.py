"""Another rank than the first: it runs the passes that it is told of, on caches of its own."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import mlx.core as mx

from mlxrunner.cache.layers.factory import CacheOptions, make_layer_caches
from mlxrunner.cache.layers.protocol import LayerCache
from mlxrunner.engine.answer import CLEAR_EVERY
from mlxrunner.engine.sampling import dispatch
from mlxrunner.errors import LaunchError, MlxrunnerError
from mlxrunner.models.files import ModelShard
from mlxrunner.ranks.group import checked_folder, join, load_share, share_of
from mlxrunner.ranks.hosts import Hosts, versions
from mlxrunner.ranks.leading import BARE, COPY, DROP, FREE, LOAD, WITH_LOGITS, BareLoop, receive
from mlxrunner.ranks.processes import inherited
from mlxrunner.ranks.wire import JOINED, JOINS, Wire
from mlxrunner.runner import Runner

WAIT_S = 120
"""Seconds that a rank waits for the first one to start."""
LEAVE_S = 3
"""Seconds within which a pass ends after the first rank has gone."""


def follow(hosts: Hosts, rank: int) -> None:
    """Follow the first rank until it ends. Raise LaunchError if it can't be reached."""
    wire, told = Wire(inherited() or _connected(hosts, rank)), queue.SimpleQueue[Any]()
    threading.Thread(target=wire.beat, daemon=True).start()
    threading.Thread(target=_listen, args=(wire, told), daemon=True).start()
    wire.send({"rank": rank, "versions": versions()})
    try:
        _follow(hosts, rank, wire, told)
    except MlxrunnerError as error:
        wire.send({"error": str(error)})
        told.get()  # the guard says it, and ends
    except RuntimeError as error:
        if "[ring]" not in str(error):
            raise


def _connected(hosts: Hosts, rank: int) -> socket.socket:
    place, end = f"{hosts.addresses[0]}:{hosts.port}", time.monotonic() + WAIT_S
    with suppress(OSError):
        os.write(2, f"mlxrunner: rank {rank}: waiting for rank 0 at {place}\n".encode())
    while True:
        try:
            return socket.create_connection((hosts.addresses[0], hosts.port), timeout=5)
        except OSError as error:
            if time.monotonic() > end:
                raise LaunchError(f"rank 0 at {place} can't be reached: {error}") from error
            time.sleep(0.1)


def _listen(wire: Wire, told: queue.SimpleQueue[Any]) -> None:
    """Pass on what the first rank says. End this process when the guard has gone."""
    for message in wire.received():
        told.put(message)
    told.put(None)
    time.sleep(LEAVE_S)
    os._exit(0)  # a pass waits for a rank that will never come


def _follow(hosts: Hosts, rank: int, wire: Wire, told: queue.SimpleQueue[Any]) -> None:
    """Do what the first rank says: compare a model, load it, run a pass."""
    order, group = told.get(), None
    while order is not None:
        if order == DROP:
            order = told.get()
            continue
        part = ModelShard(rank, len(hosts.addresses), order["way"])
        checked_folder(order["model"], part, order["fingerprint"])
        wire.send({"number": order["number"]})
        if (message := told.get()) != LOAD:
            order = message  # None at the end, or another model
            continue
        if group is None:
            wire.send(JOINS)
            group = join(hosts, rank)
            wire.send(JOINED)
        order = _run_model(order, group, wire, told)


def _run_model(
    order: Any, group: mx.distributed.Group, wire: Wire, told: queue.SimpleQueue[Any]
) -> Any:
    """Load a model and run its passes. Return the message that is not one."""
    runner = load_share(Runner, order["model"], order["settings"], group)
    wire.send({"number": order["number"], **share_of(runner)})
    sequences, bare = Sequences(runner), BareLoop(runner.model)
    does: dict[Any, Callable[..., None]] = {
        BARE: bare.run,
        COPY: sequences.copy,
        FREE: sequences.free,
    }
    while isinstance(message := told.get(), list):
        first, *rest = message
        if first in does:
            does[first](*rest)
        else:
            count, *sequence = rest
            run_pass(runner.model, sequences.caches(*sequence), group, first, count)
    return message


class Sequences:
    """The layer caches of each sequence of the first rank."""

    def __init__(self, runner: Runner) -> None:
        self._model, self._options = runner.model, CacheOptions(runner.context)
        self._caches: dict[int, list[LayerCache]] = {}

    def caches(self, sequence: int = 0) -> list[LayerCache]:
        """Return the layer caches of `sequence`, always the same ones."""
        if sequence not in self._caches:
            self._caches[sequence] = make_layer_caches(self._model, self._options)
        return self._caches[sequence]

    def copy(self, source: int, target: int, count: int) -> None:
        """Give `target` the first `count` tokens of `source`, and nothing else."""
        for cache, other in zip(self.caches(target), self.caches(source), strict=True):
            cache.free()
            if count:
                cache.copy(other, count)

    def free(self, sequence: int) -> None:
        """Free the caches of `sequence`."""
        for cache in self.caches(sequence):
            cache.free()


def run_pass(
    model: Any,
    caches: Sequence[LayerCache],
    group: mx.distributed.Group,
    offset: int,
    count: int,
) -> None:
    """Go back to `offset`, and run `count` tokens that the first rank gives.

    A short pass is not waited for: the next one is prepared while it runs, as on the first rank.
    """
    for cache in caches:
        if cache.offset != offset:
            cache.rewind(offset)
        cache.begin_forward()
    logits = model(receive(count, group), cache=[cache.model_cache for cache in caches])
    for cache in caches:
        cache.end_forward(count)
    if count <= WITH_LOGITS:
        dispatch([logits])
    else:
        mx.eval([cache.state for cache in caches])
    if count > WITH_LOGITS or offset % CLEAR_EVERY == 0:
        mx.clear_cache()
