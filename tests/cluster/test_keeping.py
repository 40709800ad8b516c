"""When local workers that end while they start are given up, and a client without a scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from mlxrunner.cluster.dask_workers import GONE_S, MOST_STARTS, SIGN, DaskWorkers, RestartLimit


def test_processes_that_end_in_turn_are_counted_for_each_worker() -> None:
    keeper, most = RestartLimit(2), 2 * MOST_STARTS
    for process in range(most):
        assert keeper.look([process], 0, 0) is None
    assert f"{most} processes ended in turn" in str(keeper.look([], 0, 0))


def test_a_worker_that_takes_part_starts_the_count_again() -> None:
    keeper = RestartLimit(1)
    for process in range(10 * MOST_STARTS):
        is_back = process % MOST_STARTS == 0
        assert keeper.look([process], int(is_back), GONE_S / 4 if is_back else 0) is None


def test_a_process_that_is_slow_to_start_is_waited_for_up_to_an_end() -> None:
    keeper = RestartLimit(1)
    assert keeper.look([1], 0, GONE_S - 1) is None
    assert "none has come for 300 s" in str(keeper.look([1], 0, 1))


def test_a_client_that_connects_again_is_waited_for() -> None:
    """Dask has no scheduler meanwhile."""

    class Scheduler:
        async def identity(self, n_workers: int) -> dict[str, Any]:
            return {"workers": {"tcp://one": {"last_seen": 7.0, "metrics": {SIGN: "well"}}}}

    async def look() -> Mapping[str, Any]:
        client = SimpleNamespace(scheduler=None)
        workers = DaskWorkers(client, None)
        looking = asyncio.create_task(workers.look())
        await asyncio.sleep(0.1)
        assert not looking.done()
        client.scheduler = Scheduler()
        await looking
        return workers.signs

    assert asyncio.run(look()) == {"tcp://one": (7.0, "well")}
