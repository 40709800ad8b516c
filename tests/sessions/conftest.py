"""A store in a temporary folder, savers of oracle runners, and small steps for both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mlxrunner import Runner
from mlxrunner.sessions.caches import Saver
from mlxrunner.sessions.store import SessionStore

MODEL = {"weights": "w", "config": "c", "tokenizer": "t", "template": "p"}


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that grow and move every few tokens, checkpoints that are close to each other."""
    monkeypatch.setattr("mlxrunner.cache.layers.extents.STEP", 4)
    monkeypatch.setattr("mlxrunner.cache.layers.attention.STEP", 8)
    monkeypatch.setattr("mlxrunner.cache.entry.SPACING", 3)


@pytest.fixture
def store(tmp_path: Path) -> SessionStore:
    return SessionStore(tmp_path / "sessions")


@pytest.fixture
def saver(store: SessionStore) -> Callable[..., Saver]:
    """Return a function that makes a saver of a runner.

    The runner lives as long as the test unless `holds` is false. Parts of the fingerprint are
    options.
    """
    runners: list[Runner] = []

    def make(runner: Runner, *, holds: bool = True, **options: object) -> Saver:
        runners.extend([runner] * holds)
        parts = {name: str(options.pop(name, value)) for name, value in MODEL.items()}
        return Saver(runner, parts, store, **options)  # type: ignore[arg-type]

    return make
