"""The entry and its layer caches. `entry`, `layer` and `tokens` are bookkeeping and never import mlx; the others hold tensors."""

from mlxrunner.cache.entry import CacheEntry, Lookup, PrefixCache, Session
from mlxrunner.cache.layer import LayerCache, RewindError
from mlxrunner.cache.tokens import TokenBuffer, common_prefix

__all__ = ["CacheEntry", "LayerCache", "Lookup", "PrefixCache", "RewindError", "Session", "TokenBuffer", "common_prefix"]
