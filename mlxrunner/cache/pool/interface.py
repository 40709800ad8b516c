"""The interface of a cache for several sequences at once, its batches, and several caches in one.

No tensors here.

All tokens of a step, of all sequences, go through the model as one row. Keys and values are `[1,
kv_heads, n, head_dim]`. Positions and sequences are given per token. A sequence is a number from 0
to `max_sequences - 1`. The interface is that of the Ollama runner's kvcache package. Operations
that may fail have two phases: the first computes everything, the second applies it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mlx.core as mx


END = 2**31 - 1
"""The end of a range of positions that reaches to the end of the sequence."""

Commit = Callable[[], None]
"""A function that applies a computed change. Call it at once or not at all."""


@dataclass(frozen=True)
class Batch:
    """The tokens of one forward pass."""

    positions: Sequence[int]
    """The position of each token."""
    sequences: Sequence[int]
    """The sequence of each token."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "positions", tuple(map(int, self.positions)))
        object.__setattr__(self, "sequences", tuple(map(int, self.sequences)))
        n = len(self.positions)
        if n == 0 or n != len(self.sequences):
            raise ValueError(
                f"{n} positions and {len(self.sequences)} sequences: "
                "give one of each per token, for at least one token"
            )
        if min(self.positions) < 0 or max(self.positions) >= END:
            raise ValueError(
                f"positions have to be in 0 .. {END - 1}, "
                f"not {min(self.positions)} .. {max(self.positions)}"
            )

    def __len__(self) -> int:
        return len(self.positions)

    @cached_property
    def by_sequence(self) -> dict[int, list[int]]:
        """The indices of each sequence's tokens."""
        found: dict[int, list[int]] = {}
        for index, sequence in enumerate(self.sequences):
            found.setdefault(sequence, []).append(index)
        return found

    @cached_property
    def is_plain(self) -> bool:
        """True if the tokens follow each other in one sequence."""
        first = self.positions[0]
        in_order = self.positions == tuple(range(first, first + len(self)))
        return in_order and len(self.by_sequence) == 1


class Cache(ABC):
    """Keys and values of several sequences.

    Call the methods in this order: `init`, then for each forward pass
    `start_forward` and, for each layer, `set_layer`, `put`, `get`; between passes `copy_prefix`,
    `can_resume`, `remove`; at the end `close`. Calls out of order raise RuntimeError, and arguments
    out of range raise ValueError. A call that raises changes nothing.
    """

    @abstractmethod
    def init(self, dtype: mx.Dtype, max_sequences: int, capacity: int, max_batch: int) -> None:
        """Fix all sizes, once.

        `capacity`: tokens per sequence. `max_batch`: tokens per forward pass over all sequences.
        The first `put` of each layer allocates its tensors of type `dtype` as a whole. They never
        grow.
        """

    @abstractmethod
    def start_forward(self, batch: Batch, reserve: bool = False) -> None:
        """Find room for the batch and build its mask, once for all layers.

        `reserve`: a pass of the worst-case shapes (the whole cache is the history) that allocates
        the tensors and stores nothing. Raise CacheFullError if there is no room.
        """

    def undo_forward(self) -> None:  # noqa: B027 -- nothing to undo unless a cache says so
        """Undo a successful `start_forward`. Do nothing if that was not the last call."""

    @abstractmethod
    def set_layer(self, layer: int) -> None:
        """Choose the layer for the next `put` and `get`."""

    @abstractmethod
    def put(self, keys: mx.array, values: mx.array) -> None:
        """Store `keys` and `values [1, kv_heads, n, head_dim]` of the batch in the current layer.

        Raise ValueError unless `n` is the number of tokens given to `start_forward`.
        """

    @abstractmethod
    def get(self) -> tuple[mx.array, mx.array, mx.array | None]:
        """Return keys and values of the history, and the mask `[n_tokens, history]`.

        The mask is True where a token may attend. Don't keep the results: as long as a view of a
        buffer is alive, each write to the buffer copies all of it.
        """

    @abstractmethod
    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Set the sequence `target` to the tokens of `source` at positions < `length`.

        Both sequences share these tokens: nothing is copied.
        """

    @abstractmethod
    def can_resume(self, sequence: int, position: int) -> bool:
        """Return True if all tokens that a query at `position` may see are stored.

        Return False if `position` is beyond the end of the sequence.
        """

    @abstractmethod
    def remove(self, sequence: int, begin: int, end: int = END) -> None:
        """Drop the tokens at positions `begin .. end - 1`.

        Unless `end` is END, the tokens behind move up by `end - begin`. Raise NotSupportedError if
        keys can't be moved, and CacheFullError if there is no room to copy shared tokens.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the storage. A second call is allowed."""

    def prepare_copy_prefix(self, source: int, target: int, length: int) -> Commit:
        """Return the second phase of `copy_prefix`, or raise the errors of `copy_prefix`.

        The second phase should not fail. By default it is all of `copy_prefix`.
        """
        return partial(self.copy_prefix, source, target, length)

    def prepare_remove(self, sequence: int, begin: int, end: int = END) -> Commit:
        """Return the second phase of `remove`, or raise the errors of `remove`.

        The second phase should not fail. By default it is all of `remove`.
        """
        return partial(self.remove, sequence, begin, end)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return 0


class Lifecycle:
    """The order of calls for all caches: initialize once, close."""

    def __init__(self) -> None:
        self._is_initialized = self._is_closed = False

    def initialize(self, **sizes: int) -> None:
        """Check the sizes. Raise RuntimeError if called twice, ValueError for a size below 1."""
        self._check_open()
        if self._is_initialized:
            raise RuntimeError("init was called twice: make another cache")
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} has to be at least 1, not {size}")
        self._is_initialized = True

    def check(self) -> None:
        """Raise RuntimeError unless the cache is initialized and open."""
        self._check_open()
        if not self._is_initialized:
            raise RuntimeError("the cache was not initialized: call init first")

    def close(self) -> None:
        """Refuse all further calls."""
        self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the cache was closed: make another one")


class WrapperCache(Cache):
    """Several caches as one.

    Every call goes to all of them, or to none if one refuses. `put` and `get` go to the cache of
    the layer's type. A wrapper of no caches stores nothing and has room for everything.
    """

    def __init__(self, *caches: Cache) -> None:
        self.caches = caches
        self._type = 0
        self._is_fresh = False
        self._lifecycle = Lifecycle()

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)

    def set_layer_type(self, index: int) -> None:
        """Choose the cache for the next `put` and `get`: its index in the constructor's arguments.

        Raise ValueError if there is no such cache.
        """
        if not 0 <= index < len(self.caches):
            raise ValueError(
                f"there is no layer type {index}: "
                f"the wrapper has {len(self.caches)} caches, counted from 0"
            )
        self._type = index

    def init(self, dtype: mx.Dtype, max_sequences: int, capacity: int, max_batch: int) -> None:
        """Initialize all caches. If one raises, close all: none has been used yet."""
        self._lifecycle.initialize(
            max_sequences=max_sequences, capacity=capacity, max_batch=max_batch
        )
        try:
            for cache in self.caches:
                cache.init(dtype, max_sequences, capacity, max_batch)
        except BaseException:
            self.close()
            raise

    def start_forward(self, batch: Batch, reserve: bool = False) -> None:
        self._is_fresh = False
        started: list[Cache] = []
        try:
            for cache in self.caches:
                cache.start_forward(batch, reserve)
                started.append(cache)
        except BaseException:
            for cache in reversed(started):
                cache.undo_forward()
            raise
        self._is_fresh = True

    def undo_forward(self) -> None:
        """Undo `start_forward` in all caches, or in none once a cache has been written to."""
        if self._is_fresh:
            for cache in reversed(self.caches):
                cache.undo_forward()
        self._is_fresh = False

    def set_layer(self, layer: int) -> None:
        for cache in self.caches:
            cache.set_layer(layer)

    def put(self, keys: mx.array, values: mx.array) -> None:
        self._is_fresh = False
        self.caches[self._type].put(keys, values)

    def get(self) -> tuple[mx.array, mx.array, mx.array | None]:
        return self.caches[self._type].get()

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        self.prepare_copy_prefix(source, target, length)()

    def prepare_copy_prefix(self, source: int, target: int, length: int) -> Commit:
        return _all([cache.prepare_copy_prefix(source, target, length) for cache in self.caches])

    def can_resume(self, sequence: int, position: int) -> bool:
        return all(cache.can_resume(sequence, position) for cache in self.caches)

    def remove(self, sequence: int, begin: int, end: int = END) -> None:
        self.prepare_remove(sequence, begin, end)()

    def prepare_remove(self, sequence: int, begin: int, end: int = END) -> Commit:
        return _all([cache.prepare_remove(sequence, begin, end) for cache in self.caches])

    def close(self) -> None:
        self._lifecycle.close()
        for cache in self.caches:
            cache.close()


def _all(commits: list[Commit]) -> Commit:
    def commit() -> None:
        for each in commits:
            each()

    return commit
