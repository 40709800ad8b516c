"""The sliding-window cache: against a model that keeps every token, mlx-lm's, and drawings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import RotatingKVCache
from support.sample import examples

from mlxrunner.cache import RewindError
from mlxrunner.cache.layers import extents as module
from mlxrunner.cache.layers.attention import SlidingWindowCache
from mlxrunner.cache.layers.extents import STEP
from mlxrunner.cache.protocol import Snapshot

Token = tuple[int, int]
"""A position, and a number that no other write has: a stale row is not an equal row."""


def rows(tokens: list[Token]) -> mx.array:
    """`[1, 1, n, 2]`: one row per token."""
    return mx.array(tokens, mx.float32)[None, None]


def stored(keys: mx.array, values: mx.array) -> list[Token]:
    """The tokens of fetched keys, whose values have to fit."""
    assert keys.shape == values.shape
    assert mx.array_equal(keys * 2, values)
    return [(int(position), int(mark)) for position, mark in np.array(keys[0, 0])]


def visible(mask: Any, n: int, total: int) -> np.ndarray[Any, Any]:
    """Return `[n, total]`, true where a mask of `n` queries over `total` rows lets them see."""
    if mask is None:
        return np.ones((n, total), bool)
    if isinstance(mask, str):
        assert mask == "causal"
        return np.arange(total - n, total)[:, None] >= np.arange(total)[None]
    assert mask.dtype == mx.bool_
    return np.broadcast_to(np.array(mask), (n, total))


def write(cache: Any, tokens: list[Token], **mask: Any) -> list[list[Token]]:
    """Ask for the mask, then write, as mlx-lm's models do.

    Returns what each of the queries sees.
    """
    asked = cache.make_mask(len(tokens), **mask)
    keys, values = cache.update_and_fetch(rows(tokens), rows(tokens) * 2)
    held = stored(keys, values)
    return [
        [held[i] for i in np.flatnonzero(seen)] for seen in visible(asked, len(tokens), len(held))
    ]


def numbered(n: int, start: int = 0) -> list[Token]:
    return [(position, position + 7) for position in range(start, start + n)]


def filled(cache: SlidingWindowCache, n: int, *, ones: int = 0) -> SlidingWindowCache:
    """`n` tokens at once, then `ones` one by one."""
    if n:
        write(cache, numbered(n))
    for position in range(n, n + ones):
        write(cache, numbered(1, position))
    return cache


def held_by(cache: SlidingWindowCache) -> list[Token]:
    """Every row that the next tokens can see, or that a rewind can bring back."""
    if cache._stored is None:
        return []
    kept = cache._stored
    return stored(kept.keys[..., : kept.rows, :], kept.values[..., : kept.rows, :])


few_steps = pytest.mark.parametrize(
    "step", [1, 3, 8], indirect=True, ids=lambda step: f"step-{step}"
)


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    monkeypatch.setattr(module, "STEP", request.param)
    return int(request.param)


def test_a_window_of_one_token_sees_itself() -> None:
    """The smallest that there is."""
    cache = SlidingWindowCache(1)
    assert write(cache, numbered(3)) == [[token] for token in numbered(3)]
    assert write(cache, numbered(1, 3)) == [numbered(1, 3)]


@pytest.mark.parametrize(
    ("before", "n", "how", "kind"),
    [
        *((0, 1, {}, type(None)), (50, 1, {}, type(None)), (50, 1, {"window_size": 8}, type(None))),
        *((5, 1, {"window_size": 7}, type(None)), (50, 1, {"window_size": 7}, mx.array)),
        *((0, 8, {}, str), (3, 5, {}, str), (3, 6, {}, mx.array), (50, 2, {}, mx.array)),
        (50, 1, {"return_array": True}, mx.array),
        (0, 3, {"return_array": True}, mx.array),
    ],
)
def test_there_is_an_array_only_where_one_is_needed(
    before: int, n: int, how: dict[str, Any], kind: type
) -> None:
    """A window of 8 tokens after `before` ones: None and "causal" cost nothing."""
    assert isinstance(filled(SlidingWindowCache(8, 4), before).make_mask(n, **how), kind)


class Naive:
    """Keeps all tokens, and checks that those which a cache calls reachable are."""

    def __init__(self, window: int, slack: int, context: int | None) -> None:
        self.cache = SlidingWindowCache(window, slack, context)
        self.window, self.slack, self.context = window, slack, context
        self.tokens: list[Token] = []
        self.floor = 0
        """Rewinds are promised down to here."""
        self.marks = 0
        self.snapshots: list[tuple[Snapshot, list[Token], int]] = []

    def write(self, n: int, how: dict[str, Any]) -> None:
        if self.context is not None:
            n = min(n, self.context - len(self.tokens))
        if n < 1:
            return
        new = [(len(self.tokens) + i, self.marks + i) for i in range(n)]
        self.marks += n
        seen = write(self.cache, new, **how)
        self.tokens += new
        self.floor = max(self.floor, len(self.tokens) - self.slack)
        window = how.get("window_size") or self.window
        for token, sees in zip(new, seen, strict=True):
            assert sees == self.tokens[max(0, token[0] - window + 1) : token[0] + 1]
        assert stored(*self.cache.keys_and_values())[-n:] == new
        self.cache.end_forward(n)

    def rewind(self, to: int) -> None:
        before = self.cache.state, held_by(self.cache)
        if self.cache.can_rewind(to):
            self.cache.rewind(to)
            del self.tokens[to:]
            self.floor = 0 if to == 0 else self.floor
            return
        with pytest.raises(
            RewindError,
            match=f"a sliding layer at offset {len(self.tokens)} can't be rewound to {to}",
        ):
            self.cache.rewind(to)
        assert (self.cache.state, held_by(self.cache)) == before

    def snapshot(self) -> None:
        self.snapshots.append((self.cache.snapshot(), list(self.tokens), self.floor))

    def restore(self, which: int) -> None:
        if self.snapshots:
            snapshot, tokens, _ = self.snapshots[which % len(self.snapshots)]
            self.cache.restore(snapshot, len(tokens))
            self.tokens = list(tokens)
            self.floor = len(tokens)

    def free(self) -> None:
        self.cache.free()
        self.tokens, self.floor = [], 0

    def check(self) -> None:
        cache, length = self.cache, len(self.tokens)
        assert cache.offset == length
        assert cache.size() == min(length, self.window)
        assert cache.empty() == (length == 0)
        held = held_by(cache)
        assert held == self.tokens[length - len(held) :]
        assert len(held) >= min(length, self.window - 1)
        for to in range(length + 2):
            assert cache.can_rewind(to) == (cache.reachable(to) == to)
            assert cache.reachable(to) in (0, min(to, length))
        assert all(cache.can_rewind(to) for to in (0, *range(max(0, self.floor), length + 1)))
        most = self.window + self.slack + module.STEP
        assert cache.nbytes <= (most if self.context is None else min(most, self.context)) * 16
        assert cache.used_bytes == len(held) * 16


chunks = st.integers(1, 4) | st.integers(1, 40)
masks = st.fixed_dictionaries(
    {}, optional={"return_array": st.booleans(), "window_size": st.integers(1, 9)}
)
actions = st.one_of(
    st.tuples(st.just("write"), chunks, masks),
    st.tuples(st.just("write"), st.just(1), masks),
    st.tuples(st.just("rewind"), st.integers(0, 6)),
    st.tuples(st.just("rewind"), st.integers(0, 100)),
    st.tuples(st.just("snapshot")),
    st.tuples(st.just("restore"), st.integers(0, 5)),
    st.tuples(st.just("free")),
)


@pytest.mark.exhaustive(0)
@few_steps
@examples(300)
@given(
    window=st.integers(1, 9),
    slack=st.integers(0, 6),
    context=st.none() | st.integers(1, 60),
    script=st.lists(actions, min_size=5, max_size=30),
)
def test_each_query_sees_its_window_and_nothing_else(
    step: int, window: int, slack: int, context: int | None, script: list[Any]
) -> None:
    """Each sees p - window + 1 to p, in any chunks, after any rewinds, restores and frees."""

    naive = Naive(window, slack, context)
    for name, *arguments in script:
        if name == "write" and arguments[1].get("window_size", 1) > window:
            arguments[1] = {}
        if name == "rewind":
            arguments = [max(0, len(naive.tokens) - arguments[0])]
        getattr(naive, name)(*arguments)
        naive.check()
    for snapshot, tokens, _ in naive.snapshots:
        naive.cache.restore(snapshot, len(tokens))
        assert held_by(naive.cache) == tokens[max(0, len(tokens) - window + 1) :]


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


def attention(
    cache: Any, queries: mx.array, keys: mx.array, values: mx.array, **how: Any
) -> mx.array:
    """Four query heads on two key heads."""
    mask = cache.make_mask(queries.shape[2], **how)
    fetched = cache.update_and_fetch(keys, values)
    attended: mx.array = mx.fast.scaled_dot_product_attention(
        queries, *fetched, scale=0.5, mask=mask
    )
    assert all(
        mx.array_equal(again, once)
        for again, once in zip(cache.keys_and_values(), fetched, strict=True)
    )
    return attended


def pieces(sizes: list[int], seed: int = 0) -> Iterator[tuple[mx.array, mx.array, mx.array]]:
    """Random queries, keys and values in chunks."""
    random = np.random.default_rng(seed)
    for n in sizes:
        q, k, v = (random.normal(size=(1, heads, n, 8)).astype(np.float32) for heads in (4, 2, 2))
        yield mx.array(q), mx.array(k), mx.array(v)


@few_steps
@pytest.mark.parametrize("smaller", [None, 5], ids=["own-window", "smaller-window"])
@pytest.mark.parametrize(
    "sizes",
    [
        [1] * 40,
        [30, *[1] * 20],
        [7, *[1] * 9],
        [3, 2, 4, 1, 1, 5, 1, 6, 2, *[1] * 9],
        [5, 25, 1, 1, 40, 3, 1, 12, *[1] * 9],
    ],
    ids="decode long-chunk window small-chunks small-and-long-chunks".split(),
)
def test_attention_is_that_of_mlx_lm(step: int, sizes: list[int], smaller: int | None) -> None:
    """The attention is within 1e-5 of mlx-lm's on the same chunks, also in shared layers."""
    ours, theirs = SlidingWindowCache(7, slack=3), RotatingKVCache(max_size=7)
    for queries, keys, values in pieces(sizes):
        how = {"window_size": smaller}
        gap = mx.abs(
            attention(ours, queries, keys, values, **how)
            - attention(theirs, queries, keys, values, **how)
        ).max()
        assert float(gap.item()) < 1e-5  # type: ignore[arg-type]
        assert ours.offset == theirs.offset


SCRAPS = 16 * 1024
"""Bytes that buffers may be rounded up by."""


def long_rows(n: int) -> mx.array:
    """`[1, 1, n, 64]`: 256 bytes a token."""
    return mx.ones((1, 1, n, 64))


def decode(cache: SlidingWindowCache) -> int:
    """One token; the most memory that it took beyond what there was."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    keys, values = cache.update_and_fetch(long_rows(1), long_rows(1))
    mx.eval(cache.state, keys.sum() + values.sum())
    del keys, values
    return int(mx.get_peak_memory()) - before


def test_a_decode_step_is_in_place_but_for_every_step_th() -> None:
    """No copy of the buffer, and no scrap of one afterwards."""
    cache = SlidingWindowCache(2000, 100)
    cache.update_and_fetch(long_rows(2300), long_rows(2300))
    mx.eval(cache.state)
    active = mx.get_active_memory()
    peaks = [decode(cache) for _ in range(2 * STEP)]
    assert sum(peak > cache.nbytes // 8 for peak in peaks) <= 2
    assert max(peaks) < cache.nbytes * 1.1
    assert mx.get_active_memory() <= active + SCRAPS


@pytest.mark.parametrize("slack", [0, 100], ids=["no-slack", "slack"])
def test_a_long_chunk_is_given_back_when_its_pass_has_ended(slack: int) -> None:
    """Window + slack + STEP rows stay, whatever was written."""
    before = mx.get_active_memory()
    cache = SlidingWindowCache(50, slack)
    for n in (20_000, 1, 30_000, 7):
        cache.begin_forward()
        shape = cache.update_and_fetch(long_rows(n), long_rows(n))[0].shape
        assert cache.keys_and_values()[0].shape == shape
        cache.end_forward(n)
        mx.eval(cache.state)
        assert mx.get_active_memory() - before <= cache.nbytes + SCRAPS
        assert cache.nbytes == 2 * 256 * (50 + slack + STEP)


def test_a_snapshot_does_not_hold_the_buffer() -> None:
    """Only the window, once the cache has gone on."""
    before = mx.get_active_memory()
    cache = SlidingWindowCache(20, 1000)
    cache.update_and_fetch(long_rows(1200), long_rows(1200))
    snapshot = cache.snapshot()
    mx.eval(snapshot.arrays)
    cache.free()
    assert snapshot.nbytes == 2 * 19 * 256
    assert mx.get_active_memory() - before <= snapshot.nbytes + SCRAPS


def test_what_was_never_written_cannot_be_read() -> None:
    """A clear error, before and after it was used."""
    cache = SlidingWindowCache(4)
    for _ in range(2):
        assert (cache.offset, cache.state, cache.nbytes, cache.used_bytes) == (0, [], 0, 0)
        with pytest.raises(ValueError, match="nothing was stored yet"):
            cache.keys_and_values()
        filled(cache, 3)
        cache.free()
