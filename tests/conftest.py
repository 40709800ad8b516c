"""For all tests."""

from __future__ import annotations

import mlx.core as mx
import pytest


@pytest.fixture(autouse=True)
def no_freed_buffers() -> None:
    """Tests that measure memory must not be handed larger buffers than they ask for, which an earlier test has freed."""
    mx.clear_cache()
