"""The full-attention layer cache: one buffer for keys, one for values, written in place, rewound by moving the offset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import create_attention_mask

from mlxrunner.cache.layer import RewindError, Rewinding, Snapshot
from mlxrunner.cache.layout import Layout

STEP = 256


class FullAttentionCache(Rewinding):
    """Keys and values of every token, `[1, kv_heads, capacity, head_dim]`.

    Speaks mlx-lm's layer-cache protocol (`update_and_fetch`, `offset`, `make_mask`, `keys_and_values`, `keys`, `values`).
    mlx-lm's own KVCache grows by concatenation every 256 tokens, a full copy each time; here the buffer for the whole context is
    allocated once, or, where that is not known, `reserve` makes room before the forward pass and one layer at a time, so that the
    peak is the buffers plus one layer. The offset is the last thing that a
    write changes: an interrupted write left nothing but unused rows.
    """

    kind = "full"
    counts_forwards = False
    needs_checkpoints = False

    def __init__(self, context: int | None = None) -> None:
        """`context`: tokens to make room for at the first write, once and for all; None: as much as `reserve` says."""
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.offset = 0
        self._context = context
        self._reserved = 0

    @property
    def model_cache(self) -> FullAttentionCache:
        return self

    @property
    def capacity(self) -> int:
        """Tokens that fit without another allocation."""
        return 0 if self.keys is None else self.keys.shape[2]

    @property
    def state(self) -> list[mx.array]:
        return [] if self.keys is None or self.values is None else [self.keys, self.values]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.state)

    @property
    def used_bytes(self) -> int:
        return self.nbytes * self.offset // self.capacity if self.capacity else 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        end = self.offset + keys.shape[2]
        if self.keys is None or self.values is None:
            tokens = _round_up(max(end, self._reserved)) if self._context is None else max(end, self._context)
            self.keys = mx.zeros((*keys.shape[:2], tokens, keys.shape[3]), keys.dtype)
            self.values = mx.zeros((*values.shape[:2], tokens, values.shape[3]), values.dtype)
        elif end > self.capacity:
            self._resize(_round_up(max(end, self._reserved, self.capacity * 3 // 2)))
        assert self.keys is not None
        assert self.values is not None
        self.keys[..., self.offset : end, :] = keys
        self.values[..., self.offset : end, :] = values
        self.offset = end
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        if self.keys is None or self.values is None:
            raise ValueError("nothing was stored yet")
        if self.offset == self.keys.shape[2]:
            return self.keys, self.values
        return self.keys[..., : self.offset, :], self.values[..., : self.offset, :]

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Any:
        return create_attention_mask(n, self.offset, return_array, window_size)

    def is_trimmable(self) -> bool:
        return True

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.keys is None

    def reserve(self, tokens: int) -> None:
        if self._context is not None:
            return
        self._reserved = tokens
        if self.capacity and tokens > self.capacity:
            self._resize(_round_up(max(tokens, self.capacity * 3 // 2)))
            mx.eval(self.state)
        else:
            self._give_back(max(tokens, self.offset))

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
        elif self._context is None:
            self._give_back(max(to, self._reserved))

    def can_shift(self, keep: int, discard: int) -> bool:
        return self.offset >= keep + discard

    def shift(self, keep: int, discard: int, rotate: Callable[[mx.array, int], mx.array]) -> None:
        if self.keys is None or self.values is None:
            return
        tail, end = slice(keep + discard, self.offset), self.offset - discard
        keys, values = rotate(self.keys[..., tail, :], -discard), mx.contiguous(self.values[..., tail, :])
        mx.eval(keys, values)  # now, so that the writes are in place
        self.keys[..., keep:end, :] = keys.astype(self.keys.dtype)
        self.values[..., keep:end, :] = values
        self.offset = end

    def layouts(self) -> list[Layout]:
        return [Layout(self.kind, row_bytes=self.nbytes // max(1, self.capacity))]

    def pretend(self, offset: int) -> None:
        self.offset = offset

    def snapshot(self) -> Snapshot:
        return Snapshot(None, 0)

    def restore(self, snapshot: Snapshot, offset: int) -> None:
        self.rewind(offset)

    def free(self) -> None:
        """A buffer for the whole context stays: it was planned for."""
        self.offset = 0
        if self._context is None:
            self.keys = self.values = None

    def _give_back(self, need: int) -> None:
        """Shrink when three quarters of the buffer have become unused."""
        if self.capacity > 4 * _round_up(need):
            self._resize(_round_up(need))
            mx.eval(self.state)

    def _resize(self, tokens: int) -> None:
        assert self.keys is not None
        assert self.values is not None
        keys, values = (_resized(buffer, self.offset, tokens) for buffer in (self.keys, self.values))
        self.keys, self.values = keys, values


def _resized(buffer: mx.array, used: int, tokens: int) -> mx.array:
    resized = mx.zeros((*buffer.shape[:2], tokens, buffer.shape[3]), buffer.dtype)
    resized[..., :used, :] = buffer[..., :used, :]
    return resized


def _round_up(tokens: int) -> int:
    return -(-tokens // STEP) * STEP
