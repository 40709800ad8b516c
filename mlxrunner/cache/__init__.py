"""The prefix-cache entry, its layer caches, and the caches that several sequences share.

Bookkeeping modules never import mlx. `CausalCache` holds tensors and is imported at its
first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mlxrunner.cache.account import Lookup
from mlxrunner.cache.entry import CacheEntry, TokenBuffer, common_prefix
from mlxrunner.cache.prefix import EntryLease, PrefixCache
from mlxrunner.cache.protocol import END, Batch, Cache, LayerCache, RewindError, WrapperCache
from mlxrunner.errors import CacheFullError, NotSupportedError

if TYPE_CHECKING:
    from mlxrunner.cache.pool.causal import CausalCache

__all__ = [
    "END",
    "Batch",
    "Cache",
    "CacheEntry",
    "CacheFullError",
    "CausalCache",
    "EntryLease",
    "LayerCache",
    "Lookup",
    "NotSupportedError",
    "PrefixCache",
    "RewindError",
    "TokenBuffer",
    "WrapperCache",
    "common_prefix",
]


def __getattr__(name: str) -> Any:
    if name != "CausalCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.pool.causal").CausalCache
