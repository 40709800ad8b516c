"""The sliding-window layer cache: the last `window` tokens, and `slack` more so that it can be rewound without help."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from mlxrunner.cache.arrays import contiguous, tree_bytes
from mlxrunner.cache.layer import RewindError, Rewinding, Snapshot
from mlxrunner.cache.layout import Layout
from mlxrunner.cache.saved import Saved
from mlxrunner.overflow import window_closes

STEP = 256


@dataclass(frozen=True)
class Stored:
    """`rows` consecutive tokens, from position `first` on, in the first rows of buffers `[1, kv_heads, room, head_dim]`."""

    keys: mx.array
    values: mx.array
    first: int
    rows: int


class SlidingWindowCache(Rewinding):
    """A query at position p sees p - window + 1 .. p.

    The rows lie in the order of their positions: a step writes behind the last one, and every STEP tokens the last
    `window - 1 + slack` rows move to the front of a fresh buffer. So what a query sees is one slice, as attention kernels like it, and
    a decode step needs no mask. A chunk that does not fit is attended together with the window before it, and only its end is kept.

    Everything that says what is stored is one attribute, set last: an interrupted write changed nothing. The semantics are those of
    mlx-lm's RotatingKVCache, which can't be rewound once it has wrapped.
    """

    kind = "sliding"
    counts_forwards = True
    needs_checkpoints = True

    def __init__(self, window: int, slack: int = 0, context: int | None = None) -> None:
        self.window, self.slack = window, slack
        self.room = (
            window + slack + STEP
            if context is None
            else min(window + slack + STEP, max(context, 1))
        )
        self._stored: Stored | None = None
        self._fetched: tuple[mx.array, mx.array] | None = (
            None  # of a chunk that was not stored whole, until its pass has ended
        )
        self._fetched_rows = 0

    @property
    def offset(self) -> int:
        return 0 if self._stored is None else self._stored.first + self._stored.rows

    @property
    def model_cache(self) -> SlidingWindowCache:
        return self

    @property
    def max_size(self) -> int:
        """mlx-lm's name for the window."""
        return self.window

    @property
    def state(self) -> list[mx.array]:
        return [] if self._stored is None else [self._stored.keys, self._stored.values]

    @property
    def nbytes(self) -> int:
        return tree_bytes(self.state)

    @property
    def used_bytes(self) -> int:
        return (
            0
            if self._stored is None
            else self.nbytes * self._stored.rows // self._stored.keys.shape[2]
        )

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """For the next chunk of `n` tokens; mlx-lm's models ask before they write."""
        window, seen = window_size or self.window, self._history()
        if n == 1 and not return_array:
            return None if seen < window else mx.arange(seen + 1) > seen - window
        if seen + n <= window and not return_array:
            return "causal"
        return create_causal_mask(n, seen, window_size=window)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        n, seen, stored = keys.shape[2], self._history(), self._stored
        if stored is None:
            stored = self._fresh(keys, values)
        elif stored.rows + n > stored.keys.shape[2]:
            stored = self._moved(stored)
        if stored.rows + n > stored.keys.shape[2]:
            return self._pass_through(stored, keys, values, seen)
        end = stored.rows + n
        stored.keys[..., stored.rows : end, :] = keys
        stored.values[..., stored.rows : end, :] = values
        self._fetched, self._fetched_rows = None, seen + n
        self._stored = Stored(stored.keys, stored.values, stored.first, end)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What the last chunk was given (for layers that share another one's cache, later in the same forward pass)."""
        if self._fetched is not None:
            return self._fetched
        if self._stored is None:
            raise ValueError("nothing was stored yet")
        end = self._stored.rows
        begin = max(0, end - self._fetched_rows)
        return self._stored.keys[..., begin:end, :], self._stored.values[..., begin:end, :]

    def empty(self) -> bool:
        return self._stored is None

    def size(self) -> int:
        return min(self.offset, self.window)

    def reserve(self, tokens: int) -> None: ...

    def begin_forward(self) -> None: ...

    def end_forward(self, tokens: int) -> None:
        """No layer asks for the chunk any more: held, it would take more memory than what is stored."""
        self._fetched = None

    def reachable(self, to: int) -> int:
        if self._stored is None or to >= self.offset:
            return self.offset
        return to if max(0, to - self.window + 1) >= self._stored.first else 0

    def rewind(self, to: int) -> None:
        if not self.can_rewind(to):
            raise RewindError(self.kind, self.offset, to)
        if to == 0 or self._stored is None:
            self.free()
        else:
            self._stored = Stored(
                self._stored.keys, self._stored.values, self._stored.first, to - self._stored.first
            )

    def can_shift(self, keep: int, discard: int) -> bool:
        """The window before the next token has to be there, whatever else is stored: after the gap, or on both sides of it."""
        return self.offset >= keep + discard and window_closes(
            self.window, self.offset, keep, discard
        )

    def shift(self, keep: int, discard: int, rotate: Callable[[mx.array, int], mx.array]) -> None:
        stored = self._stored
        if stored is None:
            return
        lowest = max(0, self.offset - discard - self.window + 1)
        before = (
            slice(min(lowest, keep) - stored.first, keep - stored.first)
            if lowest < keep
            else slice(0, 0)
        )
        after = slice(max(keep, lowest) + discard - stored.first, stored.rows)
        keys = [
            stored.keys[..., before, :],
            rotate(stored.keys[..., after, :], -discard).astype(stored.keys.dtype),
        ]
        values = [stored.values[..., before, :], stored.values[..., after, :]]
        all_keys, all_values = mx.concatenate(keys, axis=2), mx.concatenate(values, axis=2)
        rows = all_keys.shape[2]
        self._stored = self._filled(all_keys, all_values, self.offset - discard - rows, rows, rows)

    def layouts(self) -> list[Layout]:
        rows = self._stored.keys.shape[2] if self._stored else 1
        return [
            Layout(
                self.kind,
                self.nbytes // rows,
                self.window + self.slack + STEP,
                checkpoint_rows=self.window - 1,
            )
        ]

    def pretend(self, offset: int) -> None:
        if self._stored is not None:
            rows = min(offset, self.room)
            self._stored = Stored(self._stored.keys, self._stored.values, offset - rows, rows)

    def snapshot(self) -> Snapshot:
        """The window before the next token, `window - 1` rows."""
        stored, seen = self._stored, self._history()
        if stored is None or seen == 0:
            return Snapshot(None, 0)
        tail = slice(stored.rows - seen, stored.rows)
        copy = Stored(
            contiguous(stored.keys[..., tail, :]),
            contiguous(stored.values[..., tail, :]),
            self.offset - seen,
            seen,
        )
        return Snapshot(copy, copy.keys.nbytes + copy.values.nbytes, (copy.keys, copy.values))

    def restore(self, snapshot: Snapshot, offset: int) -> None:
        kept, self._fetched = snapshot.content, None
        # Arrays of its own, though not memory of its own: writing to them leaves the snapshot's as they are.
        self._stored = (
            None if kept is None else Stored(kept.keys[:], kept.values[:], kept.first, kept.rows)
        )

    def export(self, snapshot: Snapshot | None = None) -> Saved:
        stored = self._stored if snapshot is None else snapshot.content
        if stored is None:
            return Saved(self.kind)
        cut = slice(0, stored.rows)
        return Saved(
            self.kind, {"keys": stored.keys[..., cut, :], "values": stored.values[..., cut, :]}
        )

    def adopt(self, saved: Saved, offset: int) -> None:
        found, self._fetched = self._read(saved, offset), None
        self._stored = self._filled(
            found.keys, found.values, found.first, found.rows, min(found.rows, self.room)
        )
        mx.eval(self.state)

    def snapshot_of(self, saved: Saved, offset: int) -> Snapshot:
        found = self._read(saved, offset)
        if found.rows != min(offset, self.window - 1):
            raise ValueError(
                f"a checkpoint at {offset} of a window of {self.window} has {found.rows} rows"
            )
        return Snapshot(found, found.keys.nbytes + found.values.nbytes, (found.keys, found.values))

    def _read(self, saved: Saved, offset: int) -> Stored:
        keys, values = saved.arrays["keys"], saved.arrays["values"]
        rows = keys.shape[2]
        if values.shape[2] != rows or not min(offset, self.window - 1) <= rows <= offset:
            raise ValueError(
                f"{rows} rows of keys and {values.shape[2]} of values are no window of {self.window} at {offset}"
            )
        return Stored(keys, values, offset - rows, rows)

    def free(self) -> None:
        self._stored = self._fetched = None

    def _history(self) -> int:
        """Stored tokens that the first query of the next chunk sees."""
        return 0 if self._stored is None else min(self._stored.rows, self.window - 1)

    def _fresh(self, keys: mx.array, values: mx.array) -> Stored:
        """An empty buffer for rows like these."""
        shapes = ((*rows.shape[:2], self.room, rows.shape[3]) for rows in (keys, values))
        return Stored(
            mx.zeros(next(shapes), keys.dtype), mx.zeros(next(shapes), values.dtype), 0, 0
        )

    def _moved(self, stored: Stored) -> Stored:
        """The rows that are worth keeping, at the front of a fresh buffer."""
        kept = min(stored.rows, self.window - 1 + self.slack)
        return self._filled(stored.keys, stored.values, stored.first, stored.rows, kept)

    def _filled(self, keys: mx.array, values: mx.array, first: int, rows: int, kept: int) -> Stored:
        fresh = self._fresh(keys, values)
        fresh.keys[..., :kept, :] = keys[..., rows - kept : rows, :]
        fresh.values[..., :kept, :] = values[..., rows - kept : rows, :]
        return Stored(fresh.keys, fresh.values, first + rows - kept, kept)

    def _pass_through(
        self, stored: Stored, keys: mx.array, values: mx.array, seen: int
    ) -> tuple[mx.array, mx.array]:
        """A chunk longer than the room: attended with the window before it; its last rows are kept."""
        rows, n = stored.rows, keys.shape[2]
        all_keys = mx.concatenate([stored.keys[..., :rows, :], keys], axis=2) if rows else keys
        all_values = (
            mx.concatenate([stored.values[..., :rows, :], values], axis=2) if rows else values
        )
        kept = min(rows + n, self.window - 1 + self.slack, self.room)
        following = self._filled(all_keys, all_values, stored.first, rows + n, kept)
        self._fetched = all_keys[..., rows - seen :, :], all_values[..., rows - seen :, :]
        self._stored = following
        return self._fetched
