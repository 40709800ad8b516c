"""Make one LayerCache for each layer of a model.

Only `KINDS` decides which kind a layer gets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlxrunner.cache.layers.composite import CompositeCache
from mlxrunner.cache.layers.full import FullAttentionCache, QuantizedAttentionCache
from mlxrunner.cache.layers.protocol import LayerCache, Layout, Saved, combined, shapes
from mlxrunner.cache.layers.recurrent import RecurrentCache
from mlxrunner.cache.layers.sliding import SlidingWindowCache
from mlxrunner.cache.layers.stock import StockCache, chunked, sinks
from mlxrunner.errors import OptionError

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
