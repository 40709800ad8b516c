"""The layer caches of attention: full (plain or quantized) and sliding-window.

A full one has one buffer for keys and one for values, written in place; moving the offset rewinds
it. A sliding one keeps the last `window` tokens, and `slack` more for small rewinds.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, create_attention_mask

from mlxrunner.cache.layers.base import ArrayCache, contiguous, leaves, tree_bytes
from mlxrunner.cache.layers.extents import Window
from mlxrunner.cache.protocol import Everything, Extent, Layout, Snapshot, Unmovable
from mlxrunner.cache.saved import Saved
from mlxrunner.system.mlx_lm_internals import rows_in_order

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


class Stored(NamedTuple):
    """Stored tokens: `rows` of them from position `first` on.

    The buffers are `[1, kv_heads, room, head_dim]`.
    """

    keys: mx.array
    values: mx.array
    first: int
    rows: int

    @property
    def room(self) -> int:
        return int(self.keys.shape[2])


class SlidingWindowCache(ArrayCache):
    """The cache of a layer whose query at position p sees the positions p - window + 1 .. p.

    The rows lie in the order of their positions. A step writes after the last row, and every STEP
    tokens the last `window - 1 + slack` rows move to the front of a fresh buffer. Therefore a query
    sees one slice, which attention kernels prefer, and a decode step needs no mask. A chunk that
    does not fit is attended together with the window before it, and only its end is kept.

    One attribute, set last, says which tokens are stored: an interrupted write changes nothing. The
    semantics are those of mlx-lm's RotatingKVCache, which can't be rewound once it has wrapped.
    """

    kind = "sliding"
    stores_plain_rows = True
    outline_after = (1,)

    def __init__(self, window: int, slack: int = 0, context: int | None = None) -> None:
        """Make an empty cache. `window`, `slack` and `context` are numbers of tokens."""
        self._empty = Window.sized(window, slack, context)
        self.window, self.slack, self.room = window, slack, self._empty.room
        self._stored: Stored | None = None
        # The keys and values of a chunk that was not stored whole, until its pass has ended.
        self._fetched: tuple[mx.array, mx.array] | None = None
        self._fetched_rows = 0

    @property
    def extent(self) -> Window:
        stored = self._stored
        if stored is None:
            return self._empty
        return self._empty.at(stored.first, stored.first + stored.rows)

    @property
    def max_size(self) -> int:
        """The window in tokens, under mlx-lm's name."""
        return self.window

    @property
    def state(self) -> list[mx.array]:
        return [] if self._stored is None else [self._stored.keys, self._stored.values]

    @property
    def used_bytes(self) -> int:
        stored = self._stored
        return self.nbytes * stored.rows // stored.room if stored and stored.rows else 0

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """Return the mask of the next chunk of `n` tokens. Models call it before they write."""
        window, seen = window_size or self.window, self._seen()
        if n == 1 and not return_array:
            return None if seen < window else mx.arange(seen + 1) > seen - window
        if seen + n <= window and not return_array:
            return "causal"
        return create_causal_mask(n, seen, window_size=window)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys and values `[1, kv_heads, n, head_dim]` and return all that queries see."""
        n, seen, stored = keys.shape[2], self._seen(), self._stored
        if stored is None:
            stored = self._fresh(keys, values)
        elif stored.rows + n > stored.room:
            stored = self._filled(stored.keys, stored.values, stored.rows, self.extent.moved())
        begin, end = stored.rows, stored.rows + n
        if end > stored.room:
            return self._pass_through(stored, keys, values, seen)
        stored.keys[..., begin:end, :] = keys
        stored.values[..., begin:end, :] = values
        self._fetched, self._fetched_rows = None, seen + n
        self._stored = Stored(stored.keys, stored.values, stored.first, end)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return the same keys and values as the last `update_and_fetch`.

        Layers that share this cache call it later in the same forward pass. Raise ValueError if
        nothing was stored yet.
        """
        if self._fetched is not None:
            return self._fetched
        if self._stored is None:
            raise ValueError("nothing was stored yet")
        stored, end = self._stored, self._stored.rows
        rows = slice(max(0, end - self._fetched_rows), end)
        return stored.keys[..., rows, :], stored.values[..., rows, :]

    def empty(self) -> bool:
        return self._stored is None

    def size(self) -> int:
        return min(self.offset, self.window)

    def end_forward(self, tokens: int) -> None:
        """Drop the chunk, which no layer needs any more and which may be larger than the buffer."""
        self._fetched = None

    def go_back(self, to: int) -> None:
        if self._stored is not None:
            stored = self._stored
            self._stored = stored._replace(rows=to - stored.first)

    def shift(self, keep: int, discard: int, rotate: Callable[[mx.array, int], mx.array]) -> None:
        stored = self._stored
        if stored is None:
            return
        following = self.extent.shifted(keep, discard)
        first, lowest = stored.first, following.first
        before = slice(min(lowest, keep) - first, keep - first) if lowest < keep else slice(0, 0)
        after = slice(max(keep, lowest) + discard - first, stored.rows)
        moved = rotate(stored.keys[..., after, :], -discard).astype(stored.keys.dtype)
        keys = mx.concatenate([stored.keys[..., before, :], moved], axis=2)
        values = mx.concatenate(
            [stored.values[..., before, :], stored.values[..., after, :]], axis=2
        )
        self._stored = self._filled(keys, values, keys.shape[2], following)

    def layouts(self) -> list[Layout]:
        row_bytes = self.nbytes // max(self._stored.room, 1) if self._stored else 0
        most = Window.sized(self.window, self.slack).room
        return [Layout(self.kind, row_bytes, most, checkpoint_rows=self.window - 1)]

    def pretend(self, offset: int) -> None:
        if self._stored is not None:
            rows = min(offset, self.room)
            self._stored = self._stored._replace(first=offset - rows, rows=rows)

    def narrowed(self, window: int) -> SlidingWindowCache:
        return _Narrow(window, self.window)

    def snapshot(self) -> Snapshot:
        """Copy the window before the next token, at most `window - 1` rows."""
        stored, seen = self._stored, self._seen()
        if stored is None or self.offset == 0:
            return Snapshot(None, 0)
        tail = slice(stored.rows - seen, stored.rows)
        keys = contiguous(stored.keys[..., tail, :])
        values = contiguous(stored.values[..., tail, :])
        return _snapshot(Stored(keys, values, self.offset - seen, seen))

    def restore(self, snapshot: Snapshot, offset: int) -> None:
        kept: Stored | None = snapshot.content
        self._fetched = None
        # New arrays that share the snapshot's memory: MLX copies it at the first write to them.
        self._stored = None
        if kept is not None:
            self._stored = kept._replace(keys=kept.keys[:], values=kept.values[:])

    def arrays(self) -> dict[str, mx.array]:
        return {} if self._stored is None else _cut(self._stored)

    def export(self, snapshot: Snapshot | None = None) -> Saved:
        stored = self._stored if snapshot is None else snapshot.content
        return Saved(self.kind, {} if stored is None else _cut(stored))

    def fill(self, arrays: Mapping[str, mx.array], offset: int) -> None:
        found, self._fetched = self._read(arrays, offset), None
        kept = self._empty.at(offset - min(found.rows, self.room), offset)
        self._stored = self._filled(found.keys, found.values, found.rows, kept)

    def snapshot_of(self, saved: Saved, offset: int) -> Snapshot:
        found = self._read(saved.arrays, offset)
        if found.rows != min(offset, self.window - 1):
            raise ValueError(
                f"a checkpoint at {offset} of a window of {self.window} has {found.rows} rows"
            )
        return _snapshot(found)

    def to_mlx_lm(self, saved: Saved, offset: int) -> RotatingKVCache:
        rows = min(offset, self.window)
        keys, values = (_last(saved.arrays[name], rows) for name in ("keys", "values"))
        return RotatingKVCache.from_state((keys, values, offset, 0, self.window, rows))

    def from_mlx_lm(self, inner: Any) -> Saved:
        if type(inner) is not RotatingKVCache or inner.keep:
            return super().from_mlx_lm(inner)
        if inner.max_size != self.window:
            raise ValueError(
                f"a window is of {inner.max_size} tokens, and the model's of {self.window}"
            )
        rows = {"keys": inner.keys, "values": inner.values}
        return Saved(
            self.kind, {name: rows_in_order(inner, stored) for name, stored in rows.items()}
        )

    def _read(self, arrays: Mapping[str, mx.array], offset: int) -> Stored:
        keys, values = arrays["keys"], arrays["values"]
        rows = keys.shape[2]
        if values.shape[2] != rows or not min(offset, self.window - 1) <= rows <= offset:
            raise ValueError(
                f"{rows} rows of keys and {values.shape[2]} of values are not a window of "
                f"{self.window} at {offset}"
            )
        return Stored(keys, values, offset - rows, rows)

    def free(self) -> None:
        self._stored = self._fetched = None

    def _seen(self) -> int:
        """Return the number of stored tokens that the first query of the next chunk sees."""
        return 0 if self._stored is None else min(self._stored.rows, self.window - 1)

    def _fresh(self, keys: mx.array, values: mx.array) -> Stored:
        shapes = ((*rows.shape[:2], self.room, rows.shape[3]) for rows in (keys, values))
        return Stored(
            mx.zeros(next(shapes), keys.dtype), mx.zeros(next(shapes), values.dtype), 0, 0
        )

    def _filled(self, keys: mx.array, values: mx.array, rows: int, kept: Window) -> Stored:
        """Return a fresh buffer that stores `kept`, the last of the first `rows` rows given."""
        fresh = self._fresh(keys, values)
        fresh.keys[..., : kept.rows, :] = keys[..., rows - kept.rows : rows, :]
        fresh.values[..., : kept.rows, :] = values[..., rows - kept.rows : rows, :]
        return Stored(fresh.keys, fresh.values, kept.first, kept.rows)

    def _pass_through(
        self, stored: Stored, keys: mx.array, values: mx.array, seen: int
    ) -> tuple[mx.array, mx.array]:
        """Attend a chunk longer than the room with the window before it; store its last rows."""
        rows, n = stored.rows, keys.shape[2]
        if rows:
            keys = mx.concatenate([stored.keys[..., :rows, :], keys], axis=2)
            values = mx.concatenate([stored.values[..., :rows, :], values], axis=2)
        following = self._filled(keys, values, rows + n, self.extent.after(n))
        self._fetched = keys[..., rows - seen :, :], values[..., rows - seen :, :]
        self._stored = following
        return self._fetched


class _Narrow(SlidingWindowCache):
    """A cache with a narrow window that reports `true`, the size of the model's window.

    If a model asks for a mask of another window, the narrow window differs by the same number of
    tokens.
    """

    def __init__(self, window: int, true: int) -> None:
        super().__init__(min(window, true))
        self._true = true

    @property
    def max_size(self) -> int:
        return self._true

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Any:
        asked = window_size or self._true
        return super().make_mask(n, return_array, max(1, asked - self._true + self.window))


def _snapshot(stored: Stored) -> Snapshot:
    both = stored.keys, stored.values
    return Snapshot(stored, sum(rows.nbytes for rows in both), both)


def _cut(stored: Stored) -> dict[str, mx.array]:
    rows = slice(0, stored.rows)
    return {"keys": stored.keys[..., rows, :], "values": stored.values[..., rows, :]}


def _last(rows: mx.array, count: int) -> mx.array:
    """Return the last `count` rows, with zeros in front for missing rows, which no query sees."""
    missing = count - rows.shape[2]
    if missing > 0:
        zeros = mx.zeros((*rows.shape[:2], missing, rows.shape[3]), rows.dtype)
        rows = mx.concatenate([zeros, rows], axis=2)
    return rows[..., rows.shape[2] - count :, :]
