"""Anthropic's Messages API, asked by its own Python client and in the manner of Claude Code."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest
from support.scripted import CALLS, HELLO, HI, PARAMETERS, TOOL, Scripted, ended

from mlxrunner.server.events import Ping, TextDelta

ASK: dict[str, Any] = {"model": "tiny", "max_tokens": 100, "messages": HI}
READ = {"name": "read", "description": "Read a file", "input_schema": PARAMETERS}


@pytest.fixture
def client(url: str) -> anthropic.Anthropic:
    """Their client, for this server."""
    return anthropic.Anthropic(base_url=url, api_key="x", max_retries=0)


def test_a_message(client: anthropic.Anthropic, answers: Scripted) -> None:
    """Its text, its end, its usage and what was reused."""
    raw = client.messages.with_raw_response.create(
        **ASK, system="Be brief.", extra_body={"temperature": 0.5}
    )
    message = raw.parse()
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "Hello"}]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.input_tokens == 20
    assert message.usage.cache_read_input_tokens == 30
    assert message.usage.cache_creation_input_tokens == 0
    assert message.usage.output_tokens == 5
    assert raw.headers["x-mlxrunner-cache"] == (
        "outcome=partial; cached=30; missed=7; displaced=0; new=13; lost=7; "
        "reason=prefix_changed; rules=billing-header"
    )
    assert message.model_extra["mlxrunner"]["cached_tokens"] == 30  # type: ignore[index]
    asked = answers.last
    assert asked.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    assert asked.options == {"max_tokens": 100, "temperature": 0.5}
    assert (asked.protocol, asked.model, asked.thinking) == ("anthropic", "tiny", None)
    assert asked.client.name == "Anthropic"
    assert asked.id == message.id == raw.headers["request-id"]


def test_a_stream_builds_the_same_message(client: anthropic.Anthropic, answers: Scripted) -> None:
    """Thinking, text and two calls; heartbeats are frames of their own."""
    answers.script = CALLS
    whole = client.messages.create(**ASK)
    with client.messages.stream(**ASK) as stream:
        kinds = [event.type for event in stream]
        built = stream.get_final_message()
    assert [block.type for block in built.content] == ["thinking", "text", "tool_use", "tool_use"]
    plain = {"signature"}
    for one, other in zip(whole.content, built.content, strict=True):
        assert one.model_dump(exclude=plain) == other.model_dump(exclude=plain)
    assert built.content[2].input == {"path": "a"}  # type: ignore[union-attr]
    assert built.content[0].signature  # type: ignore[union-attr]
    assert (built.stop_reason, whole.stop_reason) == ("tool_use", "tool_use")
    assert built.usage.cache_read_input_tokens == 30
    assert built.usage.input_tokens == 20
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"


def frames(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the events of a stream: the name and the data of each."""
    found = []
    for frame in text.split("\n\n"):
        if frame:
            name, data = frame.split("\n")
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def test_heartbeats_are_pings(url: str, answers: Scripted) -> None:
    """They come after the start of the message and before its first block."""
    answers.script = [Ping(), Ping(), *HELLO]
    text = httpx.post(f"{url}/v1/messages?beta=true", json=ASK | {"stream": True}).text
    events = frames(text)
    assert [name for name, _ in events] == [
        "message_start",
        "ping",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert all(name == data["type"] for name, data in events)
    assert events[-1][1]["mlxrunner"]["reason"] == "prefix_changed"


def test_a_stop_sequence_is_named(client: anthropic.Anthropic, answers: Scripted) -> None:
    answers.script = [TextDelta("a"), ended("stop_sequence", stop_sequence="END")]
    message = client.messages.create(**ASK, stop_sequences=["END"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
    assert answers.last.options["stop"] == ["END"]


CLAUDE_CODE: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 32000,
    "stream": True,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli"},
        {
            "type": "text",
            "text": "You are Claude Code.",
            "cache_control": {"type": "ephemeral", "ttl": "1h"},
        },
    ],
    "tools": [READ, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "metadata": {"user_id": "user_abc_session_def"},
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>a</system-reminder>"},
                {"type": "text", "text": "Fix it.", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Read it.", "signature": "msg_1"},
                {"type": "text", "text": "I read it."},
                {"type": "tool_use", "id": "call_0", "name": "read", "input": {"path": "a"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "call_0",
                    "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}],
                },
                {"type": "tool_result", "tool_use_id": "call_1", "is_error": True, "content": ""},
                {"type": "text", "text": "Go on."},
            ],
        },
        {"role": "system", "content": "The date changed."},
    ],
}
"""A request in the manner of Claude Code."""


def test_claude_code(url: str, answers: Scripted) -> None:
    """Each message stays where it is, its own fields are no obstacle, and nothing is lost."""
    text = httpx.post(f"{url}/v1/messages?beta=true", json=CLAUDE_CODE).text
    asked = answers.last
    assert asked.messages == [
        {
            "role": "system",
            "content": "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli\n"
            "You are Claude Code.",
        },
        {"role": "user", "content": "<system-reminder>a</system-reminder>\nFix it."},
        {
            "role": "assistant",
            "content": "I read it.",
            "reasoning_content": "Read it.",
            "tool_calls": [
                {
                    "id": "call_0",
                    "type": "function",
                    "function": {"name": "read", "arguments": {"path": "a"}},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_0", "content": "1\n2"},
        {"role": "tool", "tool_call_id": "call_1", "content": "error"},
        {"role": "user", "content": "Go on."},
        {"role": "system", "content": "The date changed."},
    ]
    assert asked.tools == [TOOL]
    assert (asked.thinking, asked.effort) == (None, "medium")
    assert asked.client.session == "user_abc_session_def"
    named = {"x-claude-code-session-id": "session-1"}
    httpx.post(f"{url}/v1/messages?beta=true", json=CLAUDE_CODE, headers=named)
    assert answers.last.client.session == "session-1"
    events = dict(frames(text))
    assert events["message_stop"]["mlxrunner"]["left_out"] == ["tool web_search_20250305"]
    used = events["message_delta"]["usage"]
    assert (used["input_tokens"], used["cache_creation_input_tokens"]) == (0, 20)


def test_marks_of_the_cache_change_nothing_else(url: str, answers: Scripted) -> None:
    """The same messages with marks elsewhere are the same request."""
    moved = json.loads(json.dumps(CLAUDE_CODE))
    moved["messages"][0]["content"][1].pop("cache_control")
    moved["messages"][2]["content"][2]["cache_control"] = {"type": "ephemeral"}
    for body in (CLAUDE_CODE, moved):
        httpx.post(f"{url}/v1/messages", json=body)
    one, other = answers.asked
    assert (one.messages, one.tools, one.options) == (other.messages, other.tools, other.options)


def test_thinking_that_says_nothing_is_left_out(
    client: anthropic.Anthropic, answers: Scripted
) -> None:
    """Another server's thinking is empty here, or sealed."""
    blocks: Any = [
        {"type": "thinking", "thinking": "", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "a"},
    ]
    messages: Any = [*ASK["messages"], {"role": "assistant", "content": blocks}]
    client.messages.create(model="tiny", max_tokens=5, messages=messages)
    assert answers.last.messages[1] == {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "the body is empty"),
        (b"{", "the body is not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"model": NaN}', "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[]", "the body: "),
    ],
    ids=["empty", "cut", "deep", "nan", "bytes", "list"],
)
def test_a_broken_body(url: str, content: bytes, said: str) -> None:
    """It gets 400 with a reason, in their shape."""
    sent = {"content-type": "application/json"}
    response = httpx.post(f"{url}/v1/messages", content=content, headers=sent)
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]


def test_a_thread_is_not_kept(client: anthropic.Anthropic) -> None:
    """Their client is told so in its own terms, so that it sends the whole conversation."""
    asked = ASK | {"thread": {"type": "continue", "previous_message_id": "msg_1"}}
    with pytest.raises(anthropic.NotFoundError, match=r"msg_1.* is not kept here") as refused:
        client.beta.messages.create(**asked)
    body: Any = refused.value.body
    assert body["error"]["details"] == {"error_code": "thread_not_found"}


def test_probes(url: str) -> None:
    """HEAD says that it is there, GET how it is used."""
    assert httpx.head(f"{url}/v1/messages").status_code == 200
    refused = httpx.get(f"{url}/v1/messages")
    assert refused.status_code == 405
    assert "POST" in refused.json()["error"]["message"]


def test_models(client: anthropic.Anthropic) -> None:
    """They are listed in their form at the address that OpenAI's clients ask, too."""
    (model,) = client.models.list()
    assert (model.id, model.type) == ("tiny", "model")
    assert client.models.retrieve("tiny").display_name == "tiny"
    with pytest.raises(anthropic.NotFoundError, match="no model other"):
        client.models.retrieve("other")
