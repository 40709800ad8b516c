"""Replay requests that ran side by side, with the real scheduler. Nothing is computed.

The scheduler itself decides who gets which slot, who waits for whom, what a window still has, who
lacks room and what goes to disk. It runs on an engine whose cells have no rows and whose layers
have no states; the requests repeat the answers of the log, in the order of its calls.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any, NotRequired, TypedDict

import mlx.core as mx
import msgspec
import numpy as np
from msgspec import Meta

from mlxrunner.batch.order import order_of, sort_key
from mlxrunner.cache.account import ConversationName, Earlier
from mlxrunner.cache.disk.index import DiskCacheIndex, EntryForm, OnEvicted, StoredConversation
from mlxrunner.cache.entry import CacheEntry, Shift, TokenArray, TokenBuffer, as_tokens
from mlxrunner.cache.layers.extents import Window, read_extent
from mlxrunner.cache.pool.causal import CausalCache, CellsLayer
from mlxrunner.cache.protocol import Batch, Extent, LayerCache, Snapshot
from mlxrunner.cache.saved import Exported, Saved, SavedCheckpoint
from mlxrunner.engine.backends.backend import WINDOWS_KEEP, Backend, PromptPasses
from mlxrunner.engine.request import ActiveRequest, AnswerStream, Clock, Ending, Request
from mlxrunner.engine.sampling import Decoded, NextToken, Sampled
from mlxrunner.engine.scheduling.scheduler import Scheduler
from mlxrunner.errors import CacheFullError, FormError, NoFreeSlotError, SessionError
from mlxrunner.options import EngineSettings, GenerateOptions
from mlxrunner.profiling.replay.simulate import ExtentLayer, ReplayedLayer, as_they_are
from mlxrunner.profiling.schema import Count, Ordinal
from mlxrunner.profiling.tokenlog import LoggedRequest
from mlxrunner.results import Chunk, FinishReason, Usage
from mlxrunner.tokenizer.prompt import Caller, TokenizedPrompt

Layers = Sequence[Mapping[str, Any]]
"""The `layers` of a process of a token log."""
TOKEN_BYTES = 4
"""Bytes of a token in the file of a conversation."""


class ReplayedDiskCache:
    """A disk cache without files, with the methods of the real one."""

    def __init__(self, limit: int) -> None:
        """Hold at most `limit` bytes."""
        self._index = DiskCacheIndex(lambda name: None, limit)
        self._entries: weakref.WeakKeyDictionary[StoredConversation, CacheEntry] = (
            weakref.WeakKeyDictionary()
        )

    def offload(self, entry: CacheEntry) -> StoredConversation | None:
        """Keep an entry, unless it does not fit or what it holds is not exact."""
        if not entry.tokens or entry.is_shifted:
            return None
        held = _copy_of(entry)
        index, stored = self._index, self._index.plan(b"", _form(held, entry))
        if (there := index.named(stored.name)) is not None:
            index.use(there)
            return there
        index.claim(stored)
        new = {
            name: nbytes
            for name, nbytes in _sizes(stored, entry).items()
            if name not in index.sizes
        }
        try:
            index.make_room(sum(new.values()), stored)
        except SessionError:
            index.remove(stored)
            return None
        for name, nbytes in new.items():
            index.wrote(name, nbytes)
        index.add(stored)
        self._entries[stored] = held
        index.drop_earlier(stored, None)
        return stored

    def find(self, prompt: TokenArray) -> tuple[StoredConversation, int] | None:
        """Return the conversation that has most of a prompt, and how many of its tokens."""
        return self._index.find(prompt)

    def restore(self, stored: StoredConversation, upto: int | None = None) -> Exported:
        """Return the first `upto` tokens of a conversation."""
        copy = _copy_of(self._entries[stored])
        if upto is not None and upto < len(copy.tokens):
            copy.tokens.truncate(upto)
            copy.rewind(upto)
        found = Exported(
            copy.tokens.array,
            [saved_extent(one.kind, one.extent.saved()) for one in copy.caches],
            [
                SavedCheckpoint(
                    item.offset,
                    item.role,
                    [
                        None if kept is None else saved_extent(cache.kind, kept.content)
                        for cache, kept in zip(copy.caches, item.snapshots, strict=True)
                    ],
                )
                for item in copy.checkpoints
            ],
        )
        if stored in self._index:
            self._index.use(stored, found)
        return found

    def tell(self, on_evicted: OnEvicted) -> None:
        """Call `on_evicted` with each conversation that is given up to make room, and by what."""
        self._index.on_evicted = on_evicted


def _copy_of(entry: CacheEntry) -> CacheEntry:
    """Return an entry with the same tokens, extents and checkpoints."""
    caches: list[LayerCache] = [ExtentLayer(one.kind, one.extent) for one in entry.caches]
    copy = CacheEntry(TokenBuffer(entry.tokens[:]), caches)
    copy.checkpoints.budget = entry.checkpoints.budget
    for item in entry.checkpoints:
        copy.checkpoints.add(item)
    return copy


def _form(held: CacheEntry, entry: CacheEntry) -> EntryForm:
    """Return the form in which the real place stores `entry`, which is held as `held`."""
    has_rows = [row_bytes_of(cache) is not None for cache in entry.caches]
    can_be_cut = all(
        rows or cache.needs_checkpoints for rows, cache in zip(has_rows, entry.caches, strict=True)
    )
    return EntryForm(
        held.tokens.array,
        [cache.extent for cache in held.caches],
        [(item.offset, item.role) for item in held.checkpoints] if can_be_cut else [],
        any(has_rows),
        all(has_rows),
        can_be_cut,
        is_exact=True,
        spelled=held.tokens.array,
    )


def _sizes(stored: StoredConversation, entry: CacheEntry) -> dict[str, int]:
    """Return the bytes of each file of a conversation."""
    rows = [row_bytes_of(cache) for cache in entry.caches]
    each = sum(nbytes or 0 for nbytes in rows)
    states = sum(
        cache.snapshot().nbytes
        for cache, nbytes in zip(entry.caches, rows, strict=True)
        if nbytes is None
    )
    kept = {item.offset: item.nbytes for item in entry.checkpoints}
    return {
        **{piece.name: (piece.end - piece.begin) * each for piece in stored.rows},
        **{state.name: kept[state.offset] for state in stored.states},
        stored.name: TOKEN_BYTES * len(stored.tokens) + states,
    }


class ReplayedEngine(Backend):
    """An engine whose forward pass finds places in cells without rows, and computes nothing."""

    def __init__(self, process: Mapping[str, Any], *, is_movable: bool) -> None:
        """Make the engine for the layers of `process`. `is_movable`: keys can be moved."""
        self._context, self._is_movable = process["context"], is_movable
        self._ways = process.get("ways", ["row"])
        self._splits = process.get("splits", False)
        in_cells, self._lines = _sorted(process["layers"], any("row" in way for way in self._ways))
        self._rows = Counter[int]()
        for line in in_cells:
            self._rows[line["window"] or 0] += line["row_bytes"] * line["count"]
        self._apart: dict[int, list[ReplayedLayer]] = {}
        slack = process["rewind_slack"] if "memory" in process else WINDOWS_KEEP
        super().__init__(self._rows, slack)
        self._logits, self._prompts = mx.zeros((1, 1)), PromptPasses()
        self.hook: Callable[[], None] = lambda: None
        """Called in each forward pass when its tokens have their cells. It may raise an error."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a token in the cells of all layers."""
        return sum(self._rows.values())

    @property
    def most_sequences(self) -> int | None:
        return 1 if self._ways == ["one at a time"] else None

    def forward(self, tokens: mx.array, batch: Batch, rows: Sequence[int]) -> mx.array:
        if self.groups:
            self.cache.start_forward(batch)
        self.hook()
        for sequence, count in Counter(batch.sequences).items():
            layers, parts = self._layers_apart(sequence), [count]
            if self.most_sequences == 1:
                parts = self._prompts.of(batch, rows, self.has_stops(layers))
            for part in parts:
                for layer in layers:
                    layer.end_forward(part)
        return self._logits

    def caches(self, sequence: int) -> list[LayerCache]:
        in_cells = [ReplayedCells(group, sequence) for group in self.groups]
        return [*in_cells, *self._layers_apart(sequence)]

    def rotate(
        self, caches: Sequence[LayerCache], by: int
    ) -> Sequence[Callable[[Any, int], Any]] | None:
        return as_they_are(caches, by) if self._is_movable else None

    def expect(
        self, sequence: int, count: int, *, may_copy: bool = False, beside: Sequence[int] = ()
    ) -> None:
        if self._splits:
            for group in self.groups:
                group.expect(sequence, count, may_copy=may_copy, beside=beside)

    def _make_group(self, window: int | None, memory: int | None) -> CausalCache:
        row_bytes = self._rows[window or 0]
        return ReplayedPool(_stay if self._is_movable else None, window, memory, row_bytes)

    def _layers_apart(self, sequence: int) -> list[ReplayedLayer]:
        if sequence not in self._apart:
            self._apart[sequence] = [
                SequenceLayer(line, read_extent(line, self._context, None)) for line in self._lines
            ]
        return self._apart[sequence]


def _sorted(lines: Layers, has_cells: bool) -> tuple[Layers, Layers]:
    """Return the lines of layers and parts in shared cells, and of those that are apart."""
    if not has_cells:
        return [], lines
    in_cells: list[Mapping[str, Any]] = []
    apart: list[Mapping[str, Any]] = []
    for line in lines:
        parts = [part | {"count": line["count"]} for part in line.get("parts", ())]
        plain = [part for part in parts if is_plain(part)]
        if is_plain(line):
            in_cells.append(line)
        elif plain and len(plain) < len(parts):
            in_cells += plain
            apart += [part for part in parts if not is_plain(part)]
        else:
            apart.append(line)
    return in_cells, apart


def is_plain(line: Mapping[str, Any]) -> bool:
    """Return True if the layers of a line of a token log store plain rows of keys and values."""
    return line["kind"] == "full" or (line["kind"] == "sliding" and bool(line["window"]))


class ReplayedPool(CausalCache):
    """Cells without rows and without a mask, which no layer needs here."""

    def __init__(self, shift: Any, window: int | None, memory: int | None, row_bytes: int) -> None:
        super().__init__(shift, window, memory)
        self._row_bytes = row_bytes

    @property
    def row_bytes(self) -> int:
        return self._row_bytes

    @property
    def nbytes(self) -> int:
        return self._row_bytes * self._rows.end

    def start_forward(self, batch: Batch, reserve: bool = False) -> None:
        placed = self._place(batch)
        self._undo = placed.before, None
        self._cells = placed.after

    def put_back(self, sequence: int, extent: Extent) -> None:
        """Give a sequence without tokens those of `extent`."""
        first = extent.first if isinstance(extent, Window) else 0
        positions = range(first, extent.offset)
        if positions:
            placed = self._cells.place(Batch(positions, [sequence] * len(positions)))
            self._become(placed.after)


class ReplayedCells(CellsLayer):
    """The tokens of one sequence in cells without rows."""

    group: ReplayedPool

    def export(self, snapshot: Snapshot | None = None) -> Saved:
        return saved_extent(self.kind, self.extent if snapshot is None else snapshot.content)

    def adopt(self, saved: Saved, offset: int) -> None:
        self.free()
        self.group.put_back(self.sequence, saved.numbers["extent"])

    def snapshot(self) -> Snapshot:
        return self.snapshot_of(saved_extent(self.kind, self.extent.checkpoint()), 0)

    def restore(self, snapshot: Snapshot, offset: int) -> None:
        self.adopt(saved_extent(self.kind, snapshot.content), offset)

    def snapshot_of(self, saved: Saved, offset: int) -> Snapshot:
        extent = saved.numbers["extent"]
        rows = extent.seen if isinstance(extent, Window) else 0
        return Snapshot(extent, rows * self.group.row_bytes)


class SequenceLayer(ReplayedLayer):
    """A layer of one sequence, which can be parked and copied."""

    counts_forwards = False  # the engine counts them, as for several sequences it does itself

    @property
    def row_bytes(self) -> int:
        """Bytes of a token in all layers that this one stands for."""
        nbytes: int = self._line["count"] * self._line["row_bytes"]
        return nbytes

    @property
    def nbytes(self) -> int:
        rows = min(self.offset, self._line["room"] or self.offset) * self._line["row_bytes"]
        nbytes: int = self._line["count"] * (rows + self._line["checkpoint_fixed"])
        return nbytes if self.offset else 0

    def export(self, snapshot: Snapshot | None = None) -> Saved:
        return saved_extent(self.kind, self.extent if snapshot is None else snapshot.content)

    def adopt(self, saved: Saved, offset: int) -> None:
        self._extent = saved.numbers["extent"]

    def snapshot_of(self, saved: Saved, offset: int) -> Snapshot:
        return Snapshot(saved.numbers["extent"], self.snapshot().nbytes)


def row_bytes_of(cache: LayerCache) -> int | None:
    """Return the bytes of a token where layers store a row for each; None for other layers."""
    if isinstance(cache, ReplayedCells):
        return cache.group.row_bytes if cache.group.window is None else None
    return None if cache.needs_checkpoints else getattr(cache, "row_bytes", None)


def saved_extent(kind: str, extent: Extent) -> Saved:
    return Saved(kind, numbers={"extent": extent})


def _stay(layer: int, keys: mx.array, offsets: mx.array) -> mx.array:
    """Return the keys unchanged."""
    return keys


ANY = 2**62
"""Bytes of parked conversations where a log does not say how many there may be."""


class Interrupt(BaseException):
    """The interrupt of a step that a log tells of."""


class ReplayedRunner:
    """A scheduler whose engine computes nothing, and its calls."""

    def __init__(
        self, process: Mapping[str, Any], slots: int, longest: int, *, is_movable: bool
    ) -> None:
        """Make the scheduler. `longest` is the most tokens of a prompt and its answer."""
        self._capacity = process["context"]
        most = max(most_of_step(process), slots)
        self._engine = engine = ReplayedEngine(process, is_movable=is_movable)
        cells = cells_of(process, slots, engine.row_bytes)
        is_ample = cells >= slots * self._capacity  # fewer do as well, and are faster
        share = min(self._capacity, longest) if is_ample else -(-cells // slots)
        engine.cache.init(mx.float32, slots, share, most)
        settings = EngineSettings(
            max_sequences=slots,
            context=self._capacity,
            kv_cache_tokens=cells,
            prefill_step=most,
            # Older logs have the budget of a runner of one request at a time.
            checkpoint_budget=process["checkpoint_budget"] if "memory" in process else 0,
            checkpoint_interval=process["checkpoint_interval"],
            cache_memory=process.get("memory"),
            max_step_ms=0,
        )
        self.scheduler = Scheduler(
            engine,
            settings,
            ended=_usage,
            message_ends=as_tokens(process["message_ends"]),
            parking=ReplayedDiskCache(process.get("park_bytes", ANY))
            if process.get("parks")
            else None,
            is_reusable=not process.get("never_reused"),
        )
        self.failing: set[int] = set()
        """The steps, by number, that fail."""
        engine.hook = self._fail_if_logged
        self._call = 0

    def request(self, logged: LoggedRequest, *, ends_itself: bool = False) -> ActiveRequest:
        """Return a request that repeats `logged`. `ends_itself`: nothing ends it from outside."""
        scheduling, prompt = logged.facts["scheduling"], logged.prompt
        said, sampled = scheduling["said"], scheduling["sampled"]
        ending = "own" if ends_itself else scheduling["ending"]
        if ending == "failed" and scheduling["ended"][0] in scheduling.get("failures", ()):
            ending = "failed step"
        shift = None if scheduling["keep"] is None else Shift(self._capacity, scheduling["keep"])
        request = Request(
            prompt=_named(TokenizedPrompt(prompt), logged.conversation),
            tokens=prompt,
            options=GenerateOptions(),
            next_token=_LoggedTokens(logged.answer, sampled, ending),
            clock=Clock(0.0, 0.0),
            context=self._capacity,
            limit=scheduling["limit"],
            shift=shift,
        )
        return ActiveRequest.of(request, _LoggedAnswer(said, ending))

    def advance(self, tick: int, call: int) -> None:
        """Advance to the call before this one.

        Calls that are not in the log were refused submissions: waiting requests look again.
        """
        scheduler = self.scheduler
        while scheduler.ticks < tick and self._step():
            self._call = 0
        if scheduler.ticks < tick:
            scheduler.ticks, self._call = tick, 0
        if call > self._call + 1:
            scheduler.place_waiting()
        self._call = call

    def interrupt(self, tick: int, made: Sequence[tuple[ActiveRequest, LoggedRequest]]) -> None:
        """Run step number `tick` until its interrupt, which ends all running requests.

        If these are where the log says before the forward pass, that is where it came. Otherwise it
        came before a token was delivered that the log does not have, or at the end.
        """

        def end() -> None:
            running = [pair for pair in made if pair[0] in self.scheduler.requests]
            if not any(_is_behind(*pair) for pair in running):
                raise Interrupt

        self.advance(tick - 1, self._call if self.scheduler.ticks == tick - 1 else 0)
        self._engine.hook = end
        self._step()
        self._engine.hook = self._fail_if_logged
        self.scheduler.forget_everything(Interrupt())
        self.advance(tick, 0)

    def _fail_if_logged(self) -> None:
        """Raise an error in a step that failed."""
        if self.scheduler.ticks in self.failing:
            raise RuntimeError("as the log says")

    def begin(self, request: ActiveRequest) -> None:
        """Submit the request as soon as there is room. A request that never fits finds nothing."""
        while True:
            try:
                self.scheduler.admit(request)
            except (NoFreeSlotError, CacheFullError):
                if not self._step():
                    request.finished = True
                    return
            else:
                return

    def begin_all(self, pairs: Sequence[tuple[ActiveRequest, ActiveRequest | None]]) -> None:
        """Submit all requests, each once it need not wait for another, and run to their end."""
        waiting = list(pairs)
        while waiting:
            index = next(
                (i for i, (_, before) in enumerate(waiting) if before is None or before.finished),
                None,
            )
            if index is None and self._step():
                continue
            self.begin(waiting.pop(index or 0)[0])
        self.finish()

    def finish(self) -> None:
        """Run until all requests have ended."""
        while self._step():
            pass

    def _step(self) -> bool:
        """Run a step. Return False if there was nothing to do."""
        was_idle = self.scheduler.is_idle
        if not self.scheduler.requests:
            return False
        with suppress(Interrupt):
            self.scheduler.step()
        return not (was_idle and self.scheduler.is_idle)


def _named(prompt: TokenizedPrompt, name: ConversationName | None) -> TokenizedPrompt:
    """Return a prompt of a conversation, or of a line of a batch."""
    if name is None:
        return replace(prompt, earlier=Earlier(0))
    caller = Caller("", name.client, name.session, is_title=name.is_title)
    return replace(prompt, caller=caller)


def _is_behind(request: ActiveRequest, logged: LoggedRequest) -> bool:
    """Return True if more of a request was dispatched, as the log says, than is now."""
    facts = logged.facts
    is_decoding = request.sampled < facts["scheduling"]["sampled"]
    there = request.lookup.cached + request.evaluated
    return is_decoding or (request.is_placed and there < facts["evaluated"])


class _LoggedAnswer(AnswerStream):
    """An answer of `said` tokens, and the `ending` of its request."""

    def __init__(self, said: int, ending: str) -> None:
        self._said, self._ending, self.count = said, ending, 0

    def take(self, one: Decoded, clock: Clock) -> Chunk:
        if self.count == self._said and self._ending == "forgotten":
            raise Interrupt
        if self.count == self._said and self._ending == "failed":
            raise RuntimeError("as the log says")
        self.count += 1
        is_last = self.count == self._said and self._ending == "own"
        return Chunk("", one.token, finish_reason="stop" if is_last else None)


class _LoggedTokens(NextToken):
    """A sampler that repeats the tokens of a logged answer; zeros for those that were not run."""

    def __init__(self, answer: TokenArray, sampled: int, ending: str) -> None:
        self._tokens, self._sampled, self._ending = answer, sampled, ending
        self._count = 0

    def rewind(self, count: int) -> None:
        self._count = count

    @property
    def is_plain(self) -> bool:
        return False

    @property
    def needs_history(self) -> bool:
        return False

    def __call__(self, logits: mx.array, history: mx.array | None = None) -> Sampled:
        if self._count == self._sampled and self._ending in ("own", "no token"):
            raise FormError(self._count, "the log has no more tokens")
        if self._count == self._sampled and self._ending == "failed":
            raise RuntimeError("as the log says")
        self._count += 1
        is_known = self._count <= len(self._tokens)
        return Sampled(mx.array(self._tokens[self._count - 1 : self._count] if is_known else [0]))


def cells_of(process: Mapping[str, Any], slots: int, row_bytes: int) -> int:
    """Return the cells of a runner with `slots` slots: enough for all, where there were enough."""
    cells: int = process["cells"]
    context, memory = process["context"], process.get("memory")
    if slots == process["max_sequences"] or cells < process["max_sequences"] * context:
        return cells
    cells = slots * context
    return cells if memory is None else max(context, min(cells, memory // max(row_bytes, 1)))


def most_of_step(process: Mapping[str, Any]) -> Any:
    """Return the most tokens of a step, which older logs call `max_batch`."""
    return process.get("max_batch", process["prefill_step"])


def _usage(request: ActiveRequest, reason: FinishReason | None, error: str | None) -> Usage:
    """Return the usage of a replayed request, which took no time and no memory."""
    return request.usage(trimmed_tokens=0, prefill_s=0.0, cache_bytes=0, peak_bytes=0)


MOST_CELLS = 2**28
"""The most slots times cells of a replay, which takes a byte for each."""
BLOCK = 16
"""Tokens that are compared at once to find the conversation of a request."""
FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""An odd number, for hashes of tokens."""


def as_run(process: Mapping[str, Any], requests: Sequence[LoggedRequest]) -> list[ActiveRequest]:
    """Return the requests of a process with their lookups, begun and ended as the log says."""
    runner = _runner(process, requests, process["max_sequences"])
    made = [runner.request(logged) for logged in requests]
    events: list[tuple[list[int], bool, int, str]] = []
    for index, logged in enumerate(requests):
        scheduling = logged.facts["scheduling"]
        runner.failing.update(scheduling.get("failures", ()))
        events.append((scheduling["began"], True, index, "begins"))
        if scheduling["ending"] in ("cancelled", "forgotten"):
            events.append((scheduling["ended"], False, index, scheduling["ending"]))
    for moment, _, index, what in sorted(events):
        request = made[index]
        if request.finished:
            continue
        if what == "forgotten" and not moment[1]:
            runner.interrupt(moment[0], list(zip(made, requests, strict=True)))
            continue
        runner.advance(*moment)
        if what == "forgotten":
            runner.scheduler.forget_everything(Interrupt())
        elif what == "cancelled":
            runner.scheduler.cancel(request)
        else:
            runner.begin(request)
    runner.finish()
    return made


def packed(
    process: Mapping[str, Any],
    requests: Sequence[LoggedRequest],
    slots: int | None = None,
    *,
    by_prefix: bool = False,
) -> list[ActiveRequest]:
    """Return the requests of a process with their lookups if each begins as soon as it can.

    `slots` is the number of slots; None for that of the runner. The requests begin in the order of
    the log's begins, or with `by_prefix` in that of a batch. One that continues a conversation
    waits for the answer before, and lets later ones pass. A request that was ended from outside
    ends with its last token.
    """
    runner = _runner(process, requests, slots or process["max_sequences"])
    waits = [None] * len(requests) if by_prefix else continued(requests)
    made = [runner.request(one, ends_itself=True) for one in requests]
    order = sorted(range(len(made)), key=lambda i: requests[i].facts["scheduling"]["began"])
    if by_prefix:
        keys = [sort_key(requests[i].prompt) for i in order]
        order = [order[place] for place in order_of(keys)]
    runner.begin_all(
        [(made[i], None if (before := waits[i]) is None else made[before]) for i in order]
    )
    return made


def _runner(
    process: Mapping[str, Any], requests: Sequence[LoggedRequest], slots: int
) -> ReplayedRunner:
    records = [(len(logged.prompt), logged.facts["scheduling"]) for logged in requests]
    longest = max((prompt + record["sampled"] for prompt, record in records), default=1)
    is_movable = not any(record["stuck"] for _, record in records)
    return ReplayedRunner(process, slots, longest, is_movable=is_movable)


class _SlotsProcess(TypedDict):
    """The fields of a process that a replay in slots needs, with their bounds."""

    max_sequences: Ordinal
    context: Annotated[int, Meta(ge=2)]
    cells: Ordinal
    prefill_step: Ordinal
    max_batch: NotRequired[Ordinal]
    memory: NotRequired[Count | None]
    park_bytes: NotRequired[Count]


class _Scheduling(TypedDict):
    """The record of a request that ran in a slot, with the bounds of its values."""

    slot: Count
    began: tuple[Count, Count]
    ended: tuple[Count, Count]
    ending: Ending
    limit: Ordinal
    keep: Count | None
    said: Count
    sampled: Count
    stuck: bool
    failures: NotRequired[list[Count]]


def can_be_replayed(logged: LoggedRequest) -> bool:
    """Return True if a log says what the replay of a request beside others needs."""
    process, facts, answer = logged.process, logged.facts, len(logged.answer)
    if "scheduling" not in facts:
        return False
    try:
        msgspec.convert(process, _SlotsProcess)
        record = msgspec.convert(facts["scheduling"], _Scheduling)
    except ValueError:
        return False
    context, said, sampled = process["context"], record["said"], record["sampled"]
    return (
        process["max_sequences"] <= most_of_step(process) <= MOST_CELLS
        and has_room(process, process["max_sequences"])
        and len(logged.prompt) < context
        and answer == min(said, max(sampled - 1, 0))
        and said <= sampled <= answer + 2
        and record["began"] <= record["ended"]
        and (record["keep"] or 0) <= context - 2
    )


def has_room(process: Mapping[str, Any], slots: int) -> bool:
    """Return True if a replay with `slots` slots is small enough."""
    cells: int = max(process["cells"], slots * process["context"])
    return slots * (cells + slots) <= MOST_CELLS


def continued(requests: Sequence[LoggedRequest]) -> list[int | None]:
    """Return for each request the index of the one whose answer it waited for; None: none.

    A request continues with a conversation if the whole prompt of another one, which had ended when
    it began, is its beginning. Of all that had ended it waited for the one with the longest common
    beginning, in blocks of tokens, and of several for the last.
    """
    records = [logged.facts["scheduling"] for logged in requests]
    moments = [(tuple(scheduling["began"]), 1, index) for index, scheduling in enumerate(records)]
    moments += [(tuple(scheduling["ended"]), 0, index) for index, scheduling in enumerate(records)]
    found: list[int | None] = [None] * len(requests)
    whole: set[int] = set()
    last: dict[int, int] = {}
    for _, is_begin, index in sorted(moments):
        hashes = _hashes(requests[index].prompt)
        blocks = hashes[BLOCK - 1 :: BLOCK]
        if not is_begin:
            whole.add(hashes[-1])
            last.update(dict.fromkeys(blocks, index))
        elif not whole.isdisjoint(hashes[:-1]):
            found[index] = next((last[one] for one in reversed(blocks) if one in last), None)
    return found


def _hashes(tokens: TokenArray) -> list[int]:
    """Return a hash of each beginning of `tokens`."""
    factors = np.cumprod(np.full(len(tokens), FACTOR, np.uint64))
    hashes: list[int] = np.cumsum((tokens + np.uint64(1)) * factors).tolist()
    return hashes
