"""LangChain's structured output, from a model that is held to the schema."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field, SecretStr
from support.actor import calling, playing
from support.houses import served

from mlxrunner.options import ServeSettings
from mlxrunner.serve.models import ModelLoader

SETTINGS = ServeSettings(disk_cache=False, slots=1, memory=300_000_000)
RUNNER = {"context": 1000}
ASK = "My name is Zorblin. What is my name?"


class Found(BaseModel):
    """The name that was asked for."""

    name: str = Field(max_length=12)
    is_sure: bool


def structured(model: str, opening: ModelLoader, method: Any) -> Any:
    """Return what LangChain makes of the answer."""
    with served(model, opening) as (url, _):
        key = SecretStr("x")
        chat = ChatOpenAI(base_url=f"{url}/v1", api_key=key, model=model, max_retries=0)
        return chat.with_structured_output(Found, method=method).invoke(ASK)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_capable_model_answers_as_it_would(method: str) -> None:
    """The schema leaves its answer as it is, as JSON or as a call."""
    found = Found(name="Zorblin", is_sure=True)
    script = calling("Found", found.model_dump())
    if method == "json_schema":
        script = '{"name": "Zorblin", "is_sure": true}'
    opening = playing(lambda text: script)(settings=SETTINGS, runner=RUNNER)
    assert structured("actor", opening, method) == found


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_the_demo_model_comes_to_an_end(method: str) -> None:
    """It ends no text of JSON by itself, so the schema has to bound each."""
    found = structured("demo", ModelLoader(settings=SETTINGS, runner=RUNNER), method)
    assert isinstance(found, Found)
