"""Models of six families of chat templates, whose answers are dictated."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support.checks import read_lines
from support.families import ENDS, _write_family, family, family_tokenizers, write_family
from support.models import save_model, tiny_config, tiny_model

from mlxrunner.tokenizer import Tokenizer, load_tokenizer

__all__ = ["_write_family", "family", "family_tokenizers"]


@pytest.fixture(scope="session")
def tokenizers(family_tokenizers: dict[str, Tokenizer]) -> dict[str, Tokenizer]:
    """One of each family."""
    return family_tokenizers


@pytest.fixture
def scripted(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a model directory whose answer is a script.

    The model is a Llama that looks at nothing but the last token. `script` are texts, each of one
    token's worth or more; each token is followed by the next, the last one by the family's end.
    Tokens have to be different from each other, and the first is what the generation prompt ends
    with.
    """

    def write(family: str, begin: str, script: str, name: str = "model") -> Path:
        folder = tmp_path / name
        width = 288
        config = tiny_config(
            "llama",
            hidden_size=width,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=2048,
        )
        model: Any = tiny_model(config)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight = mx.zeros_like(layer.self_attn.o_proj.weight)
            layer.mlp.down_proj.weight = mx.zeros_like(layer.mlp.down_proj.weight)
        model.model.embed_tokens.weight = mx.eye(width)
        model.model.norm.weight = mx.ones(width)
        folder.mkdir()
        write_family(folder, family)
        tokenizer = load_tokenizer(folder)
        tokens = [tokenizer.encode_more(begin)[-1], *tokenizer.encode_more(script + ENDS[family])]
        assert len(set(tokens)) == len(tokens), tokenizer.decode(tokens)
        head = mx.zeros((width, width))
        for before, after in pairwise(tokens):
            head[after, before] = 1.0
        model.lm_head.weight = head
        (folder / "config.json").unlink()
        save_model(folder, model, config)
        return folder

    return write


class Talk:
    """A tiny model of a family with dictated answers, watched by a profile.

    `ask` gives the event of a request.
    """

    def __init__(self, tokenizer: Tokenizer, file: Path, **options: Any) -> None:
        from mlxrunner.models.facts import facts_of
        from mlxrunner.profiling.profile import Profile
        from mlxrunner.runner import Runner

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
            return mx.where(
                mx.arange(logits.shape[-1])
                == wanted[min(tokens.shape[0] - start, len(wanted) - 1)],
                0.0,
                -mx.inf,
            )[None]

        assert (
            "".join(
                chunk.text
                for chunk in self.runner.generate(prompt, logits_processors=[dictate], **options)
            )
            == answer
        )
        return read_lines(self.file)[-1]


@pytest.fixture
def talk(tokenizers: dict[str, Tokenizer], tmp_path: Path) -> Callable[..., Talk]:
    """Makes a Talk with a family's tokenizer; options of the Profile."""
    return lambda family, **options: Talk(tokenizers[family], tmp_path / "events.jsonl", **options)


@pytest.fixture
def events(tmp_path: Path) -> Path:
    """Where the events go."""
    return tmp_path / "events.jsonl"
