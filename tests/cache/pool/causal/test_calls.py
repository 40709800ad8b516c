"""Calls have an order and limits; what was refused or taken back leaves no trace."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from support.causal import drawn, made, stored

from mlxrunner.cache import Batch, CacheFullError, CausalCache


@pytest.mark.parametrize("at_once", [True, False], ids=["at-once", "one-too-many"])
def test_full(at_once: bool) -> None:
    """With the sizes; what fitted before still works."""
    cache = made(capacity=4)
    if at_once:
        with pytest.raises(
            CacheFullError,
            match=r"a batch of 5 tokens needs 5 free cells, but 4 of 4 are free: remove",
        ):
            cache.start_forward(Batch(range(5), [0] * 5))
    drawn(cache, "1234", [0, 1, 2, 3])
    with pytest.raises(
        CacheFullError,
        match=r"a batch of 1 tokens needs 1 free cells, but 0 of 4 are free: remove tokens",
    ):
        cache.start_forward(Batch([4], [0]))
    _, values, mask = cache.get()
    assert np.array(values)[0, 0, :, 0].tolist() == [1, 2, 3, 4]
    assert np.array(mask).tolist() == np.tri(4, dtype=bool).tolist()
    cache.remove(0, 3)
    assert drawn(cache, "5", [3]) == "1235"


def test_the_order_of_calls() -> None:
    """Each once, and nothing after the end; closing may be repeated."""
    cache = CausalCache()
    with pytest.raises(RuntimeError, match="call init first"):
        cache.start_forward(Batch([0], [0]))
    with pytest.raises(ValueError, match="capacity has to be at least 1, not 0"):
        cache.init(mx.float32, 1, 0, 1)
    cache.init(mx.float32, 1, 4, 4)
    with pytest.raises(RuntimeError, match="init was called twice"):
        cache.init(mx.float32, 1, 4, 4)
    with pytest.raises(RuntimeError, match="no forward pass is under way"):
        cache.put(mx.zeros((1, 1, 1, 1)), mx.zeros((1, 1, 1, 1)))
    cache.start_forward(Batch([0], [0]))
    with pytest.raises(RuntimeError, match="layer 0: get was called before anything was put"):
        cache.get()
    cache.put(mx.zeros((1, 1, 1, 1)), mx.zeros((1, 1, 1, 1)))
    cache.close()
    cache.close()
    assert (cache.nbytes, cache.num_cells, cache.sequences, cache.state) == (0, 0, (), [])
    calls = {
        "init": (mx.float32, 1, 4, 4),
        "start_forward": (Batch([0], [0]),),
        "get": (),
        "defragment": (),
        "can_resume": (0, 0),
        "remove": (0, 0),
        "copy_prefix": (0, 0, 0),
    }
    for name, arguments in calls.items():
        with pytest.raises(RuntimeError, match="the cache was closed"):
            getattr(cache, name)(*arguments)


@pytest.mark.parametrize("reserve", [False, True], ids=["real", "reserve"])
def test_a_batch_beyond_what_was_agreed(reserve: bool) -> None:
    """Longer than max_batch, or of a sequence that is not there."""
    cache = made(2, capacity=16, max_batch=4)
    with pytest.raises(
        CacheFullError,
        match=r"\(max_batch is 4\) needs 5 free cells, but 4 of 4 are free: split it, or raise",
    ):
        cache.start_forward(Batch(range(5), [0] * 5), reserve)
    with pytest.raises(ValueError, match="there is no sequence 2"):
        cache.start_forward(Batch([0], [2]), reserve)


def test_taking_back_a_step() -> None:
    """It works for the last call only."""
    cache = made(2, capacity=4, max_batch=4)
    drawn(cache, "1234", range(4))
    cache.start_forward(Batch([0, 4], [1, 0]))
    cache.undo_forward()
    cache.undo_forward()
    assert (stored(cache), cache.num_free) == ({0: [(0, 1), (1, 2), (2, 3), (3, 4)]}, 4)
    assert cache.mask.shape == (4, 4)
    assert drawn(cache, "5", [4]) == "12345"
    cache.undo_forward()
    assert cache.num_free == 3


def test_only_the_last_call_is_taken_back() -> None:
    """Not a step before a removal, nor one before a step that failed."""
    cache = made(2, capacity=4, max_batch=4)
    drawn(cache, "1234", range(4))
    cache.start_forward(Batch([4], [0]))
    cache.remove(0, 3)
    cache.undo_forward()
    assert (cache.num_free, cache.can_resume(0, 4)) == (5, False)
    cache.start_forward(Batch([3, 4, 5], [0, 0, 0]))
    with pytest.raises(CacheFullError):
        cache.start_forward(Batch([0, 1, 2], [1, 1, 1]))
    cache.undo_forward()
    assert cache.num_free == 2
