"""Models for a manager."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.managers import CHATML
from support.models import write_model, write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tiny models."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("first", "second", "third")):
        write_model(folder / name, seed=seed, tokenizer=False)
        write_tokenizer(folder / name, chat_template=CHATML)
    return folder
