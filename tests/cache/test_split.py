"""A mask taken apart is the same mask."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxrunner.cache.cells import Run
from mlxrunner.cache.split import MOST_SHARING, Split, split


def put_together(parts: Split, queries: int, cells: int) -> np.ndarray:
    """How often each query's attention would count each cell."""
    counts = np.zeros((queries, cells), np.int32)
    counts[:, parts.common.begin : parts.common.end] += 1
    for part in parts.parts:
        counts[part.begin : part.end, part.cells.begin : part.cells.end] += 1 if part.visible is None else part.visible
    return counts


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_each_visible_cell_is_counted_once(data: st.DataObject) -> None:
    """And no other, for any mask in which each query sees something, in any order of sequences."""
    queries, cells = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 9))
    row = st.lists(st.booleans(), min_size=cells, max_size=cells).filter(any)
    visible = np.array(data.draw(st.lists(row, min_size=queries, max_size=queries)))
    sequences = data.draw(st.lists(st.integers(0, 2), min_size=queries, max_size=queries))
    parts = split(visible, sequences, worth=0)
    if parts is None:
        assert len(set(sequences)) == 1
        return
    assert (put_together(parts, queries, cells) == visible).all()
    assert [part.begin for part in parts.parts] == [0, *(part.end for part in parts.parts[:-1])]


def of_their_own(sequences: int, each: int, prefix: int) -> np.ndarray:
    """One query for each sequence: a prefix that all see, then `each` cells of its own."""
    own = np.repeat(np.eye(sequences, dtype=np.bool_), each, axis=1)
    return np.hstack([np.ones((sequences, prefix), np.bool_), own])


def test_parts_are_chosen_where_they_save_at_least_half() -> None:
    """Nothing in common: yes. A long prefix and little of their own: no."""
    apart = split(of_their_own(4, 10, 0), range(4))
    assert apart is not None
    assert apart.common == Run(0, 0)
    assert [part.cells for part in apart.parts] == [Run(0, 10), Run(10, 20), Run(20, 30), Run(30, 40)]
    assert all(part.visible is None for part in apart.parts)
    assert split(of_their_own(4, 10, 100), range(4)) is None
    both = split(of_their_own(16, 100, 100), range(16))
    assert both is not None
    assert both.common == Run(0, 100)
    assert both.parts[1].cells == Run(200, 300)


def test_one_sequence_is_never_taken_apart() -> None:
    """Its attention is one product already."""
    assert split(np.tri(5, dtype=np.bool_), [3] * 5, worth=0) is None


def test_long_prompts_that_share_a_prefix_stay_in_one_product() -> None:
    """The scores of the common part would be held all at once."""
    visible = np.repeat(of_their_own(2, 400, 1), MOST_SHARING, axis=0)
    assert split(visible, [0] * MOST_SHARING + [1] * MOST_SHARING) is None
    assert split(visible[:, 1:], [0] * MOST_SHARING + [1] * MOST_SHARING) is not None
