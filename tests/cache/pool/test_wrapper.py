"""Several caches in one: each call goes to all of them or to none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.checks import raising

from mlxrunner.cache import (
    Batch,
    Cache,
    CacheFullError,
    CausalCache,
    NotSupportedError,
    WrapperCache,
)
from mlxrunner.cache.protocol import Commit

NEXT = Batch(range(4, 8), [0] * 4)


def moved(layer: int, keys: mx.array, offsets: mx.array) -> mx.array:
    """Keys that are just their position."""
    return keys + offsets[:, None]


def windowed(capacity: int = 8) -> tuple[WrapperCache, CausalCache, CausalCache]:
    """Window 3, 10 cells, beside full attention, for two sequences."""
    window, full = CausalCache(shift=moved, window=3), CausalCache(shift=moved)
    cache = WrapperCache(window, full)
    cache.init(mx.float32, 2, capacity, 4)
    return cache, window, full


def forward(
    cache: WrapperCache,
    tokens: str,
    positions: Sequence[int],
    sequences: Sequence[int] | None = None,
) -> list[str]:
    """Run a pass and return what the queries see, per cache: `1 12 23`"""
    cache.start_forward(Batch(positions, sequences or [0] * len(tokens)))
    drawn = []
    for kind in range(len(cache.caches)):
        cache.set_layer_type(kind)
        cache.set_layer(kind)
        cache.put(
            mx.array(list(positions), mx.float32)[None, None, :, None],
            mx.array([int(token) for token in tokens])[None, None, :, None],
        )
        _, values, mask = cache.get()
        contents = np.array(values)[0, 0, :, 0].astype(int)
        drawn.append(" ".join("".join(map(str, sorted(contents[row]))) for row in np.array(mask)))
    return drawn


def everything(*caches: CausalCache) -> list[Any]:
    """Return the tokens, resume points and room of each sequence, wherever the cells lie."""
    resumes = [
        [[cache.can_resume(sequence, position) for position in range(9)] for sequence in range(2)]
        for cache in caches
    ]
    return [
        [contents(cache, sequence) for cache in caches for sequence in range(2)],
        resumes,
        [cache.num_free for cache in caches],
    ]


def contents(cache: CausalCache, sequence: int = 0) -> list[tuple[int, float, int]]:
    """(position, key, token), in order."""
    cells = np.flatnonzero(cache._cells.owners[sequence])
    keys, tokens = (np.array(buffer)[0, 0, cells, 0].tolist() for buffer in cache.state)
    return sorted(zip(cache._cells.positions[cells].tolist(), keys, map(int, tokens), strict=True))


def test_each_layer_uses_the_cache_of_its_type() -> None:
    """All caches know of each batch."""
    cache, window, full = windowed()
    assert (window.num_cells, full.num_cells) == (10, 16)
    assert forward(cache, "1234", range(4)) == ["1 12 123 234", "1 12 123 1234"]
    assert forward(cache, "56", [4, 5]) == ["345 456", "12345 123456"]
    assert cache.nbytes == window.nbytes + full.nbytes == (10 + 16) * 2 * 4


def test_resuming_needs_all() -> None:
    """The window has forgotten what the other still holds."""
    cache, window, full = windowed()
    forward(cache, "1234", range(4))
    forward(cache, "5", [4])
    resumes = [
        [position for position in range(8) if each.can_resume(0, position)]
        for each in (window, full, cache)
    ]
    assert resumes == [[0, 4, 5], [0, 1, 2, 3, 4, 5], [0, 4, 5]]


def test_prefixes_and_gaps_in_all() -> None:
    cache, window, full = windowed()
    forward(cache, "1234", range(4))
    cache.copy_prefix(0, 1, 3)
    cache.remove(0, 1, 2)
    assert contents(window) == contents(full) == [(0, 0, 1), (1, 1, 3), (2, 2, 4)]
    assert contents(window, 1) == contents(full, 1) == [(0, 0, 1), (1, 1, 2), (2, 2, 3)]
    assert forward(cache, "5", [3], [1]) == ["235", "1235"]


def filled() -> tuple[WrapperCache, CausalCache, CausalCache]:
    """Fill both caches so that 4 more tokens pack the window's cells and overflow the other."""
    cache, window, full = windowed(capacity=5)
    forward(cache, "123", [0, 0, 1], [1, 0, 1])
    forward(cache, "4567", [2, 1, 2, 3], [1, 0, 0, 0])
    placement = window._cells.place(NEXT)
    assert placement.move is not None
    assert (window.can_resume(0, 3), placement.after.can_resume(0, 3)) == (True, False)
    return cache, window, full


def test_a_step_that_fails_in_one_is_undone_in_the_others() -> None:
    """Also where the first one had to move its rows, or drop some."""
    cache, window, full = filled()
    before = everything(window, full)
    with pytest.raises(
        CacheFullError, match="a batch of 4 tokens needs 4 free cells, but 3 of 10 are free"
    ):
        cache.start_forward(NEXT)
    assert everything(window, full) == before
    assert forward(cache, "8", [4]) == ["678", "25678"]


@pytest.mark.parametrize(
    "error",
    [CacheFullError("this", 1, 0, 1), KeyboardInterrupt(), MemoryError()],
    ids=lambda error: type(error).__name__,
)
def test_whatever_stops_it(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """A pass that fails between the two caches leaves the tokens as they were."""
    cache, window, full = filled()
    before = everything(window, full)
    monkeypatch.setattr(full, "start_forward", raising(error))
    with pytest.raises(type(error)):
        cache.start_forward(NEXT)
    assert everything(window, full) == before
    with pytest.raises(RuntimeError, match="no forward pass is under way"):
        window.get()
    monkeypatch.undo()
    cache.remove(1, 0)
    assert forward(cache, "8912", range(4, 8)) == [
        "678 789 189 129",
        "25678 256789 1256789 12256789",
    ]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda cache: cache.remove(0, 1, 2), NotSupportedError),
        (lambda cache: cache.remove(2, 1, 2), ValueError),
        (lambda cache: cache.copy_prefix(0, 5, 2), ValueError),
    ],
    ids=["no-rope", "no-sequence", "no-target"],
)
def test_what_one_refuses_happens_in_none(
    call: Callable[[Cache], None], error: type[Exception]
) -> None:
    """The first one could have."""
    window, full = CausalCache(shift=moved, window=3), CausalCache()
    cache = WrapperCache(window, full)
    cache.init(mx.float32, 2, 8, 4)
    forward(cache, "1234", range(4))
    before = everything(window, full)
    with pytest.raises(error):
        call(cache)
    assert everything(window, full) == before


def test_a_rotation_that_fails_in_the_second_leaves_the_first() -> None:
    """Keys are worked out everywhere before they are stored anywhere."""
    window = CausalCache(shift=moved, window=3)
    full = CausalCache(shift=raising(ArithmeticError("no")))
    cache = WrapperCache(window, full)
    cache.init(mx.float32, 2, 8, 4)
    forward(cache, "1234", range(4))
    cache.copy_prefix(0, 1, 4)
    before = everything(window, full)
    with pytest.raises(ArithmeticError):
        cache.remove(0, 0, 1)
    assert everything(window, full) == before


def test_the_order_of_calls() -> None:
    caches = CausalCache(), CausalCache(window=2)
    cache = WrapperCache(*caches)
    cache.init(mx.float32, 1, 16, 8)
    with pytest.raises(RuntimeError, match="init was called twice"):
        cache.init(mx.float32, 1, 16, 8)
    cache.start_forward(Batch([0], [0]))
    assert [each.mask.shape for each in caches] == [(1, 1)] * 2
    cache.undo_forward()
    assert not cache.can_resume(0, 1)
    with pytest.raises(
        ValueError, match="there is no layer type 2: the wrapper has 2 caches, counted from 0"
    ):
        cache.set_layer_type(2)
    cache.close()
    cache.close()
    with pytest.raises(RuntimeError, match="the cache was closed"):
        cache.start_forward(Batch([0], [0]))


def test_a_wrapper_of_nothing_has_room_for_everything() -> None:
    """An engine whose layers all keep their own states has one."""
    cache = WrapperCache()
    cache.init(mx.float32, 1, 16, 8)
    cache.start_forward(Batch([0, 1], [0, 0]))
    cache.copy_prefix(0, 1, 2)
    cache.remove(0, 0)
    assert cache.can_resume(0, 9)
    assert cache.nbytes == 0
    cache.close()


def test_a_reserve_pass_reaches_all() -> None:
    """Even when a real batch would not fit."""
    cache, window, full = filled()
    before = everything(window, full)
    cache.start_forward(Batch([0, 1, 2, 3], [0] * 4), reserve=True)
    assert (window.mask.shape, full.mask.shape) == ((4, 10), (4, 10))
    assert everything(window, full) == before


def test_another_cache_needs_no_more_than_the_interface() -> None:
    """The two phases have a fallback: nothing is foreseen, all is done in the second."""
    calls: list[str] = []

    def noting(name: str) -> Callable[..., None]:
        return lambda self, *given: calls.append(name)

    demanded = {name: noting(name) for name in Cache.__abstractmethods__}
    minimal: Cache = type("Minimal", (Cache,), demanded)()
    cache = WrapperCache(minimal, CausalCache())
    cache.init(mx.float32, 2, 8, 8)
    cache.start_forward(Batch([0], [0]))
    cache.undo_forward()
    with pytest.raises(ValueError, match="no sequence 7"):
        cache.copy_prefix(0, 7, 1)
    assert calls == ["init", "start_forward"]
    cache.copy_prefix(0, 1, 1)
    commit: Commit = cache.prepare_remove(0, 0)
    assert calls == ["init", "start_forward", "copy_prefix"]
    commit()
    assert calls == ["init", "start_forward", "copy_prefix", "remove"]
    assert cache.nbytes == 0


def test_a_step_that_one_cache_has_written_is_undone_in_none() -> None:
    cache, window, full = windowed(capacity=5)
    cache.start_forward(Batch([0, 1], [0, 0]))
    cache.set_layer_type(0)
    cache.set_layer(0)
    cache.put(mx.zeros((1, 1, 2, 1)), mx.zeros((1, 1, 2, 1)))
    cache.undo_forward()
    assert [each.can_resume(0, 2) for each in (window, full)] == [True, True]
