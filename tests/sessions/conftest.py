"""A store in a temporary folder, and keepers of oracle runners."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mlxrunner import Runner
from mlxrunner.sessions.keeper import Keeper
from mlxrunner.sessions.store import Sessions

MODEL = {"weights": "w", "config": "c", "tokenizer": "t", "template": "p"}


@pytest.fixture
def store(tmp_path: Path) -> Sessions:
    return Sessions(tmp_path / "sessions")


@pytest.fixture
def keeper(store: Sessions) -> Callable[..., Keeper]:
    """Of a runner, which lives as long as the test unless `holds` is false, with a fingerprint of which parts can be given."""
    runners: list[Runner] = []

    def make(runner: Runner, *, holds: bool = True, **options: object) -> Keeper:
        runners.extend([runner] * holds)
        parts = {name: str(options.pop(name, value)) for name, value in MODEL.items()}
        return Keeper(runner, parts, store, **options)  # type: ignore[arg-type]

    return make
