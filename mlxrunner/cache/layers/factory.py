"""Make one LayerCache for each layer of a model. Only `KINDS` decides which kind a layer gets.

`CompositeCache` holds several caches in one layer (mlx-lm's CacheList), rewound together to a
common offset. `StockCache` is mlx-lm's own cache, for kinds without a file here. One of unknown
kind can only stay at its offset; a checkpoint, which is a copy of it, takes it further back.
Chunked attention, and windows that keep their first tokens, can be trimmed as long as enough is
stored.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlxrunner.cache.layers.attention import (
    FullAttentionCache,
    QuantizedAttentionCache,
    SlidingWindowCache,
)
from mlxrunner.cache.layers.base import leaves, tree_bytes
from mlxrunner.cache.layers.extents import ChunkExtent, CompositeExtent, Filling, Stay, Torn
from mlxrunner.cache.layers.recurrent import RecurrentCache
from mlxrunner.cache.protocol import Extent, LayerCache, Layout, Snapshot
from mlxrunner.cache.saved import Saved, combined, shapes
from mlxrunner.errors import OptionError
from mlxrunner.system.mlx_lm_internals import has_settable_state, is_stock_cache


class CompositeCache(LayerCache):
    """Several caches of one layer. The model writes to each part separately."""

    kind = "composite"
    parts: Sequence[LayerCache] = ()
    model_cache: Any = None

    def __init__(self, parts: Sequence[LayerCache]) -> None:
        self.parts = list(parts)
        self.counts_forwards = any(part.counts_forwards for part in parts)
        self.outline_after = sorted({count for part in parts for count in part.outline_after})
        self._hand_over()

    def _hand_over(self) -> None:
        """Read the parts' caches again: a part may have another one after a rewind."""
        self.model_cache = CacheList(*(part.model_cache for part in self.parts))

    @property
    def extent(self) -> Extent:
        return CompositeExtent.of([part.extent for part in self.parts])

    @property
    def state(self) -> list[Any]:
        return [part.state for part in self.parts]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def used_bytes(self) -> int:
        return sum(part.used_bytes for part in self.parts)

    def reserve(self, tokens: int) -> None:
        for part in self.parts:
            part.reserve(tokens)

    def begin_forward(self) -> None:
        for part in self.parts:
            part.begin_forward()

    def end_forward(self, tokens: int) -> None:
        for part in self.parts:
            part.end_forward(tokens)

    def go_back(self, to: int) -> None:
        for part in self.parts:
            part.rewind(to)
        self._hand_over()

    def free(self) -> None:
        for part in self.parts:
            part.free()
        self._hand_over()

    def layouts(self) -> list[Layout]:
        return [layout for part in self.parts for layout in part.layouts()]

    def pretend(self, offset: int) -> None:
        for part in self.parts:
            part.pretend(offset)

    def narrowed(self, window: int) -> CompositeCache:
        return CompositeCache([part.narrowed(window) for part in self.parts])

    def snapshot(self) -> Snapshot:
        return _together([part.snapshot() for part in self.parts])

    def restore(self, snapshot: Snapshot, offset: int) -> None:
        for part, kept in zip(self.parts, snapshot.content, strict=True):
            if part.needs_checkpoints:
                part.restore(kept, offset)
            else:
                part.rewind(offset)
        self._hand_over()

    def export(self, snapshot: Snapshot | None = None) -> Saved:
        if snapshot is None:
            return Saved(self.kind, parts=[part.export() for part in self.parts])
        pairs = zip(self.parts, snapshot.content, strict=True)
        kept = [
            part.export(one) if part.needs_checkpoints else Saved(part.kind) for part, one in pairs
        ]
        return Saved(self.kind, parts=kept)

    def adopt(self, saved: Saved, offset: int) -> None:
        for part, kept in zip(self.parts, saved.parts, strict=True):
            part.adopt(kept, offset)
        self._hand_over()

    def copy(self, other: LayerCache, to: int) -> None:
        for part, source in zip(self.parts, other.parts, strict=True):
            part.copy(source, to)
        self._hand_over()

    def copy_checkpoint(self, other: LayerCache, snapshot: Snapshot, to: int) -> None:
        """Restore the parts that need it; the others still have the tokens before `to`."""
        for part, source, kept in zip(self.parts, other.parts, snapshot.content, strict=True):
            if source.can_rewind(to):
                part.copy(source, to)
            else:
                part.copy_checkpoint(source, kept, to)
        self._hand_over()

    def snapshot_of(self, saved: Saved, offset: int) -> Snapshot:
        pairs = zip(self.parts, saved.parts, strict=True)
        return _together([part.snapshot_of(kept, offset) for part, kept in pairs])

    def to_mlx_lm(self, saved: Saved, offset: int) -> CacheList:
        pairs = zip(self.parts, saved.parts, strict=True)
        return CacheList(*(part.to_mlx_lm(one, offset) for part, one in pairs))

    def from_mlx_lm(self, inner: Any) -> Saved:
        if type(inner) is not CacheList:
            return super().from_mlx_lm(inner)
        pairs = zip(self.parts, inner.caches, strict=True)
        return Saved(self.kind, parts=[part.from_mlx_lm(one) for part, one in pairs])


def _together(parts: list[Snapshot]) -> Snapshot:
    arrays = [array for part in parts for array in part.arrays]
    return Snapshot(parts, sum(part.nbytes for part in parts), arrays)


class StockCache(LayerCache):
    """A layer cache of mlx-lm, with a token count of its own.

    The count of the wrapped cache is sometimes wrong.
    """

    kind = "unknown"
    offset: int = 0

    def __init__(self, inner: Any) -> None:
        """Wrap `inner`, a new layer cache of mlx-lm."""
        self._pristine = copy.deepcopy(inner)
        self.inner = inner
        self._interrupted = False
        if is_stock_cache(inner):
            self.outline_after = (1, 2, 3, 7)

    @property
    def extent(self) -> Extent:
        return Torn(self.offset) if self._interrupted else self._extent()

    def _extent(self) -> Extent:
        return Stay(self.offset)

    @property
    def model_cache(self) -> Any:
        return self.inner

    @property
    def state(self) -> Any:
        # An mlx-lm cache before its first token may have no arrays to show.
        return [] if self.offset == 0 else self.inner.state

    @property
    def nbytes(self) -> int:
        return tree_bytes(self.state)

    def begin_forward(self) -> None:
        self._interrupted = True

    def end_forward(self, tokens: int) -> None:
        self.offset += tokens
        self._interrupted = False

    def go_back(self, to: int) -> None:
        """Do nothing: an unknown kind can't drop tokens, and `to` is always its offset."""

    def layouts(self) -> list[Layout]:
        # Only the allocated bytes of an unknown kind are known. They are taken to grow with the
        # context, in steps like mlx-lm's.
        rows, every = max(self.offset, getattr(self.inner, "step", 1)), 2**31
        twice = 0 if self._extent().undoes_a_pass else every
        row_bytes = self.nbytes // max(1, rows)
        return [Layout(self.kind, row_bytes, checkpoint_rows=every, draft_rows=twice)]

    def snapshot(self) -> Snapshot:
        return Snapshot(copy.deepcopy(self.inner), self.nbytes, leaves(self.state))

    def restore(self, snapshot: Snapshot, offset: int) -> None:
        self._become(copy.deepcopy(snapshot.content), offset)

    def free(self) -> None:
        self._become(copy.deepcopy(self._pristine), 0)

    def _become(self, inner: Any, offset: int) -> None:
        self.inner = inner
        self.offset = offset
        self._interrupted = False

    def export(self, snapshot: Snapshot | None = None) -> Saved:
        return self._saved(self.inner if snapshot is None else snapshot.content)

    def _saved(self, inner: Any) -> Saved:
        content = self._cut(inner) if has_settable_state(inner) else vars(inner)
        found: Any = dict(tree_flatten(content))
        arrays = {name: leaf for name, leaf in found.items() if isinstance(leaf, mx.array)}
        numbers = {name: leaf for name, leaf in found.items() if name not in arrays}
        return Saved(type(inner).__name__, arrays, numbers)

    def _cut(self, inner: Any) -> Any:
        """Return the state of `inner` without trimmed rows. An unknown kind has none."""
        return inner.state

    def adopt(self, saved: Saved, offset: int) -> None:
        self.restore(self.snapshot_of(saved, offset), offset)
        mx.eval(self.state)

    def snapshot_of(self, saved: Saved, offset: int) -> Snapshot:
        inner = copy.deepcopy(self._pristine)
        content = tree_unflatten([*saved.arrays.items(), *saved.numbers.items()])
        if has_settable_state(inner):
            inner.state = content
        else:
            vars(inner).update(content)
        if getattr(inner, "offset", offset) != offset:
            raise ValueError(f"a {saved.kind} is at {inner.offset} instead of {offset}")
        return Snapshot(inner, tree_bytes(inner.state), leaves(inner.state))

    def to_mlx_lm(self, saved: Saved, offset: int) -> Any:
        self.inner.state = tree_unflatten([*saved.arrays.items(), *saved.numbers.items()])
        return self.inner

    def from_mlx_lm(self, inner: Any) -> Saved:
        if type(inner) is not type(self.inner):
            return super().from_mlx_lm(inner)
        return self._saved(inner)


class TrimmableCache(StockCache):
    """A layer cache that can be trimmed as long as no tokens were dropped at its front."""

    def __init__(self, inner: Any, kind: str, extent: Callable[[Any, int], Extent]) -> None:
        """Wrap `inner`. `extent(inner, offset)` returns the tokens that it stores."""
        super().__init__(inner)
        self.kind, self._extent_of = kind, extent

    def _extent(self) -> Extent:
        return self._extent_of(self.inner, self.offset)

    def _cut(self, inner: Any) -> Any:
        keys, values, *numbers = inner.state
        rows = inner.offset - getattr(inner, "start_position", 0)
        return keys[..., :rows, :], values[..., :rows, :], *numbers

    def go_back(self, to: int) -> None:
        surplus = self.offset - to
        trimmed = self.inner.trim(surplus) if surplus else 0
        # If it trimmed another number, or its own count disagrees, -1 frees the entry.
        self.offset = to if trimmed == surplus and self.inner.offset == to else -1


def chunked(inner: ChunkedKVCache) -> TrimmableCache:
    """Wrap the cache of attention within chunks, as in Llama 4."""

    def extent(inner: ChunkedKVCache, offset: int) -> Extent:
        return ChunkExtent(offset, first=inner.start_position, window=inner.chunk_size)

    return TrimmableCache(inner, "chunked", extent)


def sinks(inner: RotatingKVCache) -> TrimmableCache:
    """Wrap the cache of a window that keeps its first tokens."""

    def extent(inner: RotatingKVCache, offset: int) -> Extent:
        return Filling(offset, window=inner.max_size)

    return TrimmableCache(inner, "sliding", extent)


DEFAULT_SLACK = 512


@dataclass(frozen=True)
class CacheOptions:
    """The options of layer caches."""

    context: int | None = None
    """Most tokens that the caches hold; None: not known."""
    whole: bool = False
    """True to allocate room for the whole context at once."""
    rewind_slack: int = DEFAULT_SLACK
    """Tokens kept beyond a sliding window. A rewind by this many needs no checkpoint."""
    kv_bits: int | None = None
    """Bits per number, 8 or 4, in layers of full attention; None: stored as computed."""

    @property
    def kept_as(self) -> dict[str, str]:
        """The options that decide how a layer stores its tokens, for a fingerprint."""
        return {"kv_bits": str(self.kv_bits)}


def full(inner: KVCache, options: CacheOptions) -> LayerCache:
    """Make the cache of a full-attention layer, quantized if `options.kv_bits` is set."""
    context = options.context if options.whole else None
    if options.kv_bits is None:
        return FullAttentionCache(context)
    return QuantizedAttentionCache(options.kv_bits, context)


def sliding(inner: RotatingKVCache, options: CacheOptions) -> LayerCache:
    """Make the cache of a sliding window.

    mlx-lm's own cache stays in use if it keeps the first tokens (attention sinks).
    """
    if inner.keep:
        return sinks(inner)
    return SlidingWindowCache(inner.max_size, options.rewind_slack, options.context)


def composite(inner: CacheList, options: CacheOptions) -> LayerCache:
    """Make the cache of a layer with several caches."""
    return CompositeCache([layer_cache(part, options) for part in inner.caches])


KINDS: dict[type, Callable[[Any, CacheOptions], LayerCache]] = {
    KVCache: full,
    RotatingKVCache: sliding,
    CacheList: composite,
    ArraysCache: lambda inner, options: RecurrentCache(inner),
    ChunkedKVCache: lambda inner, options: chunked(inner),
}
"""The function that makes the LayerCache, by the class of mlx-lm cache that a model asks for.

Any other class, subclasses of these included, gets a `StockCache`, because it may do anything.
"""


def layer_cache(inner: Any, options: CacheOptions) -> LayerCache:
    """Return the LayerCache that replaces or wraps `inner`, a new cache of mlx-lm."""
    make = KINDS.get(type(inner))
    return StockCache(inner) if make is None else make(inner, options)


def make_layer_caches(model: Any, options: CacheOptions | None = None) -> list[LayerCache]:
    """Return empty caches for an mlx-lm model, in the order in which its layers expect them."""
    return [layer_cache(inner, options or CacheOptions()) for inner in make_prompt_cache(model)]


def run_lazily(model: Any, caches: Sequence[LayerCache], tokens: int) -> mx.array:
    """Return the unevaluated logits `[1, tokens, vocab]` of `tokens` zeros.

    The shapes are known. Nothing is computed until the result or a cache is evaluated. Of a model
    that several ranks share, only this rank's part is run.
    """
    model = getattr(model, "own_part", model)
    for cache in caches:
        cache.begin_forward()
    logits: mx.array = model(
        mx.zeros((1, tokens), mx.int32), cache=[cache.model_cache for cache in caches]
    )
    for cache in caches:
        cache.end_forward(tokens)
    return logits


def evaluate(caches: Sequence[LayerCache]) -> None:
    """Evaluate the arrays that a forward pass stored, layer by layer.

    If all layers are evaluated at once, MLX computes windows and states last. It then keeps the
    inputs of every layer alive until the end.
    """
    for cache in caches:
        _dispatch(cache.state)
    mx.eval([cache.state for cache in caches])


_dispatch: Callable[[Any], None] = mx.async_eval


def outline_of(model: Any, options: CacheOptions) -> list[Saved]:
    """Return the outline of each layer of `model`, from the shapes of unevaluated tokens.

    A saved layer must match its outline.
    """
    like = CacheOptions(rewind_slack=options.rewind_slack, kv_bits=options.kv_bits)
    first = make_layer_caches(model, like)
    counts = sorted({count for cache in first for count in cache.outline_after})
    outlines = [_outline_after(model, like, tokens) for tokens in counts]
    return [combined(layers) for layers in zip(*outlines, strict=True)]


def _outline_after(model: Any, options: CacheOptions, tokens: int) -> list[Saved]:
    caches = make_layer_caches(model, options)
    run_lazily(model, caches, tokens)
    return [shapes(cache.export()) for cache in caches]


def layouts_of(model: Any, options: CacheOptions) -> list[Layout]:
    """Return the layouts of all layers of `model`, from the shapes of one unevaluated token.

    Raise OptionError if the model can't use a quantized cache (`--kv-bits`).
    """
    caches = make_layer_caches(model, options)
    try:
        run_lazily(model, caches, 1)
        if options.kv_bits is not None:  # an architecture may handle one token and several apart
            run_lazily(model, make_layer_caches(model, options), 2)
    except Exception as error:
        if options.kv_bits is None:
            raise
        why = " ".join(str(error).split())[:200].removesuffix(".")
        if isinstance(error, AttributeError | TypeError | KeyError | IndexError):
            why = "its attention computes with the keys and values that a layer stores"
        raise OptionError(
            f"kv_bits: this model can't use a quantized cache: {why}; leave kv_bits out"
        ) from error
    return [layout for cache in caches for layout in cache.layouts()]


def check_quantized(model: Any, options: CacheOptions) -> None:
    """Raise OptionError if the options ask for a quantized cache that the model can't use."""
    if options.kv_bits is not None:
        if hasattr(model, "look"):
            raise OptionError("kv_bits: a model that sees pictures runs without it: leave it out")
        layouts_of(model, options)
