"""A step taken apart sees what its mask shows, and nothing twice."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.base import scaled_dot_product_attention
from support.sample import examples

from mlxrunner.cache import END, Batch, CacheFullError
from mlxrunner.cache.shared.cells import Bools, Cells, Run
from mlxrunner.cache.shared.sight import Sight
from mlxrunner.cache.shared.split import (
    LONG,
    MOST_SHARED,
    Block,
    Part,
    Split,
    StackedParts,
    blocks_of,
    split,
)
from mlxrunner.parallel.attention import Parts

SEQUENCES = 6
SIGHTS = [
    Sight(),
    Sight(window=5),
    Sight(window=3, memory=9),
    Sight(chunk=4),
    Sight(window=80, memory=90),
]


def put_together(parts: Split, queries: int, num_cells: int) -> np.ndarray[Any, Any]:
    """Return how often each query's attention counts each cell."""
    counts = np.zeros((queries, num_cells + 1000), np.int32)
    for own in parts.own:
        rows = own.end - own.begin
        tri = np.tri(rows, len(own.cells), len(own.cells) - rows, np.int32)
        counts[own.begin : own.end, own.cells] += tri if own.visible is None else own.visible
    for level in parts.levels:
        of_level = [query for part in level for query in _asked(part)]
        assert len(of_level) == len(set(of_level))
        for part in level:
            if isinstance(part, Part):
                seen = 1 if part.visible is None else part.visible
                counts[list(part.queries), part.cells.begin : part.cells.end] += seen
            else:
                _count_stack(counts, part)
    assert not counts[:, num_cells:].any()
    return counts[:, :num_cells]


def _asked(part: Part | StackedParts) -> list[int]:
    if isinstance(part, Part):
        return list(part.queries)
    return [part.queries[index] for index in part.wanted]


def _count_stack(counts: np.ndarray[Any, Any], stack: StackedParts) -> None:
    assert stack.length <= stack.size
    for index in range(len(stack.queries)):
        begin = stack.begin + index * stack.size
        seen = 1 if stack.visible is None else stack.visible[index]
        if index in stack.wanted:
            counts[stack.queries[index], begin : begin + stack.length] += seen
        else:
            assert not np.any(seen)


class History:
    """Cells after random steps, forks, cuts and shifts."""

    def __init__(self, rng: random.Random, sight: Sight, num_cells: int = 160) -> None:
        self.rng, self.cells = rng, Cells.empty(num_cells, SEQUENCES, sight)

    def step(self, sequences: int, most: int) -> tuple[Batch, Bools] | None:
        """Place a batch of some sequences; return it with its mask, or None without room."""
        nexts = self.cells.next_positions().tolist()
        tokens = []
        for sequence in self.rng.sample(range(SEQUENCES), sequences):
            count = self.rng.choice([1, 1, 1, self.rng.randint(1, most)])
            tokens += [(nexts[sequence] + i, sequence) for i in range(count)]
        batch = Batch(*zip(*tokens, strict=True))
        with suppress(CacheFullError):
            placement = self.cells.place(batch)
            self.cells = placement.after
            return batch, self.cells.mask(batch, placement.cells, Run(0, self.cells.num_cells))
        return None

    def change(self) -> None:
        one, other, at = self.rng.randrange(6), self.rng.randrange(6), self.rng.randrange(40)
        what = self.rng.choice(["share", "share", "share", "cut", "close", "lane", "lane", "pack"])
        with suppress(CacheFullError):
            if what == "share":
                self.cells = self.cells.with_prefix(one, other, at)
            elif what == "cut":
                self.cells, _ = self.cells.without(one, at, END)
            elif what == "close":
                self.cells, _ = self.cells.without(one, at, at + self.rng.randrange(3))
            elif what == "lane":
                self.cells = self.cells.expecting(one, self.rng.randint(1, 40))
            else:
                self.cells, _ = self.cells.packed()




@pytest.mark.parametrize("sight", SIGHTS, ids=str)
@examples(400)
@given(st.randoms(), st.booleans())
def test_attention_in_parts_is_that_of_the_mask(
    sight: Sight, rng: random.Random, with_sinks: bool
) -> None:
    """Each visible cell counts once, and the sums agree, after any history, with any groups."""
    history = History(rng, sight)
    shape = (1, 2, history.cells.num_cells, 4)
    mx.random.seed(rng.randrange(1000))
    keys, values = mx.random.normal(shape), mx.random.normal(shape)
    sinks = mx.random.normal((4,)) if with_sinks else None
    for _ in range(rng.randint(1, 10)):
        for _ in range(rng.randrange(3)):
            history.change()
        found = history.step(rng.randint(1, SEQUENCES), rng.choice([4, 4, LONG + 8]))
        if found is None:
            continue
        batch, visible = found
        parts = split(history.cells, batch, _blocks(history.cells, batch), worth=0)
        if parts is None:
            continue
        assert (put_together(parts, *visible.shape) == visible).all()
        queries = mx.random.normal((1, 4, len(batch), 4))
        more = {"cache": None, "scale": 0.5} | ({} if sinks is None else {"sinks": sinks})
        expected = scaled_dot_product_attention(
            queries, keys, values, mask=mx.array(visible), **more
        )
        ours = Parts(parts).attend(
            scaled_dot_product_attention, queries, keys, values,
            scale=0.5, sinks=sinks, cache=None,
        )
        assert mx.abs(ours - expected).max().item() < 1e-5


def _blocks(cells: Cells, batch: Batch) -> list[Block]:
    blocks = blocks_of(cells, batch)
    assert blocks is not None
    return blocks
