"""Buffers of the sliding-window cache that grow in steps of any length."""

from __future__ import annotations

import pytest

from mlxrunner.cache.layers import extents as module


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    monkeypatch.setattr(module, "STEP", request.param)
    return int(request.param)
