"""Several caches in one layer (mlx-lm's CacheList), rewound together to a common offset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_lm.models.cache import CacheList

from mlxrunner.cache.layers.extents import CompositeExtent, Extent
from mlxrunner.cache.layers.protocol import LayerCache, Layout, Saved, Snapshot


class CompositeCache(LayerCache):
    """Several caches of one layer. The model writes to each part separately."""

    kind = "composite"
    parts: Sequence[LayerCache] = ()
    model_cache: Any = None

    def __init__(self, parts: Sequence[LayerCache]) -> None:
        self.parts = list(parts)
        self.counts_forwards = any(part.counts_forwards for part in parts)
        self.outline_after = sorted({count for part in parts for count in part.outline_after})
        self._hand_over()

    def _hand_over(self) -> None:
        """Read the parts' caches again: a part may have another one after a rewind."""
        self.model_cache = CacheList(*(part.model_cache for part in self.parts))

    @property
    def extent(self) -> Extent:
        return CompositeExtent.of([part.extent for part in self.parts])

    @property
    def state(self) -> list[Any]:
        return [part.state for part in self.parts]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def used_bytes(self) -> int:
        return sum(part.used_bytes for part in self.parts)

    def reserve(self, tokens: int) -> None:
        for part in self.parts:
            part.reserve(tokens)

    def begin_forward(self) -> None:
        for part in self.parts:
            part.begin_forward()

    def end_forward(self, tokens: int) -> None:
        for part in self.parts:
            part.end_forward(tokens)

    def go_back(self, to: int) -> None:
        for part in self.parts:
            part.rewind(to)
        self._hand_over()

    def free(self) -> None:
        for part in self.parts:
            part.free()
        self._hand_over()

    def layouts(self) -> list[Layout]:
        return [layout for part in self.parts for layout in part.layouts()]

    def pretend(self, offset: int) -> None:
        for part in self.parts:
            part.pretend(offset)

    def narrowed(self, window: int) -> CompositeCache:
        return CompositeCache([part.narrowed(window) for part in self.parts])

    def snapshot(self) -> Snapshot:
        return _together([part.snapshot() for part in self.parts])

    def restore(self, snapshot: Snapshot, offset: int) -> None:
        for part, kept in zip(self.parts, snapshot.content, strict=True):
            if part.needs_checkpoints:
                part.restore(kept, offset)
            else:
                part.rewind(offset)
        self._hand_over()

    def export(self, snapshot: Snapshot | None = None) -> Saved:
        if snapshot is None:
            return Saved(self.kind, parts=[part.export() for part in self.parts])
        pairs = zip(self.parts, snapshot.content, strict=True)
        kept = [
            part.export(one) if part.needs_checkpoints else Saved(part.kind) for part, one in pairs
        ]
        return Saved(self.kind, parts=kept)

    def adopt(self, saved: Saved, offset: int) -> None:
        for part, kept in zip(self.parts, saved.parts, strict=True):
            part.adopt(kept, offset)
        self._hand_over()

    def copy(self, other: LayerCache, to: int) -> None:
        for part, source in zip(self.parts, other.parts, strict=True):
            part.copy(source, to)
        self._hand_over()

    def copy_checkpoint(self, other: LayerCache, snapshot: Snapshot, to: int) -> None:
        """Restore the parts that need it; the others still have the tokens before `to`."""
        for part, source, kept in zip(self.parts, other.parts, snapshot.content, strict=True):
            if source.can_rewind(to):
                part.copy(source, to)
            else:
                part.copy_checkpoint(source, kept, to)
        self._hand_over()

    def snapshot_of(self, saved: Saved, offset: int) -> Snapshot:
        pairs = zip(self.parts, saved.parts, strict=True)
        return _together([part.snapshot_of(kept, offset) for part, kept in pairs])

    def to_mlx_lm(self, saved: Saved, offset: int) -> CacheList:
        pairs = zip(self.parts, saved.parts, strict=True)
        return CacheList(*(part.to_mlx_lm(one, offset) for part, one in pairs))

    def from_mlx_lm(self, inner: Any) -> Saved:
        if type(inner) is not CacheList:
            return super().from_mlx_lm(inner)
        pairs = zip(self.parts, inner.caches, strict=True)
        return Saved(self.kind, parts=[part.from_mlx_lm(one) for part, one in pairs])


def _together(parts: list[Snapshot]) -> Snapshot:
    arrays = [array for part in parts for array in part.arrays]
    return Snapshot(parts, sum(part.nbytes for part in parts), arrays)
