"""The arithmetic of a layer's bytes against what the layer really takes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache

from mlxrunner.cache.entry import CacheEntry, TokenBuffer
from mlxrunner.cache.layers.extents import STEP
from mlxrunner.cache.layers.factory import CacheOptions, layer_cache
from mlxrunner.cache.protocol import LayerCache, Layout
from mlxrunner.testing import UnknownCache

SCRAPS = 16 * 1024
"""Bytes that buffers may be rounded up by."""
HEAD, KEY, VALUE = 2, 64, 32
ROW = HEAD * (KEY + VALUE) * 4
STATE = 64 * 1024 * 4
WINDOW, SLACK = 300, 200

KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "full": (KVCache, {}),
    "quantized-8": (KVCache, {"kv_bits": 8}),
    "quantized-4": (KVCache, {"kv_bits": 4}),
    "sliding": (lambda: RotatingKVCache(WINDOW), {}),
    "recurrent": (lambda: ArraysCache(size=2), {}),
    "composite": (lambda: CacheList(KVCache(), ArraysCache(size=2), RotatingKVCache(WINDOW)), {}),
    "composite-quantized": (lambda: CacheList(KVCache(), ArraysCache(size=2)), {"kv_bits": 8}),
    "unknown": (UnknownCache, {}),
}
kinds = pytest.mark.parametrize("kind", KINDS)
contexts = pytest.mark.parametrize("context", [256, 1000, 1024, 5000], ids=lambda n: f"{n}-tokens")


def build(kind: str, context: int | None, *, whole: bool = True) -> LayerCache:
    make, options = KINDS[kind]
    return layer_cache(make(), CacheOptions(context, whole, SLACK, **options))


def held() -> int:
    """Bytes that MLX has handed out, once everything that is on its way has come and gone.

    Without its store of freed buffers, of which it would hand out a larger one than was asked for.
    """
    mx.synchronize()
    gc.collect()
    mx.clear_cache()
    return int(mx.get_active_memory())


def rows(n: int) -> tuple[mx.array, mx.array]:
    return mx.zeros((1, HEAD, n, KEY)), mx.zeros((1, HEAD, n, VALUE))


def write(cache: LayerCache, n: int) -> None:
    """`n` tokens through the layer, whatever it is; not evaluated."""

    def step(layer: Any) -> None:
        if isinstance(layer, CacheList):
            for part in layer.caches:
                step(part)
        elif isinstance(layer, ArraysCache):
            layer.cache = [mx.random.normal((1, 64, 1024)), mx.random.normal((1, 3))]
        else:
            layer.update_and_fetch(*rows(n))

    cache.begin_forward()
    step(cache.model_cache)
    cache.end_forward(n)


def fill(cache: LayerCache, context: int, chunk: int = 2000) -> None:
    """Up to the context: in chunks, the last ten tokens one by one."""
    while cache.offset < context:
        write(cache, min(chunk, context - 10 - cache.offset) if cache.offset < context - 10 else 1)
        mx.eval(cache.state)


def layouts(kind: str, context: int | None) -> list[Layout]:
    """From the shapes of one token that nobody evaluates."""
    cache = build(kind, context)
    write(cache, 1)
    return cache.layouts()


def states(cache: Any) -> int:
    """Bytes of the states, which are kept twice: now, and before the last forward pass."""
    parts = cache.parts if cache.kind == "composite" else [cache]
    return sum(part.nbytes for part in parts if part.kind == "recurrent")


@pytest.mark.exhaustive(10)
@kinds
@contexts
def test_the_arithmetic_is_what_the_layer_takes(kind: str, context: int) -> None:
    """The arithmetic is exact to the byte, and MLX hands out no more, kept states included."""
    foretold = sum(layout.nbytes(context) for layout in layouts(kind, context))
    before = held()
    cache = build(kind, context)
    fill(cache, context)
    if kind == "unknown":  # mlx-lm's own grow in steps, and by whole chunks
        assert foretold <= cache.nbytes <= foretold + 2 * STEP * ROW
    else:
        assert cache.nbytes + states(cache) == foretold
    assert held() - before <= cache.nbytes + states(cache) + SCRAPS


BY_HAND: dict[str, Callable[[int], float]] = {
    "full": lambda n: n * ROW,
    "quantized-8": lambda n: n * ROW * (1 + 8 / 32) / 4,
    "quantized-4": lambda n: n * ROW * (0.5 + 8 / 32) / 4,
    "sliding": lambda n: min(n, WINDOW + SLACK + STEP) * ROW,
    "recurrent": lambda n: 2 * (STATE + 12),
}


@pytest.mark.parametrize("kind", BY_HAND)
@contexts
def test_the_arithmetic_by_hand(kind: str, context: int) -> None:
    """Heads of 64 and 32 numbers have groups of 32, each with a scale and a bias in float32."""
    found = sum(layout.nbytes(context) for layout in layouts(kind, context))
    assert found == BY_HAND[kind](context)


@pytest.mark.parametrize("kind", ["full", "quantized-8", "quantized-4", "sliding"])
def test_a_layer_that_grows_takes_hardly_more_once_there_is_room_reserved(kind: str) -> None:
    """A reserved layer takes at most 1 % more than planned, an unreserved one half more."""
    context = 40 * STEP
    foretold = sum(layout.nbytes(context) for layout in layouts(kind, None))
    cache = build(kind, None, whole=False)
    cache.reserve(context)
    fill(cache, context, chunk=900)
    # A quantized one has no reservation: it is planned whole.
    most = 1.5 if kind.startswith("quantized") else 1.01
    assert 0.99 * foretold <= cache.nbytes <= most * foretold + STEP * ROW


@kinds
@contexts
def test_the_arithmetic_of_a_checkpoint(kind: str, context: int) -> None:
    """A checkpoint at the end of the context has the rows and states that its layers need."""
    foretold = sum(layout.checkpoint_bytes(context) for layout in layouts(kind, context))
    cache = build(kind, context)
    fill(cache, context)
    taken = cache.snapshot().nbytes
    if kind == "unknown":
        assert foretold <= taken <= foretold + 2 * STEP * ROW
    else:
        assert taken == foretold
    assert (foretold == 0) == (not cache.needs_checkpoints)


UNDOES: dict[str, Callable[[], LayerCache]] = {
    **{kind: partial(build, kind, 700) for kind in KINDS},
    "chunked": lambda: layer_cache(ChunkedKVCache(512), CacheOptions()),
    "sinks": lambda: layer_cache(RotatingKVCache(512, keep=4), CacheOptions()),
}


@pytest.mark.exhaustive(10)
@pytest.mark.parametrize("kind", UNDOES)
@pytest.mark.parametrize("before", [100, 690], ids=lambda n: f"{n}-tokens")
def test_what_a_draft_takes_is_planned(kind: str, before: int) -> None:
    """A layer that a draft copies says so, and the copy is not larger than it says."""
    one = UNDOES[kind]()
    write(one, 1)
    foretold = sum(layout.draft_bytes(before) for layout in one.layouts())
    cache = UNDOES[kind]()
    fill(cache, before)
    entry = CacheEntry(TokenBuffer(range(before)), [cache])
    mx.eval(cache.state)
    taken = held()
    entry.hold([8])
    write(cache, 8)
    mx.eval(cache.state)
    assert held() - taken <= foretold + states(cache) + 2 * STEP * ROW + SCRAPS
    if entry.held is not None:
        assert foretold
        assert cache.nbytes <= entry.nbytes <= cache.nbytes + foretold + 2 * STEP * ROW
    entry.tokens.extend(range(8))
    assert entry.reach(before)[0] == before


@pytest.mark.parametrize("kind", ["chunked", "sinks"])
def test_what_drops_its_front_is_never_planned_too_small(kind: str) -> None:
    """mlx-lm's own of these are taken for growing ones: safe, and too much for a long context."""
    cache = UNDOES[kind]()
    write(cache, 1)
    (layout,) = cache.layouts()
    for context in (1000, 3000):
        fill(cache, context, chunk=100)
        assert layout.nbytes(context) + 2 * STEP * ROW >= cache.nbytes
