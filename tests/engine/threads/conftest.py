"""A tiny model, and threads that take turns as often as possible."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from support.histories import tiny_parts


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_parts("llama")


@pytest.fixture(autouse=True)
def fast_switches() -> Iterator[None]:
    """Let threads take turns as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)
