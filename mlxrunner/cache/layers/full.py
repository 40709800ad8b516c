"""The full-attention layer cache: one buffer for keys, one for values, written in place.

Moving the offset rewinds it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache, create_attention_mask

from mlxrunner.cache.layers.base import ArrayCache, contiguous, leaves, tree_bytes
from mlxrunner.cache.layers.extents import Everything, Extent, Unmovable
from mlxrunner.cache.layers.protocol import Layout, Saved

STEP = 256
"""Rows by which buffers grow if the context is not known."""


class OffsetCache(ArrayCache):
    """A layer that stores every token in buffers with a row per token.

    The offset is the number of valid rows. A write changes it last, so that an interrupted write
    leaves only unused rows. The class follows mlx-lm's layer-cache protocol.
    """

    kind = "full"
    counts_forwards = False
    outline_after = (1,)
    offset: int = 0

    def __init__(self, context: int | None = None) -> None:
        """Make an empty cache.

        `context`: tokens for which the first write allocates room for good; None: the buffers grow.
        """
        self.keys: Any = None
        self.values: Any = None
        self._context = context

    @abstractmethod
    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append keys and values `[1, kv_heads, n, head_dim]` and return all stored ones."""

    @property
    def extent(self) -> Extent:
        return Everything(self.offset)

    @property
    def capacity(self) -> int:
        """Number of tokens that fit without another allocation."""
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

    def go_back(self, to: int) -> None:
        self.offset = to

    def layouts(self) -> list[Layout]:
        return [Layout(self.kind, row_bytes=self.nbytes // max(1, self.capacity))]

    def pretend(self, offset: int) -> None:
        self.offset = offset

    def free(self) -> None:
        """Drop the tokens. A buffer for the whole context stays allocated, as planned."""
        self.offset = 0
        if self._context is None:
            self.keys = self.values = None


class FullAttentionCache(OffsetCache):
    """Keys and values of every token, `[1, kv_heads, capacity, head_dim]`.

    mlx-lm's KVCache grows by concatenation every 256 tokens and copies everything each time. Here
    the buffer for the whole context is allocated once. If the context is not known, `reserve` makes
    room before the forward pass, one layer at a time. The peak is then the buffers plus one layer.
    """

    stores_plain_rows = True

    def __init__(self, context: int | None = None) -> None:
        super().__init__(context)
        self._reserved = 0

    @property
    def capacity(self) -> int:
        return 0 if self.keys is None else int(self.keys.shape[2])

    @property
    def nbytes(self) -> int:
        return 0 if self.keys is None else int(self.keys.nbytes + self.values.nbytes)

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

    def go_back(self, to: int) -> None:
        super().go_back(to)
        if self._context is None:
            self._give_back(max(to, self._reserved))

    def arrays(self) -> dict[str, mx.array]:
        cut = [rows[..., : self.offset, :] for rows in self.state]
        return dict(zip(("keys", "values"), cut, strict=False))

    def fill(self, arrays: Mapping[str, mx.array], offset: int) -> None:
        keys, values = rows_of(self.saved_kind, arrays, ("keys", "values"), offset)
        self.free()
        self.update_and_fetch(keys, values)

    def to_mlx_lm(self, saved: Saved, offset: int) -> KVCache:
        return KVCache.from_state((saved.arrays["keys"], saved.arrays["values"], offset))

    def from_mlx_lm(self, inner: Any) -> Saved:
        if type(inner) is not KVCache:
            return super().from_mlx_lm(inner)
        rows = slice(0, inner.offset)
        arrays = {"keys": inner.keys[..., rows, :], "values": inner.values[..., rows, :]}
        return Saved(self.saved_kind, arrays)

    def shift(self, keep: int, discard: int, rotate: Callable[[mx.array, int], mx.array]) -> None:
        if self.keys is None:
            return
        tail, end = slice(keep + discard, self.offset), self.offset - discard
        keys = rotate(self.keys[..., tail, :], -discard)
        values = contiguous(self.values[..., tail, :])
        mx.eval(keys, values)  # now, so that the writes are in place
        self.keys[..., keep:end, :] = keys.astype(self.keys.dtype)
        self.values[..., keep:end, :] = values
        self.offset = end

    def _give_back(self, need: int) -> None:
        """Shrink the buffer when three quarters are unused. `need`: tokens to keep room for."""
        if self.capacity > 4 * _round_up(need):
            self._resize(_round_up(need))
            mx.eval(self.state)

    def _resize(self, tokens: int) -> None:
        resized = [_resized(buffer, self.offset, tokens) for buffer in (self.keys, self.values)]
        self.keys, self.values = resized


def rows_of(
    kind: str, arrays: Mapping[str, mx.array], names: Sequence[str], rows: int
) -> list[mx.array]:
    """Return the arrays called `names`. Raise ValueError unless each has `rows` rows."""
    found = [arrays[name] for name in names if name in arrays]
    if len(found) < len(names) or any(one.ndim != 4 or one.shape[2] != rows for one in found):
        shapes = " and ".join(str(one.shape) for one in found)
        raise ValueError(f"a {kind} layer has to have {rows} rows, not {shapes}")
    return found


def _resized(buffer: mx.array, used: int, tokens: int) -> mx.array:
    resized = mx.zeros((*buffer.shape[:2], tokens, buffer.shape[3]), buffer.dtype)
    resized[..., :used, :] = buffer[..., :used, :]
    return resized


def _round_up(tokens: int) -> int:
    return -(-tokens // STEP) * STEP


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
