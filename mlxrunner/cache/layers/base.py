"""The base class of a layer cache that holds a few arrays, and helpers for trees of arrays.

A kind names its arrays (`arrays`) and replaces them (`fill`). Checkpoints, saved sessions, sizes
and the memory plan follow from these two. A kind with buffers overrides the methods that it can do
better.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxrunner.cache.protocol import LayerCache, Layout, Snapshot
from mlxrunner.cache.saved import Saved


class ArrayCache(LayerCache):
    """A layer cache whose content is a few named arrays.

    A kind defines `kind`, `extent`, `arrays`, `fill` and `go_back`, and the methods that its model
    calls.
    """

    @abstractmethod
    def arrays(self) -> dict[str, mx.array]:
        """Return the arrays that store `offset` tokens, by name, without rows that were trimmed.

        They may be views of buffers: callers copy them before the next forward pass.
        """

    @abstractmethod
    def fill(self, arrays: Mapping[str, mx.array], offset: int) -> None:
        """Replace the content by `arrays`, as the method of that name returned them at `offset`.

        An `offset` of 0, with no arrays, empties the cache. Never write to the given arrays: a
        checkpoint keeps them. Raise ValueError if they do not hold `offset` tokens.
        """

    @property
    def saved_kind(self) -> str:
        """The name of this kind in saved sessions."""
        return self.kind

    @property
    def state(self) -> Any:
        return list(self.arrays().values())

    @property
    def nbytes(self) -> int:
        return tree_bytes(self.state)

    def free(self) -> None:
        self.fill({}, 0)

    def layouts(self) -> list[Layout]:
        """Return a layout that grows with the context; a checkpoint copies all of it."""
        rows, most = max(1, self.offset), 2**31 if self.needs_checkpoints else 0
        row_bytes, twice = self.nbytes // rows, 0 if self.extent.undoes_a_pass else most
        return [Layout(self.kind, row_bytes, checkpoint_rows=most, draft_rows=twice)]

    def snapshot(self) -> Snapshot:
        if not self.needs_checkpoints:
            return Snapshot(None, 0)
        return _snapshot({name: contiguous(array) for name, array in self.arrays().items()})

    def restore(self, snapshot: Snapshot, offset: int) -> None:
        if self.needs_checkpoints:
            self.fill(snapshot.content, offset)
        else:
            self.rewind(offset)

    def export(self, snapshot: Snapshot | None = None) -> Saved:
        return Saved(self.saved_kind, self.arrays() if snapshot is None else snapshot.content)

    def adopt(self, saved: Saved, offset: int) -> None:
        self.fill(saved.arrays, offset)
        mx.eval(self.state)

    def snapshot_of(self, saved: Saved, offset: int) -> Snapshot:
        return _snapshot(dict(saved.arrays)) if self.needs_checkpoints else Snapshot(None, 0)


def _snapshot(arrays: dict[str, mx.array]) -> Snapshot:
    return Snapshot(arrays, tree_bytes(arrays), leaves(arrays))


def leaves(tree: Any) -> list[mx.array]:
    """Return all arrays in nested lists, tuples and dicts."""
    pairs: Any = tree_flatten(tree)
    return [leaf for _, leaf in pairs if isinstance(leaf, mx.array)]


def tree_bytes(tree: Any) -> int:
    """Return the bytes of all arrays in the tree."""
    return sum(leaf.nbytes for leaf in leaves(tree))


def contiguous(array: mx.array) -> mx.array:
    """Return a copy if `array` is a view, so that the array behind the view can be freed."""
    return mx.contiguous(array)
