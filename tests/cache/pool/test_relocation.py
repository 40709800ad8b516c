"""Short prefixes and conversations get cells beside those that run, and read the same rows."""

from __future__ import annotations

import random

import mlx.core as mx
import numpy as np
import pytest

from mlxrunner.cache.pool.causal import CausalCache
from mlxrunner.cache.pool.cell_table import CellRun
from mlxrunner.cache.pool.cells import (
    MOST_MOVED,
    SHORT_PREFIX,
    AttentionWindow,
    KVPool,
    Reservation,
)
from mlxrunner.cache.protocol import Batch


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
    """Its rows stay, the other sequence keeps its cells, and what follows lies after it."""
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


def lane(begin: int, size: int) -> Reservation:
    return Reservation(CellRun(begin, begin + size), begin)


def held(length: int, running: Reservation) -> KVPool:
    """A pool in which sequence 0 has its first cells, and sequence 1 runs elsewhere."""
    pool = KVPool.empty(8192, 4, AttentionWindow()).expecting(0, length)
    pool = pool.place(Batch(range(length), [0] * length)).after
    reservations = {**pool.reservations, 1: running}
    return KVPool(pool.positions, pool.owners, pool.window, reservations)


@pytest.mark.parametrize(
    ("length", "running", "moves_to"),
    [
        (200, lane(3072, 256), 2816),
        (200, lane(256, 256), None),  # side by side already
        (200, lane(768, 256), None),  # near enough for one batch
        (200, lane(3072, 512), None),  # of another size: no batch of both
        (250, lane(3072, 512), 2560),  # its own has no room for what comes
        (MOST_MOVED + 1, lane(4096, 1024), None),
    ],
)
def test_a_short_conversation_moves_to_those_that_run(
    length: int, running: Reservation, moves_to: int | None
) -> None:
    pool = held(length, running)
    moved = pool.relocated(0, 20, [1])
    if moves_to is None:
        assert moved is None
        return
    assert moved is not None
    after, cells = moved
    assert cells.tolist() == [*range(moves_to, moves_to + length)]
    assert after.reservations[0].run.begin == moves_to
    assert after.reservations[0].next == moves_to + length
    assert after.num_free == pool.num_free
    assert after.stored(0) == (0, length)


def test_a_conversation_stays_where_no_other_place_is_better() -> None:
    """No cells are free beside those that run."""
    pool = held(200, lane(3072, 256))
    owners = pool.owners
    owners[2, 1024:] = True
    assert (
        KVPool(pool.positions, owners, pool.window, pool.reservations).relocated(0, 20, [1]) is None
    )


def test_requests_that_begin_together_lie_together() -> None:
    """Between conversations that stay: where most of them find room side by side."""
    pool = KVPool.empty(4096, 8, AttentionWindow())
    for begin in (256, 1024):
        owners = pool.owners
        owners[7, begin : begin + 256] = True
        pool = KVPool(pool.positions, owners)
    for sequence in range(6):
        pool = pool.expecting(sequence, 200, [*range(sequence)])
    assert [pool.reservations[each].run.begin for each in range(6)] == [*range(1280, 2816, 256)]


@pytest.mark.parametrize("seed", range(6))
def test_any_history_reads_the_right_rows(cache: CausalCache, seed: int) -> None:
    """Sequences that share, are copied, removed and grow, in cells that are nearly full."""
    rng = random.Random(seed)
    copied = moved = 0
    for _ in range(200):
        sequence, source = rng.sample(range(4), 2)
        end = cache.stored(sequence)[1]
        act = rng.random()
        if act < 0.35:
            cache.copy_prefix(source, sequence, rng.randint(0, 90))
            before = cache.num_free
            beside = rng.sample(range(4), rng.randint(0, 3))
            cache.expect(sequence, rng.randint(1, 150), may_copy=True, beside=beside)
            copied += cache.num_free < before
        elif act < 0.6:
            beside = rng.sample(range(4), rng.randint(0, 3))
            cells = cache._cells
            cache.expect(sequence, rng.randint(1, 50), may_copy=True, beside=beside)
            moved += not np.array_equal(cells.owners[sequence], cache._cells.owners[sequence])
        elif act < 0.7:
            cache.remove(sequence, rng.randint(0, end))
        else:
            count = min(rng.randint(1, 40), 200 - end, cache.num_free)
            if count > 0:
                filled(cache, sequence, end, count)
        for one in cache.sequences:
            assert rows_of(cache, one) == [*range(cache.stored(one)[1])]
    assert copied > 3
    assert moved > 3
