"""Anthropic's Messages API, asked by its own Python client. `test_wire.py` has more of it."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest
from support.requests import CLAUDE_CODE
from support.scripted import CALLS, HI, Scripted

ASK: dict[str, Any] = {"model": "tiny", "max_tokens": 100, "messages": HI}


@pytest.fixture
def client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="x", max_retries=0)


def test_a_stream_builds_the_same_message(client: anthropic.Anthropic, answers: Scripted) -> None:
    """It has thinking, text and two calls, and the id of the request."""
    answers.script = CALLS
    raw = client.messages.with_raw_response.create(**ASK)
    whole = raw.parse()
    assert answers.last.id == whole.id == raw.headers["request-id"]
    assert answers.last.client.name == "Anthropic"
    with client.messages.stream(**ASK) as stream:
        kinds = [event.type for event in stream]
        built = stream.get_final_message()
    assert [block.type for block in built.content] == ["thinking", "text", "tool_use", "tool_use"]
    for one, other in zip(whole.content, built.content, strict=True):
        assert one.model_dump(exclude={"signature"}) == other.model_dump(exclude={"signature"})
    assert built.content[2].input == {"path": "a"}  # type: ignore[union-attr]
    assert built.content[0].signature  # type: ignore[union-attr]
    assert (built.stop_reason, whole.stop_reason) == ("tool_use", "tool_use")
    assert (built.usage.cache_read_input_tokens, built.usage.input_tokens) == (30, 20)
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4


def test_marks_of_the_cache_change_nothing_else(url: str, answers: Scripted) -> None:
    """The same messages with marks elsewhere are the same request."""
    moved = json.loads(json.dumps(CLAUDE_CODE))
    moved["messages"][0]["content"][1].pop("cache_control")
    moved["messages"][2]["content"][2]["cache_control"] = {"type": "ephemeral"}
    for body in (CLAUDE_CODE, moved):
        assert httpx.post(f"{url}/v1/messages", json={"model": "tiny", **body}).is_success
    one, other = answers.asked
    assert (one.messages, one.tools, one.options) == (other.messages, other.tools, other.options)


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
