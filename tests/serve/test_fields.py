"""Fields of requests as JSON has them: a null is not given, a whole float is an integer."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient
from support.sample import examples
from support.scripted import Scripted, app_of

from mlxrunner.batch.fields import read_fields
from mlxrunner.batch.options import BatchOptions
from mlxrunner.config.option import about
from mlxrunner.errors import MlxrunnerError
from mlxrunner.options import GenerateOptions

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"default": None}}}
FUNCTION = {"name": "read", "description": "Read", "parameters": SCHEMA, "strict": True}
SAMPLED: dict[str, Any] = {
    "max_tokens": 9, "temperature": 1, "top_p": 0.5, "top_k": 5, "seed": 3, "min_p": 0.1,
    "stop": ["END"], "presence_penalty": 1, "frequency_penalty": 1, "repetition_penalty": 1.5,
    "repeat_last_n": 30, "stop_token_ids": [7], "chat_template_kwargs": {"a": None, "b": 1.0},
}  # fmt: skip  # a field a line would be thirty lines
CALL = {"id": "c", "type": "function", "function": {"name": "read", "arguments": '{"a": null}'}}
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "Be brief"}], "name": "x"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm", "tool_calls": [CALL]},
        {"role": "tool", "content": "1", "tool_call_id": "c", "name": "read"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "read"}},
    "parallel_tool_calls": False,
    "logprobs": True,
    "top_logprobs": 2,
    "n": 2,
    "stream": False,
    "stream_options": {"include_usage": True},
    "reasoning_effort": "low",
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    "user": "me",
    **SAMPLED,
}
COMPLETION: dict[str, Any] = {
    "model": "tiny",
    "prompt": [1, 2, 3],
    "n": 2,
    "best_of": 2,
    "logprobs": 2,
    "echo": False,
    "user": "me",
    "stream": False,
    "suffix": "",
    **SAMPLED,
}
RESPONSE: dict[str, Any] = {
    "model": "tiny",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}", "id": "f"},
        {"type": "function_call_output", "call_id": "c", "output": "1", "status": "completed"},
    ],
    "instructions": "Be brief",
    "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": "auto",
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
    "store": False,
    "stream": False,
    **SAMPLED,
}
MESSAGE: dict[str, Any] = {
    "model": "tiny",
    "system": [{"type": "text", "text": "Be brief", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": "x"},
                {"type": "tool_use", "id": "c", "name": "read", "input": {"a": None}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": "1", "is_error": False}
            ],
        },
    ],
    "tools": [{"name": "read", "description": "Read", "input_schema": SCHEMA, "strict": True}],
    "tool_choice": {"type": "tool", "name": "read", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
    "metadata": {"user_id": "me"},
    "stop_sequences": ["END"],
    "max_tokens": 9,
    "temperature": 1,
    "top_k": 5,
    "top_p": 0.5,
    "stream": False,
}
OPTIONS = {
    "num_predict": 9,
    "temperature": 1,
    "top_k": 5,
    "top_p": 0.5,
    "min_p": 0.1,
    "seed": 3,
    "repeat_penalty": 1.5,
    "repeat_last_n": 30,
    "stop": ["END"],
    "num_ctx": 2048,
}
OLLAMA_CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "",
            "thinking": "Hm",
            "tool_calls": [{"id": "c", "function": {"name": "read", "arguments": {"a": None}}}],
        },
        {"role": "tool", "content": "1", "tool_name": "read", "tool_call_id": "c"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "think": True,
    "format": SCHEMA,
    "options": OPTIONS,
    "keep_alive": 5,
    "stream": False,
    "logprobs": True,
    "top_logprobs": 2,
}
OLLAMA_GENERATE: dict[str, Any] = {
    "model": "tiny",
    "prompt": "Hi",
    "system": "Be brief",
    "raw": False,
    "suffix": "",
    "think": True,
    "format": SCHEMA,
    "options": OPTIONS,
    "keep_alive": 5,
    "stream": False,
    "logprobs": True,
    "top_logprobs": 2,
}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/responses": RESPONSE,
    "/v1/messages": MESSAGE,
    "/v1/messages/count_tokens": MESSAGE,
    "/api/chat": OLLAMA_CHAT,
    "/api/generate": OLLAMA_GENERATE,
}
"""A body of each route that has nearly all of its fields."""
VALUES = frozenset(("parameters", "input_schema", "schema", "arguments", "input", "format"))
"""Fields with a value of the client's own. `input` and `format` may be objects of the protocol."""
ANSWERS = Scripted()
CLIENT = TestClient(app_of(ANSWERS), raise_server_exceptions=False)
DOCUMENT: dict[str, Any] = CLIENT.get("/openapi.json").json()
WHOLE = {
    *(one.name for one in GenerateOptions.__dataclass_fields__.values() if about(one).kind is int),
    *"max_completion_tokens max_output_tokens num_predict repeat_last_n n best_of".split(),
    *"top_logprobs stop_token_ids prompt logprobs".split(),
}
"""The names of fields whose numbers are integers."""


def outcome(path: str, body: Any) -> tuple[int, Any]:
    """Return the status of an answer, and what was asked for or the message of an error."""
    ANSWERS.begin()
    response = CLIENT.post(path, json=body)
    assert response.status_code < 500, response.text
    if response.status_code != 200:
        error = response.json()["error"]
        return response.status_code, error if isinstance(error, str) else error["message"]
    return 200, [replace(asked, id="") for asked in ANSWERS.asked]


def objects(value: Any, name: str = "") -> Iterator[dict[str, Any]]:
    """Yield the objects of a body that have fields of a protocol."""
    if isinstance(value, list):
        for part in value:
            yield from objects(part, name)
    elif isinstance(value, dict):
        is_own = (name in VALUES and "type" not in value) or name == "chat_template_kwargs"
        if is_own or value is SCHEMA or value == SCHEMA:
            return
        yield value
        for key, part in value.items():
            yield from objects(part, key)


def properties(path: str) -> list[str]:
    """Return the names of all fields that the document has for a route, nested ones, too."""
    found = set[str]()

    def walk(schema: Any) -> None:
        if isinstance(schema, list):
            for part in schema:
                walk(part)
        elif isinstance(schema, dict):
            if "$ref" in schema:
                schema = DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
            found.update(schema.get("properties", ()))
            for part in schema.values():
                walk(part)

    walk(DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"])
    return sorted(found | set(BODIES[path]))


@pytest.mark.parametrize("path", BODIES)
def test_the_body_with_nearly_all_fields_is_answered(path: str) -> None:
    """The properties below change bodies that are right."""
    status, asked = outcome(path, BODIES[path])
    assert status == 200, asked


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.exhaustive(7)
def test_a_null_is_not_given(path: str) -> None:
    """At random places of a body, null has the same outcome as no field."""
    names = properties(path)

    @given(data=st.data())
    @examples(40)
    def run(data: st.DataObject) -> None:
        nulls = copy.deepcopy(BODIES[path])
        for _ in range(data.draw(st.integers(1, 4))):
            places = list(objects(nulls))
            place = places[data.draw(st.integers(0, len(places) - 1))]
            name = data.draw(st.sampled_from(sorted(place) + names))
            place[name] = None
        status, said = outcome(path, nulls)
        expected = outcome(path, drop_nulls(nulls))
        shown = status != 200 and said.partition("{")[0] == expected[1].partition("{")[0]
        assert (status, said) == expected or (status == expected[0] and shown)

    run()


def drop_nulls(value: Any) -> Any:
    """Return a body without the nulls in the objects of its protocol."""
    copied = copy.deepcopy(value)
    for one in objects(copied):
        for name in [name for name, part in one.items() if part is None]:
            del one[name]
    return copied


@pytest.mark.parametrize("path", BODIES)
def test_each_field_may_be_null(path: str) -> None:
    """Only those without which there is no request are refused, and the message says so."""
    for name in properties(path):
        body = BODIES[path] | {name: None}
        status, said = outcome(path, body)
        assert (status, said) == outcome(path, {key: body[key] for key in body if key != name})
        assert status == 200 or any(one in said for one in NEEDED), said


NEEDED = ("has to be", "not among", "needs", "no tools", "only the same number as n")
"""Words of the errors about a field that is missing."""


@pytest.mark.parametrize("path", BODIES)
def test_a_whole_float_is_an_integer(path: str) -> None:
    """Each integer of a body, as a float: the same request. A boolean or a fraction is refused."""
    body = BODIES[path]
    for place, name in ((one, name) for one in objects(body) for name in sorted(WHOLE & set(one))):
        old = place[name]
        if isinstance(old, bool | str):
            continue
        expected = outcome(path, body)
        several = isinstance(old, list)
        try:
            place[name] = [float(one) for one in old] if several else float(old)
            assert outcome(path, body) == expected, name
            for wrong in (True, old[0] + 0.5 if several else old + 0.5, 10**400):
                place[name] = [wrong] if several else wrong
                if path == "/v1/messages/count_tokens":
                    continue  # which reads only what the prompt is made of
                status, said = outcome(path, body)
                assert status == 400, (name, wrong, said)
                assert "has to be" in said or "is not" in said, said
        finally:
            place[name] = old


def lines() -> list[tuple[str, dict[str, Any]]]:
    tools = {"tools": CHAT["tools"], "tool_choice": "auto"}
    chat = {name: value for name, value in CHAT.items() if name != "parallel_tool_calls"}
    messages = [{key: m[key] for key in m if key != "name" or m["role"] == "tool"}
                for m in CHAT["messages"]]  # fmt: skip
    completion = {name: value for name, value in COMPLETION.items() if name != "best_of"}
    return [
        ("/v1/chat/completions", {**chat, **tools, "messages": messages, "n": 1}),
        ("/v1/completions", {**completion, "n": 1}),
        ("/v1/responses", RESPONSE),
    ]


def line(url: str, body: Any) -> Any:
    """Return what a line of a batch asks for, or its error."""
    try:
        return read_fields({"custom_id": "a", "url": url, "body": body}, BatchOptions())
    except MlxrunnerError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(("url", "body"), lines())
def test_lines_of_batches_are_read_alike(url: str, body: dict[str, Any]) -> None:
    """Nulls and whole floats in each object of a body in OpenAI's form."""
    expected = line(url, body)
    assert not isinstance(expected, str), expected
    names = properties(url)
    for number, place in enumerate(objects(body)):
        for name in names:
            if name not in place:
                changed = copy.deepcopy(body)
                list(objects(changed))[number][name] = None
                assert line(url, changed) == expected, (place, name)
    for name in sorted(WHOLE & set(body)):
        if type(body[name]) is int:
            assert line(url, body | {name: float(body[name])}) == expected, name
            said = line(url, body | {name: True})
            assert name == "logprobs" or "is not" in str(said), name
