"""mlx-lm's own layer caches behind the LayerCache protocol, honest about how far each can be rewound without a checkpoint.

- recurrent states (ArraysCache): stay, or undo the last forward pass, whose arrays are kept (no copy)
- chunked attention (ChunkedKVCache): to wherever the chunk of the next token is still stored from its beginning
- sliding windows that keep their first tokens (RotatingKVCache with keep): anywhere until the window has wrapped; then only stay
- several caches in one layer (CacheList): as far as all of its parts
- anything else: stay

Further back, each goes through a checkpoint: a copy of its state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, RotatingKVCache

from mlxrunner.cache.arrays import contiguous, leaves, tree_bytes
from mlxrunner.cache.layer import LayerCache, RewindError, Rewinding, Snapshot, reach
from mlxrunner.cache.layout import Layout


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

    def free(self) -> None:
        self.inner = copy.deepcopy(self._pristine)
        self.offset = 0
        self._interrupted = False


class RecurrentCache(StockCache):
    """A state that is overwritten by each forward pass; the state before the last one is kept."""

    kind = "recurrent"

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

    def free(self) -> None:
        super().free()
        self._before = (0, [])


def _copies(states: Sequence[mx.array | None]) -> list[mx.array | None]:
    return [None if state is None else contiguous(state) for state in states]


class TrimmableCache(StockCache):
    """A layer cache that can be trimmed as long as nothing has been dropped at its front."""

    def __init__(self, inner: Any, kind: str, holds_enough: Callable[[Any, int], bool]) -> None:
        """`holds_enough(inner, to)`: whether everything that a query at `to` sees is still stored."""
        super().__init__(inner)
        self.kind, self._holds_enough = kind, holds_enough

    def reachable(self, to: int) -> int:
        if self._interrupted or to >= self.offset or not self._holds_enough(self.inner, to):
            return super().reachable(to)
        return to

    def rewind(self, to: int) -> None:
        if not self.can_rewind(to):
            raise RewindError(self.kind, self.offset, to)
        if to == 0:
            self.free()
            return
        surplus = self.offset - to
        trimmed = self.inner.trim(surplus) if surplus else 0
        # Another number than asked for, or a count of its own that disagrees: the entry is freed, never used.
        self.offset = to if trimmed == surplus and self.inner.offset == to else -1


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
        return Snapshot(parts, sum(part.nbytes for part in parts), [array for part in parts for array in part.arrays])

    def restore(self, snapshot: Snapshot, offset: int) -> None:
        for part, kept in zip(self.parts, snapshot.content, strict=True):
            if part.needs_checkpoints:
                part.restore(kept, offset)
            else:
                part.rewind(offset)
        self._hand_over()

    def free(self) -> None:
        for part in self.parts:
            part.free()
        self._hand_over()


def wrap(inner: Any) -> LayerCache:
    """The LayerCache that looks after a new mlx-lm layer cache of a kind that has none of our own."""
    if type(inner) is ArraysCache:
        return RecurrentCache(inner)
    if type(inner) is RotatingKVCache:
        return TrimmableCache(inner, "sliding", lambda cache, to: cache.offset < cache.max_size)
    if type(inner) is ChunkedKVCache:
        return TrimmableCache(inner, "chunked", lambda cache, to: cache.start_position <= to - to % cache.chunk_size)
    return StockCache(inner)
