"""OpenAI's Responses API, asked by its own Python client and in the manner of Codex."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from support.scripted import CALLS, FUNCTION, Scripted, call, ended

from mlxrunner.batch.openai_format import TokenLogprob, sealed
from mlxrunner.server.events import ApiError, TextDelta, ThinkingDelta
from mlxrunner.server.responses import ResponseStore

READ: Any = {"type": "function", **FUNCTION, "strict": False}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def test_a_response(client: openai.OpenAI, answers: Scripted) -> None:
    """Its text, its usage and what was reused."""
    raw = client.responses.with_raw_response.create(
        model="tiny", input="Hi", instructions="Be brief.", max_output_tokens=9, temperature=0.5
    )
    response = raw.parse()
    assert (response.output_text, response.status) == ("Hello", "completed")
    used = response.usage
    assert (used.input_tokens, used.output_tokens, used.total_tokens) == (50, 5, 55)
    assert used.input_tokens_details.cached_tokens == 30
    assert response.model_extra["mlxrunner"]["lost_tokens"] == 7  # type: ignore[index]
    assert raw.headers["x-mlxrunner-cache"].startswith("outcome=partial")
    Response.model_validate(raw.http_response.json(), strict=True)
    asked = answers.last
    assert asked.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    assert asked.options == {"max_tokens": 9, "temperature": 0.5}
    assert (asked.protocol, asked.id) == ("responses", response.id)


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream, each checked against their types."""
    found = []
    for number, frame in enumerate(part for part in text.split("\n\n") if part):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        EVENT.validate_python(event)
        found.append(event)
    return found


def test_events_are_of_their_types(url: str, answers: Scripted) -> None:
    """Each item begins, grows and ends; heartbeats are events that their clients know."""
    answers.script = CALLS
    body = {"model": "tiny", "input": "Hi", "stream": True}
    events = events_of(httpx.post(f"{url}/v1/responses", json=body).text)
    item = ["response.output_item.added", "response.content_part.added"]
    done = ["response.content_part.done", "response.output_item.done"]
    calls = ["response.function_call_arguments.delta", "response.function_call_arguments.done"]
    assert [event["type"] for event in events] == [
        "response.created",
        *["response.in_progress"] * 3,
        *item,
        *["response.reasoning_text.delta"] * 2,
        "response.reasoning_text.done",
        *done,
        *item,
        *["response.output_text.delta"] * 2,
        "response.output_text.done",
        *done,
        *[item[0], *calls, done[1]] * 2,
        "response.completed",
    ]
    response = events[-1]["response"]
    added = [event["item"] for event in events if event["type"] == done[1]]
    assert response["output"] == added
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [one["type"] for one in added] == kinds
    assert len({one["id"] for one in added}) == 4
    assert response["mlxrunner"]["cached_tokens"] == 30
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}


def test_a_stream_builds_the_same_response(client: openai.OpenAI, answers: Scripted) -> None:
    """Their client puts it together."""
    answers.script = CALLS
    whole = client.responses.create(model="tiny", input="Hi", tools=[READ])
    with client.responses.stream(model="tiny", input="Hi", tools=[READ]) as stream:
        for _ in stream:
            pass
        built = stream.get_final_response()
    assert whole.output_text == built.output_text == "I'll read."
    for response in (whole, built):
        _, _, one, other = response.output
        assert (one.type, other.type) == ("function_call", "function_call")
        assert (one.name, one.arguments, one.call_id) == ("read", '{"path": "a"}', "call_0")
        assert json.loads(other.arguments) == {"path": "b"}


CODEX: dict[str, Any] = {
    "model": "tiny",
    "instructions": "You are Codex.",
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "conversation-1",
    "client_metadata": {"x-codex-installation-id": "1"},
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "text": {"verbosity": "low"},
    "tools": [
        READ,
        {"type": "web_search", "external_web_access": False},
        {
            "type": "namespace",
            "name": "collab",
            "description": "Agents",
            "tools": [
                {"type": "function", "name": "spawn", "parameters": {"type": "object"}},
                {"type": "custom", "name": "patch"},
            ],
        },
    ],
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "Permissions."}],
        },
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "Skills."}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix it."}]},
        {"type": "reasoning", "summary": [], "encrypted_content": sealed("Read it.")},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I read it."}],
        },
        {"type": "function_call", "call_id": "call_0", "name": "read", "arguments": "{}"},
        {
            "type": "function_call",
            "call_id": "call_1",
            "namespace": "collab",
            "name": "spawn",
            "arguments": "{}",
        },
        {"type": "function_call_output", "call_id": "call_0", "output": "text of a"},
        {
            "type": "function_call_output",
            "call_id": "call_1",
            "output": [{"type": "input_text", "text": "done"}],
        },
    ],
}
"""A request in the manner of Codex."""


def test_codex(url: str, answers: Scripted) -> None:
    """Each item stays where it is, thinking comes back, and a namespace has functions."""
    answers.script = [ThinkingDelta("Go on."), call(0, "collab__spawn", "{}"), ended("tool_calls")]
    events = events_of(httpx.post(f"{url}/v1/responses", json=CODEX).text)
    asked = answers.last
    assert asked.messages == [
        {"role": "system", "content": "You are Codex."},
        {"role": "developer", "content": "Permissions."},
        {"role": "developer", "content": "Skills."},
        {"role": "user", "content": "Fix it."},
        {
            "role": "assistant",
            "content": "I read it.",
            "reasoning_content": "Read it.",
            "tool_calls": [
                {
                    "type": "function",
                    "id": f"call_{number}",
                    "function": {"name": name, "arguments": "{}"},
                }
                for number, name in enumerate(["read", "collab__spawn"])
            ],
        },
        {"role": "tool", "tool_call_id": "call_0", "name": "read", "content": "text of a"},
        {"role": "tool", "tool_call_id": "call_1", "name": "collab__spawn", "content": "done"},
    ]
    assert [tool["function"]["name"] for tool in asked.tools] == ["read", "collab__spawn"]
    assert (asked.effort, asked.client.session) == ("medium", "conversation-1")
    response = events[-1]["response"]
    thought, called = response["output"]
    assert thought["encrypted_content"] == sealed("Go on.")
    assert (called["namespace"], called["name"]) == ("collab", "spawn")
    assert response["mlxrunner"]["left_out"] == ["tool web_search", "tool custom"]
    again = httpx.get(f"{url}/v1/responses/{response['id']}")
    assert again.status_code == 404


def test_what_came_out_goes_in_again(client: openai.OpenAI, answers: Scripted) -> None:
    """The items of an answer are items of the next request as they are."""
    answers.script = CALLS
    first = client.responses.create(model="tiny", input="Hi", tools=[READ])
    outputs: Any = [
        {"type": "function_call_output", "call_id": f"call_{number}", "output": "text"}
        for number in (0, 1)
    ]
    items: Any = [
        {"role": "user", "content": "Hi"},
        *(item.to_dict() for item in first.output),
        *outputs,
    ]
    client.responses.create(model="tiny", input=items, tools=[READ], store=False)
    whole = answers.last
    client.responses.create(
        model="tiny", input=outputs, tools=[READ], previous_response_id=first.id
    )
    assert answers.last.messages == whole.messages
    named: Any = [{"type": "item_reference", "id": item.id} for item in first.output]
    client.responses.create(
        model="tiny", input=[{"role": "user", "content": "Hi"}, *named, *outputs], tools=[READ]
    )
    assert answers.last.messages == whole.messages
    assistant = whole.messages[1]
    assert assistant["reasoning_content"] == "Let me see."
    assert len(assistant["tool_calls"]) == 2


def test_a_response_is_kept_until_it_is_deleted(client: openai.OpenAI) -> None:
    """It has an address, and so has what it answered."""
    made = client.responses.create(model="tiny", input="Hi")
    assert client.responses.retrieve(made.id).output_text == "Hello"
    (item,) = client.responses.input_items.list(made.id)
    assert item.content[0].text == "Hi"  # type: ignore[union-attr]
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError, match="is not kept") as raised:
        client.responses.create(model="tiny", input="Hi", previous_response_id=made.id)
    assert raised.value.code == "previous_response_not_found"


def body_of(name: str, size: int = 1) -> dict[str, Any]:
    return {"id": name, "output": [{"id": f"msg_{name}", "text": "x" * size}]}


@pytest.mark.parametrize("limits", [(2, 10**6), (10, 1000)], ids=["count", "bytes"])
def test_what_is_kept_is_bounded(limits: tuple[int, int]) -> None:
    """The one that was used longest ago is forgotten, and others still go on from it."""
    kept = ResponseStore(*limits)
    kept.add(body_of("a", 300), [], None)
    kept.add(body_of("b", 300), [], kept.find("a"))
    assert kept.find("a") is not None
    kept.add(body_of("c", 300), [], kept.find("b"))
    kept.add(body_of("d", 300), [], kept.find("c"))
    assert [kept.find(name) is not None for name in "abcd"] == [False, False, True, True]
    names = [item["id"] for item in kept.previous("d").history]
    assert names == ["msg_a", "msg_b", "msg_c", "msg_d"]
    assert kept.item("msg_c") is not None
    assert kept.remove("c")
    assert not kept.remove("c")


def test_an_answer_that_was_cut(client: openai.OpenAI, answers: Scripted) -> None:
    """It is incomplete, and says why."""
    answers.script = [TextDelta("Hel"), ended("length")]
    response = client.responses.create(model="tiny", input="Hi")
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    events = list(client.responses.create(model="tiny", input="Hi", stream=True))
    assert events[-1].type == "response.incomplete"


def test_logprobs_and_forms(client: openai.OpenAI, answers: Scripted) -> None:
    """They are asked for as this API does."""
    token = TokenLogprob("Hi", 1, -0.5, (("Hi", 1, -0.5),))
    answers.script = [TextDelta("Hi", (token,)), ended()]
    schema = {"type": "object", "properties": {}}
    response = client.responses.create(
        model="tiny",
        input="Hi",
        include=["message.output_text.logprobs"],
        top_logprobs=1,
        text={"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}},
    )
    (content,) = response.output[0].content  # type: ignore[union-attr]
    assert content.logprobs[0].logprob == -0.5  # type: ignore[union-attr,index]
    assert answers.last.options == {"logprobs": 1, "schema": json.dumps(schema)}


@pytest.mark.parametrize(
    ("refused", "code"),
    [
        (ApiError(503, "out of memory"), "server_error"),
        (ApiError(429, "too many"), "rate_limit_exceeded"),
        (ApiError(400, "too long", code="context_length_exceeded"), "context_length_exceeded"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_error_in_the_middle_ends_the_stream(
    client: openai.OpenAI, answers: Scripted, refused: ApiError, code: str
) -> None:
    """The response has failed, and is not kept."""
    answers.script = [TextDelta("Hel"), refused]
    *_, last = client.responses.create(model="tiny", input="Hi", stream=True)
    assert last.type == "response.failed"
    assert (last.response.error.code, last.response.error.message) == (code, refused.message)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(last.response.id)
