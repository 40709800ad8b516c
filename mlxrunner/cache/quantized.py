"""The full-attention layer cache with keys and values in 8 or 4 bits, from the first token on, so that warm and cold are the same."""

from __future__ import annotations

import mlx.core as mx

from mlxrunner.cache.full import STEP, OffsetCache, rows_of
from mlxrunner.cache.layer import Snapshot
from mlxrunner.cache.saved import Saved

GROUP_SIZES = (64, 32)
Packed = tuple[mx.array, ...]
"""mx.quantize's packed values, scales and biases, each `[1, kv_heads, n, ...]`."""
PARTS = ("packed", "scales", "biases")


class QuantizedAttentionCache(OffsetCache):
    """mlx-lm's attention sees by `bits` that it is handed packed keys and values. Rewound by moving the offset."""

    def __init__(self, bits: int, context: int | None = None) -> None:
        super().__init__(context)
        self.bits = bits
        self.group_size = GROUP_SIZES[0]

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
        return tuple(part[..., cut, :] for part in self.keys), tuple(
            part[..., cut, :] for part in self.values
        )

    def export(self, snapshot: Snapshot | None = None) -> Saved:
        arrays = {
            f"{name} {part}": rows[..., : self.offset, :]
            for name, packed in zip(("keys", "values"), self.state, strict=False)
            for part, rows in zip(PARTS, packed, strict=True)
        }
        return Saved("quantized", arrays)

    def adopt(self, saved: Saved, offset: int) -> None:
        rows = rows_of(
            saved, [f"{name} {part}" for name in ("keys", "values") for part in PARTS], offset
        )
        self.free()
        self.group_size = rows[0].shape[3] * 32 // self.bits // rows[1].shape[3]
        self._append(tuple(rows[:3]), tuple(rows[3:]))
        mx.eval(self.state)

    def _pack(self, rows: mx.array) -> Packed:
        return tuple(mx.quantize(rows, group_size=self.group_size, bits=self.bits))


def _group_size(*head_dims: int) -> int:
    for size in GROUP_SIZES:
        if all(dim % size == 0 for dim in head_dims):
            return size
    raise ValueError(
        f"heads of {' and '.join(map(str, head_dims))} numbers can't be quantized in groups of {GROUP_SIZES[-1]}"
    )


def _room(old: Packed | None, like: Packed, used: int, tokens: int) -> Packed:
    """Buffers for `tokens` rows like `like`, with the first `used` rows of `old`."""
    fresh = tuple(mx.zeros((*part.shape[:2], tokens, part.shape[3]), part.dtype) for part in like)
    if old is not None:
        for buffer, part in zip(fresh, old, strict=True):
            buffer[..., :used, :] = part[..., :used, :]
    return fresh
