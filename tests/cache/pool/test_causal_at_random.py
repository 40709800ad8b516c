"""The causal cache holds after any calls what plain lists would hold."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.causal import forward, made, put, rotated, stored
from support.sample import examples

from mlxrunner.cache import Batch, CacheFullError, NotSupportedError


@dataclass
class Naive:
    """A list of (position, token, where) per sequence; equal `where`s are shared."""

    num_cells: int
    window: int | None
    memory: int | None
    chunk: int | None
    lists: dict[int, list[tuple[int, int, int]]] = field(
        default_factory=lambda: {0: [], 1: [], 2: []}
    )
    made: int = 0

    @property
    def used(self) -> int:
        return len({where for tokens in self.lists.values() for _, _, where in tokens})

    def next(self, sequence: int) -> int:
        return max((at for at, _, _ in self.lists[sequence]), default=-1) + 1

    def last_run(self, sequence: int) -> tuple[int, int]:
        """Return the first position, and the one after the last, of the tokens without a gap."""
        there = {at for at, _, _ in self.lists[sequence]}
        first = end = self.next(sequence)
        while first - 1 in there:
            first -= 1
        return first, end

    def stored(self) -> dict[int, list[tuple[int, int]]]:
        return {
            sequence: sorted((at, token) for at, token, _ in tokens)
            for sequence, tokens in self.lists.items()
            if tokens
        }

    def sees(self, query: int, at: int) -> bool:
        is_near = self.window is None or query - self.window < at
        return (
            at <= query
            and is_near
            and (self.chunk is None or at // self.chunk >= query // self.chunk)
        )

    def start(self, batch: Batch, tokens: Sequence[int]) -> list[list[int]] | None:
        """Return what each query sees, or None, with nothing done, where there is no room."""
        kept = {}
        for sequence, old in self.lists.items():
            own = [
                at
                for at, other in zip(batch.positions, batch.sequences, strict=True)
                if other == sequence
            ]
            begin = min(own) if own else self.next(sequence)
            kept[sequence] = [
                token for token in old if self.memory is None or token[0] >= begin - self.memory + 1
            ]
        trial = replace(self, lists=kept)
        if trial.used + len(batch) > self.num_cells:
            return None
        self.lists = kept
        for at, sequence, token in zip(batch.positions, batch.sequences, tokens, strict=True):
            self.lists[sequence].append((at, token, self.new()))
        seen = []
        for query, sequence in zip(batch.positions, batch.sequences, strict=True):
            own_list = self.lists[sequence]
            seen.append(sorted(token for at, token, _ in own_list if self.sees(query, at)))
        return seen

    def new(self) -> int:
        self.made += 1
        return self.made

    def remove(self, sequence: int, begin: int, end: int) -> bool:
        """Return True if there was room."""
        others = {
            where
            for other, tokens in self.lists.items()
            if other != sequence
            for _, _, where in tokens
        }
        before = [token for token in self.lists[sequence] if token[0] < begin]
        behind = [token for token in self.lists[sequence] if token[0] >= end]
        copies = sum(where in others for _, _, where in behind)
        kept = others | {where for _, _, where in before + behind}
        if len(kept) + copies > self.num_cells:
            return False
        by = end - begin
        self.lists[sequence] = before + [
            (at - by, token, self.new() if where in others else where)
            for at, token, where in behind
        ]
        return True

    def can_resume(self, sequence: int, position: int) -> bool:
        if position > self.next(sequence):
            return False
        there = {at for at, _, _ in self.lists[sequence]}
        return self.memory is None or all(
            at in there for at in range(position) if self.sees(position, at)
        )


class Work:
    """A cache and the lists that it has to agree with, under the same random calls."""

    def __init__(self, window: int | None, memory: int | None, chunk: int | None) -> None:
        self.cache = made(
            3, capacity=7, max_batch=6, window=window, memory=memory, chunk=chunk, shift=self.shift
        )
        kept = window if memory is None else memory
        self.naive = Naive(21 if kept is None else min(21, 3 * kept + 6), window, kept, chunk)
        self.tokens = 0
        self.fails = False

    def shift(self, layer: int, keys: mx.array, offsets: mx.array) -> mx.array:
        if self.fails and layer == 1:
            raise NotSupportedError("not now")
        return rotated(layer, keys, offsets)

    def step(self, what: str, rng: random.Random) -> None:
        held = self.cache._cells
        getattr(self, what)(rng)
        if what != "forward":  # which has looked already
            self.compare()
        assert self.cache.num_free == self.naive.num_cells - self.naive.used
        for sequence, tokens in self.naive.lists.items():
            if len({at for at, _, _ in tokens}) == len(tokens):  # a model stores each once
                assert self.cache.stored(sequence) == self.naive.last_run(sequence)
        for sequence in range(3):
            for position in range(self.naive.next(sequence) + 2):
                assert self.cache.can_resume(sequence, position) == self.naive.can_resume(
                    sequence, position
                ), (sequence, position)
        assert what != "refused" or self.cache._cells is held

    def compare(self) -> None:
        assert (
            stored(self.cache) == self.naive.stored() if self.cache.nbytes else not self.naive.used
        )

    def batch(self, rng: random.Random) -> tuple[Batch, list[int]]:
        n = rng.choice([1, 1, 2, 3, 6])
        nexts = {sequence: self.naive.next(sequence) for sequence in range(3)}
        positions, sequences = [], []
        for _ in range(n):
            sequence = rng.randrange(3)
            jump = rng.random() < 0.05
            positions.append(rng.randrange(nexts[sequence] + 3) if jump else nexts[sequence])
            sequences.append(sequence)
            nexts[sequence] = max(nexts[sequence], positions[-1] + 1)
        self.tokens += n
        return Batch(positions, sequences), [*range(self.tokens - n, self.tokens)]

    def forward(self, rng: random.Random) -> None:
        batch, tokens = self.batch(rng)
        expected, held = self.naive.start(batch, tokens), self.cache._cells
        if expected is not None:
            assert forward(self.cache, batch, tokens) == expected
            return
        with pytest.raises(CacheFullError):
            self.cache.start_forward(batch)
        assert self.cache._cells is held

    def taken_back(self, rng: random.Random) -> None:
        batch, _ = self.batch(rng)
        if (
            self.cache.nbytes
            and replace(self.naive, lists=dict(self.naive.lists)).start(batch, [0] * len(batch))
            is not None
        ):
            self.cache.start_forward(batch)
            self.cache.undo_forward()

    def reserve(self, rng: random.Random) -> None:
        batch, tokens = self.batch(rng)
        self.cache.start_forward(batch, reserve=True)
        for layer in (0, 1):
            put(self.cache, layer, tokens, batch)
            assert self.cache.get()[1].shape[2] == self.naive.num_cells

    def copy(self, rng: random.Random) -> None:
        source, target = rng.randrange(3), rng.randrange(3)
        length = rng.randrange(self.naive.next(source) + 2)
        self.cache.copy_prefix(source, target, length)
        self.naive.lists[target] = [
            token for token in self.naive.lists[source] if token[0] < length
        ]

    def cut(self, rng: random.Random) -> None:
        sequence = rng.randrange(3)
        begin = max(0, self.naive.next(sequence) - rng.randrange(5))
        self.cache.remove(sequence, begin)
        self.naive.lists[sequence] = [
            token for token in self.naive.lists[sequence] if token[0] < begin
        ]

    def close_gap(self, rng: random.Random) -> None:
        sequence = rng.randrange(3)
        begin, end = sorted(rng.randrange(self.naive.next(sequence) + 2) for _ in range(2))
        held = self.cache._cells
        if begin == end or self.naive.remove(sequence, begin, end):
            self.cache.remove(sequence, begin, end)
            return
        with pytest.raises(CacheFullError):
            self.cache.remove(sequence, begin, end)
        assert self.cache._cells is held

    def refused(self, rng: random.Random) -> None:
        sequence = rng.randrange(3)
        moved = any(at >= 1 for at, _, _ in self.naive.lists[sequence])
        if moved and self.cache.nbytes:
            self.fails = True
            with pytest.raises((NotSupportedError, CacheFullError)):
                self.cache.remove(sequence, 0, 1)
            self.fails = False

    def pack(self, rng: random.Random) -> None:
        self.cache.defragment()


CALLS = ["forward"] * 6 + ["copy", "copy", "close_gap", "close_gap"]
CALLS += "cut refused pack reserve taken_back".split()


@pytest.mark.parametrize(
    ("window", "memory", "chunk"),
    [
        *((None, None, None), (3, None, None), (1, None, None), (9, None, None)),
        *((2, 5, None), (None, None, 4), (4, 6, 3), (2, None, 4), (None, 5, 4)),
    ],
    ids="full window narrow wide memory chunk all chunk-window chunk-memory".split(),
)
@examples(120)
@given(st.lists(st.sampled_from(CALLS), min_size=8, max_size=24), st.integers(0, 2**32))
def test_it_sees_what_lists_would_hold(
    window: int | None, memory: int | None, chunk: int | None, calls: list[str], seed: int
) -> None:
    """Any calls leave the tokens, positions, keys, room and errors that plain lists would have."""
    work, rng = Work(window, memory, chunk), random.Random(seed)
    for call in calls:
        work.step(call, rng)
    work.compare()
    work.cache.close()
    assert work.cache.nbytes == 0
