"""Thousands of requests leave no more memory in use than hundreds do."""

from __future__ import annotations

import gc

import mlx.core as mx
import pytest
from support.conversations import Trace, play
from support.engine import Engine
from support.histories import tiny_parts
from support.sample import fewer

from mlxrunner.cache.disk.disk_cache import DiskCache


@pytest.mark.exhaustive(0)
def test_memory_is_flat() -> None:
    """MLX's memory and the objects of Python, after many requests and after five times as many."""
    requests = fewer(100, 30)
    parking = DiskCache(None, {"model": "llama"}, limit=2**20)
    with Engine(
        *tiny_parts("llama"), max_sequences=4, context=200, prefill_step=64, parking=parking
    ) as runner:
        used = []
        for seed in range(5):
            played = play(
                runner, Trace(seed, conversations=8, requests=requests, context=200, scale=0.2)
            )
            assert played.requests >= requests  # a conversation begun is played to its end
            assert not played.failures
            runner.observers.clear()
            del played
            gc.collect()
            mx.clear_cache()
            used.append((mx.get_active_memory(), len(gc.get_objects())))
    (early, few), (late, many) = used[1], used[-1]
    assert late <= early * 1.02
    assert many <= few * 1.02
