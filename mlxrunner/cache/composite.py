"""Several caches in one layer (mlx-lm's CacheList), rewound together: as far as all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from mlxrunner.cache.layer import LayerCache, RewindError, Rewinding, Snapshot, reach
from mlxrunner.cache.layout import Layout
from mlxrunner.cache.saved import Saved


class CompositeCache(Rewinding):
    """Several caches of one layer (mlx-lm's CacheList), rewound together."""

    kind = "composite"

    def __init__(self, parts: Sequence[LayerCache]) -> None:
        self.parts = list(parts)
        self._hand_over()

    def _hand_over(self) -> None:
        self.model_cache = CacheList(*(part.model_cache for part in self.parts))

    @property
    def counts_forwards(self) -> bool:
        return any(part.counts_forwards for part in self.parts)

    @property
    def offset(self) -> int:
        offsets = {part.offset for part in self.parts}
        return offsets.pop() if len(offsets) == 1 else -1

    @property
    def state(self) -> list[Any]:
        return [part.state for part in self.parts]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def used_bytes(self) -> int:
        return sum(part.used_bytes for part in self.parts)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        raise TypeError("a composite layer is written through its parts")

    def reserve(self, tokens: int) -> None:
        for part in self.parts:
            part.reserve(tokens)

    def begin_forward(self) -> None:
        for part in self.parts:
            part.begin_forward()

    def end_forward(self, tokens: int) -> None:
        for part in self.parts:
            part.end_forward(tokens)

    def reachable(self, to: int) -> int:
        return reach(self.parts, to)[0]

    def rewind(self, to: int) -> None:
        if not self.can_rewind(to):
            raise RewindError(self.kind, self.offset, to)
        for part in self.parts:
            part.rewind(to)
        self._hand_over()

    def layouts(self) -> list[Layout]:
        return [layout for part in self.parts for layout in part.layouts()]

    def pretend(self, offset: int) -> None:
        for part in self.parts:
            part.pretend(offset)

    @property
    def needs_checkpoints(self) -> bool:
        return any(part.needs_checkpoints for part in self.parts)

    def snapshot(self) -> Snapshot:
        parts = [part.snapshot() for part in self.parts]
        return Snapshot(
            parts,
            sum(part.nbytes for part in parts),
            [array for part in parts for array in part.arrays],
        )

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
        kept = zip(self.parts, snapshot.content, strict=True)
        return Saved(
            self.kind,
            parts=[
                part.export(of) if part.needs_checkpoints else Saved(part.kind) for part, of in kept
            ],
        )

    def adopt(self, saved: Saved, offset: int) -> None:
        for part, kept in zip(self.parts, saved.parts, strict=True):
            part.adopt(kept, offset)
        self._hand_over()

    def snapshot_of(self, saved: Saved, offset: int) -> Snapshot:
        parts = [
            part.snapshot_of(kept, offset)
            for part, kept in zip(self.parts, saved.parts, strict=True)
        ]
        return Snapshot(
            parts,
            sum(part.nbytes for part in parts),
            [array for part in parts for array in part.arrays],
        )

    def free(self) -> None:
        for part in self.parts:
            part.free()
        self._hand_over()
