"""The full-attention layer cache: one buffer for keys, one for values, written in place, rewound by moving the offset."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import create_attention_mask

from mlxrunner.cache.arrays import contiguous, leaves, tree_bytes
from mlxrunner.cache.layer import RewindError, Rewinding, Snapshot
from mlxrunner.cache.layout import Layout
from mlxrunner.cache.saved import Saved

STEP = 256


class OffsetCache(Rewinding, ABC):
    """A layer that stores every token in buffers with a row per token: the offset says how many count.

    It speaks mlx-lm's layer-cache protocol. The offset is the last thing that a write changes: an interrupted write left nothing but
    unused rows.
    """

    kind = "full"
    counts_forwards = False
    needs_checkpoints = False

    def __init__(self, context: int | None = None) -> None:
        """`context`: tokens to make room for at the first write, once and for all; None: the buffers grow."""
        self.keys: Any = None
        self.values: Any = None
        self.offset = 0
        self._context = context

    @abstractmethod
    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]: ...

    @property
    def model_cache(self) -> OffsetCache:
        return self

    @property
    def capacity(self) -> int:
        """Tokens that fit without another allocation."""
        return 0 if self.keys is None else leaves(self.keys)[0].shape[2]

    @property
    def state(self) -> list[Any]:
        return [] if self.keys is None else [self.keys, self.values]

    @property
    def nbytes(self) -> int:
        return tree_bytes(self.state)

    @property
    def used_bytes(self) -> int:
        return self.nbytes * self.offset // self.capacity if self.capacity else 0

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Any:
        return create_attention_mask(n, self.offset, return_array, window_size)

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.keys is None

    def reserve(self, tokens: int) -> None: ...

    def begin_forward(self) -> None: ...

    def end_forward(self, tokens: int) -> None: ...

    def reachable(self, to: int) -> int:
        return min(to, self.offset)

    def rewind(self, to: int) -> None:
        if not self.can_rewind(to):
            raise RewindError(self.kind, self.offset, to)
        self.offset = to
        if to == 0:
            self.free()

    def layouts(self) -> list[Layout]:
        return [Layout(self.kind, row_bytes=self.nbytes // max(1, self.capacity))]

    def pretend(self, offset: int) -> None:
        self.offset = offset

    def snapshot(self) -> Snapshot:
        return Snapshot(None, 0)

    def restore(self, snapshot: Snapshot, offset: int) -> None:
        self.rewind(offset)

    @abstractmethod
    def export(self, snapshot: Snapshot | None = None) -> Saved: ...

    @abstractmethod
    def adopt(self, saved: Saved, offset: int) -> None: ...

    def snapshot_of(self, saved: Saved, offset: int) -> Snapshot:
        return Snapshot(None, 0)

    def free(self) -> None:
        """A buffer for the whole context stays: it was planned for."""
        self.offset = 0
        if self._context is None:
            self.keys = self.values = None


class FullAttentionCache(OffsetCache):
    """Keys and values of every token, `[1, kv_heads, capacity, head_dim]`.

    mlx-lm's own KVCache grows by concatenation every 256 tokens, a full copy each time; here the buffer for the whole context is
    allocated once, or, where that is not known, `reserve` makes room before the forward pass and one layer at a time, so that the
    peak is the buffers plus one layer.
    """

    def __init__(self, context: int | None = None) -> None:
        super().__init__(context)
        self._reserved = 0

    @property
    def capacity(self) -> int:
        return 0 if self.keys is None else int(self.keys.shape[2])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        end = self.offset + keys.shape[2]
        if self.keys is None:
            tokens = (
                _round_up(max(end, self._reserved))
                if self._context is None
                else max(end, self._context)
            )
            empty = [
                mx.zeros((*rows.shape[:2], tokens, rows.shape[3]), rows.dtype)
                for rows in (keys, values)
            ]
            self.keys, self.values = empty
        elif end > self.capacity:
            self._resize(_round_up(max(end, self._reserved, self.capacity * 3 // 2)))
        self.keys[..., self.offset : end, :] = keys
        self.values[..., self.offset : end, :] = values
        self.offset = end
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        if self.keys is None:
            raise ValueError("nothing was stored yet")
        if self.offset == self.capacity:
            return self.keys, self.values
        return self.keys[..., : self.offset, :], self.values[..., : self.offset, :]

    def reserve(self, tokens: int) -> None:
        if self._context is not None:
            return
        self._reserved = tokens
        if self.capacity and tokens > self.capacity:
            self._resize(_round_up(max(tokens, self.capacity * 3 // 2)))
            mx.eval(self.state)
        else:
            self._give_back(max(tokens, self.offset))

    def rewind(self, to: int) -> None:
        super().rewind(to)
        if to and self._context is None:
            self._give_back(max(to, self._reserved))

    def export(self, snapshot: Snapshot | None = None) -> Saved:
        cut = [rows[..., : self.offset, :] for rows in self.state]
        return Saved(self.kind, dict(zip(("keys", "values"), cut, strict=False)))

    def adopt(self, saved: Saved, offset: int) -> None:
        keys, values = rows_of(saved, ("keys", "values"), offset)
        self.free()
        self.update_and_fetch(keys, values)
        mx.eval(self.state)

    def can_shift(self, keep: int, discard: int) -> bool:
        return self.offset >= keep + discard

    def shift(self, keep: int, discard: int, rotate: Callable[[mx.array, int], mx.array]) -> None:
        if self.keys is None:
            return
        tail, end = slice(keep + discard, self.offset), self.offset - discard
        keys, values = (
            rotate(self.keys[..., tail, :], -discard),
            contiguous(self.values[..., tail, :]),
        )
        mx.eval(keys, values)  # now, so that the writes are in place
        self.keys[..., keep:end, :] = keys.astype(self.keys.dtype)
        self.values[..., keep:end, :] = values
        self.offset = end

    def _give_back(self, need: int) -> None:
        """Shrink when three quarters of the buffer have become unused."""
        if self.capacity > 4 * _round_up(need):
            self._resize(_round_up(need))
            mx.eval(self.state)

    def _resize(self, tokens: int) -> None:
        resized = [_resized(buffer, self.offset, tokens) for buffer in (self.keys, self.values)]
        self.keys, self.values = resized


def rows_of(saved: Saved, names: Sequence[str], rows: int) -> list[mx.array]:
    """These arrays, each of which has to have so many rows."""
    arrays = [saved.arrays[name] for name in names if name in saved.arrays]
    if len(arrays) != len(names) or any(
        array.ndim != 4 or array.shape[2] != rows for array in arrays
    ):
        raise ValueError(
            f"a {saved.kind} layer has to have {rows} rows, not {' and '.join(str(array.shape) for array in arrays)}"
        )
    return arrays


def _resized(buffer: mx.array, used: int, tokens: int) -> mx.array:
    resized = mx.zeros((*buffer.shape[:2], tokens, buffer.shape[3]), buffer.dtype)
    resized[..., :used, :] = buffer[..., :used, :]
    return resized


def _round_up(tokens: int) -> int:
    return -(-tokens // STEP) * STEP
