"""Conversations with models of several families of chat templates, with dictated answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support.checks import read_lines
from support.families import _write_family, family, family_tokenizers
from support.models import tiny_config, tiny_model

from mlxrunner.models.facts import facts_of
from mlxrunner.profiling.profile import Profile
from mlxrunner.runner import Runner
from mlxrunner.tokenizer import Tokenizer

__all__ = ["_write_family", "family", "family_tokenizers"]


class Talk:
    """A tiny model of a family with dictated answers, watched by a profile.

    `ask` gives the event of a request.
    """

    def __init__(self, tokenizer: Tokenizer, file: Path, **options: Any) -> None:
        config = tiny_config("llama", max_position_embeddings=2048)
        model = tiny_model(config)
        self.runner = Runner(model, tokenizer, facts_of(model, config), name="tiny")
        self.file, self.profile = file, Profile("python", events=file, **options)
        self.profile.watch(self.runner)

    def ask(self, prompt: Any, answer: str = "", **options: Any) -> dict[str, Any]:
        """The event of a request that is answered with `answer`."""
        tokenizer = self.runner.tokenizer
        wanted = [*tokenizer.encode_more(answer), sorted(tokenizer.stop_tokens)[-1]]
        start = len(self.runner.tokenize(prompt))

        def dictate(tokens: Any, logits: Any) -> Any:
            token = wanted[min(tokens.shape[0] - start, len(wanted) - 1)]
            return mx.where(mx.arange(logits.shape[-1]) == token, 0.0, -mx.inf)[None]

        chunks = self.runner.generate(prompt, logits_processors=[dictate], **options)
        assert "".join(chunk.text for chunk in chunks) == answer
        return read_lines(self.file)[-1]


@pytest.fixture
def talk(family_tokenizers: dict[str, Tokenizer], events: Path) -> Callable[..., Talk]:
    """Makes a Talk with a family's tokenizer; options of the Profile."""
    return lambda family, **options: Talk(family_tokenizers[family], events, **options)


@pytest.fixture
def events(tmp_path: Path) -> Path:
    """Where the events go."""
    return tmp_path / "events.jsonl"
