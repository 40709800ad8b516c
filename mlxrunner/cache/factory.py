"""One LayerCache for each of a model's layers. The only place that decides which kind a layer gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache, make_prompt_cache

from mlxrunner.cache.full import FullAttentionCache
from mlxrunner.cache.layer import LayerCache
from mlxrunner.cache.sliding import SlidingWindowCache
from mlxrunner.cache.stock import CompositeCache, wrap

DEFAULT_SLACK = 512


@dataclass(frozen=True)
class CacheOptions:
    """`context`: tokens that the caches will have to hold at most (None: not known). `rewind_slack`: tokens that a sliding window keeps
    beyond itself, so that it can be rewound by so many without a checkpoint."""

    context: int | None = None
    rewind_slack: int = DEFAULT_SLACK


def make_layer_caches(model: Any, options: CacheOptions | None = None) -> list[LayerCache]:
    """Empty caches for an mlx-lm model, in the order in which its layers expect them."""
    return [_layer_cache(inner, options or CacheOptions()) for inner in make_prompt_cache(model)]


def _layer_cache(inner: Any, options: CacheOptions) -> LayerCache:
    if type(inner) is KVCache:
        return FullAttentionCache()
    if type(inner) is RotatingKVCache and not inner.keep:
        return SlidingWindowCache(inner.max_size, options.rewind_slack, options.context)
    if type(inner) is CacheList:
        return CompositeCache([_layer_cache(part, options) for part in inner.caches])
    return wrap(inner)
