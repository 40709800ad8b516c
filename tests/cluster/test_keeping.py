"""When local workers that end while they start are given up."""

from __future__ import annotations

from mlxrunner.cluster.keeping import GONE_S, MOST_STARTS, Keeper


def test_processes_that_end_in_turn_are_counted_for_each_worker() -> None:
    keeper, most = Keeper(2), 2 * MOST_STARTS
    for process in range(most):
        assert keeper.look([process], 0, 0) is None
    assert f"{most} processes ended in turn" in str(keeper.look([], 0, 0))


def test_a_worker_that_takes_part_starts_the_count_again() -> None:
    keeper = Keeper(1)
    for process in range(10 * MOST_STARTS):
        is_back = process % MOST_STARTS == 0
        assert keeper.look([process], int(is_back), GONE_S / 4 if is_back else 0) is None


def test_a_process_that_is_slow_to_start_is_waited_for_up_to_an_end() -> None:
    keeper = Keeper(1)
    assert keeper.look([1], 0, GONE_S - 1) is None
    assert "none has come for 300 s" in str(keeper.look([1], 0, 1))
