"""OpenAI's completions of raw text, asked by its own Python client."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from support.scripted import Scripted, ended

from mlxrunner.batch.openai_format import TokenLogprob
from mlxrunner.serve.events import Ping, TextDelta, ThinkingDelta


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    """Their client, for this server."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)


def test_a_completion(client: openai.OpenAI, answers: Scripted) -> None:
    """Its text, its end, its usage and what was reused."""
    raw = client.completions.with_raw_response.create(
        model="tiny", prompt="Once", max_tokens=9, temperature=0.5, stop="E"
    )
    completion = raw.parse()
    (choice,) = completion.choices
    assert (choice.text, choice.finish_reason) == ("Hello", "stop")
    used = completion.usage
    assert used is not None
    assert (used.prompt_tokens, used.completion_tokens, used.total_tokens) == (50, 5, 55)
    assert completion.model_extra["mlxrunner"]["cached_tokens"] == 30  # type: ignore[index]
    assert raw.headers["x-mlxrunner-cache"].startswith("outcome=partial")
    asked = answers.last
    assert (asked.protocol, asked.prompt, list(asked.messages)) == ("completions", "Once", [])
    assert asked.options == {"max_tokens": 9, "temperature": 0.5, "stop": ["E"]}


def test_a_stream(client: openai.OpenAI, answers: Scripted) -> None:
    """The pieces, heartbeats without text, the usage; nothing in raw text is thinking."""
    answers.script = [Ping(), ThinkingDelta("a "), TextDelta("b"), ended("length")]
    chunks = list(
        client.completions.create(
            model="tiny", prompt="Once", stream=True, stream_options={"include_usage": True}
        )
    )
    texts = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert texts == ["", "a ", "b", ""]
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].model_extra["mlxrunner"]["cached_tokens"] == 30  # type: ignore[index]
    whole = client.completions.create(model="tiny", prompt="Once")
    assert whole.choices[0].text == "a b"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("Once", ["Once"]),
        (["Once", "Twice"], ["Once", "Twice"]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
    ids=["text", "texts", "tokens", "lists"],
)
def test_prompts(client: openai.OpenAI, answers: Scripted, prompt: Any, prompts: list[Any]) -> None:
    """Each has its choices, in the order of the prompts, and is counted once."""
    completion = client.completions.create(model="tiny", prompt=prompt, n=2, seed=5)
    assert [choice.index for choice in completion.choices] == list(range(2 * len(prompts)))
    found = sorted((asked.id, asked.prompt, asked.options["seed"]) for asked in answers.asked)
    assert [prompt for _, prompt, _ in found] == [one for one in prompts for _ in range(2)]
    assert [seed for _, _, seed in found] == [5, 6] * len(prompts)
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == 50 * len(prompts)
    assert completion.usage.completion_tokens == 5 * 2 * len(prompts)


def test_echo(client: openai.OpenAI) -> None:
    """The prompt comes before the answer, whole or streamed."""
    completion = client.completions.create(model="tiny", prompt="Once ", echo=True)
    assert completion.choices[0].text == "Once Hello"
    chunks = client.completions.create(model="tiny", prompt="Once ", echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Once Hello"


def test_logprobs(client: openai.OpenAI, answers: Scripted) -> None:
    """They are written as completions have them, with the place of each token."""
    tokens = [
        TokenLogprob(text, 1, -0.5, ((text, 1, -0.5), ("x", 2, float("-inf")))) for text in "ab"
    ]
    answers.script = [TextDelta("a", (tokens[0],)), TextDelta("b", (tokens[1],)), ended()]
    found = client.completions.create(model="tiny", prompt="Once", logprobs=2)
    assert answers.last.options["logprobs"] == 2
    logprobs = found.choices[0].logprobs
    assert logprobs is not None
    assert (logprobs.tokens, logprobs.text_offset) == (["a", "b"], [0, 1])
    assert logprobs.token_logprobs == [-0.5, -0.5]
    assert logprobs.top_logprobs == [{"a": -0.5, "x": -9999.0}, {"b": -0.5, "x": -9999.0}]
    stream: Any = client.completions.create(model="tiny", prompt="Once", logprobs=2, stream=True)
    chunks = list(stream)
    assert [chunk.choices[0].logprobs.text_offset for chunk in chunks[:2]] == [[0], [1]]
