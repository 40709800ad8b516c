"""Recurrent and convolution states: they stay, undo the last forward pass, or go back through a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlxrunner.cache.arrays import contiguous, leaves, tree_bytes
from mlxrunner.cache.layer import RewindError, Snapshot
from mlxrunner.cache.layout import Layout
from mlxrunner.cache.saved import STATES, Saved
from mlxrunner.cache.stock import StockCache


class RecurrentCache(StockCache):
    """A state that is overwritten by each forward pass; the state before the last one is kept."""

    kind = STATES

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._before: tuple[int, list[Any]] = (0, [])

    def begin_forward(self) -> None:
        self._before = (self.offset, list(self.inner.cache))
        self._interrupted = True

    def end_forward(self, tokens: int) -> None:
        if tokens > 1:  # mlx-lm's models leave a view of the whole chunk
            self.inner.cache = _copies(self.inner.cache)
        super().end_forward(tokens)

    def reachable(self, to: int) -> int:
        before = self._before[0]
        if to >= self.offset and not self._interrupted:
            return self.offset
        return before if to >= before else 0

    def rewind(self, to: int) -> None:
        if not self.can_rewind(to):
            raise RewindError(self.kind, self.offset, to)
        if to == 0:
            self.free()
        elif to != self.offset or self._interrupted:
            self.inner.cache = list(self._before[1])
            self.offset = to
            self._interrupted = False

    def layouts(self) -> list[Layout]:
        return [Layout(self.kind, fixed_bytes=2 * self.nbytes, checkpoint_fixed=self.nbytes)]

    def snapshot(self) -> Snapshot:
        states = _copies(self.inner.cache)
        return Snapshot(states, tree_bytes(states), leaves(states))

    def restore(self, snapshot: Snapshot, offset: int) -> None:
        self.inner.cache = list(snapshot.content)
        self._before = (offset, list(snapshot.content))
        self.offset = offset
        self._interrupted = False

    def export(self, snapshot: Snapshot | None = None) -> Saved:
        """The states, not those before the last forward pass."""
        states = self.inner.cache if snapshot is None else snapshot.content
        return Saved(
            self.kind,
            {str(index): state for index, state in enumerate(states) if state is not None},
        )

    def adopt(self, saved: Saved, offset: int) -> None:
        self.restore(self.snapshot_of(saved, offset), offset)
        mx.eval(self.state)

    def snapshot_of(self, saved: Saved, offset: int) -> Snapshot:
        states = [saved.arrays.get(str(index)) for index in range(len(self.inner.cache))]
        return Snapshot(states, tree_bytes(states), leaves(states))

    def free(self) -> None:
        super().free()
        self._before = (0, [])


def _copies(states: Sequence[mx.array | None]) -> list[mx.array | None]:
    return [None if state is None else contiguous(state) for state in states]
