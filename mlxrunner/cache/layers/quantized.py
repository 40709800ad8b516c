"""The full-attention layer cache with keys and values in 8 or 4 bits.

They are quantized from the first token on, so that warm and cold runs store the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache

from mlxrunner.cache.layers.extents import Extent, Unmovable
from mlxrunner.cache.layers.full import STEP, OffsetCache, rows_of
from mlxrunner.cache.saved import Saved

GROUP_SIZES = (64, 32)
Packed = tuple[mx.array, ...]
"""The packed values, scales and biases of mx.quantize, each `[1, kv_heads, n, ...]`."""
PARTS = ("packed", "scales", "biases")
NAMES = [f"{which} {part}" for which in ("keys", "values") for part in PARTS]


class QuantizedAttentionCache(OffsetCache):
    """Packed keys and values of every token.

    mlx-lm's attention recognizes a quantized cache by its attribute `bits`.
    """

    def __init__(self, bits: int, context: int | None = None) -> None:
        super().__init__(context)
        self.bits = bits
        self.group_size = GROUP_SIZES[0]

    @property
    def saved_kind(self) -> str:
        return "quantized"

    @property
    def extent(self) -> Extent:
        return Unmovable(self.offset)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Packed, Packed]:
        if self.keys is None:
            self.group_size = _group_size(keys.shape[3], values.shape[3])
        self._append(self._pack(keys), self._pack(values))
        return self.keys_and_values()

    def _append(self, new_keys: Packed, new_values: Packed) -> None:
        end = self.offset + new_keys[0].shape[2]
        if end > self.capacity:
            tokens = max(end, self._context or -(-max(end, self.capacity * 3 // 2) // STEP) * STEP)
            both = (
                _room(self.keys, new_keys, self.offset, tokens),
                _room(self.values, new_values, self.offset, tokens),
            )
            self.keys, self.values = both
        for buffers, new in ((self.keys, new_keys), (self.values, new_values)):
            for buffer, part in zip(buffers, new, strict=True):
                buffer[..., self.offset : end, :] = part
        self.offset = end

    def keys_and_values(self) -> tuple[Packed, Packed]:
        if self.keys is None:
            raise ValueError("nothing was stored yet")
        cut = slice(0, self.offset)
        keys, values = (
            tuple(part[..., cut, :] for part in packed) for packed in (self.keys, self.values)
        )
        return keys, values

    def arrays(self) -> dict[str, mx.array]:
        stored = [rows for packed in self.state for rows in packed]
        return {
            name: rows[..., : self.offset, :] for name, rows in zip(NAMES, stored, strict=False)
        }

    def fill(self, arrays: Mapping[str, mx.array], offset: int) -> None:
        rows = rows_of(self.saved_kind, arrays, NAMES, offset)
        self.free()
        self.group_size = self._group_size_of(rows)
        self._append(tuple(rows[:3]), tuple(rows[3:]))

    def to_mlx_lm(self, saved: Saved, offset: int) -> QuantizedKVCache:
        rows = [saved.arrays[name] for name in NAMES]
        state = (tuple(rows[:3]), tuple(rows[3:]), offset, self._group_size_of(rows), self.bits)
        return QuantizedKVCache.from_state(state)

    def from_mlx_lm(self, inner: Any) -> Saved:
        if type(inner) is not QuantizedKVCache:
            return super().from_mlx_lm(inner)
        stored = zip(NAMES, (*inner.keys, *inner.values), strict=True)
        arrays = {name: rows[..., : inner.offset, :] for name, rows in stored}
        return Saved(self.saved_kind, arrays)

    def _pack(self, rows: mx.array) -> Packed:
        return tuple(mx.quantize(rows, group_size=self.group_size, bits=self.bits))

    def _group_size_of(self, rows: list[mx.array]) -> int:
        """Return the group size of packed rows: numbers per row divided by scales per row."""
        return rows[0].shape[3] * 32 // self.bits // rows[1].shape[3]


def _group_size(*head_dims: int) -> int:
    for size in GROUP_SIZES:
        if all(dim % size == 0 for dim in head_dims):
            return size
    dims = " and ".join(map(str, head_dims))
    raise ValueError(f"heads of {dims} numbers can't be quantized in groups of {GROUP_SIZES[-1]}")


def _room(old: Packed | None, like: Packed, used: int, tokens: int) -> Packed:
    """Return buffers for `tokens` rows shaped as `like`, with the first `used` rows of `old`."""
    fresh = tuple(mx.zeros((*part.shape[:2], tokens, part.shape[3]), part.dtype) for part in like)
    if old is not None:
        for buffer, part in zip(fresh, old, strict=True):
            buffer[..., :used, :] = part[..., :used, :]
    return fresh
