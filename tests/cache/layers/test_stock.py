"""mlx-lm's own layer caches return exactly to each state that they call reachable."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache
from support.sample import examples

from mlxrunner.cache import RewindError
from mlxrunner.cache.layers.attention import (
    FullAttentionCache,
    QuantizedAttentionCache,
    SlidingWindowCache,
)
from mlxrunner.cache.layers.factory import (
    CacheOptions,
    CompositeCache,
    StockCache,
    TrimmableCache,
    chunked,
    layer_cache,
)
from mlxrunner.cache.layers.recurrent import RecurrentCache
from mlxrunner.testing import UnknownCache

SCRAPS = 16 * 1024
"""Bytes that buffers may be rounded up by."""


def wrapped(inner: Any) -> Any:
    return layer_cache(inner, CacheOptions())


def content(cache: Any) -> list[Any]:
    """All numbers that a layer cache holds."""
    arrays: list[Any] = []

    def collect(tree: Any) -> None:
        if isinstance(tree, mx.array):
            arrays.append(tree.tolist())
        elif isinstance(tree, list | tuple):
            for branch in tree:
                collect(branch)

    collect(cache.state)
    return arrays


def forward(cache: Any, step: Callable[[Any], None], tokens: int) -> None:
    cache.begin_forward()
    step(cache.model_cache)
    cache.end_forward(tokens)


def advance(start: int) -> Callable[[Any], None]:
    """Return the forward pass of a recurrent layer with two states."""

    def step(model_cache: Any) -> None:
        for i in range(2):
            before = model_cache[i] if model_cache[i] is not None else mx.zeros((1, 3))
            model_cache[i] = before * 2 + start + i

    return step


def recurrent(*passes: int) -> RecurrentCache:
    """Return the cache of a recurrent layer after forward passes of `passes` tokens each."""
    cache = RecurrentCache(ArraysCache(size=2))
    for tokens in passes:
        forward(cache, advance(cache.offset), tokens)
    return cache


REACHABLE: dict[tuple[int, ...], dict[int, int]] = {
    (): {0: 0, 5: 0},
    (10,): {0: 0, 1: 0, 9: 0, 10: 10, 99: 10},
    (10, 1): {0: 0, 9: 0, 10: 10, 11: 11},
    (10, 1, 5): {0: 0, 10: 0, 11: 11, 12: 11, 15: 11, 16: 16, 17: 16},
}


@pytest.mark.parametrize("passes", REACHABLE, ids="none one two three".split())
def test_a_state_can_stay_or_undo_the_last_pass(passes: tuple[int, ...]) -> None:
    """Nowhere else but to the beginning; refused elsewhere, with nothing changed."""
    refused = f"recurrent layer at offset {sum(passes)} can't be rewound to"
    for to, expected in REACHABLE[passes].items():
        cache = recurrent(*passes)
        before = content(cache)
        assert cache.reachable(to) == expected
        if expected == to:
            cache.rewind(to)
            done = [0, *np.cumsum(passes)].index(to)
            assert (cache.offset, content(cache)) == (to, content(recurrent(*passes[:done])))
        else:
            with pytest.raises(RewindError, match=f"{refused} {to}"):
                cache.rewind(to)
            assert (cache.offset, content(cache)) == (sum(passes), before)


def test_a_restored_state_cannot_undo_what_happened_elsewhere() -> None:
    """The last pass before it was restored belongs to other tokens."""
    cache = recurrent(20)
    snapshot = cache.snapshot()
    cache.free()
    forward(cache, advance(0), 5)
    forward(cache, advance(5), 1)
    cache.restore(snapshot, 20)
    assert [to for to in range(21) if cache.can_rewind(to)] == [0, 20]


@pytest.mark.parametrize("passes", [(), (10,), (10, 3)], ids=str)
@pytest.mark.parametrize("done", [0, 1, 2], ids=lambda n: f"{n}-states-written")
def test_an_interrupted_pass_is_undone(passes: tuple[int, ...], done: int) -> None:
    """The offset and the states are what they were, though some were overwritten already."""
    cache = recurrent(*passes)
    before = content(cache)
    cache.begin_forward()
    for i in range(done):
        cache.model_cache[i] = mx.full((1, 3), -1.0)
    assert cache.offset == sum(passes)
    assert cache.reachable(cache.offset) == cache.offset
    cache.rewind(cache.offset)
    assert (cache.offset, content(cache)) == (sum(passes), before)
    forward(cache, advance(cache.offset), 4)
    assert content(cache) == content(recurrent(*passes, 4))


def test_a_state_does_not_hold_the_chunk_that_it_was_cut_from() -> None:
    """A state keeps its own rows, not the activations of the pass that it was cut from."""
    before = mx.get_active_memory()
    cache = RecurrentCache(ArraysCache(size=1))

    def step(model_cache: Any) -> None:
        model_cache[0] = mx.random.normal((1, 4000, 64))[:, -3:, :]

    for _ in range(3):
        forward(cache, step, 4000)
        mx.eval(cache.state)
        assert mx.get_active_memory() - before <= 2 * cache.nbytes + SCRAPS
    assert cache.nbytes == 3 * 64 * 4


def test_the_snapshot_of_a_state_does_not_hold_what_it_was_cut_from() -> None:
    """Its bytes are what it says, also when the state is a view."""
    before = mx.get_active_memory()
    cache = RecurrentCache(ArraysCache(size=2))
    cache.inner[0] = mx.random.normal((1, 4000, 64))[:, -3:, :]
    cache.end_forward(1)
    mx.eval(cache.state)
    snapshot = cache.snapshot()
    mx.eval(snapshot.arrays)
    cache.free()
    assert snapshot.nbytes == 3 * 64 * 4
    assert mx.get_active_memory() - before <= snapshot.nbytes + SCRAPS


KINDS: dict[str, Callable[[], Any]] = {
    "recurrent": lambda: ArraysCache(size=2),
    "chunked": lambda: ChunkedKVCache(8),
    "sinks": lambda: RotatingKVCache(max_size=9, keep=4),
    "unknown": lambda: UnknownCache(),
    "composite": lambda: CacheList(KVCache(), ArraysCache(size=2), RotatingKVCache(max_size=6)),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def rows(n: int, start: int, mark: int = 0) -> mx.array:
    """`[1, 1, n, 2]`: positions, and a mark."""
    return mx.array([[float(position), float(mark)] for position in range(start, start + n)])[
        None, None
    ]


def write(kind: str, cache: Any, n: int, mark: int = 0) -> list[list[float]]:
    """Run a forward pass of `n` tokens through such a layer and return what it attends to."""
    start, fetched = cache.offset, list[list[float]]()

    def attend(layer: Any) -> None:
        if hasattr(layer, "maybe_trim_front"):
            layer.maybe_trim_front()
        fetched.extend(
            layer.update_and_fetch(rows(n, start, mark), rows(n, start, mark))[0][0, 0].tolist()
        )

    def step(layer: Any) -> None:
        if kind == "recurrent":
            advance(start + mark)(layer)
        elif kind == "composite":
            attend(layer[0])
            advance(start + mark)(layer[1])
            attend(layer[2])
        else:
            attend(layer)

    forward(cache, step, n)
    return [
        *fetched,
        *(content(cache) if kind == "recurrent" else []),
        *(content(cache.parts[1]) if kind == "composite" else []),
    ]


def build(kind: str) -> Any:
    return layer_cache(KINDS[kind](), CacheOptions(rewind_slack=2))


def written(kind: str, *passes: int) -> Any:
    cache = build(kind)
    for n in passes:
        write(kind, cache, n)
    return cache


@kinds
@pytest.mark.parametrize("passes", [(), (5,), (5, 1, 1), (20, 3), (3, 1, 30)], ids=str)
def test_a_snapshot_outlives_what_comes_after_it(kind: str, passes: tuple[int, ...]) -> None:
    """Restored however often, the layer continues as one that has seen nothing else."""
    cache = written(kind, *passes)
    if not passes:
        assert cache.offset == 0
    snapshot = cache.snapshot()
    mx.eval(snapshot.arrays)
    assert snapshot.nbytes == sum(array.nbytes for array in snapshot.arrays)
    for restart in range(3):
        for n in (1, 4, 30):
            write(kind, cache, n, mark=-1)
        if restart == 1:
            cache.begin_forward()  # interrupted
        cache.restore(snapshot, sum(passes))
        assert cache.offset == sum(passes)
        expected = written(kind, *passes)
        for n in (1, 1, 5, 2):
            assert write(kind, cache, n, mark=restart) == write(kind, expected, n, mark=restart)
        cache.restore(snapshot, sum(passes))


@kinds
def test_a_freed_layer_is_as_new(kind: str) -> None:
    """It may have held anything, and an interrupt may have come before."""
    cache = written(kind, 20, 3)
    cache.begin_forward()
    cache.free()
    assert (cache.offset, content(cache)) == (0, [])
    assert [write(kind, cache, n) for n in (5, 1)] == [
        write(kind, expected, n) for expected in [build(kind)] for n in (5, 1)
    ]


@kinds
def test_every_place_that_is_called_reachable_is(kind: str) -> None:
    """A layer that is rewound there continues as a fresh one; elsewhere it refuses and stays."""
    for passes in [(4, 1), (4, 1, 1, 1), (7,), (20, 1, 1), (3, 9, 5)]:
        for to in range(sum(passes) + 1):
            cache = written(kind, *passes)
            before = content(cache)
            if not cache.can_rewind(to):
                assert cache.reachable(to) < to
                with pytest.raises(
                    RewindError, match=f"layer at offset {sum(passes)} can't be rewound to {to}"
                ):
                    cache.rewind(to)
                assert cache.offset == sum(passes)
                assert content(cache) == before
                continue
            cache.rewind(to)
            assert cache.offset == to
            expected = copy.deepcopy(cache)
            expected.free()
            ends = [0, *np.cumsum(passes).tolist()]
            chunks = [n for n, end in zip(passes, ends[1:], strict=True) if end <= to]
            for n in [*chunks, *([to - sum(chunks)] if to > sum(chunks) else [])]:
                write(kind, expected, n)
            for n in (1, 3):
                found, wanted = write(kind, cache, n, mark=5), write(kind, expected, n, mark=5)
                assert found[-len(wanted) :] == wanted[-len(found) :]


@kinds
def test_an_interrupted_pass_is_never_taken_for_a_finished_one(kind: str) -> None:
    """It can be undone, or nothing is reachable but a fresh start."""
    cache = written(kind, 5, 1)
    cache.begin_forward()
    model_cache = cache.model_cache[0] if kind == "composite" else cache.model_cache
    if kind == "recurrent":
        model_cache[0] = mx.zeros((1, 3))
    else:
        model_cache.update_and_fetch(rows(4, 6), rows(4, 6))
    to = cache.reachable(6)
    assert to == {"recurrent": 6, "composite": 6}.get(kind, 0)
    cache.rewind(to)
    assert cache.offset == to
    if to:
        assert write(kind, cache, 2) == write(kind, written(kind, 5, 1), 2)


CHUNK = 6


def attend_in_chunks(layer: Any, n: int, mark: int) -> list[list[tuple[int, int]]]:
    """Trim, mask from `start_position` and write, as mlx-lm's Llama 4 does.

    Returns what each query sees.
    """
    layer.maybe_trim_front()
    end = layer.offset + n
    places, queries = mx.arange(layer.start_position, end), mx.arange(layer.offset, end)[:, None]
    mask = np.array((mx.abs((places // CHUNK) - (queries // CHUNK)) == 0) & (places <= queries))
    new = rows(n, layer.offset, mark)
    keys = layer.update_and_fetch(new, new)[0][0, 0].tolist()
    return [[(int(keys[i][0]), int(keys[i][1])) for i in np.flatnonzero(seen)] for seen in mask]


@examples(150)
@given(
    script=st.lists(
        st.tuples(st.sampled_from(["write", "write", "rewind"]), st.integers(1, 16)),
        min_size=3,
        max_size=14,
    )
)
def test_a_chunked_layer_sees_the_chunk_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, script: list[tuple[str, int]]
) -> None:
    """A token sees its chunk from the beginning to itself, also after rewinds within the chunk."""
    monkeypatch.setattr(ChunkedKVCache, "step", 4)
    cache, tokens = wrapped(ChunkedKVCache(CHUNK)), list[tuple[int, int]]()
    for mark, (what, n) in enumerate(script):
        if what == "write":
            cache.begin_forward()
            seen = attend_in_chunks(cache.model_cache, n, mark)
            cache.end_forward(n)
            tokens += [(len(tokens) + i, mark) for i in range(n)]
            assert seen == [
                tokens[p - p % CHUNK : p + 1] for p in range(len(tokens) - n, len(tokens))
            ]
        else:
            first = cache.model_cache.start_position
            for to in range(len(tokens)):
                assert cache.can_rewind(to) == (to == 0 or first <= to - to % CHUNK)
            to = cache.reachable(max(0, len(tokens) - n))
            cache.rewind(to)
            del tokens[to:]
        assert cache.offset == len(tokens)


def test_a_window_that_keeps_its_first_tokens_goes_back_until_it_has_wrapped() -> None:
    """After that it can only stay: dropped tokens are gone."""
    cache = wrapped(RotatingKVCache(max_size=9, keep=4))
    reachable = {}
    for _ in range(11):
        write("sinks", cache, 1)
        reachable[cache.offset] = [to for to in range(cache.offset + 2) if cache.can_rewind(to)]
    assert reachable == {n: list(range(n + 1)) if n < 9 else [0, n] for n in range(1, 12)}


@pytest.mark.parametrize(
    ("more", "says"),
    [(-1, -1), (1, 1), (0, 1), (-1, 0)],
    ids=["too-few", "too-many", "miscounted", "too-few-in-secret"],
)
def test_a_layer_that_does_not_trim_as_asked_is_never_used(more: int, says: int) -> None:
    """Its offset is nobody's: the entry will be freed."""

    class Odd(ChunkedKVCache):  # type: ignore[misc]  # mlx-lm has no annotations
        def trim(self, n: int) -> int:
            super().trim(n + more)
            return n + says

    cache = chunked(Odd(8))
    write("chunked", cache, 7)
    cache.rewind(4)
    assert cache.offset == -1


def test_each_part_of_a_composite_is_what_it_would_be_alone() -> None:
    """Each part equals a lone layer, quantized where asked for, within mlx-lm's CacheList."""
    parts = layer_cache(
        CacheList(KVCache(), CacheList(RotatingKVCache(5), ArraysCache(1))), CacheOptions()
    ).parts  # type: ignore[attr-defined]
    assert [type(part) for part in parts] == [FullAttentionCache, CompositeCache]
    assert [type(part) for part in parts[1].parts] == [SlidingWindowCache, RecurrentCache]
    packed = layer_cache(CacheList(KVCache(), ArraysCache(1)), CacheOptions(kv_bits=4))
    assert isinstance(packed, CompositeCache)
    assert isinstance(packed.parts[0], QuantizedAttentionCache)
    assert isinstance(packed.model_cache, CacheList)
    assert packed.model_cache[0] is packed.parts[0]
    assert not hasattr(packed, "update_and_fetch")  # it is written through its parts


def test_a_composite_goes_back_as_far_as_all_of_its_parts() -> None:
    """The state undoes one pass, the window some tokens, full attention all: together, one pass."""
    cache = written("composite", 10, 2)
    assert [to for to in range(13) if cache.can_rewind(to)] == [0, 10, 12]
    assert cache.reachable(11) == 10
    cache = written("composite", 10, 5)
    assert cache.parts[2].reachable(10) == 10
    far = written("composite", 3, 400)
    assert far.parts[1].reachable(3) == 3
    assert far.parts[2].reachable(3) == 0
    assert far.reachable(399) == 0


def test_the_model_gets_the_parts_as_they_are_after_a_checkpoint() -> None:
    """A part of an unknown kind has another cache of mlx-lm then."""
    cache = layer_cache(CacheList(KVCache(), UnknownCache()), CacheOptions())
    snapshot = cache.snapshot()
    cache.begin_forward()
    cache.end_forward(0)
    before = cache.model_cache[1]
    cache.restore(snapshot, 0)
    assert cache.model_cache[1] is cache.parts[1].model_cache is not before


def test_parts_that_disagree_are_at_no_offset() -> None:
    """-1, so that nobody takes them for true."""
    cache = written("composite", 5)
    cache.parts[0].rewind(3)
    assert cache.offset == -1


def test_only_the_kinds_that_are_known_are_wrapped_as_such() -> None:
    """A subclass may do anything: it stays where it is, or goes back through a copy."""
    found = {name: wrapped(KINDS[name]()) for name in ("recurrent", "chunked", "sinks", "unknown")}
    assert {name: (type(cache), cache.kind) for name, cache in found.items()} == {
        "recurrent": (RecurrentCache, "recurrent"),
        "chunked": (TrimmableCache, "chunked"),
        "sinks": (TrimmableCache, "sliding"),
        "unknown": (StockCache, "unknown"),
    }
    assert all(cache.needs_checkpoints and cache.counts_forwards for cache in found.values())
    unknown = written("unknown", 5, 1)
    assert [to for to in range(8) if unknown.can_rewind(to)] == [0, 6]
