"""Room, eviction, packing, lifting and masks assign the right cells, without any tensor.

Each cell is drawn as its owners.
"""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrunner.cache import END, Batch, CacheFullError
from mlxrunner.cache.pool.cell_table import MAX_SPANS, CellRun, CellSpan, runs
from mlxrunner.cache.pool.cells import AttentionWindow, KVPool, Reservation


def placed(cells: KVPool, *tokens: tuple[int, int]) -> KVPool:
    sequences, positions = zip(*tokens, strict=True)
    return cells.place(Batch(positions, sequences)).after


def drawn(cells: KVPool) -> str:
    """Draw per cell its owners and position, `.` for a free one: `0@3 01@4 .`"""
    owners = [
        "".join(str(sequence) for sequence in np.flatnonzero(cell)) for cell in cells.owners.T
    ]
    return " ".join(
        f"{owner}@{position}" if owner else "."
        for owner, position in zip(owners, cells.positions.tolist(), strict=True)
    )


def cells(num_cells: int = 6, max_sequences: int = 3, **window: int) -> KVPool:
    return KVPool.empty(num_cells, max_sequences, AttentionWindow(**window))


def test_a_batch_goes_to_the_first_room_that_holds_it() -> None:
    """Side by side, in its own order."""
    some = placed(cells(8), (0, 0), (1, 0), (0, 1), (1, 1))
    holes, _ = some.without(1, 0, END)
    assert drawn(holes) == "0@0 . 0@1 . . . . ."
    assert drawn(placed(holes, (2, 0))) == "0@0 2@0 0@1 . . . . ."
    assert drawn(placed(holes, (2, 0), (2, 1))) == "0@0 . 0@1 2@0 2@1 . . ."


def test_without_room_side_by_side_the_cells_are_packed() -> None:
    """In order, neighbours in one go, each row read before one is written."""
    holes, _ = placed(cells(7), (0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (2, 0)).without(1, 0, END)
    assert drawn(holes) == "0@0 . 0@1 0@2 . 2@0 ."
    placement = holes.place(Batch([1, 2, 3], [2, 2, 2]))
    assert drawn(placement.before) == "0@0 0@1 0@2 2@0 . . ."
    assert drawn(placement.after) == "0@0 0@1 0@2 2@0 2@1 2@2 2@3"
    assert placement.cells.tolist() == [4, 5, 6]
    assert placement.move is not None
    assert (placement.move.begin, runs(placement.move.sources)) == (
        1,
        [CellRun(2, 4), CellRun(5, 6)],
    )
    assert drawn(holes) == "0@0 . 0@1 0@2 . 2@0 ."  # a value: nothing was done to it


def test_packing_parks_what_is_about_to_be_dropped() -> None:
    """Behind the rest, so that the step can be taken back until the batch is written over it."""
    some = placed(cells(6, window=2), (0, 0), (1, 0), (0, 1), (1, 1), (0, 2))
    assert drawn(some) == "0@0 1@0 0@1 1@1 0@2 ."
    placement = some.place(Batch([3, 4, 5, 6], [0, 0, 0, 0]))
    assert drawn(placement.before) == "1@1 0@2 0@0 1@0 0@1 ."
    assert drawn(placement.after) == "1@1 0@2 0@3 0@4 0@5 0@6"
    assert some.can_resume(0, 2)
    assert placement.before.can_resume(0, 2)
    assert not placement.after.can_resume(0, 2)


def test_packed_cells_need_no_move() -> None:
    """Packing is done once."""
    once, move = placed(cells(), (0, 0), (0, 1)).packed()
    assert move is None
    holes, _ = placed(once, (1, 0)).without(0, 0, 1)
    again, move = holes.packed()
    assert (drawn(holes), drawn(again), move is not None) == (
        ". 0@0 1@0 . . .",
        "0@0 1@0 . . . .",
        True,
    )
    assert again.packed()[1] is None


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ([(0, 5)], "1@3 1@4 0@3 0@4 0@5 ."),
        ([(0, 3)], "1@3 1@4 0@3 0@4 0@3 0@2"),
        ([(1, 5)], "1@3 1@4 0@3 0@4 1@5 ."),
        ([(1, 9)], "1@9 . 0@3 0@4 . ."),
    ],
    ids=["the-next", "an-earlier-one", "the-other-sequence", "far-ahead"],
)
def test_a_batch_drops_what_is_beyond_each_memory(
    batch: list[tuple[int, int]], expected: str
) -> None:
    """Before its lowest position, or before the next one of a sequence that is not in it."""
    before = placed(cells(6, 2), (1, 3), (1, 4), (0, 3), (0, 4), (1, 2), (0, 2))
    assert drawn(before) == "1@3 1@4 0@3 0@4 1@2 0@2"
    assert (
        drawn(placed(KVPool(before.positions, before.owners, AttentionWindow(window=3)), *batch))
        == expected
    )


def test_a_full_cache_says_how_full() -> None:
    """With the sizes; neighbours don't matter, room does."""
    some = placed(cells(4), (0, 0), (0, 1), (1, 0))
    with pytest.raises(
        CacheFullError,
        match=r"a batch of 2 tokens needs 2 free cells, but 1 of 4 are free: "
        r"remove .* larger capacity",
    ):
        some.place(Batch([2, 3], [0, 0]))
    assert drawn(placed(some, (0, 2))) == "0@0 0@1 1@0 0@2"


def test_closing_a_gap_moves_positions_and_copies_what_is_shared() -> None:
    """The other sequence keeps its cells."""
    shared = placed(cells(6), (0, 0), (0, 1), (0, 2), (0, 3)).with_prefix(0, 1, 3)
    assert drawn(shared) == "01@0 01@1 01@2 0@3 . ."
    after, shift = shared.without(0, 0, 1)
    assert drawn(after) == "1@0 1@1 1@2 0@2 0@0 0@1"
    assert shift is not None
    assert (shift.sources.tolist(), shift.targets.tolist(), shift.by) == ([1, 2, 3], [4, 5, 3], -1)
    assert (shift.copies.sources.tolist(), shift.copies.targets.tolist()) == ([1, 2], [4, 5])


def test_a_gap_that_can_not_be_closed_for_want_of_cells() -> None:
    """Only copies need room; what the removal itself frees counts."""
    shared = placed(cells(4), (0, 0), (0, 1), (0, 2)).with_prefix(0, 1, 3)
    with pytest.raises(
        CacheFullError,
        match=r"removing positions 0 .. 0 of sequence 0 needs 2 free cells, but 1 of 4 are free",
    ):
        shared.without(0, 0, 1)
    assert drawn(shared.without(0, 1, 2)[0]) == "01@0 1@1 1@2 0@1"
    full = KVPool(np.array([1, 0], np.int32), np.array([[True, True], [True, False]]))
    assert (drawn(full), drawn(full.without(0, 0, 1)[0])) == ("01@1 0@0", "1@1 0@0")


@pytest.mark.parametrize(
    "args",
    [(0, 2, 2), (0, 4, END), (2, 0, END), (2, 0, 5)],
    ids=["empty", "behind", "no-tokens", "no-gap"],
)
def test_removing_nothing_changes_nothing(args: tuple[int, int, int]) -> None:
    some = placed(cells(), (0, 0), (0, 1), (0, 2), (0, 3)).with_prefix(0, 1, 4)
    after, shift = some.without(*args)
    assert (drawn(after), shift) == (drawn(some), None)


@pytest.mark.parametrize(
    ("window", "positions", "first"),
    [
        ({}, [0, 7], [0, 0]),
        ({"window": 3}, [0, 2, 3, 7], [0, 0, 1, 5]),
        ({"chunk": 4}, [0, 3, 4, 7], [0, 0, 4, 4]),
        ({"window": 3, "chunk": 4}, [3, 4, 7], [1, 4, 5]),
    ],
    ids=["all", "window", "chunk", "both"],
)
def test_where_sight_begins(window: dict[str, int], positions: list[int], first: list[int]) -> None:
    """The query's own position is always inside."""
    assert AttentionWindow(**window).first_seen(np.array(positions, np.int32)).tolist() == first


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        ({}, 300),
        ({"window": 10}, 46),
        ({"window": 10, "memory": 20}, 76),
        ({"window": 99}, 300),
        ({"chunk": 8}, 300),
    ],
    ids=["all", "window", "memory", "never-more", "chunk"],
)
def test_how_many_cells(window: dict[str, int], expected: int) -> None:
    """Three sequences of 100 tokens, batches of 16."""
    assert AttentionWindow(**window).num_cells(3, 100, 16) == expected


@pytest.mark.parametrize(
    "window",
    [
        {"window": 0},
        {"chunk": -1},
        {"window": 4, "memory": 3},
        {"memory": 8},
        {"chunk": 4, "memory": 2},
    ],
    ids=str,
)
def test_a_memory_has_to_hold_what_is_seen(window: dict[str, int]) -> None:
    """Otherwise a query would miss something without a word."""
    with pytest.raises(ValueError, match=r"at least 1|does not hold"):
        AttentionWindow(**window)


@given(st.lists(st.integers(0, 40), unique=True))
def test_runs_are_the_cells_again(numbers: list[int]) -> None:
    """In order, none twice, no two that could be one."""
    found = runs(np.array(numbers, np.int32))
    assert [cell for run in found for cell in range(run.begin, run.end)] == numbers
    assert all(a.end != b.begin for a, b in pairwise(found))


@pytest.mark.parametrize(
    "arguments",
    [
        {"positions": [], "sequences": []},
        {"positions": [1, 2], "sequences": [0]},
        {"positions": [-1], "sequences": [0]},
        {"positions": [END], "sequences": [0]},
    ],
    ids=["empty", "lengths", "negative", "end"],
)
def test_a_batch_is_checked(arguments: dict[str, list[int]]) -> None:
    """When it is made, so that no cache has to."""
    with pytest.raises(ValueError, match="positions"):
        Batch(**arguments)


def test_a_batch_is_plain_data() -> None:
    """Made of anything that counts, equal and hashable by its numbers."""
    batch = Batch(np.arange(3), [0, 0, 1])
    assert batch == Batch([0, 1, 2], (0, 0, 1))
    assert (len(batch), len({batch, Batch([0, 1, 2], [0, 0, 1])})) == (3, 1)


@pytest.mark.parametrize("call", ["place", "with_prefix", "without", "can_resume"])
def test_a_sequence_that_is_not_there(call: str) -> None:
    arguments = {
        "place": (Batch([0, 0], [1, 3]),),
        "with_prefix": (0, 3, 1),
        "without": (3, 0, END),
        "can_resume": (3, 0),
    }[call]
    with pytest.raises(
        ValueError, match="there is no sequence 3: the cache was initialized for 3, counted from 0"
    ):
        getattr(cells(), call)(*arguments)


def test_the_interface_comes_without_mlx() -> None:
    """Batches, errors and cells are there at once; the caches bring mlx when they are asked for."""
    script = (
        "import sys; from mlxrunner.cache import Cache, Batch, CacheFullError, "
        "NotSupportedError, END\n"
        "import mlxrunner.cache.pool.cells, mlxrunner.cache; assert not [name for name in "
        "sys.modules if name.split('.')[0].startswith('mlx_') "
        "or name.split('.')[0] == 'mlx']\n"
        "from mlxrunner.cache import CausalCache; assert 'mlx.core' in "
        "sys.modules\n"
        "try: mlxrunner.cache.Nothing\n"
        "except AttributeError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "module 'mlxrunner.cache' has no attribute 'Nothing'"


def test_a_lane_keeps_the_tokens_of_a_sequence_side_by_side() -> None:
    """The others go beside the reservations, and a reservation ends where it was filled."""
    cells = KVPool.empty(200, 3, AttentionWindow()).expecting(0, 30).expecting(1, 20)
    assert cells.reservations == {
        0: Reservation(CellRun(0, 32), 0),
        1: Reservation(CellRun(32, 64), 32),
    }
    first = cells.place(Batch([0, 1, 0, 0, 1], [0, 0, 1, 2, 2]))
    assert first.cells.tolist() == [0, 1, 32, 64, 65]
    second = first.after.place(Batch([2, 1, 2], [0, 1, 2]))
    assert second.cells.tolist() == [2, 33, 66]
    assert second.after.reservations == {
        0: Reservation(CellRun(0, 32), 3),
        1: Reservation(CellRun(32, 64), 34),
    }
    third = second.after.place(Batch(range(3, 33), [0] * 30))
    assert third.cells.tolist() == [*range(67, 97)]  # more than was left of the reservation
    assert third.after.reservations == {1: Reservation(CellRun(32, 64), 34)}


def test_lanes_come_in_few_sizes_and_begin_at_multiples_of_them() -> None:
    """Lanes have 32, 64, 128 ... cells, up to a sequence's equal share of them."""
    cells = KVPool.empty(300, 3, AttentionWindow()).place(Batch([0], [0])).after
    assert cells.expecting(1, 1).reservations[1].run == CellRun(32, 64)
    assert cells.expecting(1, 33).reservations[1].run == CellRun(64, 128)
    assert cells.expecting(1, 70).reservations[1].run == CellRun(100, 200)
    assert cells.expecting(1, 101).reservations == cells.expecting(1, 0).reservations == {}


def test_a_conversation_goes_on_in_the_cells_behind_it() -> None:
    """Each turn has a reservation; the one after the last token is taken if nobody else has it."""
    cells = KVPool.empty(400, 3, AttentionWindow()).expecting(0, 30)
    for begin in range(0, 120, 20):
        cells = cells.expecting(0, 30).place(Batch(range(begin, begin + 20), [0] * 20)).after
    assert [tuple(one) for one in cells.spans(0) or ()] == [(0, 120, 0)]
    beside = cells.place(Batch([0], [1])).after
    assert beside.expecting(0, 30).reservations[0].run == CellRun(
        160, 192
    )  # a cell after it is taken
    shared = cells.with_prefix(0, 1, 120)
    assert shared.expecting(0, 30).reservations[0].run == CellRun(
        128, 160
    )  # both continue: reservations of one size
    cut = cells.without(0, 50, 120)[0].expecting(0, 30).reservations[0]
    assert cut == (CellRun(0, 128), 50)  # the rest of a reservation that has all of it


def test_lanes_give_way_where_there_is_no_other_room() -> None:
    """They are a wish: everything that would fit without them fits."""
    cells = KVPool.empty(64, 2, AttentionWindow()).expecting(0, 6)
    placement = cells.place(Batch(range(40), [1] * 40))
    assert placement.cells.tolist() == [*range(40)]
    assert placement.after.reservations == {}
    assert placement.before.num_free == 64
    assert cells.place(Batch(range(20), [1] * 20)).cells.tolist() == [*range(32, 52)]


def test_a_lane_whose_cells_were_taken_is_no_lane() -> None:
    """Copies that a shift needs may land in it."""
    cells = KVPool.empty(64, 2, AttentionWindow()).expecting(0, 6)
    owners = cells.owners
    owners[1, 1] = True
    taken = KVPool(cells.positions, owners, cells.window, cells.reservations)
    placement = taken.place(Batch([0, 1], [0, 0]))
    assert placement.cells.tolist() == [2, 3]
    assert placement.after.reservations == {}


def test_packing_forgets_the_lanes() -> None:
    """Their cells are somewhere else now."""
    cells = KVPool.empty(64, 2, AttentionWindow()).place(Batch([0], [0])).after.expecting(1, 3)
    assert cells.reservations
    assert cells.packed()[0].reservations == {}


def test_a_sequence_in_many_pieces_is_scattered() -> None:
    """Its pieces are not listed one by one."""
    some = cells(200, 2)
    for position in range(MAX_SPANS + 1):
        assert some.spans(0) is not None
        some = placed(some, (0, position), (1, position))
    assert some.spans(0) is None
    assert some.without(1, 0, END)[0].packed()[0].spans(0) == (CellSpan(0, MAX_SPANS + 1, 0),)


def test_the_last_run_of_a_sequence_begins_behind_its_last_hole() -> None:
    """Wherever its cells lie."""
    pool = KVPool(np.array([5, 0, 2, 6, 3], np.int32), np.ones((1, 5), np.bool_))
    assert pool.stored(0) == (5, 7)
