"""OpenAI's chat completions and completions, asked by their Python client and others.

`test_wire.py` has more of them.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import SecretStr
from support.scripted import CALLS, HELLO, HI, TOOL, Scripted, ended

from mlxrunner.batch.openai_format import TokenLogprob
from mlxrunner.server.events import Ping, TextDelta, ToolChoice

ASK: dict[str, Any] = {"model": "tiny", "messages": HI}
WITH_USAGE: Any = {"stream_options": {"include_usage": True}}


def test_a_stream_builds_the_same_completion(client: openai.OpenAI, answers: Scripted) -> None:
    """It has text, thinking and two calls, the id of the request, and the usage at its end."""
    answers.script = CALLS
    raw = client.chat.completions.with_raw_response.create(**ASK, tools=[TOOL])
    whole = raw.parse()
    assert answers.last.id == whole.id == raw.headers["x-request-id"]
    assert answers.last.client.name == "OpenAI"
    with client.chat.completions.stream(**ASK, tools=[TOOL], **WITH_USAGE) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        built = stream.get_final_completion()
    for found in (whole, built):
        (choice,) = found.choices
        assert (choice.message.content, choice.finish_reason) == ("I'll read.", "tool_calls")
        calls: Any = choice.message.tool_calls or []
        assert [one.id for one in calls] == ["call_0", "call_1"]
        assert [json.loads(one.function.arguments)["path"] for one in calls] == ["a", "b"]
        used: Any = found.usage
        assert used.completion_tokens_details.reasoning_tokens == 2
    message: Any = whole.choices[0].message
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(thoughts) == message.reasoning_content == "Let me see."
    assert chunks[-1].choices == []


def test_several_answers(client: openai.OpenAI, answers: Scripted) -> None:
    """They run side by side, each with a seed and an id of its own; the prompt is counted once."""
    for is_stream in (False, True):
        answers.scripts = [[TextDelta("one"), ended()], [TextDelta("two"), ended()]]
        if is_stream:
            with client.chat.completions.stream(**ASK, n=2, seed=5, **WITH_USAGE) as stream:
                found = stream.get_final_completion()
        else:
            found = client.chat.completions.create(**ASK, n=2, seed=5)  # type: ignore[assignment]
        choices = [(choice.message.content, choice.finish_reason) for choice in found.choices]
        assert choices == [("one", "stop"), ("two", "stop")]
        assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (50, 10)
        first, second = answers.asked[-2:]
        assert (first.options["seed"], second.options["seed"]) == (5, 6)
        assert first.id != second.id


def test_logprobs_of_a_stream(client: openai.OpenAI, answers: Scripted) -> None:
    """Their client puts them together as they are in a whole answer."""
    token = TokenLogprob("Hé", 1, -0.5, (("Hé", 1, -0.5), ("bytes:\\xc3", 2, float("-inf"))))
    answers.script = [TextDelta("Hé", (token,)), ended()]
    whole: Any = client.chat.completions.create(**ASK, logprobs=True, top_logprobs=2)
    with client.chat.completions.stream(**ASK, logprobs=True, top_logprobs=2) as stream:
        built: Any = stream.get_final_completion()
    assert built.choices[0].logprobs.content == whole.choices[0].logprobs.content
    assert whole.choices[0].logprobs.content[0].top_logprobs[1].bytes == [0xC3]


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({"top_k": -1}, {}),
        ({"seed": -1}, {"seed": 2**64 - 1}),
        ({"seed": -(2**63)}, {"seed": 2**63}),
        ({"seed": 3, "top_k": 0}, {"seed": 3, "top_k": 0}),
    ],
)
def test_numbers_below_zero(
    url: str, answers: Scripted, given: dict[str, int], options: dict[str, int]
) -> None:
    """A top_k of -1 means all tokens, as in vLLM; a seed has 64 bits with a sign."""
    assert httpx.post(f"{url}/v1/chat/completions", json=ASK | given).status_code == 200
    assert answers.last.options == options


def test_models(client: openai.OpenAI, url: str) -> None:
    """Both clients list them at the same address."""
    (model,) = client.models.list()
    assert (model.id, model.owned_by) == ("tiny", "mlxrunner")
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="no model other"):
        client.models.retrieve("other")


@tool
def read(path: str) -> str:
    """Read a file."""
    return path


def test_langchain(url: str, answers: Scripted) -> None:
    """Its chat model calls tools, streams, and finds the usage."""
    key = SecretStr("x")
    model = ChatOpenAI(base_url=f"{url}/v1", api_key=key, model="tiny", max_retries=0)
    answers.script = CALLS
    message = model.bind_tools([read], tool_choice="read").invoke("Hi")
    calls = [(one["name"], one["args"]) for one in message.tool_calls]
    assert calls == [("read", {"path": "a"}), ("read", {"path": "b"})]
    assert answers.last.tool_choice == ToolChoice("named", "read")
    answers.script = [Ping(), *HELLO]
    joined: Any = AIMessageChunk(content="")
    for part in model.stream([HumanMessage("Hi")], stream_usage=True):
        joined += part
    assert joined.content == "Hello"
    assert joined.usage_metadata["input_token_details"]["cache_read"] == 30


def test_llm(url: str, answers: Scripted) -> None:
    """The command line's models of OpenAI's kind work with this address."""
    from llm.default_plugins.openai_models import Chat  # which imports pandas: a second

    model = Chat("tiny", model_name="tiny", api_base=f"{url}/v1", key="x")
    for stream in (True, False):
        assert model.prompt("Hi", key="x", stream=stream).text() == "Hello"
    assert answers.last.messages == HI


def test_completions_of_raw_text(client: openai.OpenAI, answers: Scripted) -> None:
    """Each prompt has its choices, in order, and is counted once; a stream has the same text."""
    raw = client.completions.with_raw_response.create(model="tiny", prompt=["a", "b"], n=2)
    found = raw.parse()
    assert [(one.index, one.text) for one in found.choices] == [(n, "Hello") for n in range(4)]
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (100, 20)
    asked = sorted(answers.asked, key=lambda one: one.id)
    assert [one.prompt for one in asked] == ["a", "a", "b", "b"]
    assert asked[0].id.startswith(found.id)
    chunks = client.completions.create(model="tiny", prompt="Once ", echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Once Hello"
