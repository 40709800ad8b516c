"""The sliding-window cache against a model that keeps every token."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sample import examples
from support.sliding import Token, few_steps, held_by, stored, write

from mlxrunner.cache import RewindError
from mlxrunner.cache.layers import extents as module
from mlxrunner.cache.layers.protocol import Snapshot
from mlxrunner.cache.layers.sliding import SlidingWindowCache


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


@few_steps
@examples(300)
@given(
    window=st.integers(2, 9),
    slack=st.integers(0, 6),
    context=st.none() | st.integers(1, 60),
    script=st.lists(actions, min_size=5, max_size=30),
)
def test_each_query_sees_its_window_and_nothing_else(
    step: int, window: int, slack: int, context: int | None, script: list[Any]
) -> None:
    """p - window + 1 ..

    p, in whatever chunks, after whatever rewinds, snapshots, restores and fresh starts.
    """
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
