"""OpenAI's Responses API, asked by its own Python client. `test_wire.py` has more of it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from support.requests import CODEX
from support.scripted import CALLS, FUNCTION, Scripted, call, ended

from mlxrunner.server.events import ApiError, TextDelta, ThinkingDelta
from mlxrunner.server.responses import ResponseStore

READ: Any = {"type": "function", **FUNCTION, "strict": False}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def test_a_response(client: openai.OpenAI, answers: Scripted) -> None:
    """It is of their type, strictly, and has the id of the request."""
    raw = client.responses.with_raw_response.create(model="tiny", input="Hi")
    response = raw.parse()
    assert (response.output_text, response.status) == ("Hello", "completed")
    Response.model_validate(raw.http_response.json(), strict=True)
    assert answers.last.id == response.id


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


CODEX_ANSWER = [ThinkingDelta("Go on."), call(0, "collab__spawn", "{}"), ended("tool_calls")]


@pytest.mark.parametrize(
    ("body", "script"), [({"input": "Hi"}, CALLS), (CODEX, CODEX_ANSWER)], ids=["calls", "codex"]
)
def test_events_are_of_their_types(
    url: str, answers: Scripted, body: dict[str, Any], script: Any
) -> None:
    """The response has the items that came, each with an id. Codex does not want it kept."""
    answers.script = script
    sent = {"model": "tiny", "stream": True, **body}
    events = events_of(httpx.post(f"{url}/v1/responses", json=sent).text)
    response = events[-1]["response"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert response["output"] == done
    assert len({one["id"] for one in done}) == len(done) > 1
    again = httpx.get(f"{url}/v1/responses/{response['id']}")
    assert again.status_code == (404 if body is CODEX else 200)


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


def test_what_came_out_goes_in_again(client: openai.OpenAI, answers: Scripted) -> None:
    """The items of an answer are items of the next request as they are, or by reference."""
    answers.script = CALLS
    first = client.responses.create(model="tiny", input="Hi", tools=[READ])
    ask: Any = {"role": "user", "content": "Hi"}
    outputs: Any = [
        {"type": "function_call_output", "call_id": f"call_{number}", "output": "text"}
        for number in (0, 1)
    ]
    named: Any = [{"type": "item_reference", "id": item.id} for item in first.output]
    said: Any = [item.to_dict() for item in first.output]
    for more in (
        {"input": [ask, *said, *outputs], "store": False},
        {"input": outputs, "previous_response_id": first.id},
        {"input": [ask, *named, *outputs]},
    ):
        client.responses.create(model="tiny", tools=[READ], **more)
    whole, *others = (asked.messages for asked in answers.asked[1:])
    assert others == [whole, whole]
    assert whole[1]["reasoning_content"] == "Let me see."
    assert len(whole[1]["tool_calls"]) == 2


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
    """The one that was used longest ago is forgotten, and others still continue from it."""
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
