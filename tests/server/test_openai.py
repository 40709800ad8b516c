"""OpenAI's chat completions and completions, asked by their Python client and others."""

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
from mlxrunner.server.events import Ping, TextDelta, ThinkingDelta, ToolChoice

ASK: dict[str, Any] = {"model": "tiny", "messages": HI}


def test_a_completion(client: openai.OpenAI, answers: Scripted) -> None:
    """Its text, its end, its usage and what was reused."""
    raw = client.chat.completions.with_raw_response.create(
        **ASK, temperature=0.5, max_completion_tokens=9, seed=3, stop=["END"], user="me"
    )
    completion = raw.parse()
    (choice,) = completion.choices
    assert (choice.message.content, choice.finish_reason) == ("Hello", "stop")
    used = completion.usage
    assert (used.prompt_tokens, used.completion_tokens, used.total_tokens) == (50, 5, 55)
    assert used.prompt_tokens_details.cached_tokens == 30
    assert raw.headers["x-mlxrunner-cache"].startswith("outcome=partial; cached=30; missed=7; ")
    assert completion.model_extra["mlxrunner"]["missed_tokens"] == 7  # type: ignore[index]
    asked = answers.last
    assert asked.options == {"max_tokens": 9, "temperature": 0.5, "seed": 3, "stop": ["END"]}
    assert (asked.protocol, asked.messages) == ("chat", ASK["messages"])
    assert (asked.client.name, asked.client.session) == ("OpenAI", "me")
    assert asked.id == completion.id == raw.headers["x-request-id"]


def test_a_stream_builds_the_same_completion(client: openai.OpenAI, answers: Scripted) -> None:
    """Text, thinking and two calls, and the usage in the last chunk."""
    answers.script = CALLS
    whole = client.chat.completions.create(**ASK, tools=[TOOL])
    with client.chat.completions.stream(
        **ASK, tools=[TOOL], stream_options={"include_usage": True}
    ) as stream:
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
    assert message.reasoning_content == "Let me see."
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(thoughts) == "Let me see."
    assert chunks[-1].choices == []
    assert chunks[-1].model_extra["mlxrunner"]["cached_tokens"] == 30  # type: ignore[index]


def frames(text: str) -> list[str]:
    """Return the frames of a stream."""
    return [frame for frame in text.split("\n\n") if frame]


def test_heartbeats_count_for_every_client(url: str, answers: Scripted) -> None:
    """Each is a comment and a chunk without content."""
    answers.script = [Ping(), *HELLO]
    text = httpx.post(f"{url}/v1/chat/completions", json=ASK | {"stream": True}).text
    role, comment, empty, *_, last, done = frames(text)
    assert json.loads(role.removeprefix("data: "))["choices"][0]["delta"]["role"] == "assistant"
    assert comment.startswith(": ")
    assert json.loads(empty.removeprefix("data: "))["choices"][0]["delta"] == {}
    ending = json.loads(last.removeprefix("data: "))
    assert ending["choices"][0]["finish_reason"] == "stop"
    assert ending["mlxrunner"]["outcome"] == "partial"
    assert "usage" not in ending
    assert done == "data: [DONE]"


OPENCODE: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 32000,
    "top_p": 1,
    "stream": True,
    "stream_options": {"include_usage": True},
    "tool_choice": "auto",
    "tools": [TOOL],
    "messages": [
        {"role": "system", "content": "You are opencode."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Fix "}, {"type": "text", "text": "it."}],
        },
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Read it.",
            "tool_calls": [
                {
                    "id": "call_0",
                    "type": "function",
                    "function": {"name": "read", "arguments": '{"path": "a"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_0", "content": "text of a"},
        {"role": "developer", "content": "Be brief."},
    ],
}
"""A request in the manner of opencode."""


def test_opencode(url: str, answers: Scripted) -> None:
    """Each message stays where it is, with its thinking and its calls."""
    headers = {"user-agent": "opencode/1.18.33 ai-sdk/provider-utils", "x-session-id": "ses_1"}
    response = httpx.post(f"{url}/v1/chat/completions", json=OPENCODE, headers=headers)
    usage = json.loads(frames(response.text)[-2].removeprefix("data: "))
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 30}
    asked = answers.last
    sent = OPENCODE["messages"]
    assert asked.messages == [
        sent[0],
        {"role": "user", "content": "Fix it."},
        sent[2] | {"content": ""},
        sent[3],
        sent[4],
    ]
    assert asked.tools == [TOOL]
    assert asked.options == {"max_tokens": 32000, "top_p": 1}
    assert (asked.client.name, asked.client.session) == ("opencode", "ses_1")


def test_several_answers(client: openai.OpenAI, answers: Scripted) -> None:
    """They run side by side, each with a seed of its own; the prompt is counted once."""
    for is_stream in (False, True):
        answers.scripts = [[TextDelta("one"), ended()], [TextDelta("two"), ended()]]
        if is_stream:
            with client.chat.completions.stream(
                **ASK, n=2, seed=5, stream_options={"include_usage": True}
            ) as stream:
                found = stream.get_final_completion()
        else:
            found = client.chat.completions.create(**ASK, n=2, seed=5)  # type: ignore[assignment]
        choices = [(choice.message.content, choice.finish_reason) for choice in found.choices]
        assert choices == [("one", "stop"), ("two", "stop")]
        assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (50, 10)
        first, second = answers.asked[-2:]
        assert (first.options["seed"], second.options["seed"]) == (5, 6)
        assert first.id != second.id


def test_logprobs(client: openai.OpenAI, answers: Scripted) -> None:
    """Each token with its likeliest others; a part of a character has its bytes."""
    token = TokenLogprob("Hé", 1, -0.5, (("Hé", 1, -0.5), ("bytes:\\xc3", 2, float("-inf"))))
    answers.script = [TextDelta("Hé", (token,)), ended()]
    whole: Any = client.chat.completions.create(**ASK, logprobs=True, top_logprobs=2)
    assert answers.last.options["logprobs"] == 2
    (one,) = logprobs = whole.choices[0].logprobs.content
    assert (one.token, one.logprob, one.bytes) == ("Hé", -0.5, list("Hé".encode()))
    assert [(top.logprob, top.bytes) for top in one.top_logprobs] == [
        (-0.5, list("Hé".encode())),
        (-9999.0, [0xC3]),
    ]
    with client.chat.completions.stream(**ASK, logprobs=True, top_logprobs=2) as stream:
        built: Any = stream.get_final_completion()
    assert built.choices[0].logprobs.content == logprobs


def test_a_tool_that_is_no_function_is_left_out(url: str, answers: Scripted) -> None:
    """The response says so."""
    tools = [{"type": "custom", "custom": {"name": "patch"}}, TOOL]
    body = httpx.post(f"{url}/v1/chat/completions", json=ASK | {"tools": tools}).json()
    assert answers.last.tools == [TOOL]
    assert body["mlxrunner"]["left_out"] == ["tool custom"]


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


def test_variables_of_the_template(url: str, answers: Scripted) -> None:
    """vLLM's name for them is known."""
    more = {"chat_template_kwargs": {"enable_thinking": False}, "top_k": 4, "metadata": {"a": "b"}}
    httpx.post(f"{url}/v1/chat/completions", json=ASK | more)
    assert answers.last.variables == {"enable_thinking": False}
    assert answers.last.options == {"top_k": 4}


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
    assert [(one["name"], one["args"]) for one in message.tool_calls] == [
        ("read", {"path": "a"}),
        ("read", {"path": "b"}),
    ]
    assert answers.last.tool_choice == ToolChoice("named", "read")
    answers.script = [Ping(), *HELLO]
    parts = list(model.stream([HumanMessage("Hi")], stream_usage=True))
    joined: Any = AIMessageChunk(content="")
    for part in parts:
        joined += part
    assert joined.content == "Hello"
    assert joined.usage_metadata["input_token_details"]["cache_read"] == 30


def test_llm(url: str, answers: Scripted) -> None:
    """The command line's models of OpenAI's kind work with this address."""
    from llm.default_plugins.openai_models import Chat  # which imports pandas: a second

    model = Chat("tiny", model_name="tiny", api_base=f"{url}/v1", key="x")
    assert "".join(model.prompt("Hi", key="x")) == "Hello"
    response = model.prompt("Hi", key="x", stream=False)
    assert response.text() == "Hello"
    assert answers.last.messages == ASK["messages"]


def test_a_completion_of_raw_text(client: openai.OpenAI, answers: Scripted) -> None:
    """Its text, its end, its usage and what was reused."""
    raw = client.completions.with_raw_response.create(
        model="tiny", prompt="Once", max_tokens=9, temperature=0.5, stop="E"
    )
    completion = raw.parse()
    (choice,) = completion.choices
    assert (choice.text, choice.finish_reason) == ("Hello", "stop")
    used = completion.usage
    assert (used.prompt_tokens, used.completion_tokens, used.total_tokens) == (50, 5, 55)
    assert completion.model_extra["mlxrunner"]["cached_tokens"] == 30  # type: ignore[index]
    assert raw.headers["x-mlxrunner-cache"].startswith("outcome=partial")
    asked = answers.last
    assert (asked.protocol, asked.prompt, list(asked.messages)) == ("completions", "Once", [])
    assert asked.options == {"max_tokens": 9, "temperature": 0.5, "stop": ["E"]}


def test_a_stream_of_raw_text(client: openai.OpenAI, answers: Scripted) -> None:
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
def test_several_prompts(
    client: openai.OpenAI, answers: Scripted, prompt: Any, prompts: list[Any]
) -> None:
    """Each has its choices, in the order of the prompts, and is counted once."""
    completion = client.completions.create(model="tiny", prompt=prompt, n=2, seed=5)
    assert [choice.index for choice in completion.choices] == list(range(2 * len(prompts)))
    found = sorted((asked.id, asked.prompt, asked.options["seed"]) for asked in answers.asked)
    assert [prompt for _, prompt, _ in found] == [one for one in prompts for _ in range(2)]
    assert [seed for _, _, seed in found] == [5, 6] * len(prompts)
    assert completion.usage.prompt_tokens == 50 * len(prompts)
    assert completion.usage.completion_tokens == 5 * 2 * len(prompts)


def test_echo(client: openai.OpenAI) -> None:
    """The prompt comes before the answer, whole or streamed."""
    completion = client.completions.create(model="tiny", prompt="Once ", echo=True)
    assert completion.choices[0].text == "Once Hello"
    chunks = client.completions.create(model="tiny", prompt="Once ", echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Once Hello"


def test_logprobs_of_raw_text(client: openai.OpenAI, answers: Scripted) -> None:
    """They are written as completions have them, with the place of each token."""
    tokens = [
        TokenLogprob(text, 1, -0.5, ((text, 1, -0.5), ("x", 2, float("-inf")))) for text in "ab"
    ]
    answers.script = [TextDelta("a", (tokens[0],)), TextDelta("b", (tokens[1],)), ended()]
    found = client.completions.create(model="tiny", prompt="Once", logprobs=2)
    assert answers.last.options["logprobs"] == 2
    logprobs = found.choices[0].logprobs
    assert (logprobs.tokens, logprobs.text_offset) == (["a", "b"], [0, 1])
    assert logprobs.token_logprobs == [-0.5, -0.5]
    assert logprobs.top_logprobs == [{"a": -0.5, "x": -9999.0}, {"b": -0.5, "x": -9999.0}]
    stream: Any = client.completions.create(model="tiny", prompt="Once", logprobs=2, stream=True)
    chunks = list(stream)
    assert [chunk.choices[0].logprobs.text_offset for chunk in chunks[:2]] == [[0], [1]]
