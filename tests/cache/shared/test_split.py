"""A mask taken apart is the same mask."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.sample import examples

from mlxrunner.cache.shared.cells import Lane, Run
from mlxrunner.cache.shared.split import MOST_SHARED, Split, split

OFF = 5
"""The first cell of the history."""


def put_together(parts: Split, queries: int, cells: int) -> np.ndarray:
    """Return how often each query's attention would count each cell."""
    counts = np.zeros((queries, OFF + cells + 100), np.int32)
    counts[:, parts.common.begin : parts.common.end] += 1
    for part in parts.parts:
        counts[part.begin : part.end, part.cells.begin : part.cells.end] += (
            1 if part.visible is None else part.visible
        )
    for lanes in parts.stacks:
        for index in lanes.wanted:
            begin = lanes.begin + index * lanes.size
            assert lanes.length <= lanes.size
            seen = 1 if lanes.visible is None else lanes.visible[index]
            counts[lanes.queries[index], begin : begin + lanes.length] += seen
    assert not counts[:, :OFF].any()
    assert not counts[:, OFF + cells :].any()
    return counts[:, OFF : OFF + cells]


@examples(400)
@given(st.data())
def test_each_visible_cell_is_counted_once(data: st.DataObject) -> None:
    """Each visible cell is counted once and no other, for any mask, order and lanes."""
    queries, cells = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 12))
    row = st.lists(st.booleans(), min_size=cells, max_size=cells).filter(any)
    visible = np.array(data.draw(st.lists(row, min_size=queries, max_size=queries)))
    sequences = data.draw(st.lists(st.integers(0, 5), min_size=queries, max_size=queries))
    size = data.draw(st.sampled_from([1, 2, 4, 8]))
    begins = data.draw(st.permutations(range(0, 24, size)))
    lanes = {s: Lane(Run(begin, begin + size), begin) for s, begin in enumerate(begins[:5])}
    parts = split(visible, sequences, Run(OFF, OFF + cells), lanes, worth=0)
    if parts is None:
        assert len(set(sequences)) == 1
        return
    assert (put_together(parts, queries, cells) == visible).all()
    order = [q for part in parts.parts for q in range(part.begin, part.end)]
    order += [lanes.queries[i] for lanes in parts.stacks for i in lanes.wanted]
    assert sorted(order) == list(range(queries))


def of_their_own(sequences: int, each: int, prefix: int) -> np.ndarray:
    """One query for each sequence: a prefix that all see, then `each` cells of its own."""
    own = np.repeat(np.eye(sequences, dtype=np.bool_), each, axis=1)
    return np.hstack([np.ones((sequences, prefix), np.bool_), own])


def test_lanes_of_one_size_are_one_part() -> None:
    """Also where one in between is not asked for; the common prefix is a part for all."""
    visible = np.delete(of_their_own(8, 64, 256), 3, axis=0)
    numbers = [0, 1, 2, 4, 5, 6, 7]
    lanes = {s: Lane(Run(256 + 64 * s, 320 + 64 * s), 320 + 64 * s) for s in range(8)}
    found = split(visible, numbers, Run(0, visible.shape[1]), lanes, worth=0)
    assert found is not None
    assert (found.common, found.parts) == (Run(0, 256), ())
    assert found.stacks[0].queries == (0, 1, 2, 0, 3, 4, 5, 6)
    assert found.stacks[0].wanted == (0, 1, 2, 4, 5, 6, 7)
    assert (found.stacks[0].begin, found.stacks[0].size, found.stacks[0].length) == (256, 64, 64)


def test_lanes_far_apart_are_parts() -> None:
    """A batch of mostly nothing would be more work than they are."""
    visible = of_their_own(3, 10, 0)
    lanes = {s: Lane(Run(320 * s, 320 * s + 32), 0) for s in range(3)}
    found = split(visible, range(3), Run(0, 30), lanes, worth=0)
    assert found is not None
    assert len(found.parts) == 3


def test_parts_are_chosen_where_they_are_less_work() -> None:
    """Much of their own: yes. A long prefix and little of their own, or little altogether: no."""
    apart = split(of_their_own(4, 1000, 0), range(4), Run(0, 4000), {})
    assert apart is not None
    assert apart.common == Run(0, 0)
    assert [part.cells for part in apart.parts] == [
        Run(0, 1000),
        Run(1000, 2000),
        Run(2000, 3000),
        Run(3000, 4000),
    ]
    assert all(part.visible is None for part in apart.parts)
    assert split(of_their_own(4, 10, 1000), range(4), Run(0, 1040), {}) is None
    assert split(of_their_own(4, 10, 0), range(4), Run(0, 40), {}) is None
    both = split(of_their_own(16, 400, 100), range(16), Run(7, 6507), {})
    assert both is not None
    assert both.common == Run(7, 107)
    assert both.parts[1].cells == Run(507, 907)


def test_one_sequence_is_never_taken_apart() -> None:
    """Its attention is one product already."""
    assert split(np.tri(5, dtype=np.bool_), [3] * 5, Run(0, 5), {}, worth=0) is None


def test_long_prompts_that_share_a_prefix_stay_in_one_product() -> None:
    """The scores of the common part would be held all at once."""
    visible = np.repeat(of_their_own(2, 4000, 1024), 500, axis=0)
    sequences = [0] * 500 + [1] * 500
    assert split(visible, sequences, Run(0, 9024), {}) is not None
    assert (
        split(np.repeat(visible, 2, axis=0), np.repeat(sequences, 2).tolist(), Run(0, 9024), {})
        is None
    )
    assert MOST_SHARED == 1024 * 1024
