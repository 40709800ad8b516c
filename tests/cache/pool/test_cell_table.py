"""Every value of a pool keeps its cells, whichever was used before, wherever Ctrl-C comes."""

from __future__ import annotations

import random
from contextlib import suppress

import numpy as np
import pytest

from mlxrunner.cache import END, Batch, CacheFullError
from mlxrunner.cache.pool.cell_table import Bools, CellRun, Ints, num_covered
from mlxrunner.cache.pool.cells import AttentionWindow, KVPool
from mlxrunner.testing import interrupt_at

WINDOWS = {
    "full": AttentionWindow(),
    "window": AttentionWindow(window=3),
    "memory": AttentionWindow(window=2, memory=7),
}
Contents = tuple[Ints, Bools]


def contents(pool: KVPool) -> Contents:
    """The owners, and the positions of the cells that have one."""
    owners = pool.owners
    return np.where(owners.any(axis=0), pool.positions, -1), owners


def are_equal(one: Contents, other: Contents) -> bool:
    return all(map(np.array_equal, one, other))


def listed(pool: KVPool, sequence: int) -> list[tuple[int, int]]:
    """Return (cell, position) of each token, from the spans."""
    found = pool.spans(sequence)
    assert found is not None
    assert sorted(found) == list(found)
    return [
        (cell, span.position + cell - span.begin)
        for span in found
        for cell in range(span.begin, span.end)
    ]


def counts(pool: KVPool, cells: Contents) -> None:
    """All that is counted without the arrays is what they hold."""
    positions, owners = cells
    used = owners.any(axis=0)
    assert pool.num_free == np.count_nonzero(~used)
    assert pool.sequences == tuple(np.flatnonzero(owners.any(axis=1)))
    ends = (owners * (positions + 1)).max(axis=1)
    assert pool.next_positions().tolist() == ends.tolist()
    for sequence, own in enumerate(owners):
        others = [number for number in range(len(owners)) if number != sequence]
        assert pool.num_own(sequence) == np.count_nonzero(own & ~owners[others].any(axis=0))
        assert pool.glance(sequence) == pool.num_own(sequence)
        for at in (0, 4):
            shared = own & owners[others].any(axis=0) & (positions >= at)
            assert pool.num_shared(sequence, others, at) == np.count_nonzero(shared)
            with_prefix = owners[others].any(axis=0) | own & (positions < at)
            assert pool.num_used_by(others, (sequence, at)) == np.count_nonzero(with_prefix)
            assert pool.holds(sequence, at) == (own & (positions >= at)).any()
        cells_of = np.flatnonzero(own).tolist()
        assert listed(pool, sequence) == [(cell, int(positions[cell])) for cell in cells_of]
        first = np.flatnonzero(own)[:1].astype(np.int32)
        assert pool.owners_of(first) == {*np.flatnonzero(owners[:, first].any(axis=1)).tolist()}


def changed(pool: KVPool, rng: random.Random) -> KVPool:
    """The pool after any call."""
    one, other = rng.randrange(4), rng.randrange(4)
    act = rng.randrange(8)
    with suppress(CacheFullError):
        if act < 4:
            nexts = pool.next_positions().tolist()
            first, second = rng.randint(1, 6), rng.randrange(3) if one != other else 0
            begin = nexts[one] + (rng.random() < 0.1)
            positions = [*range(begin, begin + first)]
            positions += range(nexts[other], nexts[other] + second)
            placement = pool.place(Batch(positions, [one] * first + [other] * second))
            return rng.choice([placement.after] * 5 + [placement.before])
        if act == 4:
            return pool.with_prefix(one, other, rng.randrange(14))
        if act == 5:
            begin = rng.randrange(12)
            return pool.without(one, begin, rng.choice([END, begin + 2]))[0]
        if act == 6:
            copied = pool.relocated(one, rng.randrange(8), [other])
            return pool.expecting(one, rng.randrange(12), [other]) if copied is None else copied[0]
    return pool.packed()[0] if rng.random() < 0.3 else pool


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("seed", range(4))
def test_every_value_keeps_its_cells(window: str, seed: int) -> None:
    """Also one from which others were made, and in any order."""
    rng = random.Random(seed)
    known = [KVPool.empty(64, 4, WINDOWS[window])]
    expected = [contents(known[0])]
    for _ in range(300):
        pool = changed(rng.choice(known[-5:]), rng)
        known.append(pool)
        expected.append(contents(pool))
        number = rng.randrange(len(known))
        assert are_equal(contents(known[number]), expected[number])
        counts(known[number], expected[number])
    assert max(np.count_nonzero(owners) for _, owners in expected) > 12
    for pool, cells in zip(known, expected, strict=True):
        assert are_equal(contents(pool), cells)


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("window", WINDOWS)
def test_an_interrupt_at_any_line_changes_no_value(window: str) -> None:
    """The arrays are in order at the next call."""
    rng = random.Random(7)
    start = KVPool.empty(64, 4, WINDOWS[window])
    for _ in range(30):
        start = changed(start, rng)
    cells, interrupted = contents(start), 0
    for seed in range(6):
        line = 0
        while True:
            line += 1
            after = None
            try:
                with interrupt_at(line):
                    after = changed(start, random.Random(seed))
                    after.num_own(0)
            except KeyboardInterrupt:
                interrupted += 1
            if line % 2 or after is None:
                assert are_equal(contents(start), cells)
            counts(after or start, contents(after or start))
            if after is not None:
                break
        whole = changed(start, random.Random(seed))
        assert are_equal(contents(after), contents(whole))
    assert interrupted > 100


def test_a_value_that_nobody_holds_is_forgotten() -> None:
    """A long conversation costs what its cells cost, not one change for each token."""
    pool = KVPool.empty(4096, 2, AttentionWindow())
    for position in range(2000):
        pool = pool.place(Batch([position], [0])).after
    assert pool.num_own(0) == 2000
    assert pool._version.origin is None


def test_a_new_value_is_seen_at_a_glance() -> None:
    """A glance is another thread's, which may not write the arrays."""
    before = KVPool.empty(64, 2, AttentionWindow())
    pool = before.place(Batch(range(9), [0] * 9)).after
    assert [before.glance(0), pool.glance(0)] == [9, 9]
    shared = pool.with_prefix(0, 1, 4)
    assert [pool.glance(0), shared.glance(1)] == [5, 0]
    assert before.num_own(0) == 0
    assert [pool.glance(0), pool.num_own(0), pool.glance(0)] == [0, 9, 9]


def test_a_cell_may_have_as_many_owners_as_there_are_sequences() -> None:
    most = 2**16
    owners = np.zeros((most + 1, 3), np.bool_)
    owners[:most, 0] = True
    pool = KVPool(np.zeros(3, np.int32), owners)
    assert pool.num_free == 2
    assert pool.with_prefix(0, most, 1).num_free == 2
    assert pool.with_prefix(0, 0, 0).num_own(1) == 0


@pytest.mark.parametrize(
    ("runs", "count"),
    [([], 0), ([(3, 5)], 2), ([(3, 5), (4, 9), (0, 1)], 7), ([(0, 9), (2, 3), (9, 9)], 9)],
)
def test_cells_in_several_runs_count_once(runs: list[tuple[int, int]], count: int) -> None:
    assert num_covered(CellRun(*run) for run in runs) == count
