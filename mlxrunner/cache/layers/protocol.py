"""The protocol of all layer caches. No tensors, no policy.

A new kind derives from `mlxrunner.cache.layers.base.ArrayCache`, which implements most of it;
docs/architecture.md walks through one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlxrunner.cache.layers.extents import Extent
from mlxrunner.cache.layers.layout import Layout
from mlxrunner.cache.saved import Saved


@dataclass(frozen=True)
class Snapshot:
    """A copy of a layer at one offset."""

    content: Any
    """The copied data, in a form that only the layer knows."""
    nbytes: int
    arrays: Sequence[Any] = ()
    """The arrays of the copy, to be evaluated soon."""


class LayerCache(ABC):
    """The part of the entry that belongs to one layer.

    Each forward pass lies between `begin_forward()` and `end_forward(n)`. A pass that was begun and
    never ended (Ctrl-C, an exception) leaves the layer in an intermediate state. `rewind` to the
    offset before the pass repairs it.

    The model and its layer's cache agree on the methods for writing: mlx-lm's models call
    `update_and_fetch(keys, values)` and `make_mask(n)` of an attention layer's `model_cache`.
    """

    kind: str
    """A name for users and logs: "full", "sliding", "recurrent", "composite", "unknown" ..."""
    counts_forwards: bool = True
    """False if `begin_forward` and `end_forward` do nothing and need not be called."""
    stores_plain_rows: bool = False
    """True if the layer stores keys and values as computed, one row per token.

    Such rows can move to other positions, and can lie in cells that sequences share.
    """
    takes_pieces: bool = False
    """True if `extend` appends saved rows to those that the layer has."""
    outline_after: Sequence[int] = (1, 2, 3, 7, 300)
    """Numbers of tokens after which `export` has shown every shape that it can have.

    States may grow with the first few tokens, which convolutions look back at. Groups of up to 256
    tokens may be stored once they are full.
    """

    @property
    @abstractmethod
    def extent(self) -> Extent:
        """The tokens that are stored now.

        A write changes the extent last, so that an interrupt undoes the write.
        """

    @abstractmethod
    def go_back(self, to: int) -> None:
        """Drop the tokens from offset `to` on, which is reachable. A call may be repeated."""

    @abstractmethod
    def free(self) -> None:
        """Drop all tokens: the offset becomes 0."""

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """Return a bounded copy, at the present offset, of the state that can't be rewound."""

    @abstractmethod
    def restore(self, snapshot: Snapshot, offset: int) -> None:
        """Go back to the state that `snapshot` holds, at `offset`. The snapshot stays usable."""

    # The methods below follow from those above.

    @property
    def offset(self) -> int:
        """Number of tokens stored; -1 if the parts of a composite layer disagree."""
        return self.extent.offset

    @property
    def needs_checkpoints(self) -> bool:
        """True if there are offsets that the layer can't be rewound to by itself."""
        return self.extent.needs_checkpoints

    @property
    def has_plain_rows(self) -> bool:
        """True if the layer stores plain rows of all its tokens."""
        return self.stores_plain_rows and not self.needs_checkpoints and self.offset > 0

    def reachable(self, to: int) -> int:
        """Return the largest offset <= `to` that `rewind` can reach; 0 means start over."""
        return self.extent.reachable(to)

    def can_rewind(self, to: int) -> bool:
        return self.reachable(to) == to

    def rewind(self, to: int) -> None:
        """Go back to offset `to`.

        Raise RewindError, with nothing changed, if `can_rewind(to)` is False.
        """
        if self.extent.reachable(to) != to:
            raise RewindError(self.kind, self.offset, to)
        if to == 0:
            self.free()
        else:
            self.go_back(to)

    def trim(self, tokens: int) -> int:
        """Drop the last `tokens` tokens if possible, and return the number of dropped tokens."""
        before = self.offset
        if not 0 <= tokens <= before or not self.can_rewind(before - tokens):
            return 0
        self.rewind(before - tokens)
        return before - self.offset

    def can_shift(self, keep: int, discard: int) -> bool:
        """Return True if the tokens from `keep + discard` on can move up to `keep`."""
        return self.extent.can_shift(keep, discard)

    # A kind overrides these where it has something to say or to do.

    @property
    def model_cache(self) -> Any:
        """The object that the model's layer gets: this one, or a cache of mlx-lm behind it."""
        return self

    @property
    def state(self) -> Any:
        """The tree of stored arrays, to be evaluated."""
        return []

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return 0

    @property
    def used_bytes(self) -> int:
        """Bytes that hold stored tokens."""
        return self.nbytes

    @property
    def parts(self) -> Sequence[LayerCache]:
        """The caches that a composite layer consists of."""
        return ()

    def reserve(self, tokens: int) -> None:  # noqa: B027  # nothing to do for most kinds
        """Make room for `tokens` tokens in all, so that writes up to there allocate nothing."""

    def begin_forward(self) -> None:  # noqa: B027
        """Note that a forward pass begins."""

    def end_forward(self, tokens: int) -> None:  # noqa: B027
        """Note that the forward pass of `tokens` tokens has ended."""

    def pretend(self, offset: int) -> None:  # noqa: B027
        """Behave as if `offset` tokens were stored, for the worst-case batch at start."""

    def shift(self, keep: int, discard: int, rotate: Callable[[Any, int], Any]) -> None:
        """Drop the tokens `keep .. keep + discard - 1` and move up those behind them.

        `rotate(keys, -discard)` moves their keys. Tokens before `keep` never change. The offset
        changes last. Raise TypeError if this kind can't move its tokens.
        """
        raise TypeError(f"the tokens of a {self.kind} layer can't be moved")

    def layouts(self) -> list[Layout]:
        """Return the layout for the memory plan; a composite layer returns one per part.

        The result is valid once a token was written (evaluated or not).
        """
        return []

    def narrowed(self, window: int) -> LayerCache:
        """Return a new cache like this one with a window of at most `window` tokens.

        A few tokens then show the behaviour of a full window. Return this cache if it has no
        window.
        """
        return self

    def export(self, snapshot: Snapshot | None = None) -> Saved:
        """Return the content, or that of `snapshot`, as plain data.

        Its arrays are views, to be copied soon. Raise TypeError if this kind can't be saved.
        """
        raise TypeError(f"a {self.kind} layer can't be saved")

    def export_rows(self, begin: int, end: int) -> Saved:
        """Return the rows of the tokens `begin .. end - 1` of a layer that rewinds by itself.

        All arrays of its export have one row per token. They are views, to be copied soon.
        """
        saved = self.export()
        arrays = {name: array[:, :, begin:end] for name, array in saved.arrays.items()}
        return Saved(saved.kind, arrays)

    def extend(self, saved: Saved) -> None:
        """Append the rows of `saved`. An interrupt leaves the layer as it was.

        Raise ValueError if they do not fit. Only a layer that `takes_pieces` has to know it.
        """
        raise TypeError(f"a layer of the kind {self.kind!r} is read as a whole")

    def adopt(self, saved: Saved, offset: int) -> None:
        """Replace the content by `saved`, from a layer like this one, and evaluate it.

        `offset`: tokens in `saved`. Raise ValueError if `saved` does not fit, and TypeError if this
        kind can't be saved.
        """
        raise TypeError(f"a {self.kind} layer can't be saved")

    def copy(self, other: LayerCache, to: int) -> None:
        """Replace the content by the first `to` tokens of `other`, a cache of the same layer.

        `other` can be rewound to `to`, and does not change. Raise TypeError if this kind can't be
        copied.
        """
        self.adopt(other.export(), other.offset)
        self.rewind(to)

    def copy_checkpoint(self, other: LayerCache, snapshot: Snapshot, to: int) -> None:
        """Replace the content by that of `other` at `to`, which only its `snapshot` still has.

        `other` stores more than `to` tokens, and does not change.
        """
        self.restore(snapshot, to)

    def snapshot_of(self, saved: Saved, offset: int) -> Snapshot:
        """Return the snapshot that was exported as `saved`.

        Raise ValueError if `saved` does not hold `offset` tokens, and TypeError if this kind can't
        be saved.
        """
        raise TypeError(f"a {self.kind} layer can't be saved")

    def to_mlx_lm(self, saved: Saved, offset: int) -> Any:
        """Return mlx-lm's own cache with the `offset` tokens of `saved`.

        `saved` comes from a layer like this one. Raise ValueError if mlx-lm has no cache for this
        kind.
        """
        raise ValueError(f"mlx-lm has no cache for a {self.kind} layer")

    def from_mlx_lm(self, inner: Any) -> Saved:
        """Return the content of `inner`, an mlx-lm cache for a layer like this one.

        Raise ValueError if `inner` is for another kind.
        """
        raise ValueError(f"it has a {type(inner).__name__} for a {self.kind} layer")


class RewindError(RuntimeError):
    """The error of a layer that was asked to go to an unreachable offset. Nothing was changed."""

    def __init__(self, kind: str, offset: int, to: int) -> None:
        super().__init__(f"a {kind} layer at offset {offset} can't be rewound to {to}")


def describe(cache: LayerCache) -> dict[str, Any]:
    """Return the line of a token log for a layer that has stored a token (docs/profiling.md)."""
    layouts, parameters = cache.layouts(), cache.extent.describe()
    return {
        "kind": cache.kind,
        "needs_checkpoints": cache.needs_checkpoints,
        "row_bytes": sum(layout.row_bytes for layout in layouts),
        "checkpoint_rows": max((layout.checkpoint_rows for layout in layouts), default=0),
        "checkpoint_fixed": sum(layout.checkpoint_fixed for layout in layouts),
        **dict.fromkeys(("window", "slack", "room")),
        **parameters,
        "parts": [describe(part) for part in cache.parts],
    }


def reach(caches: Sequence[LayerCache], to: int) -> tuple[int, str | None]:
    """Return the largest offset <= `to` that all layers can be rewound to, and the limiting kind.

    The limiting kind is that of the layer that prevents more; None if `to` itself is reachable.
    """
    limited_by = None
    kinds = {cache.extent: cache.kind for cache in caches}
    while True:
        for extent, kind in kinds.items():
            if (reachable := extent.reachable(to)) < to:
                to, limited_by = reachable, kind
                break
        else:
            return to, limited_by
