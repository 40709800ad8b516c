"""mlx-lm's own layer caches behind the LayerCache protocol, for kinds without a file here.

A cache of unknown kind can only stay at its offset. A checkpoint, which is a copy of it, takes it
further back. Chunked attention, and windows that keep their first tokens, can be trimmed as long as
enough is stored.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import ChunkedKVCache, RotatingKVCache

from mlxrunner.cache.layers.base import leaves, tree_bytes
from mlxrunner.cache.layers.extents import ChunkExtent, Extent, Filling, Stay, Torn
from mlxrunner.cache.layers.protocol import LayerCache, Layout, Saved, Snapshot
from mlxrunner.system.mlx_lm_internals import has_settable_state, is_stock_cache


class StockCache(LayerCache):
    """A layer cache of mlx-lm, with a token count of its own.

    The count of the wrapped cache is sometimes wrong.
    """

    kind = "unknown"
    offset: int = 0

    def __init__(self, inner: Any) -> None:
        """Wrap `inner`, a new layer cache of mlx-lm."""
        self._pristine = copy.deepcopy(inner)
        self.inner = inner
        self._interrupted = False
        if is_stock_cache(inner):
            self.outline_after = (1, 2, 3, 7)

    @property
    def extent(self) -> Extent:
        return Torn(self.offset) if self._interrupted else self._extent()

    def _extent(self) -> Extent:
        return Stay(self.offset)

    @property
    def model_cache(self) -> Any:
        return self.inner

    @property
    def state(self) -> Any:
        # An mlx-lm cache before its first token may have no arrays to show.
        return [] if self.offset == 0 else self.inner.state

    @property
    def nbytes(self) -> int:
        return tree_bytes(self.state)

    def begin_forward(self) -> None:
        self._interrupted = True

    def end_forward(self, tokens: int) -> None:
        self.offset += tokens
        self._interrupted = False

    def go_back(self, to: int) -> None:
        """Do nothing: an unknown kind can't drop tokens, and `to` is always its offset."""

    def layouts(self) -> list[Layout]:
        # Only the allocated bytes of an unknown kind are known. They are taken to grow with the
        # context, in steps like mlx-lm's.
        rows, every = max(self.offset, getattr(self.inner, "step", 1)), 2**31
        twice = 0 if self._extent().undoes_a_pass else every
        row_bytes = self.nbytes // max(1, rows)
        return [Layout(self.kind, row_bytes, checkpoint_rows=every, draft_rows=twice)]

    def snapshot(self) -> Snapshot:
        return Snapshot(copy.deepcopy(self.inner), self.nbytes, leaves(self.state))

    def restore(self, snapshot: Snapshot, offset: int) -> None:
        self._become(copy.deepcopy(snapshot.content), offset)

    def free(self) -> None:
        self._become(copy.deepcopy(self._pristine), 0)

    def _become(self, inner: Any, offset: int) -> None:
        self.inner = inner
        self.offset = offset
        self._interrupted = False

    def export(self, snapshot: Snapshot | None = None) -> Saved:
        return self._saved(self.inner if snapshot is None else snapshot.content)

    def _saved(self, inner: Any) -> Saved:
        content = self._cut(inner) if has_settable_state(inner) else vars(inner)
        found: Any = dict(tree_flatten(content))
        arrays = {name: leaf for name, leaf in found.items() if isinstance(leaf, mx.array)}
        numbers = {name: leaf for name, leaf in found.items() if name not in arrays}
        return Saved(type(inner).__name__, arrays, numbers)

    def _cut(self, inner: Any) -> Any:
        """Return the state of `inner` without trimmed rows. An unknown kind has none."""
        return inner.state

    def adopt(self, saved: Saved, offset: int) -> None:
        self.restore(self.snapshot_of(saved, offset), offset)
        mx.eval(self.state)

    def snapshot_of(self, saved: Saved, offset: int) -> Snapshot:
        inner = copy.deepcopy(self._pristine)
        content = tree_unflatten([*saved.arrays.items(), *saved.numbers.items()])
        if has_settable_state(inner):
            inner.state = content
        else:
            vars(inner).update(content)
        if getattr(inner, "offset", offset) != offset:
            raise ValueError(f"a {saved.kind} is at {inner.offset} instead of {offset}")
        return Snapshot(inner, tree_bytes(inner.state), leaves(inner.state))

    def to_mlx_lm(self, saved: Saved, offset: int) -> Any:
        self.inner.state = tree_unflatten([*saved.arrays.items(), *saved.numbers.items()])
        return self.inner

    def from_mlx_lm(self, inner: Any) -> Saved:
        if type(inner) is not type(self.inner):
            return super().from_mlx_lm(inner)
        return self._saved(inner)


class TrimmableCache(StockCache):
    """A layer cache that can be trimmed as long as no tokens were dropped at its front."""

    def __init__(self, inner: Any, kind: str, extent: Callable[[Any, int], Extent]) -> None:
        """Wrap `inner`. `extent(inner, offset)` returns the tokens that it stores."""
        super().__init__(inner)
        self.kind, self._extent_of = kind, extent

    def _extent(self) -> Extent:
        return self._extent_of(self.inner, self.offset)

    def _cut(self, inner: Any) -> Any:
        keys, values, *numbers = inner.state
        rows = inner.offset - getattr(inner, "start_position", 0)
        return keys[..., :rows, :], values[..., :rows, :], *numbers

    def go_back(self, to: int) -> None:
        surplus = self.offset - to
        trimmed = self.inner.trim(surplus) if surplus else 0
        # If it trimmed another number, or its own count disagrees, -1 frees the entry.
        self.offset = to if trimmed == surplus and self.inner.offset == to else -1


def chunked(inner: ChunkedKVCache) -> TrimmableCache:
    """Wrap the cache of attention within chunks, as in Llama 4."""

    def extent(inner: ChunkedKVCache, offset: int) -> Extent:
        return ChunkExtent(offset, first=inner.start_position, window=inner.chunk_size)

    return TrimmableCache(inner, "chunked", extent)


def sinks(inner: RotatingKVCache) -> TrimmableCache:
    """Wrap the cache of a window that keeps its first tokens."""

    def extent(inner: RotatingKVCache, offset: int) -> Extent:
        return Filling(offset, window=inner.max_size)

    return TrimmableCache(inner, "sliding", extent)
