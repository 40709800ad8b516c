"""Answers of the demo model over HTTP: where they end, and where they begin."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.scripted import serving

from mlxrunner.config.serving import ServeSettings
from mlxrunner.serve.answering.house import House
from mlxrunner.serve.answering.names import ModelNames
from mlxrunner.serve.answering.opened import Opening
from mlxrunner.serve.server import application
from mlxrunner.serve.watch.record import Record

ASK = "My name is Bo. What is my name?"
USER: list[dict[str, Any]] = [{"role": "user", "content": ASK}]
RAW = f"<|im_start|>user\n{ASK}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def demo() -> Iterator[str]:
    """The address of a server with the demo model."""
    settings = ServeSettings(parks=False, slots=1, memory=300_000_000)
    record = Record()
    opening = Opening(settings=settings, runner={"context": 1000})
    house = House(ModelNames("demo"), opening, record.watch, record.ended)
    house.load_first()
    with serving(application(house, record, settings)) as address:
        yield address


def post(url: str, path: str, **body: Any) -> Any:
    """Return the JSON of an answer of at most 60 tokens."""
    answer = httpx.post(url + path, json={"model": "demo", "max_tokens": 60, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.exhaustive(4)
@pytest.mark.parametrize("ids", [None, [], [5], [7, 9]], ids=str)
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {"messages": USER}),
        ("/v1/completions", {"prompt": RAW}),
        ("/v1/responses", {"input": ASK}),
    ],
    ids=["chat", "completions", "responses"],
)
def test_stop_token_ids_add_to_the_models_ends(
    demo: str, path: str, asked: dict[str, Any], ids: Any
) -> None:
    """An empty list, which clients send unset, changes nothing; others leave the model's own."""
    text = json.dumps(post(demo, path, stop_token_ids=ids, **asked))
    assert "Your name is Bo" in text
    assert "<|im_end|>" not in text.replace(json.dumps(RAW), "")
