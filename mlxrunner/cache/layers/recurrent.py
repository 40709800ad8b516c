"""The layer cache of recurrent and convolution states.

It can stay at its offset, undo the last forward pass, or go back through a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from mlxrunner.cache.layers.base import ArrayCache, contiguous, leaves
from mlxrunner.cache.layers.extents import Extent, LastPass
from mlxrunner.cache.layers.layout import Layout
from mlxrunner.cache.layers.protocol import LayerCache
from mlxrunner.cache.saved import STATES, Saved

States = list[mx.array | None]


class RecurrentCache(ArrayCache):
    """A state that each forward pass overwrites. The state before the last pass is kept."""

    kind = STATES
    outline_after = (1, 2, 3, 7)
    offset: int = 0

    def __init__(self, inner: ArraysCache) -> None:
        """Wrap `inner`, a new ArraysCache of mlx-lm."""
        self.inner = inner
        self._empty: States = list(inner.cache)
        self._before: tuple[int, States] = (0, self._empty)

    @property
    def model_cache(self) -> ArraysCache:
        return self.inner

    @property
    def extent(self) -> Extent:
        return LastPass(self.offset, self._before[0])

    @property
    def state(self) -> Any:
        return leaves(self.inner.cache)

    def begin_forward(self) -> None:
        self._before = (self.offset, list(self.inner.cache))

    def end_forward(self, tokens: int) -> None:
        if tokens > 1:  # mlx-lm's models leave a view of the whole chunk
            self.inner.cache = [
                None if state is None else contiguous(state) for state in self.inner.cache
            ]
        self.offset += tokens

    def go_back(self, to: int) -> None:
        """Undo the last pass, also one that never ended and left the offset where it was."""
        before, states = self._before
        if to == before:
            self.inner.cache = list(states)
            self.offset = to

    def layouts(self) -> list[Layout]:
        return [Layout(self.kind, fixed_bytes=2 * self.nbytes, checkpoint_fixed=self.nbytes)]

    def arrays(self) -> dict[str, mx.array]:
        """Return the present states, without those before the last forward pass."""
        states = enumerate(self.inner.cache)
        return {str(index): state for index, state in states if state is not None}

    def fill(self, arrays: Mapping[str, mx.array], offset: int) -> None:
        states = [arrays.get(str(index)) for index in range(len(self._empty))]
        self.inner.cache = states if offset else list(self._empty)
        self._before = (offset, list(self.inner.cache))
        self.offset = offset

    def copy(self, other: LayerCache, to: int) -> None:
        """Take the state of `other` at `to`: the present one, or that before its last pass."""
        assert isinstance(other, RecurrentCache)
        states = other.inner.cache if to == other.offset else other._before[1]
        self._before = (to, list(states))
        self.inner.cache, self.offset = list(states), to

    def to_mlx_lm(self, saved: Saved, offset: int) -> ArraysCache:
        self.fill(saved.arrays, offset)
        return self.inner

    def from_mlx_lm(self, inner: Any) -> Saved:
        if type(inner) is not type(self.inner):
            return super().from_mlx_lm(inner)
        states = enumerate(inner.cache)
        return Saved(self.kind, {str(index): state for index, state in states if state is not None})
