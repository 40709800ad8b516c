"""Rewinds and snapshots of the sliding-window cache bring the window back."""

from __future__ import annotations

import pytest
from support.sliding import few_steps, filled, held_by, numbered, write

from mlxrunner.cache import RewindError
from mlxrunner.cache.layers.sliding import SlidingWindowCache


@few_steps
@pytest.mark.parametrize("slack", [0, 1, 5])
def test_a_decoding_cache_can_always_go_back_by_its_slack(step: int, slack: int) -> None:
    """At least the slack and at most STEP + 1 more tokens can go; further back is refused."""
    cache = filled(SlidingWindowCache(6, slack), 20)
    for position in range(20, 60):
        write(cache, numbered(1, position))
        back = [to for to in range(1, cache.offset) if cache.can_rewind(to)]
        assert set(range(max(20, cache.offset - slack), cache.offset)) <= set(back)
        assert len(back) <= slack + step + 1
        for to in set(range(1, cache.offset)) - set(back):
            before = held_by(cache)
            with pytest.raises(RewindError):
                cache.rewind(to)
            assert (cache.offset, held_by(cache)) == (position + 1, before)
            assert cache.trim(cache.offset - to) == 0


@few_steps
def test_every_place_that_is_called_reachable_is(step: int) -> None:
    """Rewound there, the next chunk sees the window before it."""
    for ones in range(1, 20, 3):
        cache = filled(SlidingWindowCache(6, 4), 9, ones=ones)
        reachable = [to for to in range(cache.offset + 1) if cache.can_rewind(to)]
        assert reachable[0] == 0
        for to in reachable[1:]:
            for n in (1, 20):
                cache = filled(SlidingWindowCache(6, 4), 9, ones=ones)
                cache.rewind(to)
                new = [(to + i, 1000 + i) for i in range(n)]
                everything = numbered(to) + new
                assert write(cache, new) == [everything[max(0, p - 5) : p + 1] for p, _ in new]


def test_a_rewind_to_where_it_is_keeps_everything() -> None:
    """Also when nothing else is reachable."""
    cache = filled(SlidingWindowCache(4), 4000)
    assert [to for to in range(1, 4001) if cache.can_rewind(to)] == [4000]
    cache.rewind(4000)
    assert held_by(cache) == numbered(3, 3997)


@few_steps
@pytest.mark.parametrize("length", [0, 3, 8, 30], ids=lambda n: f"{n}-tokens")
def test_a_snapshot_outlives_what_comes_after_it(step: int, length: int) -> None:
    """The cache is written over, rewound or freed, and restored any number of times."""
    cache = filled(SlidingWindowCache(8, 3), length)
    snapshot = cache.snapshot()
    expected = numbered(length)[-7:]
    assert snapshot.nbytes == 16 * len(expected) == sum(array.nbytes for array in snapshot.arrays)
    for _ in range(3):
        for n in (1, 1, 5, 40, 1):
            write(cache, [(cache.offset + i, -1) for i in range(n)])
        cache.restore(snapshot, length)
        assert (cache.offset, held_by(cache)) == (length, expected)
        if length == 3:
            cache.rewind(1)
            write(cache, [(1, -2)])
        cache.restore(snapshot, length)
        assert held_by(cache) == expected
        cache.free()
        cache.restore(snapshot, length)
        following = (length, -3)
        assert write(cache, [following]) == [[*expected, following]]
