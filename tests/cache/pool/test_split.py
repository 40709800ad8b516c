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
from support.engine import SplitAttention
from support.sample import examples

from mlxrunner.cache import END, Batch, CacheFullError
from mlxrunner.cache.pool.attention_split import (
    LONG,
    MOST_SHARED,
    AnyPart,
    Block,
    Gathered,
    Split,
    SplitPart,
    StackedParts,
    blocks_of,
    largest_splits,
    split,
)
from mlxrunner.cache.pool.cell_table import Bools, CellRun
from mlxrunner.cache.pool.cells import AttentionWindow, KVPool

SEQUENCES = 6
SIGHTS = [
    AttentionWindow(),
    AttentionWindow(window=5),
    AttentionWindow(window=3, memory=9),
    AttentionWindow(chunk=4),
    AttentionWindow(window=80, memory=90),
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
            if isinstance(part, SplitPart):
                seen = 1 if part.visible is None else part.visible
                counts[list(part.queries), part.cells.begin : part.cells.end] += seen
            elif isinstance(part, StackedParts):
                _count_stack(counts, part)
            else:
                for index, query in enumerate(part.queries):
                    seen = 1 if part.visible is None else part.visible[index]
                    np.add.at(counts[query], part.cells[index], seen)
    assert not counts[:, num_cells:].any()
    return counts[:, :num_cells]


def _asked(part: AnyPart) -> list[int]:
    if isinstance(part, StackedParts):
        return [part.queries[index] for index in part.wanted]
    return list(part.queries)


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

    def __init__(self, rng: random.Random, window: AttentionWindow, num_cells: int = 160) -> None:
        self.rng, self.cells = rng, KVPool.empty(num_cells, SEQUENCES, window)

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
            return batch, self.cells.mask(batch, CellRun(0, self.cells.num_cells))
        return None

    def change(self) -> None:
        one, other, at = self.rng.randrange(6), self.rng.randrange(6), self.rng.randrange(40)
        what = self.rng.choice(
            ["share", "share", "share", "cut", "close", "reservation", "reservation", "pack"]
        )
        with suppress(CacheFullError):
            if what == "share":
                self.cells = self.cells.with_prefix(one, other, at)
            elif what == "cut":
                self.cells, _ = self.cells.without(one, at, END)
            elif what == "close":
                self.cells, _ = self.cells.without(one, at, at + self.rng.randrange(3))
            elif what == "reservation":
                self.cells = self.cells.expecting(one, self.rng.randint(1, 40))
            else:
                self.cells, _ = self.cells.packed()


@pytest.mark.parametrize("window", SIGHTS, ids=str)
@examples(120)
@given(st.randoms(), st.booleans())
def test_attention_in_parts_is_that_of_the_mask(
    window: AttentionWindow, rng: random.Random, with_sinks: bool
) -> None:
    """Each visible cell counts once, and the sums agree, after any history, with any groups."""
    history = History(rng, window)
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
        ours = SplitAttention(parts).attend(
            scaled_dot_product_attention, queries, keys, values, scale=0.5, sinks=sinks, cache=None
        )
        assert mx.abs(ours - expected).max().item() < 1e-5


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("window", SIGHTS, ids=str)
@examples(60)
@given(st.randoms())
def test_no_step_takes_more_than_the_largest_splits(
    window: AttentionWindow, rng: random.Random
) -> None:
    """The memory of a server is measured with these: pairs of query and cell, and copied cells."""
    history = History(rng, window, num_cells=900)
    for _ in range(rng.randint(1, 30)):
        history.change()
        found = history.step(rng.randint(1, SEQUENCES), rng.choice([4, 4, LONG + 40]))
        if found is None:
            continue
        batch, visible = found
        parts = split(history.cells, batch, _blocks(history.cells, batch))
        if parts is None:
            seen = np.flatnonzero(visible.any(axis=0))
            pairs, copied = len(batch) * int(seen[-1] + 1 - seen[0]), 0
        else:
            pairs, copied = pairs_of(parts), sum(len(own.cells) for own in parts.own)
        longest = max(
            len(np.flatnonzero(visible[rows].any(axis=0)))
            for block in _blocks(history.cells, batch)
            for rows in [slice(block.begin, block.end)]
        )
        whole, _ = largest_splits(len(batch), SEQUENCES, 900, longest)
        assert pairs <= pairs_of(whole)
        assert copied <= SEQUENCES * len(whole.own[0].cells)


def pairs_of(parts: Split) -> int:
    """Return the pairs of query and cell in all products."""
    own = sum((one.end - one.begin) * len(one.cells) for one in parts.own)
    sizes = [
        part.cells.size
        if isinstance(part, Gathered)
        else len(part.queries)
        * (part.length if isinstance(part, StackedParts) else part.cells.end - part.cells.begin)
        for level in parts.levels
        for part in level
    ]
    return own + sum(sizes)


def _blocks(cells: KVPool, batch: Batch) -> list[Block]:
    blocks = blocks_of(cells, batch)
    assert blocks is not None
    return blocks


def stored(
    tokens: int, reservations: dict[int, int] | None = None, num_cells: int = 20_000
) -> KVPool:
    """Return cells: sequence 0 has `tokens` tokens, others have reservations of some sizes."""
    cells = KVPool.empty(num_cells, 8, AttentionWindow())
    for sequence, size in (reservations or {}).items():
        cells = cells.expecting(sequence, size)
    for begin in range(0, tokens, 5000):
        positions = range(begin, min(tokens, begin + 5000))
        cells = cells.place(Batch(positions, [0] * len(positions))).after
    return cells


def apart(
    cells: KVPool, *counts: tuple[int, int], worth: float = 1.2
) -> tuple[KVPool, Split | None]:
    """Place the next tokens of some sequences, given as (sequence, number), and split them."""
    nexts = cells.next_positions().tolist()
    tokens = [(nexts[s] + i, s) for s, count in counts for i in range(count)]
    batch = Batch(*zip(*tokens, strict=True))
    after = cells.place(batch).after
    return after, split(after, batch, _blocks(after, batch), worth)


def drawn(found: Split | None) -> list[str]:
    """Draw each part: its queries and its cells, with a bar between reservations of a stack."""
    if found is None:
        return ["one product"]
    rows = [f"own {own.begin}-{own.end - 1}: {len(own.cells)} cells" for own in found.own]
    for number, level in enumerate(found.levels):
        for part in level:
            asked = ",".join(map(str, _asked(part)))
            if isinstance(part, SplitPart):
                cells = f"{part.cells.begin}-{part.cells.end - 1}"
            elif isinstance(part, Gathered):
                cells = f"{part.cells.shape[1]} gathered x {len(part.queries)}"
            else:
                cells = f"{part.begin}+{part.length} of {part.size} x {len(part.queries)}"
            masked = "" if part.visible is None else " masked"
            rows.append(f"level {number}: {asked}: {cells}{masked}")
    return rows


def test_each_group_reads_its_trunk_once() -> None:
    """Two groups of two with a trunk each, below one that all share; reservations are one stack."""
    cells = stored(1000, dict.fromkeys(range(1, 8), 30))
    cells = cells.with_prefix(0, 1, 500)
    for tokens in range(0, 2000, 500):
        cells = cells.place(Batch(range(500 + tokens, 1000 + tokens), [1] * 500)).after
    cells = cells.with_prefix(0, 2, 1000).with_prefix(0, 3, 1000)
    cells = cells.with_prefix(1, 4, 2500).with_prefix(1, 5, 2500)
    for sequence in (2, 3, 4, 5):
        cells = cells.expecting(sequence, 30)
    for _ in range(3):
        cells, found = apart(cells, (2, 1), (3, 1), (4, 1), (5, 1))
    first = cells.reservations[2].run.begin
    assert drawn(found) == [
        f"level 0: 0,1,2,3: {first}+3 of 32 x 4",
        "level 1: 0,1,2,3: 224-723",
        "level 2: 0,1: 724-1223",
        "level 2: 2,3: 1224-3223",
    ]


def test_lanes_of_one_size_are_one_part() -> None:
    """Also where one in between is not asked for, and where some have fewer tokens."""
    cells = stored(0, dict.fromkeys(range(8), 50))
    for count in (40, 1, 1):
        cells, _ = apart(cells, *[(sequence, count) for sequence in range(8)])
    cells, found = apart(cells, *[(sequence, 1) for sequence in range(8) if sequence != 3])
    assert drawn(found) == ["level 0: 0,1,2,3,4,5,6: 0+43 of 64 x 8 masked"]
    cells, found = apart(cells, *[(sequence, 1) for sequence in range(8)])
    assert drawn(found) == ["level 0: 0,1,2,3,4,5,6,7: 0+44 of 64 x 8 masked"]


def test_lanes_far_apart_are_no_stack() -> None:
    """A batch of mostly nothing would be more work: short ones are copied, long ones are parts."""
    cells = stored(0, dict.fromkeys(range(8), 500))
    cells, _ = apart(cells, *[(sequence, 40) for sequence in range(8)])
    _, found = apart(cells, (0, 1), (5, 1), worth=0)
    assert drawn(found) == ["level 0: 0,1: 41 gathered x 2"]
    for _ in range(3):
        cells, _ = apart(cells, *[(sequence, 60) for sequence in range(8)])
    _, found = apart(cells, (0, 1), (5, 1), worth=0)
    assert drawn(found) == ["level 0: 0: 0-220", "level 0: 1: 2560-2780"]


def test_neighbours_are_stacks_of_their_own() -> None:
    """Two groups far from each other: each is a batch."""
    cells = KVPool.empty(2000, 12, AttentionWindow())
    for sequence in range(12):
        cells = cells.expecting(sequence, 100)
    cells, _ = apart(cells, *[(sequence, 40) for sequence in range(12)])
    _, found = apart(cells, (0, 1), (1, 1), (9, 1), (11, 1), worth=0)
    assert drawn(found) == [
        "level 0: 0,1: 0+41 of 128 x 2",
        "level 0: 2,3: 1152+41 of 128 x 3 masked",
    ]


def test_short_sequences_between_each_other_are_gathered() -> None:
    """One copy of what they see is less work than a product over all that lies between."""
    cells = KVPool.empty(4000, 8, AttentionWindow())
    for _ in range(3):
        cells, _ = apart(cells, *[(sequence, 10) for sequence in range(8)])
    cells, found = apart(cells, *[(sequence, 1) for sequence in range(8)])
    assert drawn(found) == ["level 0: 0,1,2,3,4,5,6,7: 31 gathered x 8"]
    for _ in range(60):  # too many pieces to list
        cells, found = apart(cells, *[(sequence, 1) for sequence in range(8)])
    assert drawn(found) == ["level 0: 0,1,2,3,4,5,6,7: 91 gathered x 8"]


def test_long_sequences_are_not_copied() -> None:
    """A part for each of them costs less than a copy."""
    cells = KVPool.empty(9000, 4, AttentionWindow())
    for _ in range(2):
        cells, _ = apart(cells, *[(sequence, 500) for sequence in range(4)])
    _, found = apart(cells, *[(sequence, 1) for sequence in range(4)])
    assert drawn(found) == [
        "level 0: 0,1,2,3: 4000-4003 masked",
        *[
            f"level {1 + half}: {number}: {begin}-{begin + 499}"
            for half in (0, 1)
            for number in range(4)
            for begin in (500 * number + 2000 * half,)
        ],
    ]


def test_one_product_where_it_is_less_work() -> None:
    """A long prefix and little of their own, or little altogether: the mask is shown."""
    cells = stored(1000).with_prefix(0, 1, 1000).with_prefix(0, 2, 1000)
    assert drawn(apart(cells, (1, 4), (2, 4))[1]) == ["one product"]
    assert drawn(apart(stored(0), (1, 4), (2, 4))[1]) == ["one product"]


def test_tokens_that_lie_between_each_other_are_one_masked_part() -> None:
    """Sequences without reservations decode into every other cell; their prompts are parts."""
    cells = KVPool.empty(9000, 2, AttentionWindow())
    for sequence in (0, 1):
        cells, _ = apart(cells, (sequence, 4000))
    for _ in range(10):
        cells, found = apart(cells, (0, 1), (1, 1))
    assert drawn(found) == [
        "level 0: 0,1: 8000-8019 masked",
        "level 1: 0: 0-3999",
        "level 1: 1: 4000-7999",
    ]


def test_a_long_piece_attends_by_itself() -> None:
    """Its cells come in the order of positions, wherever they lie, and need no mask."""
    cells = stored(300).with_prefix(0, 1, 200).with_prefix(0, 2, 200)
    cells, _ = apart(cells, (2, 500))
    cells, found = apart(cells, (1, LONG), (2, 1), (0, 1), worth=0)
    assert found is not None
    assert drawn(found)[0] == f"own 0-{LONG - 1}: {200 + LONG} cells"
    assert found.own[0].visible is None
    assert found.own[0].cells.tolist() == [*range(200), *range(800, 800 + LONG)]


def test_scores_of_shared_cells_are_bounded() -> None:
    """Queries that would have too many with each other read the cells in smaller groups."""
    cells = stored(18_000)
    for sequence in (1, 2, 3):
        cells = cells.with_prefix(0, sequence, 18_000)
    _, found = apart(cells, *[(sequence, 30) for sequence in (1, 2, 3)], worth=0)
    assert found is not None
    sizes = [
        len(part.queries) * (part.cells.end - part.cells.begin)
        for level in found.levels
        for part in level
        if isinstance(part, SplitPart)
    ]
    assert max(sizes) <= MOST_SHARED < 90 * 18_000


def test_scattered_sequences_have_a_mask() -> None:
    """They lie in too many pieces to list; beside a long piece, what one query sees is copied."""
    cells = KVPool.empty(1000, 3, AttentionWindow())
    for _ in range(50):
        cells, found = apart(cells, (0, 1), (1, 1), (2, 1), worth=0)
    assert drawn(found) == ["one product"]
    cells, found = apart(cells, (0, LONG), (1, 1), worth=0)
    assert drawn(found) == [
        f"own 0-{LONG - 1}: {50 + LONG} cells",
        f"level 0: {LONG}: 51 gathered x 1",
    ]


def test_a_short_piece_of_a_scattered_sequence_attends_by_itself() -> None:
    """All cells of the pool are more than it sees; the others are read as without it."""
    cells = KVPool.empty(9000, 4, AttentionWindow())
    for _ in range(50):
        cells, _ = apart(cells, (0, 1), (1, 1), (2, 1), worth=0)
    cells, _ = apart(cells, (3, 600))
    cells, found = apart(cells, (0, 3), (3, 1), worth=0)
    assert drawn(found) == ["own 0-2: 53 cells", "level 0: 3: 150-753 masked"]


@pytest.mark.parametrize(
    "batch", [Batch([0, 0, 1], [0, 1, 0]), Batch([0, 2], [0, 0])], ids=["mixed", "jump"]
)
def test_tokens_in_another_order_have_a_mask(batch: Batch) -> None:
    """A scheduler never makes such a step."""
    assert blocks_of(KVPool.empty(20, 2, AttentionWindow()).place(batch).after, batch) is None
