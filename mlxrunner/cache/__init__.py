"""The prefix-cache entry, its layer caches, and the caches that several sequences share.

Bookkeeping modules never import mlx. Classes that hold tensors are imported at their first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mlxrunner.cache.entry import CacheEntry
from mlxrunner.cache.layers.protocol import LayerCache, RewindError
from mlxrunner.cache.lease import EntryLease
from mlxrunner.cache.lookup import Lookup
from mlxrunner.cache.prefix import PrefixCache
from mlxrunner.cache.shared.sequences import END, Batch, Cache
from mlxrunner.cache.tokens import TokenBuffer, common_prefix
from mlxrunner.errors import CacheFullError, NotSupportedError

if TYPE_CHECKING:
    from mlxrunner.cache.shared.causal import CausalCache
    from mlxrunner.cache.shared.wrapper import WrapperCache

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

_WITH_TENSORS = {"CausalCache": "causal", "WrapperCache": "wrapper"}


def __getattr__(name: str) -> Any:
    if name not in _WITH_TENSORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.shared.{_WITH_TENSORS[name]}"), name)
