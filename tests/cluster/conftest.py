"""A cluster of two workers, for the tests of a module."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from support.batches import folder as folder


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Start two workers of their own processes, and their scheduler, as `mlxrunner worker` does."""
    import dask
    from distributed import LocalCluster

    from mlxrunner.cluster.dask_workers import worker_settings

    dask.config.set({f"distributed.{one}.http.routes": [] for one in ("scheduler", "worker")})
    with LocalCluster(
        n_workers=2,
        threads_per_worker=1,
        host="127.0.0.1",
        protocol="tcp",
        dashboard_address="127.0.0.1:0",
        silence_logs=logging.CRITICAL,
        **worker_settings(),
    ) as made:
        yield made
