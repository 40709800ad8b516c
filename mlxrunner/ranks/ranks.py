"""A model over several ranks: the first one decides, and tells the others, which follow.

Every rank compares its model, joins the ring and loads its part. The first one tells the others of
each forward pass, through the guard that has started it, and ends when one of them is lost.
"""

from __future__ import annotations

import faulthandler
import os
import queue
import signal
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

from mlxrunner.cache.layers.factory import CacheOptions, make_layer_caches
from mlxrunner.cache.protocol import LayerCache
from mlxrunner.cache.saved import SavedEntry
from mlxrunner.engine.backends.backend import SequentialModel
from mlxrunner.engine.request import CLEAR_EVERY
from mlxrunner.engine.sampling import dispatch
from mlxrunner.errors import LaunchError, MlxrunnerError, ModelError, NotSupportedError
from mlxrunner.memory.reserve import weights_of
from mlxrunner.models.files import ModelShard, ShardingWay, be_rank, check_shard, read_config
from mlxrunner.models.fingerprint import by_files, different_files
from mlxrunner.models.load import LoadedModel
from mlxrunner.models.resolve import resolve
from mlxrunner.models.sharding import share_among
from mlxrunner.options import MOST_TOKENS
from mlxrunner.ranks.guard import (
    END,
    GUARD_PATIENCE_S,
    JOIN_S,
    JOINED,
    JOINS,
    Hosts,
    Wire,
    inherited,
    versions,
)
from mlxrunner.results import logger
from mlxrunner.runner import EntryControl, Runner
from mlxrunner.system import device
from mlxrunner.system.writing import open_temporary
from mlxrunner.terminal.output import size


def checked_folder(model: str, part: ModelShard, expected: dict[str, str] | None = None) -> Path:
    """Return the folder of `model`, of which this process has `part` from now on.

    What is missing of it is downloaded. Raise ModelError if it can't be, or can't be shared, and
    LaunchError if its fingerprint is not the `expected` one.
    """
    if model.startswith("random:"):
        raise ModelError(f"{model}: ranks share no random weights: name a folder or a hub id")
    be_rank(part)
    folder = resolve(model)
    check_shard(folder, read_config(folder))
    other = [] if expected is None else different_files(expected, by_files(folder))
    if other:
        raise LaunchError(f"{model}: not the model of rank 0: {', '.join(other)}")
    return folder


def join(hosts: Hosts, rank: int) -> mx.distributed.Group:
    """Join the ring as `rank`. Raise LaunchError if its port is in use."""
    with open_temporary() as file:
        file.write(hosts.ring.encode())
        file.seek(0)
        of_mlx = {"MLX_RANK": str(rank), "MLX_HOSTFILE": f"/dev/fd/{file.fileno()}"}
        environ = os.environ
        environ |= of_mlx
        try:
            with _bounded():
                return mx.distributed.init(strict=True, backend="ring")
        except RuntimeError as error:
            if "bind" not in str(error):
                raise  # a rank was lost: the guard says which
            raise LaunchError(
                f"can't join the ring ({error}): {_bind_advice(hosts, rank)}"
            ) from error
        finally:
            for name in of_mlx:
                environ.pop(name, None)


def _bind_advice(hosts: Hosts, rank: int) -> str:
    """Return what to do about a rank that can't listen: its address or its port is to blame."""
    own = ip_address(hosts.addresses[rank])
    with socket.socket(socket.AF_INET if own.version == 4 else socket.AF_INET6) as free:
        try:
            free.bind((str(own), 0))
        except OSError:
            return (
                f"{own} is not an address of this machine, and rank {rank} is here: correct --hosts"
            )
    first, last = hosts.port + 1, hosts.port + len(hosts.addresses)
    return f"the ranks need the ports {first} to {last}, one each: choose another --rank-port"


def load_share(
    kind: type[Runner], model: str, settings: dict[str, Any], group: mx.distributed.Group
) -> Runner:
    """Load this rank's part of `model` into a runner of class `kind`."""
    share_among(group)
    try:
        return kind.load(model, reserve=False, **settings)
    finally:
        share_among(None)


def share_of(runner: Runner) -> dict[str, int]:
    """Describe this rank's part of a model to the other ranks.

    Return the bytes of its weights, the bytes that a token takes, the tokens of the context, and
    the tokens of all conversations for which there is room.
    """
    demand = runner.growing
    assert demand is not None
    return {
        "weights": weights_of(runner.model),
        "token": demand.caches(1),
        "context": runner.context,
        "room": demand.largest_context(device.offered_bytes(), MOST_TOKENS),
    }


@contextmanager
def _bounded() -> Iterator[None]:
    """End this process if the block lasts too long: MLX joins a ring with Python's lock held."""
    with open_temporary() as nowhere:
        faulthandler.dump_traceback_later(JOIN_S, exit=True, file=nowhere)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


LOAD = "load"
"""The message that lets all ranks load the model that they have compared."""
WITH_LOGITS = 64
"""Most tokens of a forward pass whose logits are computed. A longer one only fills the caches."""


COPY, FREE, DROP = "copy", "free", "drop"
"""Messages: give a sequence the first tokens of another one, free its caches, drop the model."""


class RankTokens:
    """The tokens in the caches of the other ranks."""

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}
        """The number of tokens of each sequence."""
        self.model: LeadingModel | None = None
        """The model whose sequences they are."""

    def of(self, model: LeadingModel) -> dict[int, int]:
        """Return the tokens of each sequence of `model`. Forget those of any other model."""
        if self.model is not model:
            self.model, self.tokens = model, {}
        return self.tokens


class LeadingModel:
    """A model on the first rank, which runs every pass together with the other ranks.

    Each pass names the offset where it begins. The others go back to it first, so that their caches
    hold what the entry holds, however the request before has ended.
    """

    def __init__(
        self,
        model: Any,
        caches: Callable[[], Mapping[int, Sequence[LayerCache]]],
        group: mx.distributed.Group,
        tell: Callable[[Any], None],
        held: RankTokens,
    ) -> None:
        """Wrap this rank's part of a model.

        `caches` returns the layers of each sequence: of an entry alone, those of sequence 0. `tell`
        sends a message to all other ranks. `held` is common to all models whose passes the other
        ranks run.
        """
        self.own_part = model
        """The part of this rank, for passes of which only shapes are asked."""
        self.caches, self.group, self.tell = caches, group, tell
        self.held = held

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own_part, name)

    def __call__(self, tokens: mx.array, cache: Sequence[Any]) -> mx.array:
        """Return the logits of `tokens [1, n]`; of more than WITH_LOGITS tokens, only zeros.

        Raise NotSupportedError if `cache` is not the entry's, which the other ranks lack.
        """
        sequence, count = self._sequence(cache), tokens.shape[1]
        layers, held = self.caches()[sequence], self.held.of(self)
        offset = layers[0].offset
        if offset > (known := held.get(sequence, 0)):
            raise NotSupportedError(
                f"the other ranks hold {known} tokens of the cache, which has {offset}"
            )
        self._free_as_here()
        with undisturbed():
            self.tell([offset, count, sequence] if sequence else [offset, count])
            held[sequence] = offset + count
            passed = hand_on(tokens.astype(mx.int32), self.group)
            logits: mx.array = self.own_part(passed, cache=cache)
            if count <= WITH_LOGITS:
                dispatch([logits])
                return logits
            dispatch([layer.state for layer in layers])
            return mx.zeros(logits.shape, logits.dtype)

    def _sequence(self, cache: Sequence[Any]) -> int:
        asked = list(map(id, cache))
        for sequence, layers in self.caches().items():
            if [id(layer.model_cache) for layer in layers] == asked:
                return sequence
        raise NotSupportedError("a model on several ranks runs only the passes of its own cache")

    def _free_as_here(self) -> None:
        """Let the other ranks free the caches of sequences that have none here any more."""
        held, here = self.held.of(self), self.caches()
        if len(held) > 1:
            for sequence in [one for one in held if not here[one][0].nbytes]:
                self.tell([FREE, sequence])
                del held[sequence]


def hand_on(tokens: mx.array, group: mx.distributed.Group) -> mx.array:
    """Return `tokens`, and give them to the rank after this one in the ring, if there is one.

    A sum over all ranks would do the same, but every rank waits for the others in it.
    """
    behind = group.rank() + 1
    if behind == group.size():
        return tokens
    given = mx.distributed.send(tokens, behind, group=group)
    dispatch([given])  # a rank that has the last layers computes nothing from tokens
    return given


def receive(count: int, group: mx.distributed.Group) -> mx.array:
    """Return the `count` tokens that come from the first rank, `[1, count]`."""
    tokens = mx.distributed.recv((1, count), mx.int32, group.rank() - 1, group=group)
    return hand_on(tokens, group)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Delay Ctrl-C and `kill` until the block ends, so that all ranks begin a pass or none does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    numbers: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)
    before = {one: signal.signal(one, lambda number, _: came.append(number)) for one in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in came[:1]:
            signal.raise_signal(number)


BARE = "bare"
"""Begins the message that lets the other ranks run the loop, too."""


class BareLoop:
    """One rank's part of a model, with a prompt cache of mlx-lm. Every rank samples by itself."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache: list[Any] = []

    def steps(self, kept: int, rest: list[int], count: int) -> Generator[int, None, None]:
        """Yield `count` tokens that answer a prompt.

        The prompt is the first `kept` tokens of the last call, whose caches are kept, and then
        `rest`. The loop runs to its end even if its reader leaves, because the other ranks do.
        """
        mx.synchronize()  # the loop has a stream of its own: sums of two streams must not mix
        if not kept:
            self._cache = make_prompt_cache(self._model)
        trim_prompt_cache(self._cache, (self._cache[0].offset if kept else 0) - kept)
        loop = generate_step(
            mx.array(rest), self._model, max_tokens=count, prompt_cache=self._cache
        )
        try:
            for token, _ in loop:
                yield token
        finally:
            for _ in loop:
                pass
            mx.synchronize(generation_stream)  # a pass whose token nobody reads is still under way


def lead(
    model: Any, tell: Callable[[Any], None]
) -> Callable[[int, list[int], int], Generator[int, None, None]]:
    """Return `steps` of a loop on the first rank, which tells the others to run it."""
    bare = BareLoop(model)

    def steps(kept: int, rest: list[int], count: int) -> Generator[int, None, None]:
        tell([BARE, kept, rest, count])
        yield from bare.steps(kept, rest, count)

    return steps


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
    bare, options = BareLoop(runner.model), CacheOptions(runner.context)
    caches = defaultdict[int, list[LayerCache]](lambda: make_layer_caches(runner.model, options))
    while isinstance(message := told.get(), list):
        first, *rest = message
        if first == BARE:
            for _ in bare.steps(*rest):
                pass
        elif first == COPY:
            source, target, count = rest
            for cache, other in zip(caches[target], caches[source], strict=True):
                cache.free()
                if count:
                    cache.copy(other, count)
        elif first == FREE:
            for cache in caches[rest[0]]:
                cache.free()
        else:
            count, sequence = (*rest, 0)[:2]
            run_pass(runner.model, caches[sequence], group, first, count)
    return message


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


WAITING_S: float | None = 10.0
"""Seconds after which the user is told of a rank that is slow to get or read its part."""


class Ranks:
    """All ranks but the first. Use it as a context manager: it lets the others end."""

    def __init__(
        self, hosts: Hosts, connection: socket.socket, way: ShardingWay = "tensor-parallel"
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
        found: dict[int, Any] = {}
        for rank, replies in self._replies.items():
            timeout = WAITING_S
            while found.get(rank, {}).get("number") != self._number:  # of an interrupted order
                try:
                    found[rank] = replies.get(timeout=timeout)
                except queue.Empty:
                    timeout = None
                    with suppress(OSError):
                        line = f"mlxrunner: waiting for rank {rank} to get the model\n"
                        os.write(2, line.encode())
        return found


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


class SharedModel(LeadingModel):
    """A model that brings the engine of its conversations."""

    def own_engine(self, options: CacheOptions) -> LeadingEngine:
        """Return the engine, with layer caches of `options`."""
        why = "ranks that share a model run one request in a step"
        engine = LeadingEngine(self, options, why)
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
