"""A folder to work in, and the requests of a runner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxrunner import Runner


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """The prompt and the options of each request."""
    found: list[tuple[Any, dict[str, Any]]] = []
    generate = Runner.generate

    def recorded(self: Runner, prompt: Any, **options: Any) -> Any:
        found.append((prompt, options))
        return generate(self, prompt, **options)

    monkeypatch.setattr(Runner, "generate", recorded)
    return found
