"""An engine that computes nothing: cells without rows, layers without states, a disk without files.

The scheduler of `mlxrunner.parallel` runs on it as on a model: what an offset can go back to, what
has room and what is parked is decided by the same code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxrunner.cache.checkpoints import Checkpoint
from mlxrunner.cache.entry import CacheEntry
from mlxrunner.cache.layers.extents import Extent, Window
from mlxrunner.cache.layers.logged_extents import read_extent
from mlxrunner.cache.layers.protocol import LayerCache, Snapshot
from mlxrunner.cache.saved import Saved, SavedCheckpoint
from mlxrunner.cache.shared.causal import CausalCache
from mlxrunner.cache.shared.layer import CellsLayer
from mlxrunner.cache.shared.sequences import Batch
from mlxrunner.cache.tokens import TokenArray, TokenBuffer, common_prefix, goes_on
from mlxrunner.parallel.rows.alone import passes
from mlxrunner.parallel.rows.engine import WINDOWS_KEEP, Engine
from mlxrunner.profiling.replay.simulate import ReplayedLayer

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
        self._logits = mx.zeros((1, 1))
        self.hook: Callable[[], None] = lambda: None
        """Called in each forward pass when its tokens have their cells. It may raise an error."""

    @property
    def most_sequences(self) -> int | None:
        return 1 if self._ways == ["one at a time"] else None

    def forward(self, tokens: mx.array, batch: Batch, rows: Sequence[int]) -> mx.array:
        if self.groups:
            self.cache.start_forward(batch)
        self.hook()
        for sequence, count in Counter(batch.sequences).items():
            is_alone = self.most_sequences == 1
            for part in passes(batch, rows) if is_alone else [count]:
                for layer in self._layers_apart(sequence):
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
        return _saved(self.kind, self.extent if snapshot is None else snapshot.content)

    def adopt(self, saved: Saved, offset: int) -> None:
        self.free()
        self.group.put_back(self.sequence, saved.numbers["extent"])

    def snapshot(self) -> Snapshot:
        extent = self.extent.checkpoint()
        rows = extent.seen if isinstance(extent, Window) else 0
        return Snapshot(extent, rows * self.group.row_bytes)

    def restore(self, snapshot: Snapshot, offset: int) -> None:
        self.adopt(_saved(self.kind, snapshot.content), offset)

    def snapshot_of(self, saved: Saved, offset: int) -> Snapshot:
        extent = saved.numbers["extent"]
        rows = extent.seen if isinstance(extent, Window) else 0
        return Snapshot(extent, rows * self.group.row_bytes)


class _PaperLayer(ReplayedLayer):
    """A layer of one sequence, which can be parked and copied."""

    counts_forwards = False  # the engine counts them, as for several sequences it does itself

    @property
    def nbytes(self) -> int:
        rows = min(self.offset, self._line["room"] or self.offset) * self._line["row_bytes"]
        nbytes: int = self._line["count"] * (rows + self._line["checkpoint_fixed"])
        return nbytes if self.offset else 0

    def export(self, snapshot: Snapshot | None = None) -> Saved:
        return _saved(self.kind, self.extent if snapshot is None else snapshot.content)

    def adopt(self, saved: Saved, offset: int) -> None:
        self._extent = saved.numbers["extent"]

    def snapshot_of(self, saved: Saved, offset: int) -> Snapshot:
        return Snapshot(saved.numbers["extent"], self.snapshot().nbytes)


def _saved(kind: str, extent: Extent) -> Saved:
    return Saved(kind, numbers={"extent": extent})


def _stay(layer: int, keys: mx.array, offsets: mx.array) -> mx.array:
    """Return the keys unchanged."""
    return keys


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


@dataclass(frozen=True)
class _Restored:
    """A part of a parked conversation that is read again."""

    tokens: TokenArray
    layers: Sequence[Saved]
    checkpoints: Sequence[SavedCheckpoint]
    is_exact: bool = True


class ReplayedParking:
    """A place for conversations, with the methods of `mlxrunner.stored.parking.Parking`."""

    def __init__(self) -> None:
        self._parked: dict[bytes, CacheEntry] = {}
        self._restored: set[bytes] = set()

    def park(self, entry: CacheEntry, *, replaces: Any = None) -> CacheEntry | None:
        """Keep an entry, unless what it holds is not exact."""
        if not entry.tokens or entry.is_shifted:
            return None
        held = CacheEntry(
            TokenBuffer(entry.tokens[:]), [_Held(one.export()) for one in entry.caches]
        )
        held.checkpoints.budget = entry.checkpoints.budget
        for item in entry.checkpoints:
            held.checkpoints.add(item)
        self._drop_earlier(held)
        self._parked[held.tokens.array.tobytes()] = held
        return held

    def _drop_earlier(self, held: CacheEntry) -> None:
        """Drop what is an earlier state of a conversation, as the real place does."""
        is_enough = all(cache.reachable(1) == 1 for cache in held.caches)
        for key, one in list(self._parked.items()):
            shared = common_prefix(one.tokens.array, held.tokens.array)
            if goes_on(shared, len(one.tokens)) and (is_enough or key in self._restored):
                del self._parked[key]

    def find(self, prompt: TokenArray) -> tuple[CacheEntry, int] | None:
        """Return the conversation that has most of a prompt, and how many of its tokens."""
        best: tuple[CacheEntry, int] | None = None
        for held in self._parked.values():
            shared = min(common_prefix(held.tokens.array, prompt), len(prompt) - 1)
            if shared > (best[1] if best else 0):
                to = held.reach(shared)[0]
                if to > (best[1] if best else 0):
                    best = held, to
        return best

    def restore(self, parked: CacheEntry, upto: int | None = None) -> _Restored:
        """Return the first `upto` tokens of a conversation."""
        self._restored.add(parked.tokens.array.tobytes())
        to = len(parked.tokens) if upto is None else upto
        copy = CacheEntry(caches=[_Held(_saved(one.kind, one.extent)) for one in parked.caches])
        copy.checkpoints.budget = parked.checkpoints.budget
        copy.tokens.extend(parked.tokens.array)
        for item in parked.checkpoints:
            copy.checkpoints.add(item)
        if to < len(parked.tokens):
            copy.tokens.truncate(to)
            copy.rewind(to)
        return _Restored(
            copy.tokens.array,
            [_saved(one.kind, one.extent.saved()) for one in copy.caches],
            [_saved_checkpoint(item, copy.caches) for item in copy.checkpoints],
        )

    def tell(self, on_given_up: Callable[[Any], None]) -> None:
        """Do nothing: there is room for all."""

    def close(self) -> None:
        """Forget everything."""
        self._parked.clear()
        self._restored.clear()


def _saved_checkpoint(item: Checkpoint, caches: Sequence[LayerCache]) -> SavedCheckpoint:
    return SavedCheckpoint(
        item.offset,
        item.role,
        [
            None if kept is None else _saved(cache.kind, kept.content)
            for cache, kept in zip(caches, item.snapshots, strict=True)
        ],
    )
