"""The buffers of keys and values, and rows written to and read from their cells."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlxrunner.cache.shared.runs import Run, runs
from mlxrunner.cache.shared.sight import Ints

MANY_RUNS = 64
"""Number of runs beyond which one gather is faster than a slice for each run."""
SOME_RUNS, SHORT = 4, 8
"""More than SOME_RUNS runs, on average shorter than SHORT cells, are written by one scatter.

That is faster than a slice for each run.
"""


class Places:
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

    def write(self, places: Places, keys: mx.array, values: mx.array) -> None:
        places.put(self.keys, keys.astype(self.keys.dtype))
        places.put(self.values, values.astype(self.values.dtype))

    def read(self, run: Run) -> tuple[mx.array, mx.array]:
        return self.keys[..., run.begin : run.end, :], self.values[..., run.begin : run.end, :]


def _stride(cells: Ints) -> slice | None:
    """Return `cells` as a slice if each has the same distance to the one before."""
    first, last, by = int(cells[0]), int(cells[-1]), int(cells[1] - cells[0])
    if by < 1 or (cells[1:] - cells[:-1] != by).any():
        return None
    return slice(first, last + 1, by)


def read(buffer: mx.array, cells: Ints) -> mx.array:
    """Return an evaluated copy of these rows: a view would make the next write copy the buffer."""
    found = runs(cells)
    if len(found) > MANY_RUNS:
        rows = mx.take(buffer, mx.array(cells), axis=2)
    else:
        rows = mx.contiguous(
            mx.concatenate(
                [buffer[..., run.begin : run.end, :] for run in found or [Run(0, 0)]], axis=2
            )
        )
    mx.eval(rows)
    return rows


def write(buffer: mx.array, cells: Ints, rows: mx.array) -> None:
    Places(cells).put(buffer, rows)
    mx.eval(buffer)
