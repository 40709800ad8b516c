"""Rows of the buffers move together with their labels, or not at all."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest
from support.causal import drawn, forward, made, rotated, stored

from mlxrunner.cache import Batch, CacheFullError, CausalCache, NotSupportedError


@pytest.mark.parametrize("count", [12, 400], ids=["slices", "gathers"])
def test_packing_moves_labels_and_data_together(count: int) -> None:
    """Every other token goes, and there may be any number of pieces."""
    cache = made(3, capacity=count // 2, max_batch=count)
    tokens = [*range(count)]
    forward(cache, Batch([token // 2 for token in tokens], [token % 2 for token in tokens]), tokens)
    cache.remove(1, 1)
    assert cache.num_free == count - 1
    held = stored(cache)
    batch = Batch(range(count - 4), [2] * (count - 4))
    assert forward(cache, batch, range(1000, 1000 + len(batch))) == [
        [*range(1000, 1001 + row)] for row in range(len(batch))
    ]
    assert stored(cache) == {**held, 2: [(n, 1000 + n) for n in range(len(batch))]}


def test_gaps_are_closed_in_however_many_pieces() -> None:
    """Where a sequence lies in every other cell."""
    cache, count = made(2, capacity=200, max_batch=400), 400
    forward(
        cache,
        Batch([token // 2 for token in range(count)], [token % 2 for token in range(count)]),
        range(count),
    )
    held = stored(cache)
    cache.remove(0, 10, 20)
    assert stored(cache) == {
        0: [(n, 2 * n if n < 10 else 2 * n + 20) for n in range(190)],
        1: held[1],
    }


def test_packing_by_hand_ends_the_pass() -> None:
    """Its rows are somewhere else now."""
    cache = made()
    drawn(cache, "123", range(3))
    cache.remove(0, 1, 2)
    cache.defragment()
    assert stored(cache) == {0: [(0, 1), (1, 3)]}
    with pytest.raises(RuntimeError, match="no forward pass is under way"):
        cache.get()
    cache.defragment()
    assert drawn(cache, "4", [2]) == "134"


def test_without_a_way_to_rotate_gaps_stay_open() -> None:
    """Refused before anything changed; tails go all the same."""
    cache = made(2, shift=None)
    drawn(cache, "1234", range(4))
    cache.copy_prefix(0, 1, 4)
    with pytest.raises(
        NotSupportedError,
        match="the tokens behind position 0 can't move up: this cache was made without a shift",
    ):
        cache.remove(0, 0, 1)
    cache.remove(0, 3, 9)
    cache.remove(0, 1, 1)
    assert stored(cache) == {0: [(0, 1), (1, 2), (2, 3)], 1: [(0, 1), (1, 2), (2, 3), (3, 4)]}


@pytest.mark.parametrize("layer", [0, 1])
def test_a_rotation_that_fails_changes_nothing(layer: int) -> None:
    """Not even the layers for which it worked."""
    failing = [True]

    def shift(index: int, keys: mx.array, offsets: mx.array) -> mx.array:
        if index == layer and failing:
            raise NotSupportedError("no rope here")
        return rotated(index, keys, offsets)

    cache = made(2, shift=shift)
    drawn(cache, "1234", range(4))
    cache.copy_prefix(0, 1, 3)
    held, free = stored(cache), cache.num_free
    with pytest.raises(NotSupportedError, match="no rope here"):
        cache.remove(0, 1, 2)
    assert (stored(cache), cache.num_free) == (held, free)
    failing.clear()
    cache.remove(0, 1, 2)
    assert stored(cache) == {0: [(0, 1), (1, 3), (2, 4)], 1: held[1]}


def test_a_rotation_of_another_shape_is_refused() -> None:
    """It would be broadcast, or fail half-way."""
    cache = made(shift=lambda layer, keys, offsets: keys[:, :1])
    drawn(cache, "123", range(3))
    with pytest.raises(ValueError, match="layer 0: keys of shape"):
        cache.remove(0, 0, 1)
    assert stored(cache) == {0: [(0, 1), (1, 2), (2, 3)]}


def test_shared_tokens_without_room_for_a_copy() -> None:
    """Refused with the sizes, and nothing changed."""
    cache = made(2, capacity=2)
    drawn(cache, "123", range(3))
    cache.copy_prefix(0, 1, 3)
    with pytest.raises(
        CacheFullError,
        match=r"removing positions 0 .. 0 of sequence 1 needs 2 free cells, but 1 of 4 are free",
    ):
        cache.remove(1, 0, 1)
    assert stored(cache) == {0: [(0, 1), (1, 2), (2, 3)], 1: [(0, 1), (1, 2), (2, 3)]}


def test_positions_do_not_drift() -> None:
    """Shifted a hundred times, the keys are still right."""
    cache = made(capacity=120, max_batch=120)
    forward(cache, Batch(range(120), [0] * 120), range(120))
    for _ in range(100):
        cache.remove(0, 4, 5)
    assert stored(cache) == {0: [(n, n if n < 4 else n + 100) for n in range(20)]}


@pytest.mark.parametrize(
    "call",
    [lambda cache: cache.defragment(), lambda cache: cache.remove(0, 1, 2)],
    ids=["packing", "a-gap"],
)
def test_an_interrupt_while_rows_move_leaves_an_empty_cache(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[CausalCache], None]
) -> None:
    """Correct first: nobody is told that half of it is still true."""
    cache = made()
    drawn(cache, "1234", range(4))
    cache.remove(0, 0, 1)
    with monkeypatch.context() as patch:
        patch.setattr(
            "mlxrunner.cache.pool.causal.write",
            lambda *_: (_ for _ in ()).throw(KeyboardInterrupt),
        )
        with pytest.raises(KeyboardInterrupt):
            call(cache)
    assert (cache.sequences, cache.num_free, cache.can_resume(0, 1), cache.can_resume(0, 0)) == (
        (),
        16,
        False,
        True,
    )
    assert drawn(cache, "12", [0, 1]) == "1 12"
