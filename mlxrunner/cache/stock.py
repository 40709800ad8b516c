"""mlx-lm's own layer cache behind the LayerCache protocol, for every kind that has no file of its own here.

Of a kind that nobody knows it can only be said that it may stay as it is; further back it goes through a checkpoint, a copy of it.
"""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from mlxrunner.cache.arrays import leaves, tree_bytes
from mlxrunner.cache.layer import RewindError, Rewinding, Snapshot
from mlxrunner.cache.layout import Layout
from mlxrunner.cache.saved import Saved


class StockCache(Rewinding):
    """A layer cache of mlx-lm, its tokens counted from outside: what it says of itself is not always so."""

    kind = "unknown"
    counts_forwards = True
    needs_checkpoints = True

    def __init__(self, inner: Any) -> None:
        self._pristine = copy.deepcopy(inner)
        self.inner = inner
        self.offset = 0
        self._interrupted = False

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

    @property
    def used_bytes(self) -> int:
        return self.nbytes

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        fetched: tuple[mx.array, mx.array] = self.inner.update_and_fetch(keys, values)
        return fetched

    def reserve(self, tokens: int) -> None: ...

    def begin_forward(self) -> None:
        self._interrupted = True

    def end_forward(self, tokens: int) -> None:
        self.offset += tokens
        self._interrupted = False

    def reachable(self, to: int) -> int:
        return self.offset if to >= self.offset and not self._interrupted else 0

    def rewind(self, to: int) -> None:
        if to == 0:
            self.free()
        elif not self.can_rewind(to):
            raise RewindError(self.kind, self.offset, to)

    def layouts(self) -> list[Layout]:
        # Of an unknown kind it is only known what it has allocated: taken as growing with the context, in steps like mlx-lm's.
        rows = max(self.offset, getattr(self.inner, "step", 1))
        return [Layout(self.kind, row_bytes=self.nbytes // max(1, rows), checkpoint_rows=2**31)]

    def pretend(self, offset: int) -> None: ...

    def snapshot(self) -> Snapshot:
        kept = copy.deepcopy(self.inner)
        return Snapshot(kept, self.nbytes, leaves(self.state))

    def restore(self, snapshot: Snapshot, offset: int) -> None:
        self.inner = copy.deepcopy(snapshot.content)
        self.offset = offset
        self._interrupted = False

    def export(self, snapshot: Snapshot | None = None) -> Saved:
        inner = self.inner if snapshot is None else snapshot.content
        found: Any = dict(
            tree_flatten(self._cut(inner) if _has_settable_state(inner) else vars(inner))
        )
        arrays = {name: leaf for name, leaf in found.items() if isinstance(leaf, mx.array)}
        return Saved(
            type(inner).__name__,
            arrays,
            {name: leaf for name, leaf in found.items() if name not in arrays},
        )

    def _cut(self, inner: Any) -> Any:
        """The state of `inner` without rows that were trimmed. Of an unknown kind no row ever is."""
        return inner.state

    def adopt(self, saved: Saved, offset: int) -> None:
        self.restore(self.snapshot_of(saved, offset), offset)
        mx.eval(self.state)

    def snapshot_of(self, saved: Saved, offset: int) -> Snapshot:
        inner = copy.deepcopy(self._pristine)
        content = tree_unflatten([*saved.arrays.items(), *saved.numbers.items()])
        if _has_settable_state(inner):
            inner.state = content
        else:
            vars(inner).update(content)
        if getattr(inner, "offset", offset) != offset:
            raise ValueError(f"a {saved.kind} is at {inner.offset} instead of {offset}")
        return Snapshot(inner, tree_bytes(inner.state), leaves(inner.state))

    def free(self) -> None:
        self.inner = copy.deepcopy(self._pristine)
        self.offset = 0
        self._interrupted = False


def _has_settable_state(inner: Any) -> bool:
    """As mlx-lm's own caches have; of one that a model brings (DeepSeek-V4.1), what its attributes hold is all there is."""
    state = getattr(type(inner), "state", None)
    return not isinstance(state, property) or state.fset is not None
