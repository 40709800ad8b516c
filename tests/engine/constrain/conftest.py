"""Models that answers in a form are asked of."""

from __future__ import annotations

import pytest
from support.forms import build

from mlxrunner import Runner


@pytest.fixture(scope="module")
def llama() -> Runner:
    return build()


@pytest.fixture(scope="module")
def demo() -> Runner:
    return Runner.load("demo", reserve=False)
