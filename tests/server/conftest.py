"""A server for the tests of protocols, and makers of prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from support.models import write_model, write_tokenizer
from support.scripted import Scripted, app_of, serving
from support.strict_templates import TEMPLATES, load_strict

from mlxrunner.server.prompts.builder import PromptBuilder


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Scripted, str]]:
    """A server for the tests of a module: its answers and its address."""
    answers = Scripted()
    with serving(app_of(answers)) as address:
        yield answers, address


@pytest.fixture
def answers(served: tuple[Scripted, str]) -> Scripted:
    """Answers that the test writes, as if the server had just begun."""
    answers, _ = served
    answers.begin()
    return answers


@pytest.fixture
def url(served: tuple[Scripted, str], answers: Scripted) -> str:
    """The address of a server that gives these answers."""
    return served[1]


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    """OpenAI's client, for this server."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)


@pytest.fixture(scope="module")
def makers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PromptBuilder]:
    """A maker for each family of templates."""
    root = tmp_path_factory.mktemp("makers")
    return {
        family: PromptBuilder(load_strict(root / family, family), template)
        for family, (template, _) in TEMPLATES.items()
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with 1,500 tokens of context, whose answers never end by themselves."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_model(folder, max_position_embeddings=1500, tokenizer=False)
    template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    write_tokenizer(folder, chat_template=template)
    return folder
