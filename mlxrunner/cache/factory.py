"""One LayerCache for each of a model's layers. The only place that decides which kind a layer gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_caches
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlxrunner.cache.composite import CompositeCache
from mlxrunner.cache.full import FullAttentionCache
from mlxrunner.cache.layer import LayerCache
from mlxrunner.cache.layout import Layout
from mlxrunner.cache.quantized import QuantizedAttentionCache
from mlxrunner.cache.recurrent import RecurrentCache
from mlxrunner.cache.saved import ROWS, STATES, Saved, combined, shapes
from mlxrunner.cache.sliding import SlidingWindowCache
from mlxrunner.cache.stock import StockCache
from mlxrunner.cache.trimmable import TrimmableCache
from mlxrunner.errors import OptionError

DEFAULT_SLACK = 512
FIRST_TOKENS = (2, 3, 7)
"""In which a state may still grow: convolutions and n-grams look back over a few tokens."""
MANY_TOKENS = 300
"""After which a cache of an unknown kind should have stored all that it ever stores: groups of up to 256 tokens."""


@dataclass(frozen=True)
class CacheOptions:
    """`context`: tokens that the caches will have to hold at most (None: not known);
    `whole`: allocate room for all of them at once. `rewind_slack`: tokens that a sliding window keeps
    beyond itself, so that it can be rewound by so many without a checkpoint. `kv_bits`: 8 or 4, of full-attention layers; None: as computed."""

    context: int | None = None
    whole: bool = False
    rewind_slack: int = DEFAULT_SLACK
    kv_bits: int | None = None


def make_layer_caches(model: Any, options: CacheOptions | None = None) -> list[LayerCache]:
    """Empty caches for an mlx-lm model, in the order in which its layers expect them."""
    return [layer_cache(inner, options or CacheOptions()) for inner in make_prompt_cache(model)]


def run_lazily(model: Any, caches: Sequence[LayerCache], tokens: int) -> mx.array:
    """The logits of `tokens` zeros `[1, tokens]`, as a graph: shapes are known, nothing is computed until somebody evaluates it."""
    for cache in caches:
        cache.begin_forward()
    logits: mx.array = model(
        mx.zeros((1, tokens), mx.int32), cache=[cache.model_cache for cache in caches]
    )
    for cache in caches:
        cache.end_forward(tokens)
    return logits


def evaluate(caches: Sequence[LayerCache]) -> None:
    """Evaluate what a forward pass stored, layer by layer: asked for all at once, MLX computes windows and states last, and keeps alive
    what they are made from, of every layer."""
    for cache in caches:
        _dispatch(cache.state)
    mx.eval([cache.state for cache in caches])


_dispatch: Callable[[Any], None] = mx.async_eval


def outline_of(model: Any, options: CacheOptions) -> list[Saved]:
    """Outline each layer of `model`, by the shapes of unevaluated tokens: a saved layer has to be like it.

    One token says all about rows. A state may grow with the first few tokens, and a cache of an unknown kind with every so many.
    """
    like = CacheOptions(rewind_slack=options.rewind_slack, kv_bits=options.kv_bits)
    first = _outline_after(model, like, 1)
    kinds = {kind for layer in first for kind in _kinds(layer)}
    more = (
        ()
        if kinds <= set(ROWS)
        else FIRST_TOKENS
        if all(map(_is_known, kinds))
        else (*FIRST_TOKENS, MANY_TOKENS)
    )
    outlines = [first, *(_outline_after(model, like, tokens) for tokens in more)]
    return [combined(layers) for layers in zip(*outlines, strict=True)]


def _outline_after(model: Any, options: CacheOptions, tokens: int) -> list[Saved]:
    caches = make_layer_caches(model, options)
    run_lazily(model, caches, tokens)
    return [shapes(cache.export()) for cache in caches]


def _kinds(layer: Saved) -> Iterator[str]:
    yield layer.kind
    for part in layer.parts:
        yield from _kinds(part)


def _is_known(kind: str) -> bool:
    """Return True for a kind of this package, or a class of mlx-lm's caches."""
    return kind in (*ROWS, STATES, CompositeCache.kind) or hasattr(mlx_lm_caches, kind)


def layouts_of(model: Any, options: CacheOptions) -> list[Layout]:
    """How each layer of `model` stores its tokens, from the shapes of an unevaluated token. OptionError where `--kv-bits` can't be."""
    caches = make_layer_caches(model, options)
    try:
        run_lazily(model, caches, 1)
    except Exception as error:
        if options.kv_bits is None:
            raise
        raise OptionError(
            f"kv_bits: this model can't use a quantized cache: {' '.join(str(error).split())[:200]}"
        ) from error
    return [layout for cache in caches for layout in cache.layouts()]


def layer_cache(inner: Any, options: CacheOptions) -> LayerCache:
    """The LayerCache that takes the place of, or looks after, a new mlx-lm layer cache."""
    if type(inner) is KVCache:
        context = options.context if options.whole else None
        return (
            FullAttentionCache(context)
            if options.kv_bits is None
            else QuantizedAttentionCache(options.kv_bits, context)
        )
    if type(inner) is RotatingKVCache and not inner.keep:
        return SlidingWindowCache(inner.max_size, options.rewind_slack, options.context)
    if type(inner) is CacheList:
        return CompositeCache([layer_cache(part, options) for part in inner.caches])
    if type(inner) is ArraysCache:
        return RecurrentCache(inner)
    if type(inner) is RotatingKVCache:
        return TrimmableCache(inner, "sliding", lambda cache, to: cache.offset < cache.max_size)
    if type(inner) is ChunkedKVCache:
        return TrimmableCache(
            inner, "chunked", lambda cache, to: cache.start_position <= to - to % cache.chunk_size
        )
    return StockCache(inner)
