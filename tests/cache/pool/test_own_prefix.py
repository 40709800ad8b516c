"""A short prefix that sequences share becomes cells of each one's own, and reads the same rows."""

from __future__ import annotations

import random

import mlx.core as mx
import numpy as np
import pytest

from mlxrunner.cache.pool.causal import CausalCache
from mlxrunner.cache.pool.cells import SHORT_PREFIX
from mlxrunner.cache.pool.interface import Batch


def filled(cache: CausalCache, sequence: int, first: int, count: int) -> None:
    """Store tokens whose rows say their position."""
    positions = range(first, first + count)
    cache.start_forward(Batch(positions, [sequence] * count))
    rows = mx.broadcast_to(
        mx.array([*positions], mx.float32)[None, None, :, None], (1, 2, count, 4)
    )
    cache.put(rows, -rows)


def rows_of(cache: CausalCache, sequence: int) -> list[int]:
    keys, values = cache.read(sequence, *cache.stored(sequence))[0]
    assert mx.array_equal(keys, -values)
    return [int(one) for one in np.array(keys[0, 0, :, 0])]


@pytest.fixture
def cache() -> CausalCache:
    cache = CausalCache()
    cache.init(mx.float32, 4, 200, 128)
    return cache


@pytest.mark.parametrize("shared", [1, 5, SHORT_PREFIX])
def test_a_short_prefix_is_copied(cache: CausalCache, shared: int) -> None:
    """Its rows stay, the other sequence keeps its cells, and what follows lies behind it."""
    filled(cache, 0, 0, 100)
    cache.copy_prefix(0, 1, shared)
    free = cache.num_free
    cache.expect(1, 20, may_copy=True)
    assert cache.num_free == free - shared
    assert cache.num_own(1) == shared
    filled(cache, 1, shared, 20)
    assert rows_of(cache, 1) == [*range(shared + 20)]
    assert rows_of(cache, 0) == [*range(100)]
    assert len(cache._cells.spans(1) or ()) == 1


@pytest.mark.parametrize(
    ("shared", "free", "may_copy"), [(SHORT_PREFIX + 1, 200, True), (5, 200, False), (5, 3, True)]
)
def test_other_prefixes_stay_shared(
    cache: CausalCache, shared: int, free: int, may_copy: bool
) -> None:
    """Those that are long, may not be copied, or find no cells."""
    filled(cache, 0, 0, 100)
    while cache.num_free > free:
        filled(cache, 2, cache.stored(2)[1], min(100, cache.num_free - free))
    cache.copy_prefix(0, 1, shared)
    before = cache.num_free
    cache.expect(1, 20, may_copy=may_copy)
    assert cache.num_free == before
    assert cache.num_own(1) == 0
    assert rows_of(cache, 1) == [*range(shared)]


@pytest.mark.parametrize("seed", range(6))
def test_any_history_reads_the_right_rows(cache: CausalCache, seed: int) -> None:
    """Sequences that share, are copied, removed and grow, in cells that are nearly full."""
    rng = random.Random(seed)
    copied = 0
    for _ in range(200):
        sequence, source = rng.sample(range(4), 2)
        end = cache.stored(sequence)[1]
        act = rng.random()
        if act < 0.35:
            cache.copy_prefix(source, sequence, rng.randint(0, 90))
            before = cache.num_free
            cache.expect(sequence, rng.randint(1, 150), may_copy=True)
            copied += cache.num_free < before
        elif act < 0.5:
            cache.remove(sequence, rng.randint(0, end))
        else:
            count = min(rng.randint(1, 40), 200 - end, cache.num_free)
            if count > 0:
                filled(cache, sequence, end, count)
        for one in cache.sequences:
            assert rows_of(cache, one) == [*range(cache.stored(one)[1])]
    assert copied > 3
