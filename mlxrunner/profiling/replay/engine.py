"""An engine that computes nothing: cells without rows and layers without states.

The scheduler of `mlxrunner.parallel` runs on it as on a model: what an offset can go back to, what
has room and what is parked is decided by the same code.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx

from mlxrunner.cache.checkpoints import Checkpoint
from mlxrunner.cache.disk.index import DiskCacheIndex, EntryForm, StoredConversation
from mlxrunner.cache.entry import CacheEntry
from mlxrunner.cache.layers.extents import Extent, Window, read_extent
from mlxrunner.cache.layers.protocol import Exported, LayerCache, Saved, SavedCheckpoint, Snapshot
from mlxrunner.cache.pool.causal import CausalCache, CellsLayer
from mlxrunner.cache.pool.interface import Batch
from mlxrunner.cache.tokens import TokenArray, TokenBuffer
from mlxrunner.errors import SessionError
from mlxrunner.parallel.rows.alone import PromptPasses
from mlxrunner.parallel.rows.engine import WINDOWS_KEEP, Engine
from mlxrunner.profiling.replay.simulate import ReplayedLayer

TOKEN_BYTES = 4
"""Bytes of a token in the file of a conversation."""


class _Held(LayerCache):
    """A layer of a parked conversation: its extent alone."""

    def __init__(self, saved: Saved) -> None:
        self.kind, self._extent = saved.kind, saved.numbers["extent"]

    @property
    def extent(self) -> Extent:
        extent: Extent = self._extent
        return extent

    def go_back(self, to: int) -> None:
        self._extent = self.extent.rewound(to)

    def free(self) -> None:
        self._extent = self.extent.empty()

    def snapshot(self) -> Snapshot:
        return Snapshot(self.extent.checkpoint(), 0)

    def restore(self, snapshot: Snapshot, offset: int) -> None:
        self._extent = snapshot.content


class ReplayedParking:
    """A place for conversations, with the methods of `mlxrunner.cache.disk.disk_cache.Parking`."""

    def __init__(self, limit: int) -> None:
        """Park at most `limit` bytes."""
        self._shelf = DiskCacheIndex(lambda name: None, limit)
        self._entries: weakref.WeakKeyDictionary[StoredConversation, CacheEntry] = (
            weakref.WeakKeyDictionary()
        )

    def park(self, entry: CacheEntry) -> StoredConversation | None:
        """Keep an entry, unless it does not fit or what it holds is not exact."""
        if not entry.tokens or entry.is_shifted:
            return None
        held = CacheEntry(
            TokenBuffer(entry.tokens[:]), [_Held(one.export()) for one in entry.caches]
        )
        held.checkpoints.budget = entry.checkpoints.budget
        for item in entry.checkpoints:
            held.checkpoints.add(item)
        shelf, parked = self._shelf, self._shelf.plan(b"", _form(held, entry))
        if (there := shelf.named(parked.name)) is not None:
            shelf.use(there)
            return there
        shelf.claim(parked)
        new = {
            name: nbytes
            for name, nbytes in _sizes(parked, entry).items()
            if name not in shelf.sizes
        }
        try:
            shelf.make_room(sum(new.values()), parked)
        except SessionError:
            shelf.remove(parked)
            return None
        for name, nbytes in new.items():
            shelf.wrote(name, nbytes)
        shelf.add(parked)
        self._entries[parked] = held
        shelf.drop_earlier(parked, None)
        return parked

    def find(self, prompt: TokenArray) -> tuple[StoredConversation, int] | None:
        """Return the conversation that has most of a prompt, and how many of its tokens."""
        return self._shelf.find(prompt)

    def restore(self, parked: StoredConversation, upto: int | None = None) -> Exported:
        """Return the first `upto` tokens of a conversation."""
        held = self._entries[parked]
        to = len(held.tokens) if upto is None else upto
        copy = CacheEntry(caches=[_Held(saved_extent(one.kind, one.extent)) for one in held.caches])
        copy.checkpoints.budget = held.checkpoints.budget
        copy.tokens.extend(held.tokens.array)
        for item in held.checkpoints:
            copy.checkpoints.add(item)
        if to < len(held.tokens):
            copy.tokens.truncate(to)
            copy.rewind(to)
        found = Exported(
            copy.tokens.array,
            [saved_extent(one.kind, one.extent.saved()) for one in copy.caches],
            [_saved_checkpoint(item, copy.caches) for item in copy.checkpoints],
        )
        if parked in self._shelf:
            self._shelf.use(parked, found)
        return found

    def tell(self, on_given_up: Callable[[StoredConversation], None]) -> None:
        """Call `on_given_up` with each conversation that is given up to make room."""
        self._shelf.on_given_up = on_given_up


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


def _sizes(parked: StoredConversation, entry: CacheEntry) -> dict[str, int]:
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
        **{piece.name: (piece.end - piece.begin) * each for piece in parked.rows},
        **{state.name: kept[state.offset] for state in parked.states},
        parked.name: TOKEN_BYTES * len(parked.tokens) + states,
    }


def _saved_checkpoint(item: Checkpoint, caches: Sequence[LayerCache]) -> SavedCheckpoint:
    return SavedCheckpoint(
        item.offset,
        item.role,
        [
            None if kept is None else saved_extent(cache.kind, kept.content)
            for cache, kept in zip(caches, item.snapshots, strict=True)
        ],
    )


Lines = Sequence[Mapping[str, Any]]
"""The `layers` of a process of a token log."""


class ReplayedEngine(Engine):
    """An engine whose forward pass finds places in cells without rows, and computes nothing."""

    def __init__(self, process: Mapping[str, Any], *, is_movable: bool) -> None:
        """Make the engine for the layers of `process`. `is_movable`: keys can be moved."""
        self._context, self._is_movable = process["context"], is_movable
        self._ways = process.get("ways", ["row"])
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
        in_cells = [_PaperCells(group, sequence) for group in self.groups]
        return [*in_cells, *self._layers_apart(sequence)]

    def rotate(
        self, caches: Sequence[LayerCache], by: int
    ) -> Sequence[Callable[[Any, int], Any]] | None:
        return [lambda keys, by: keys for _ in caches] if self._is_movable else None

    def expect(self, sequence: int, count: int) -> None:
        """Do nothing: the places of tokens make no difference here."""

    def _make_group(self, window: int | None, memory: int | None) -> CausalCache:
        row_bytes = self._rows[window or 0]
        return _ReplayedGroup(_stay if self._is_movable else None, window, memory, row_bytes)

    def _layers_apart(self, sequence: int) -> list[ReplayedLayer]:
        if sequence not in self._apart:
            self._apart[sequence] = [
                _PaperLayer(line, read_extent(line, self._context, None)) for line in self._lines
            ]
        return self._apart[sequence]


def _sorted(lines: Lines, has_cells: bool) -> tuple[list[Mapping[str, Any]], Lines]:
    """Return the lines of layers in shared cells, and of those that are apart.

    A composite layer with some parts in cells falls apart.
    """
    if not has_cells:
        return [], lines
    in_cells, apart = [], []
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


class _ReplayedGroup(CausalCache):
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


class _PaperCells(CellsLayer):
    """The tokens of one sequence in cells without rows."""

    group: _ReplayedGroup

    def export(self, snapshot: Snapshot | None = None) -> Saved:
        return saved_extent(self.kind, self.extent if snapshot is None else snapshot.content)

    def adopt(self, saved: Saved, offset: int) -> None:
        self.free()
        self.group.put_back(self.sequence, saved.numbers["extent"])

    def snapshot(self) -> Snapshot:
        extent = self.extent.checkpoint()
        rows = extent.seen if isinstance(extent, Window) else 0
        return Snapshot(extent, rows * self.group.row_bytes)

    def restore(self, snapshot: Snapshot, offset: int) -> None:
        self.adopt(saved_extent(self.kind, snapshot.content), offset)

    def snapshot_of(self, saved: Saved, offset: int) -> Snapshot:
        extent = saved.numbers["extent"]
        rows = extent.seen if isinstance(extent, Window) else 0
        return Snapshot(extent, rows * self.group.row_bytes)


class _PaperLayer(ReplayedLayer):
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
    if isinstance(cache, _PaperCells):
        return cache.group.row_bytes if cache.group.window is None else None
    return None if cache.needs_checkpoints else getattr(cache, "row_bytes", None)


def saved_extent(kind: str, extent: Extent) -> Saved:
    return Saved(kind, numbers={"extent": extent})


def _stay(layer: int, keys: mx.array, offsets: mx.array) -> mx.array:
    """Return the keys unchanged."""
    return keys
