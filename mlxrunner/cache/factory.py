"""One LayerCache for each of a model's layers. The only place that decides which kind a layer gets."""

from __future__ import annotations

from typing import Any

from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache

from mlxrunner.cache.full import FullAttentionCache
from mlxrunner.cache.layer import LayerCache
from mlxrunner.cache.stock import CompositeCache, wrap


def make_layer_caches(model: Any) -> list[LayerCache]:
    """Empty caches for an mlx-lm model, in the order in which its layers expect them."""
    return [_layer_cache(inner) for inner in make_prompt_cache(model)]


def _layer_cache(inner: Any) -> LayerCache:
    if type(inner) is KVCache:
        return FullAttentionCache()
    if type(inner) is CacheList:
        return CompositeCache([_layer_cache(part) for part in inner.caches])
    return wrap(inner)
