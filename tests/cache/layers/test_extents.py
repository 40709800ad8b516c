"""Extents say of each kind of layer what its cache does: the arithmetic against the real thing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache

from mlxrunner.cache.layers.extents import is_layer, read_extent
from mlxrunner.cache.layers.factory import CacheOptions, layer_cache
from mlxrunner.cache.protocol import LayerCache, describe
from mlxrunner.testing import UnknownCache

CONTEXT = 4000
KINDS: dict[str, Callable[[], Any]] = {
    "full": KVCache,
    "sliding": lambda: RotatingKVCache(20),
    "sinks": lambda: RotatingKVCache(300, keep=4),
    "chunked": lambda: ChunkedKVCache(30),
    "unknown": UnknownCache,
    "recurrent": lambda: ArraysCache(1),
    "composite": lambda: CacheList(KVCache(), ArraysCache(1), RotatingKVCache(20)),
}


def new(kind: str) -> LayerCache:
    return layer_cache(KINDS[kind](), CacheOptions(CONTEXT, rewind_slack=5))


def write(cache: LayerCache, tokens: int) -> None:
    cache.begin_forward()
    for inner in getattr(cache.model_cache, "caches", [cache.model_cache]):
        if isinstance(inner, ArraysCache):
            inner[0] = mx.zeros((1, 4))
            continue
        if isinstance(inner, ChunkedKVCache):
            inner.maybe_trim_front()
        inner.update_and_fetch(mx.zeros((1, 1, tokens, 2)), mx.zeros((1, 1, tokens, 2)))
    cache.end_forward(tokens)


def line_of(kind: str) -> dict[str, Any]:
    """Return what a token log says of such a layer."""
    cache = new(kind)
    write(cache, 1)
    return describe(cache) | {"count": 1}


steps = st.lists(
    st.tuples(st.sampled_from(["pass", "decode", "rewind", "restore"]), st.integers(1, 400)),
    max_size=12,
)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(steps=steps)
def test_an_extent_goes_where_its_layer_goes(kind: str, steps: list[tuple[str, int]]) -> None:
    """After any passes, rewinds and checkpoints: the same offsets, and checkpoints of that size."""
    cache, line = new(kind), line_of(kind)
    assert is_layer(line)
    extent = read_extent(line, CONTEXT)
    kept: tuple[Any, Any] | None = None
    for step, count in steps:
        if step == "pass":
            write(cache, count)
            extent = extent.after(count)
        elif step == "decode":
            for _ in range(count % 40):
                write(cache, 1)
            extent = extent.decoded(count % 40)
        elif step == "rewind":
            to = cache.reachable(max(cache.offset - count % 60, 0))
            cache.rewind(to)
            extent = extent.rewound(to) if to else extent.empty()
            if kept is not None and kept[1].offset > to:
                kept = None  # as an entry gives up checkpoints after its end
        elif kept is not None:
            cache.restore(kept[0], kept[1].offset)
            extent = kept[1]
        assert cache.offset == extent.offset
        places = {0, 1, extent.offset // 2, *range(max(0, extent.offset - 70), extent.offset + 2)}
        assert [cache.reachable(to) for to in places] == [extent.reachable(to) for to in places]
        snapshot = cache.snapshot()
        if cache.needs_checkpoints and cache.offset:
            assert snapshot.nbytes == extent.checkpoint_bytes(line)
            kept = snapshot, extent.checkpoint()
