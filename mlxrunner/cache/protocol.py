"""The interfaces of caches: of one layer, and of many sequences at once. No tensors, no policy.

A new kind of layer derives from `mlxrunner.cache.layers.base.ArrayCache`, which implements most of
`LayerCache`; docs/architecture.md walks through one.

`Cache` is the interface of Ollama's kvcache package, for parallel generation. All tokens of a step,
of all sequences, go through the model as one row. Keys and values are `[1, kv_heads, n, head_dim]`.
Positions and sequences are given per token. A sequence is a number from 0 to `max_sequences - 1`.
Operations that may fail have two phases: the first computes everything, the second applies it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

from mlxrunner.cache.saved import Saved

if TYPE_CHECKING:
    import mlx.core as mx


EXTENTS: dict[str, type[Extent]] = {}
"""The classes of extents by their names in token logs. Each class registers itself."""


@dataclass(frozen=True)
class Extent(ABC):
    """The tokens that a layer stores after `offset` tokens."""

    offset: int = 0
    """Tokens evaluated; -1 if the parts of a composite layer disagree."""

    name: ClassVar[str]
    """The name in a token log."""
    parameters: ClassVar[Sequence[str]] = ()
    """Names of the fields that never change for a layer: whole numbers, written to token logs."""
    needs_checkpoints: ClassVar[bool] = True
    """True unless the layer can go back to every offset by itself."""
    undoes_a_pass: ClassVar[bool] = False
    """True if the layer can always go back by itself to where its last forward pass began."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        EXTENTS[cls.name] = cls

    @abstractmethod
    def reachable(self, to: int) -> int:
        """Return the largest offset <= `to` that the layer can go back to; 0 means start over."""

    @abstractmethod
    def after(self, tokens: int) -> Self:
        """Return the extent after a forward pass of `tokens` tokens."""

    @abstractmethod
    def rewound(self, to: int) -> Self:
        """Return the extent after going back to `to`, a reachable offset that is not 0."""

    def decoded(self, tokens: int) -> Self:
        """Return the extent after `tokens` forward passes of one token each."""
        extent = self
        for _ in range(tokens):
            extent = extent.after(1)
        return extent

    def empty(self) -> Self:
        """Return the extent of the same layer when it holds nothing."""
        return type(self)(**{name: getattr(self, name) for name in self.parameters})

    def can_shift(self, keep: int, discard: int) -> bool:
        """Return True if the tokens from `keep + discard` on can move up to `keep`."""
        return False

    def shifted(self, keep: int, discard: int) -> Self:
        """Return the extent after dropping `discard` tokens after the first `keep`.

        Raise TypeError if the tokens of this kind can't be moved.
        """
        raise TypeError(f"the tokens of {self.name!r} can't be moved")

    def checkpoint(self) -> Self:
        """Return the extent of a layer that is restored from a checkpoint of this one."""
        return self

    def saved(self) -> Self:
        """Return the extent of a layer that is restored from a file of this one."""
        return self

    @property
    def checkpoint_rows(self) -> int:
        """Rows that a checkpoint copies."""
        return 0

    def checkpoint_bytes(self, line: Mapping[str, Any]) -> int:
        """Return the bytes of a checkpoint of the layer that `line` of a token log describes."""
        nbytes: int = self.checkpoint_rows * line["row_bytes"] + line["checkpoint_fixed"]
        return nbytes

    def describe(self) -> dict[str, Any]:
        """Return the fields of a token log from which `read_extent` makes this extent, empty."""
        return {"extent": self.name, **{name: getattr(self, name) for name in self.parameters}}

    @classmethod
    def read(cls, line: Mapping[str, Any], context: int, slack: int | None) -> Self:
        """Make an empty extent from the `line` of a token log.

        `context`: tokens of the context. `slack`: the rewind slack in tokens, in place of the
        logged one; None: the logged one.
        """
        return cls(**{name: line[name] for name in cls.parameters})


@dataclass(frozen=True)
class Everything(Extent):
    """A layer that stores every token and can go back to any of them."""

    name = "everything"
    needs_checkpoints = False
    undoes_a_pass = True

    def reachable(self, to: int) -> int:
        return min(to, self.offset)

    def after(self, tokens: int) -> Self:
        return replace(self, offset=self.offset + tokens)

    def decoded(self, tokens: int) -> Self:
        return self.after(tokens)

    def rewound(self, to: int) -> Self:
        return replace(self, offset=to)

    def can_shift(self, keep: int, discard: int) -> bool:
        return self.offset >= keep + discard

    def shifted(self, keep: int, discard: int) -> Self:
        return replace(self, offset=self.offset - discard)


@dataclass(frozen=True)
class Unmovable(Everything):
    """A layer that stores every token in a form that can't move to another position."""

    name = "unmovable"

    def can_shift(self, keep: int, discard: int) -> bool:
        return False


@dataclass(frozen=True)
class Layout:
    """The storage of one layer, or of one part of a composite layer."""

    kind: str
    row_bytes: int = 0
    """Bytes of one stored token."""
    most_rows: int | None = None
    """Most tokens stored at once (a window with its slack); None: the whole context."""
    fixed_bytes: int = 0
    """Bytes that do not depend on the number of tokens, such as those of states."""
    checkpoint_rows: int = 0
    """Most rows that a checkpoint copies."""
    checkpoint_fixed: int = 0
    """Bytes that a checkpoint copies in addition to those rows."""
    draft_rows: int = 0
    """Most rows that are kept twice while a draft is checked, because nothing else can undo it."""

    def rows(self, context: int) -> int:
        """Return the most tokens stored at once in a context of `context` tokens."""
        return context if self.most_rows is None else min(self.most_rows, context)

    def nbytes(self, context: int) -> int:
        """Return the bytes allocated for a context of `context` tokens."""
        return self.rows(context) * self.row_bytes + self.fixed_bytes

    def checkpoint_bytes(self, context: int) -> int:
        """Return the bytes of one checkpoint at the far end of the context."""
        return min(self.checkpoint_rows, context) * self.row_bytes + self.checkpoint_fixed

    def draft_bytes(self, context: int) -> int:
        """Return the bytes that checking a draft takes at the far end of the context."""
        return min(self.draft_rows, context) * self.row_bytes


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
        """The object that the model's layer gets: this one, or the cache of mlx-lm in it."""
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
        """Drop the tokens `keep .. keep + discard - 1` and move up those after them.

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


END = 2**31 - 1
"""The end of a range of positions that reaches to the end of the sequence."""

Commit = Callable[[], None]
"""A function that applies a computed change. Call it at once or not at all."""


@dataclass(frozen=True)
class Batch:
    """The tokens of one forward pass."""

    positions: Sequence[int]
    """The position of each token."""
    sequences: Sequence[int]
    """The sequence of each token."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "positions", tuple(map(int, self.positions)))
        object.__setattr__(self, "sequences", tuple(map(int, self.sequences)))
        n = len(self.positions)
        if n == 0 or n != len(self.sequences):
            raise ValueError(
                f"{n} positions and {len(self.sequences)} sequences: "
                "give one of each per token, for at least one token"
            )
        if min(self.positions) < 0 or max(self.positions) >= END:
            raise ValueError(
                f"positions have to be in 0 .. {END - 1}, "
                f"not {min(self.positions)} .. {max(self.positions)}"
            )

    def __len__(self) -> int:
        return len(self.positions)

    @cached_property
    def by_sequence(self) -> dict[int, list[int]]:
        """The indices of each sequence's tokens."""
        found: dict[int, list[int]] = {}
        for index, sequence in enumerate(self.sequences):
            found.setdefault(sequence, []).append(index)
        return found

    @cached_property
    def is_plain(self) -> bool:
        """True if the tokens follow each other in one sequence."""
        first = self.positions[0]
        in_order = self.positions == tuple(range(first, first + len(self)))
        return in_order and len(self.by_sequence) == 1


class Cache(ABC):
    """Keys and values of several sequences.

    Call the methods in this order: `init`, then for each forward pass
    `start_forward` and, for each layer, `set_layer`, `put`, `get`; between passes `copy_prefix`,
    `can_resume`, `remove`; at the end `close`. Calls out of order raise RuntimeError, and arguments
    out of range raise ValueError. A call that raises changes nothing.
    """

    @abstractmethod
    def init(self, dtype: mx.Dtype, max_sequences: int, capacity: int, max_batch: int) -> None:
        """Fix all sizes, once.

        `capacity`: tokens per sequence. `max_batch`: tokens per forward pass over all sequences.
        The first `put` of each layer allocates its tensors of type `dtype` as a whole. They never
        grow.
        """

    @abstractmethod
    def start_forward(self, batch: Batch, reserve: bool = False) -> None:
        """Find room for the batch and build its mask, once for all layers.

        `reserve`: a pass of the worst-case shapes (the whole cache is the history) that allocates
        the tensors and stores nothing. Raise CacheFullError if there is no room.
        """

    def undo_forward(self) -> None:  # noqa: B027 -- nothing to undo unless a cache says so
        """Undo a successful `start_forward`. Do nothing if that was not the last call."""

    @abstractmethod
    def set_layer(self, layer: int) -> None:
        """Choose the layer for the next `put` and `get`."""

    @abstractmethod
    def put(self, keys: mx.array, values: mx.array) -> None:
        """Store `keys` and `values [1, kv_heads, n, head_dim]` of the batch in the current layer.

        Raise ValueError unless `n` is the number of tokens given to `start_forward`.
        """

    @abstractmethod
    def get(self) -> tuple[mx.array, mx.array, mx.array | None]:
        """Return keys and values of the history, and the mask `[n_tokens, history]`.

        The mask is True where a token may attend. Don't keep the results: as long as a view of a
        buffer is alive, each write to the buffer copies all of it.
        """

    @abstractmethod
    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Set the sequence `target` to the tokens of `source` at positions < `length`.

        Both sequences share these tokens: nothing is copied.
        """

    @abstractmethod
    def can_resume(self, sequence: int, position: int) -> bool:
        """Return True if all tokens that a query at `position` may see are stored.

        Return False if `position` is beyond the end of the sequence.
        """

    @abstractmethod
    def remove(self, sequence: int, begin: int, end: int = END) -> None:
        """Drop the tokens at positions `begin .. end - 1`.

        Unless `end` is END, the tokens behind move up by `end - begin`. Raise NotSupportedError if
        keys can't be moved, and CacheFullError if there is no room to copy shared tokens.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the storage. A second call is allowed."""

    def prepare_copy_prefix(self, source: int, target: int, length: int) -> Commit:
        """Return the second phase of `copy_prefix`, or raise the errors of `copy_prefix`.

        The second phase should not fail. By default it is all of `copy_prefix`.
        """
        return partial(self.copy_prefix, source, target, length)

    def prepare_remove(self, sequence: int, begin: int, end: int = END) -> Commit:
        """Return the second phase of `remove`, or raise the errors of `remove`.

        The second phase should not fail. By default it is all of `remove`.
        """
        return partial(self.remove, sequence, begin, end)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return 0


class Lifecycle:
    """The order of calls for all caches: initialize once, close."""

    def __init__(self) -> None:
        self._is_initialized = self._is_closed = False

    def initialize(self, **sizes: int) -> None:
        """Check the sizes. Raise RuntimeError if called twice, ValueError for a size below 1."""
        self._check_open()
        if self._is_initialized:
            raise RuntimeError("init was called twice: make another cache")
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} has to be at least 1, not {size}")
        self._is_initialized = True

    def check(self) -> None:
        """Raise RuntimeError unless the cache is initialized and open."""
        self._check_open()
        if not self._is_initialized:
            raise RuntimeError("the cache was not initialized: call init first")

    def close(self) -> None:
        """Refuse all further calls."""
        self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the cache was closed: make another one")


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
