"""A parking in a scratch folder, and runners whose conversations are parked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxrunner import Runner
from mlxrunner.stored.parking import Parking

PARTS = {"weights": "", "settings": ""}
PLENTY = 10**9


@pytest.fixture
def parking(tmp_path: Path) -> Callable[..., Parking]:
    """Make a parking that is kept in one folder of the test."""

    def make(**options: Any) -> Parking:
        return Parking(tmp_path / "kept", PARTS, **{"limit": PLENTY, **options})

    return make


def evaluate(runner: Runner, prompt: list[int], tokens: int = 6) -> list[tuple[Any, Any]]:
    """Return the tokens of an answer and their log-probabilities."""
    return [
        (chunk.token, chunk.logprob)
        for chunk in runner.generate(prompt, max_tokens=tokens, stop_tokens=[], logprobs=0)
    ]
