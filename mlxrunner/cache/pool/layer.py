"""One sequence of a group of shared cells, as the layer cache of a prefix-cache entry.

It stands for all layers of the group at once, because their cells have the same bookkeeping.
Windows are checkpointed by copies of their rows; everything else is shared by reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from mlxrunner.cache.layers.extents import Everything, Extent, Window
from mlxrunner.cache.layers.layout import Layout
from mlxrunner.cache.layers.protocol import LayerCache, Snapshot
from mlxrunner.cache.pool.causal import CausalCache, Rows
from mlxrunner.cache.pool.interface import END
from mlxrunner.cache.saved import Saved


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
        """Bytes of the cells that only this sequence owns."""
        return self.group.row_bytes * self.group.num_own(self.sequence)

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
