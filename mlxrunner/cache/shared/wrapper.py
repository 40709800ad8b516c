"""Several caches in one, for models with several kinds of layers: windows beside full attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxrunner.cache.shared.sequences import END, Batch, Cache, Commit, Lifecycle

if TYPE_CHECKING:
    import mlx.core as mx


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
