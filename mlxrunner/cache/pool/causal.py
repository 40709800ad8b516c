"""The cache of causal attention for several sequences: full, windowed or chunked.

It has the semantics of Ollama's causal cache. The buffers of a whole layer are allocated once and
written in place, as `KVPool` plans it. While rows move, the cells count as empty until all have
arrived. An interrupt in between leaves an empty cache, never a wrong one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlxrunner.cache.layers.extents import Window
from mlxrunner.cache.pool.attention_split import (
    WORTH_SPLITTING,
    Forward,
    Split,
    largest_splits,
)
from mlxrunner.cache.pool.cell_table import CellRun, Ints, runs
from mlxrunner.cache.pool.cells import AttentionWindow, KVPool, Move, Placement, PositionShift
from mlxrunner.cache.protocol import (
    END,
    Batch,
    Cache,
    Commit,
    Everything,
    Extent,
    LayerCache,
    Layout,
    Lifecycle,
    Snapshot,
)
from mlxrunner.cache.saved import Saved
from mlxrunner.errors import CacheFullError, NotSupportedError

MANY_RUNS = 64
"""Number of runs beyond which one gather is faster than a slice for each run."""
SOME_RUNS, SHORT = 4, 8
"""More than SOME_RUNS runs, on average shorter than SHORT cells, are written by one scatter.

That is faster than a slice for each run.
"""


class BatchPlaces:
    """Cells that rows are written to, prepared once for all layers."""

    def __init__(self, cells: Ints) -> None:
        self._runs = runs(cells)
        scattered = len(self._runs) > SOME_RUNS and len(cells) < SHORT * len(self._runs)
        self._cells: slice | mx.array | None = None
        if scattered:
            self._cells = _stride(cells) or mx.array(cells)

    def put(self, buffer: mx.array, rows: mx.array) -> None:
        """Write `rows [1, heads, n, dim]` into `buffer [1, heads, cells, dim]`, in place."""
        if self._cells is not None:
            buffer[:, :, self._cells, :] = rows
            return
        done = 0
        for run in self._runs:
            following = done + run.end - run.begin
            buffer[..., run.begin : run.end, :] = rows[..., done:following, :]
            done = following


@dataclass
class Layer:
    """The buffers of one layer: `[1, kv_heads, rows, head_dim]`. The values may be wider."""

    keys: mx.array
    values: mx.array

    @classmethod
    def like(cls, keys: mx.array, values: mx.array, rows: int, dtype: mx.Dtype) -> Layer:
        """Allocate the buffers at once, so that an allocation that does not fit fails here."""
        layer = cls(
            *(mx.zeros((1, part.shape[1], rows, part.shape[3]), dtype) for part in (keys, values))
        )
        mx.eval(layer.keys, layer.values)
        return layer

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def check(self, index: int, keys: mx.array, values: mx.array) -> None:
        """Raise ValueError unless `keys` and `values` have the shape of this layer's rows."""
        for name, rows, buffer in (("keys", keys, self.keys), ("values", values, self.values)):
            if rows.shape != (expected := (*buffer.shape[:2], rows.shape[2], buffer.shape[3])):
                raise ValueError(
                    f"layer {index}: {name} of shape {rows.shape}, "
                    f"but the cache was allocated for {expected}"
                )

    def write(self, places: BatchPlaces, keys: mx.array, values: mx.array) -> None:
        places.put(self.keys, keys.astype(self.keys.dtype))
        places.put(self.values, values.astype(self.values.dtype))

    def read(self, run: CellRun) -> tuple[mx.array, mx.array]:
        return self.keys[..., run.begin : run.end, :], self.values[..., run.begin : run.end, :]


def _stride(cells: Ints) -> slice | None:
    """Return `cells` as a slice if each has the same distance to the one before."""
    first, last, by = int(cells[0]), int(cells[-1]), int(cells[1] - cells[0])
    if by < 1 or (cells[1:] - cells[:-1] != by).any():
        return None
    return slice(first, last + 1, by)


def read(cells: Ints, *buffers: mx.array) -> list[mx.array]:
    """Return evaluated copies of these rows: a view would make the next write copy the buffer."""
    found, copies = runs(cells), list[mx.array]()
    for buffer in buffers:
        if len(found) > MANY_RUNS:
            copies.append(mx.take(buffer, mx.array(cells), axis=2))
            continue
        parts = [buffer[..., run.begin : run.end, :] for run in found or [CellRun(0, 0)]]
        copies.append(mx.contiguous(mx.concatenate(parts, axis=2)))
    mx.eval(copies)
    return copies


def write(buffer: mx.array, cells: Ints, rows: mx.array) -> None:
    BatchPlaces(cells).put(buffer, rows)
    mx.eval(buffer)


Shift = Callable[[int, mx.array, mx.array], mx.array]
"""A function of a layer index, keys and offsets that returns the re-rotated keys.

`shift(layer, keys [1, kv_heads, n, head_dim], offsets [n] int32)` moves each key by its number of
positions.
"""

Rows = dict[int, tuple[mx.array, mx.array]]
"""The keys and values `[1, kv_heads, n, head_dim]` of some tokens, by layer."""


@dataclass
class Pass:
    """The pass under way, and where its rows are written: nowhere in a reserve pass."""

    forward: Forward
    places: BatchPlaces | None
    mask: mx.array | None = None
    """The mask `[n_tokens, history]`, once it was asked for."""


class CausalCache(Cache):
    """The cache of causal attention, in cells that all sequences share.

    A query sees the tokens of its sequence at positions up to its own: all of them, the last
    `window`, or those of its `chunk`. One sequence may have more than `capacity` tokens while
    others have fewer. With a `memory`, there are at most `max_sequences * memory + max_batch`
    cells, and older tokens are dropped when a batch starts. `shift` re-rotates keys. Without it,
    `remove` can't close gaps.
    """

    def __init__(
        self,
        shift: Shift | None = None,
        window: int | None = None,
        memory: int | None = None,
        chunk: int | None = None,
    ) -> None:
        self._shift, self._attention_window = shift, AttentionWindow(window, memory, chunk)
        self._lifecycle = Lifecycle()
        self._dtype, self._max_batch, self._rows = mx.float32, 0, CellRun(0, 0)
        self._cells = KVPool.empty(0, 0, self._attention_window)
        self._layers: dict[int, Layer] = {}
        self._layer = 0
        self._pass: Pass | None = None
        self._undo: tuple[KVPool, Pass | None] | None = None

    @property
    def window(self) -> int | None:
        return self._attention_window.window

    @property
    def memory(self) -> int | None:
        """Tokens kept per sequence, by default the window; None: all."""
        return self._attention_window.memory

    @property
    def mask(self) -> mx.array:
        """The mask of the pass under way, `[n_tokens, history]`.

        Some models need it before their layers write. It is made when it is first asked for.
        """
        under_way = self._current()
        if under_way.mask is None:
            under_way.mask = mx.array(under_way.forward.visible)
        return under_way.mask

    @property
    def state(self) -> list[mx.array]:
        """All buffers, to be evaluated."""
        return [buffer for layer in self._layers.values() for buffer in (layer.keys, layer.values)]

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self._layers.values())

    @property
    def used_bytes(self) -> int:
        """Bytes of the cells that have an owner."""
        return self.nbytes * (self.num_cells - self.num_free) // max(1, self.num_cells)

    @property
    def num_cells(self) -> int:
        return self._cells.num_cells

    @property
    def num_free(self) -> int:
        return self._cells.num_free

    def buffers(self) -> tuple[mx.array, mx.array]:
        """Return keys and values of the current layer, all cells: for a pass that is split."""
        return self._layers[self._layer].keys, self._layers[self._layer].values

    def split(self, worth: float = WORTH_SPLITTING) -> Split | None:
        """Split the attention of the pass under way; return None if one product is faster."""
        return self._current().forward.split(worth)

    def largest_splits(self, tokens: int, context: int) -> list[Split]:
        """Return splits for the worst-case memory of `tokens` tokens; see `largest_splits` there.

        `context`: most tokens of a sequence.
        """
        longest = context if self.window is None else min(context, self.window + tokens)
        return largest_splits(tokens, self._cells.max_sequences, self.num_cells, longest)

    def attention_mask(self, *, is_split: bool, as_array: bool) -> mx.array | str | None:
        """Return the mask of the pass under way as mlx-lm's attention takes it.

        `is_split`: the attention is computed in parts, which have their own masks. `as_array`: the
        model needs an array, as long as what `fetch` returns.
        """
        forward = self._current().forward
        alone, queries = forward.alone, len(forward.batch)
        if alone is None and (as_array or not is_split):
            return self.mask
        if alone is not None and alone.visible is not None:
            return mx.array(alone.visible)
        if alone is not None and as_array:
            cells = alone.cells.end - alone.cells.begin
            return mx.array(np.tri(queries, cells, cells - queries, dtype=np.bool_))
        return None if queries == 1 else "causal"

    def fetch(self) -> tuple[mx.array, mx.array]:
        """Return the keys and values of the current layer that `attention_mask` speaks of."""
        forward, layer = self._current().forward, self._layers[self._layer]
        alone = forward.alone
        return layer.read(forward.history if alone is None else alone.cells)

    def expect(
        self, sequence: int, count: int, *, may_copy: bool = False, beside: Sequence[int] = ()
    ) -> None:
        """Reserve a reservation, so that the next `count` tokens of the sequence lie side by side.

        Without enough room there is no reservation. Caches with a memory never have reservations.
        `may_copy`: there are cells for a copy of a short prefix that the sequence shares.
        `beside`: the sequences that run: their steps read neighbours together.
        """
        self._lifecycle.check()
        if self._attention_window.memory is not None:
            return
        copied = self._cells.relocated(sequence, count, beside) if may_copy else None
        if copied is None:
            self._become(self._cells.expecting(sequence, count, beside))
            return
        after, cells = copied
        sources = self._cells.cells_of(sequence, 0, len(cells))
        buffers = [part for layer in self._layers.values() for part in (layer.keys, layer.values)]
        places = BatchPlaces(cells)
        for buffer, rows in zip(buffers, read(sources, *buffers), strict=True):
            places.put(buffer, rows)
        mx.eval(buffers)
        self._become(after)

    def num_used_by(self, sequences: Sequence[int], prefix: tuple[int, int] = (0, 0)) -> int:
        """Return the number of cells with tokens of any of `sequences`, or of a prefix.

        `prefix`: another sequence, and how many of its first tokens count.
        """
        return self._cells.num_used_by(sequences, prefix)

    def num_shared(self, sequence: int, others: Sequence[int], begin: int = 0) -> int:
        """Return how many tokens of `sequence`, from `begin` on, any of `others` shares."""
        return self._cells.num_shared(sequence, others, begin)

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences that have tokens."""
        return self._cells.sequences

    def stored(self, sequence: int) -> tuple[int, int]:
        """Return the positions `first, end` of the last run of tokens of `sequence`.

        All tokens `first .. end - 1` are stored; both are 0 if there are none.
        """
        return self._cells.stored(sequence)

    def broken(self, number: int) -> NDArray[np.bool_] | None:
        """Return which cells of the layer `number` hold NaN or infinities, `[cells]`; None if none.

        Such a value reaches all that reads the buffer: where it is masked it is multiplied by 0.
        """
        layer = self._layers.get(number)
        if layer is None:
            return None
        wrong = [~mx.isfinite(part).all(axis=(0, 1, 3)) for part in (layer.keys, layer.values)]
        cells: NDArray[np.bool_] = np.array(wrong[0] | wrong[1])
        return cells if cells.any() else None

    def owners_of(self, cells: NDArray[np.bool_]) -> set[int]:
        """Return the sequences that own any of `cells`."""
        return self._cells.owners_of(np.flatnonzero(cells).astype(np.int32))

    def num_own(self, sequence: int) -> int:
        """Return the number of cells that no other sequence owns."""
        return self._cells.num_own(sequence)

    def glance(self, sequence: int) -> int:
        """Return `num_own` of the moment. Any thread may ask, while a step runs, too."""
        return self._cells.glance(sequence)

    @property
    def row_bytes(self) -> int:
        """Bytes of one cell in all layers; 0 before the first forward pass."""
        return self.nbytes // max(1, self._rows.end)

    def read(self, sequence: int, begin: int, end: int) -> Rows:
        """Return evaluated copies of the rows of the tokens `begin .. end - 1`, by layer.

        Raise ValueError unless all of them are stored.
        """
        self._lifecycle.check()
        cells = self._cells.cells_of(sequence, begin, end)
        buffers = [part for layer in self._layers.values() for part in (layer.keys, layer.values)]
        rows = iter(read(cells, *buffers))
        return {index: (next(rows), next(rows)) for index in self._layers}

    def write(self, sequence: int, begin: int, rows: Rows) -> None:
        """Store `rows` as the tokens from position `begin` on of a sequence, where its tokens end.

        An interrupt leaves the sequence as it was. Raise CacheFullError if there is no room,
        and ValueError if the rows have another shape than the layers.
        """
        self._lifecycle.check()
        n = next(iter(rows.values()))[0].shape[2]
        layers = {
            index: self._layers.get(index) or Layer.like(*both, self._rows.end, self._dtype)
            for index, both in rows.items()
        }
        for index, layer in layers.items():
            layer.check(index, *rows[index])
        positions = range(begin, begin + n)
        before, after, cells, move = self._cells.place(Batch(positions, [sequence] * n))
        if move is not None:
            self._move(move, before)
        self._layers.update(layers)
        places = BatchPlaces(cells)
        for index, (keys, values) in rows.items():
            self._layers[index].write(places, keys, values)
        mx.eval([(layer.keys, layer.values) for layer in self._layers.values()])
        self._become(after)

    def init(self, dtype: mx.Dtype, max_sequences: int, capacity: int, max_batch: int) -> None:
        self._lifecycle.initialize(
            max_sequences=max_sequences, capacity=capacity, max_batch=max_batch
        )
        self._dtype, self._max_batch = dtype, max_batch
        num_cells = self._attention_window.num_cells(max_sequences, capacity, max_batch)
        self._rows = CellRun(0, num_cells)
        self._cells = KVPool.empty(num_cells, max_sequences, self._attention_window)

    def start_forward(self, batch: Batch, reserve: bool = False) -> None:
        self._undo = None
        if reserve:
            self._check_size(batch)
            self._undo = self._cells, self._pass
            self._pass = Pass(Forward(batch, self._cells, None, self._rows), None)
            return
        before, after, cells, move = self._place(batch)
        coming = Pass(Forward(batch, after, cells, self._rows), BatchPlaces(cells))
        if move is not None:
            self._move(move, before)
        self._undo = before, self._pass
        self._cells, self._pass = after, coming

    def undo_forward(self) -> None:
        if self._undo is not None:
            (self._cells, self._pass), self._undo = self._undo, None

    def set_layer(self, layer: int) -> None:
        self._layer = layer

    def put(self, keys: mx.array, values: mx.array) -> None:
        under_way = self._current()
        places, tokens = under_way.places, len(under_way.forward.batch)
        for name, rows in (("keys", keys), ("values", values)):
            if rows.shape[2] != tokens:
                raise ValueError(
                    f"layer {self._layer}: {rows.shape[2]} {name} were put, "
                    f"but start_forward announced {tokens} tokens"
                )
        layer = self._layers.get(self._layer) or Layer.like(
            keys, values, self._rows.end, self._dtype
        )
        layer.check(self._layer, keys, values)
        self._layers[self._layer] = layer
        if places is not None:
            self._undo = None
            layer.write(places, keys, values)

    def get(self) -> tuple[mx.array, mx.array, mx.array]:
        forward, layer = self._current().forward, self._layers.get(self._layer)
        if layer is None:
            raise RuntimeError(f"layer {self._layer}: get was called before anything was put")
        return *layer.read(forward.history), self.mask

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        self.prepare_copy_prefix(source, target, length)()

    def prepare_copy_prefix(self, source: int, target: int, length: int) -> Commit:
        self._lifecycle.check()
        return partial(self._become, self._cells.with_prefix(source, target, length))

    def can_resume(self, sequence: int, position: int) -> bool:
        self._lifecycle.check()
        return self._cells.can_resume(sequence, position)

    def remove(self, sequence: int, begin: int, end: int = END) -> None:
        self.prepare_remove(sequence, begin, end)()

    def prepare_remove(self, sequence: int, begin: int, end: int = END) -> Commit:
        self._lifecycle.check()
        if self._shift is None and begin < end and self._cells.holds(sequence, end):
            raise NotSupportedError(
                f"the tokens after position {end - 1} can't move up: "
                "this cache was made without a shift function for their keys; "
                "remove all from a position on, and evaluate the rest again"
            )
        after, shift = self._cells.without(sequence, begin, end)
        if shift is None or self._shift is None:
            return partial(self._become, after)
        offsets = mx.full(shift.sources.shape, shift.by, mx.int32)
        rows = {}
        for index, layer in self._layers.items():
            keys = self._shift(index, read(shift.sources, layer.keys)[0], offsets).astype(
                self._dtype
            )
            rows[index] = keys, read(shift.copies.sources, layer.values)[0]
            layer.check(index, *rows[index])
        mx.eval(rows)
        return partial(self._apply_shift, shift, rows, after)

    def defragment(self) -> None:
        """Close all holes between cells in use.

        A forward pass that is under way has to be started again.
        """
        self._lifecycle.check()
        after, move = self._cells.packed()
        if move is not None:
            self._move(move, after)

    def forget(self) -> None:
        """Drop all tokens and buffers. The next forward pass allocates them again."""
        self._forget()
        self._layers.clear()

    def close(self) -> None:
        self._lifecycle.close()
        self._layers.clear()
        self._cells = KVPool.empty(0, 0, self._attention_window)
        self._pass = self._undo = None

    def _current(self) -> Pass:
        self._lifecycle.check()
        if self._pass is None:
            raise RuntimeError("no forward pass is under way: call start_forward first")
        return self._pass

    def _check_size(self, batch: Batch) -> None:
        self._lifecycle.check()
        self._cells.check_sequences(*batch.sequences)
        if (n := len(batch)) > (most := self._max_batch):
            raise CacheFullError(
                f"a batch of {n} tokens (max_batch is {most})",
                n,
                most,
                most,
                remedy="split it, or raise max_batch",
            )

    def _place(self, batch: Batch) -> Placement:
        self._check_size(batch)
        return self._cells.place(batch)

    def _become(self, after: KVPool) -> None:
        self._cells, self._undo = after, None

    def _forget(self) -> None:
        empty = KVPool.empty(self.num_cells, self._cells.max_sequences, self._attention_window)
        self._cells, self._pass, self._undo = empty, None, None

    def _move(self, move: Move, after: KVPool) -> None:
        self._forget()
        targets = np.arange(move.begin, move.begin + len(move.sources), dtype=np.int32)
        for layer in self._layers.values():
            for buffer in (layer.keys, layer.values):
                write(buffer, targets, *read(move.sources, buffer))
        self._cells = after

    def _apply_shift(self, shift: PositionShift, rows: Rows, after: KVPool) -> None:
        self._forget()
        for index, (keys, values) in rows.items():
            write(self._layers[index].keys, shift.targets, keys)
            write(self._layers[index].values, shift.copies.targets, values)
        self._cells = after


class CellsLayer(LayerCache):
    """The tokens of one sequence in the cells of a group of layers."""

    counts_forwards = False
    stores_plain_rows = True
    outline_after = (1,)

    def __init__(self, group: CausalCache, sequence: int) -> None:
        """Stand for `sequence` of `group`. Both have no tokens of it yet, or keep those it has."""
        self.group, self.sequence = group, sequence
        self.kind = "full" if group.window is None else "sliding"

    @property
    def takes_pieces(self) -> bool:  # type: ignore[override]  # a window has only its last rows
        return self.group.window is None

    @property
    def extent(self) -> Extent:
        first, end = self.group.stored(self.sequence)
        window, memory = self.group.window, self.group.memory
        if window is None or memory is None:
            return Everything(end)
        return Window.sized(window, memory - window).at(first, end)

    @property
    def needs_checkpoints(self) -> bool:
        return self.group.window is not None

    @property
    def used_bytes(self) -> int:
        """Bytes of the cells that only this sequence owns, at the moment."""
        return self.group.row_bytes * self.group.glance(self.sequence)

    def go_back(self, to: int) -> None:
        self.group.remove(self.sequence, to, END)

    def free(self) -> None:
        self.group.remove(self.sequence, 0, END)

    def copy(self, other: LayerCache, to: int) -> None:
        """Share the first `to` tokens of `other`: nothing is copied within a group."""
        if not isinstance(other, CellsLayer) or other.group is not self.group:
            super().copy(other, to)
            return
        self.group.copy_prefix(other.sequence, self.sequence, to)

    def shift(self, keep: int, discard: int, rotate: Callable[[Any, int], Any]) -> None:
        """Move the tokens in the way that the group was made with, instead of by `rotate`."""
        self.group.remove(self.sequence, keep, keep + discard)

    def layouts(self) -> list[Layout]:
        row_bytes = self.group.row_bytes
        if self.group.window is None:
            return [Layout(self.kind, row_bytes)]
        memory = self.group.memory or self.group.window
        return [Layout(self.kind, row_bytes, memory, checkpoint_rows=self.group.window - 1)]

    def export_rows(self, begin: int, end: int) -> Saved:
        """Return the rows of the tokens `begin .. end - 1`, all of which are stored."""
        return Saved(self.kind, _arrays(self.group.read(self.sequence, begin, end)))

    def export(self, snapshot: Snapshot | None = None) -> Saved:
        if snapshot is not None:
            return Saved(self.kind, snapshot.content)
        extent = self.extent
        return self.export_rows(extent.first if isinstance(extent, Window) else 0, extent.offset)

    def extend(self, saved: Saved) -> None:
        if _count(saved.arrays):
            self.group.write(self.sequence, self.offset, _rows(saved.arrays))

    def adopt(self, saved: Saved, offset: int) -> None:
        self._store(saved.arrays, offset)

    def snapshot(self) -> Snapshot:
        """Copy the rows that a window sees before its next token."""
        extent = self.extent
        if not isinstance(extent, Window) or not extent.seen:
            return Snapshot({}, 0)
        return _snapshot(dict(self.export_rows(extent.offset - extent.seen, extent.offset).arrays))

    def restore(self, snapshot: Snapshot, offset: int) -> None:
        self._store(snapshot.content, offset)

    def snapshot_of(self, saved: Saved, offset: int) -> Snapshot:
        rows = _count(saved.arrays)
        window = self.group.window
        if window is not None and rows != min(offset, window - 1):
            raise ValueError(f"a checkpoint at {offset} of a window of {window} has {rows} rows")
        return _snapshot(dict(saved.arrays))

    def _store(self, arrays: Mapping[str, mx.array], offset: int) -> None:
        """Replace all tokens by the rows before `offset`. Raise ValueError if they don't fit."""
        rows, window = _count(arrays), self.group.window
        least = offset if window is None else min(offset, window - 1)
        if not least <= rows <= offset:
            raise ValueError(f"{rows} rows are not those of a {self.kind} layer at {offset}")
        self.free()
        if rows:
            self.group.write(self.sequence, offset - rows, _rows(arrays))


def _arrays(rows: Rows) -> dict[str, mx.array]:
    """Return rows by names: that of a layer is "3.keys" or "3.values"."""
    named = {}
    for layer, (keys, values) in rows.items():
        named[f"{layer}.keys"], named[f"{layer}.values"] = keys, values
    return named


def _rows(arrays: Mapping[str, mx.array]) -> Rows:
    """Return named rows by layer. Raise ValueError if keys or values are missing."""
    layers = {name.partition(".")[0] for name in arrays}
    try:
        return {
            int(layer): (arrays[f"{layer}.keys"], arrays[f"{layer}.values"]) for layer in layers
        }
    except KeyError as error:
        raise ValueError(f"a layer lacks {error.args[0]}") from error


def _count(arrays: Mapping[str, mx.array]) -> int:
    """Return the number of rows. Raise ValueError unless all arrays have the same."""
    counts = {array.shape[2] if array.ndim == 4 else -1 for array in arrays.values()}
    if len(counts) > 1 or -1 in counts:
        raise ValueError(f"the arrays of a layer have {sorted(counts)} rows")
    return counts.pop() if counts else 0


def _snapshot(arrays: dict[str, mx.array]) -> Snapshot:
    return Snapshot(arrays, sum(array.nbytes for array in arrays.values()), list(arrays.values()))
