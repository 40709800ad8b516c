"""The entry and its layer caches, and the caches of several sequences. Bookkeeping never imports mlx; what holds tensors comes when asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mlxrunner.cache.entry import CacheEntry, PrefixCache, Session
from mlxrunner.cache.layer import LayerCache, RewindError
from mlxrunner.cache.lookup import Lookup
from mlxrunner.cache.sequences import (
    END,
    Batch,
    Cache,
    CacheConfig,
    CacheFullError,
    NotSupportedError,
)
from mlxrunner.cache.tokens import TokenBuffer, common_prefix

if TYPE_CHECKING:
    from mlxrunner.cache.causal import CausalCache
    from mlxrunner.cache.encoder import EncoderCache
    from mlxrunner.cache.wrapper import WrapperCache

__all__ = [
    "END", "Batch", "Cache", "CacheConfig", "CacheEntry", "CacheFullError", "CausalCache", "EncoderCache", "LayerCache", "Lookup",
    "NotSupportedError", "PrefixCache", "RewindError", "Session", "TokenBuffer", "WrapperCache", "common_prefix",
]  # fmt: skip

_WITH_TENSORS = {"CausalCache": "causal", "EncoderCache": "encoder", "WrapperCache": "wrapper"}


def __getattr__(name: str) -> Any:
    if name not in _WITH_TENSORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WITH_TENSORS[name]}"), name)
