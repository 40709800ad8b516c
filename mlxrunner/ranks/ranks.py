"""The other ranks as the first one sees them, through the guard that has started it."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from socket import socket
from typing import Any

import mlx.core as mx

from mlxrunner.cache.layers.factory import CacheOptions
from mlxrunner.cache.protocol import LayerCache, SavedEntry
from mlxrunner.engine.backends.backend import SequentialModel
from mlxrunner.errors import ModelError
from mlxrunner.models.files import ModelShard, ShardingWay, be_rank, read_config
from mlxrunner.models.fingerprint import by_files
from mlxrunner.models.load import LoadedModel
from mlxrunner.models.resolve import resolve
from mlxrunner.ranks.links import END, GUARD_PATIENCE_S, Hosts, Wire
from mlxrunner.ranks.passes import (
    COPY,
    DROP,
    LOAD,
    LeadingModel,
    RankTokens,
    checked_folder,
    join,
    load_share,
    share_of,
    undisturbed,
)
from mlxrunner.results import logger
from mlxrunner.runner import EntryControl, Runner
from mlxrunner.terminal.output import size

WAITING_S: float | None = 10.0
"""Seconds after which the user is told of a rank that is slow to get or read its part."""


class Ranks:
    """All ranks but the first. Use it as a context manager: it lets the others end."""

    def __init__(
        self, hosts: Hosts, connection: socket, way: ShardingWay = "tensor-parallel"
    ) -> None:
        """Lead over `connection`, the one to the guard. `way`: how the ranks share each model."""
        self.hosts, self.wire, self.way = hosts, Wire(connection), way
        self._replies: dict[int, queue.SimpleQueue[Any]] = {
            rank: queue.SimpleQueue() for rank in range(1, len(hosts.addresses))
        }
        self._all_here, self._number = threading.Event(), 0
        self.group: mx.distributed.Group | None = None
        """The ring, once a model is loaded."""
        self.shares: dict[int, dict[str, int]] = {}
        """The part of the last model that each rank has: `group.share_of`."""
        self._part = ModelShard(0, len(hosts.addresses), way)
        be_rank(self._part)
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.tell(END)
        be_rank(None)

    def wait_for_all(self) -> None:
        """Wait until all ranks are there. The guard ends this process if one does not come."""
        self._all_here.wait()

    def load(self, model: str, settings: dict[str, Any]) -> Runner:
        """Load `model` on all ranks, and return the runner of the first one.

        A model that was loaded before is dropped by the other ranks.
        """
        runner = self._load(model, settings)
        return self._lead(runner, partial(self._tell_of, self._number), RankTokens())

    def load_served(self, model: str, settings: dict[str, Any]) -> LoadedModel:
        """Load `model` on all ranks for an engine of several conversations.

        The first rank's part brings that engine. `room` says how many tokens they may have.
        """
        runner, tell = self._load(model, settings), partial(self._tell_of, self._number)
        folder = resolve(model)
        assert self.group is not None
        return LoadedModel(
            model,
            folder,
            SharedModel(runner.model, dict, self.group, tell, RankTokens()),
            runner.tokenizer,
            replace(runner.facts, context=runner.context),
            read_config(folder),
            runner.suggested_options,
        )

    @property
    def room(self) -> int:
        """The tokens of all conversations that find room on every rank."""
        return min(share["room"] for share in self.shares.values())

    def _load(self, model: str, settings: dict[str, Any]) -> Runner:
        """Load the parts of `model`; see `load`. The runner has this rank's part alone."""
        folder = checked_folder(model, self._part)
        self.wait_for_all()
        self._number += 1
        order = {"model": model, "settings": settings, "fingerprint": by_files(folder)}
        self.tell({"number": self._number, "way": self.way, **order})
        self._answers()
        with undisturbed():
            self.tell(LOAD)
            self.group = self.group or join(self.hosts, 0)
        runner = load_share(FirstRunner, model, settings, self.group)
        self.shares = {0: share_of(runner), **self._answers()}
        for rank, share in self.shares.items():
            logger.info(
                "rank %d: weights of %s, caches of %s for each token, room for %d tokens",
                *(rank, size(share["weights"]), size(share["token"]), share["context"]),
            )
        runner.context = min(share["context"] for share in self.shares.values())
        return runner

    def beside(self, first: Runner, *, context: int | None = None, **settings: Any) -> Runner:
        """Return another runner on the parts that `first` has loaded, with an entry of its own.

        The other ranks hold one entry: the first pass after one of another runner begins at the
        first token. Raise NotSupportedError in a pass that does not.
        """
        led: LeadingModel = first.model
        runner = FirstRunner(
            led.own_part,
            first.tokenizer,
            first.facts,
            name=first.name,
            context=min(context or first.context, first.context),
            **settings,
        )
        return self._lead(runner, led.tell, led.held)

    def _lead(self, runner: Runner, tell: Callable[[Any], None], held: RankTokens) -> Runner:
        """Let the other ranks run the passes of `runner`, too."""
        assert self.group is not None
        part, caches = runner.model, lambda: {0: runner.entry.caches}
        runner.model = LeadingModel(part, caches, self.group, tell, held)
        return runner

    def tell(self, message: Any) -> None:
        """Send `message` to all other ranks."""
        with suppress(OSError):
            self.wire.send(message)

    def _tell_of(self, number: int, message: Any) -> None:
        """Send a message about the model of order `number`. Raise ModelError if it is dropped."""
        if number != self._number:
            raise ModelError("another model has been loaded on the ranks since")
        self.tell(message)

    def wait_for_the_guard(self) -> None:
        """Give the guard time to end this process, after an error that a lost rank causes."""
        time.sleep(GUARD_PATIENCE_S)

    def _listen(self) -> None:
        """Take the replies of the other ranks. End this process when the guard has gone."""
        for message in self.wire.received():
            if isinstance(message, list):
                rank, reply = message
                self._replies[rank].put(reply)
            else:
                self._all_here.set()
        os._exit(1)

    def _answers(self) -> dict[int, Any]:
        """Wait for a reply of each rank to the last order. The guard ends this if one is lost."""
        return {rank: self._answer(rank) for rank in self._replies}

    def _answer(self, rank: int) -> Any:
        replies, timeout = self._replies[rank], WAITING_S
        while True:
            try:
                reply = replies.get(timeout=timeout)
            except queue.Empty:
                timeout = None
                with suppress(OSError):
                    os.write(2, f"mlxrunner: waiting for rank {rank} to get the model\n".encode())
            else:
                if reply["number"] == self._number:  # not of an order that was interrupted
                    return reply


class FirstRunner(Runner):
    """A runner whose passes other ranks run, too. They have no saved entries."""

    @property
    def cache(self) -> EntryControl:
        """Operations on the entry; a saved one is not adopted."""
        return _Control(**vars(super().cache))


class _Control(EntryControl):
    def adopt(self, saved: SavedEntry, source: str = "a file") -> None:
        self.enter()
        self.entries.reset()
        self.explain_loss("entry_freed", f"{source} has the part of one rank", saved.tokens)


WHY = "ranks that share a model run one request in a step"


class SharedModel(LeadingModel):
    """A model that brings the engine of its conversations."""

    def own_engine(self, options: CacheOptions) -> LeadingEngine:
        """Return the engine, with layer caches of `options`."""
        engine = LeadingEngine(self, options, WHY)
        self.caches = lambda: engine.sequences
        return engine


class LeadingEngine(SequentialModel):
    """The first rank's engine. The other ranks run its steps, and copy and drop what it does."""

    model: SharedModel

    def copied(self, source: int, target: int, count: int) -> None:
        self.model.tell([COPY, source, target, count])
        self.model.held.of(self.model)[target] = count

    def rotate(
        self, caches: Sequence[LayerCache], by: int
    ) -> Sequence[Callable[[Any, int], Any]] | None:
        """Return None: no keys are moved."""
        return None

    def close(self) -> None:
        """Forget all sequences, and let the other ranks drop their parts of the model.

        The last pass ends first: the others are in it, too.
        """
        if self.sequences:
            with suppress(RuntimeError):  # a rank is lost: the guard says so
                mx.synchronize()
            with suppress(ModelError):  # another model has taken its place
                self.model.tell(DROP)
        super().close()
