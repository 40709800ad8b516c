"""The full-attention layer cache with keys and values in 8 or 4 bits, from the first token on, so that warm and cold are the same."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import create_attention_mask

from mlxrunner.cache.arrays import tree_bytes
from mlxrunner.cache.layer import RewindError, Rewinding, Snapshot
from mlxrunner.cache.layout import Layout

STEP = 256
GROUP_SIZES = (64, 32)
Packed = tuple[mx.array, ...]
"""mx.quantize's packed values, scales and biases, each `[1, kv_heads, n, ...]`."""


class QuantizedAttentionCache(Rewinding):
    """mlx-lm's attention sees by `bits` that it is handed packed keys and values. Rewound by moving the offset.

    `context`: tokens to make room for at the first write; None: the buffers grow by half as they fill up.
    """

    kind = "full"
    counts_forwards = False
    needs_checkpoints = False

    def __init__(self, bits: int, context: int | None = None) -> None:
        self.bits = bits
        self.group_size = GROUP_SIZES[0]
        self.keys: Packed | None = None
        self.values: Packed | None = None
        self.offset = 0
        self._context = context

    @property
    def model_cache(self) -> QuantizedAttentionCache:
        return self

    @property
    def capacity(self) -> int:
        return 0 if self.keys is None else self.keys[0].shape[2]

    @property
    def state(self) -> list[Packed]:
        return [] if self.keys is None or self.values is None else [self.keys, self.values]

    @property
    def nbytes(self) -> int:
        return tree_bytes(self.state)

    @property
    def used_bytes(self) -> int:
        return self.nbytes * self.offset // self.capacity if self.capacity else 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Packed, Packed]:
        end = self.offset + keys.shape[2]
        if self.keys is None:
            self.group_size = _group_size(keys.shape[3], values.shape[3])
        new_keys, new_values = self._pack(keys), self._pack(values)
        if end > self.capacity:
            tokens = max(end, self._context or -(-max(end, self.capacity * 3 // 2) // STEP) * STEP)
            both = _room(self.keys, new_keys, self.offset, tokens), _room(self.values, new_values, self.offset, tokens)
            self.keys, self.values = both
        for buffers, new in ((self.keys, new_keys), (self.values, new_values)):
            for buffer, part in zip(buffers or (), new, strict=True):
                buffer[..., self.offset : end, :] = part
        self.offset = end
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Packed, Packed]:
        if self.keys is None or self.values is None:
            raise ValueError("nothing was stored yet")
        cut = slice(0, self.offset)
        return tuple(part[..., cut, :] for part in self.keys), tuple(part[..., cut, :] for part in self.values)

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Any:
        return create_attention_mask(n, self.offset, return_array, window_size)

    def empty(self) -> bool:
        return self.keys is None

    def size(self) -> int:
        return self.offset

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

    def free(self) -> None:
        """A buffer for the whole context stays: it was planned for."""
        self.offset = 0
        if self._context is None:
            self.keys = self.values = None

    def _pack(self, rows: mx.array) -> Packed:
        return tuple(mx.quantize(rows, group_size=self.group_size, bits=self.bits))


def _group_size(*head_dims: int) -> int:
    for size in GROUP_SIZES:
        if all(dim % size == 0 for dim in head_dims):
            return size
    raise ValueError(f"heads of {' and '.join(map(str, head_dims))} numbers can't be quantized in groups of {GROUP_SIZES[-1]}")


def _room(old: Packed | None, like: Packed, used: int, tokens: int) -> Packed:
    """Buffers for `tokens` rows like `like`, with the first `used` rows of `old`."""
    fresh = tuple(mx.zeros((*part.shape[:2], tokens, part.shape[3]), part.dtype) for part in like)
    if old is not None:
        for buffer, part in zip(fresh, old, strict=True):
            buffer[..., :used, :] = part[..., :used, :]
    return fresh
