"""The bytes that are made free for a model before it is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxrunner.options import ServeSettings
from mlxrunner.serve.models import ModelLoader
from tests.support.models import write_model

CONTEXT = 500


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next", "jamba"])
@pytest.mark.parametrize("budget", [None, 200_000], ids=["usual", "given"])
def test_a_model_finds_room_in_its_least(kind: str, budget: int | None, tmp_path: Path) -> None:
    """The states of all slots and the checkpoints count: else others stay, and it has no room."""
    write_model(tmp_path / kind, kind)
    runner = {"context": CONTEXT, "prefill_step": 32, "checkpoint_budget": budget}
    settings = ServeSettings(slots=4, disk_cache=False, memory=50_000_000)
    opening = ModelLoader(settings=settings, runner=runner)
    name = str(tmp_path / kind)
    opened = opening.load(name, opening.least(name))
    with opened.runner:
        assert opened.room == CONTEXT
