"""Answers of the demo model over HTTP: where they end, and where they begin."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.managers import served

from mlxrunner.options import ServeSettings
from mlxrunner.server.models import ModelLoader

ASK = "My name is Bo. What is my name?"
USER: list[dict[str, Any]] = [{"role": "user", "content": ASK}]
RAW = f"<|im_start|>user\n{ASK}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def demo() -> Iterator[str]:
    """The address of a server with the demo model."""
    settings = ServeSettings(disk_cache=False, slots=1, memory=300_000_000)
    with served("demo", ModelLoader(settings=settings, runner={"context": 1000})) as (address, _):
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


def texts(demo: str, messages: list[Any], **more: Any) -> dict[str, str]:
    """Return the text with which each protocol continues a conversation."""
    items = [{"role": one["role"], "content": one["content"]} for one in messages]
    claude = post(demo, "/v1/messages", messages=messages, **more)
    llama = httpx.post(
        f"{demo}/api/chat", json={"model": "demo", "stream": False, "messages": messages}
    )
    chat = post(demo, "/v1/chat/completions", messages=messages, **more)
    responses = post(demo, "/v1/responses", input=items)
    return {
        "anthropic": "".join(block["text"] for block in claude["content"]),
        "ollama": llama.json()["message"]["content"],
        "chat": chat["choices"][0]["message"]["content"],
        "responses": responses["output"][-1]["content"][0]["text"],
    }


@pytest.mark.exhaustive(4)
@pytest.mark.parametrize("words", ["Your name", "Your na", "Y", "Your name is Bo"])
def test_an_answer_continues_the_assistants_words(demo: str, words: str) -> None:
    """All protocols give the text alone that a raw prompt is continued with."""
    raw = post(demo, "/v1/completions", prompt=RAW + words)["choices"][0]["text"]
    found = texts(demo, [*USER, {"role": "assistant", "content": words}])
    assert set(found.values()) == {raw}
    assert words + raw == "Your name is Bo."


def content_of(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


def test_a_stream_has_the_new_text_only(demo: str) -> None:
    """White space at the end of the words does not come again."""
    messages = [*USER, {"role": "assistant", "content": "Your name "}]
    body = {"model": "demo", "messages": messages, "stream": True, "max_tokens": 60}
    lines = httpx.post(f"{demo}/v1/chat/completions", json=body).text.splitlines()
    frames = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    choices = [choice for frame in frames for choice in frame["choices"]]
    streamed = "".join(choice["delta"].get("content") or "" for choice in choices)
    assert streamed == content_of(post(demo, "/v1/chat/completions", messages=messages))
    assert not streamed.startswith("Your")


@pytest.mark.exhaustive(2)
@pytest.mark.parametrize("words", [[], [{"type": "text", "text": "Your name"}]], ids=["", "words"])
def test_a_picture_in_the_last_answer_is_no_fault(demo: str, words: list[Any]) -> None:
    """A model that sees none gets a text in its place, and the answer continues what is there."""
    picture = {"type": "image_url", "image_url": "data:image/png;base64,AAAA"}
    messages = [*USER, {"role": "assistant", "content": [picture, *words]}]
    claude = post(demo, "/v1/messages", messages=messages)
    text = "".join(block["text"] for block in claude["content"])
    assert text == content_of(post(demo, "/v1/chat/completions", messages=messages))


def test_the_next_turn_reuses_words_and_answer(demo: str) -> None:
    """It also counts the words as a part of the prompt."""
    messages = [*USER, {"role": "assistant", "content": "Your na"}]
    first = post(demo, "/v1/chat/completions", messages=messages)
    said = {"role": "assistant", "content": f"Your na{content_of(first)}"}
    talk = [*USER, said, {"role": "user", "content": "Thanks"}]
    usage = post(demo, "/v1/chat/completions", messages=talk)["usage"]
    before = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= before - 1


@pytest.mark.parametrize(
    ("more", "continues"),
    [
        ({"continue_final_message": True, "add_generation_prompt": False}, True),
        ({"add_generation_prompt": False}, True),
        ({"continue_final_message": False, "add_generation_prompt": True}, False),
        ({"continue_final_message": False}, False),
        ({"continue_final_message": None, "add_generation_prompt": None}, True),
    ],
    ids=str,
)
@pytest.mark.exhaustive(5)
def test_a_client_says_if_its_words_are_continued(demo: str, more: Any, continues: bool) -> None:
    """vLLM's fields are honoured; a new message says everything again."""
    messages = [*USER, {"role": "assistant", "content": "Your name"}]
    chat = post(demo, "/v1/chat/completions", messages=messages, **more)
    assert chat["choices"][0]["message"]["content"].startswith(" is Bo") == continues
    llama = {"model": "demo", "stream": False, "messages": messages}
    for body in (llama | more, llama | {"options": more}):
        found = httpx.post(f"{demo}/api/chat", json=body).json()
        assert found["message"]["content"].startswith(" is Bo") == continues


CALL = {"id": "a", "function": {"name": "f", "arguments": "{}"}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
GO_ON = {"continue_final_message": True}


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (
            "/v1/messages",
            {"messages": [*USER, {"role": "assistant", "content": "Your "}]},
            "messages.1.content: final assistant content cannot end with trailing whitespace",
        ),
        (
            "/v1/chat/completions",
            {"messages": USER, **GO_ON},
            "continue_final_message needs a last message of the assistant, and it is of role",
        ),
        (
            "/v1/chat/completions",
            {"messages": USER, "add_generation_prompt": False},
            "leave it out, as well as add_generation_prompt: false",
        ),
        (
            "/v1/chat/completions",
            {"messages": USER, **GO_ON, "add_generation_prompt": True},
            "add_generation_prompt and continue_final_message are opposites",
        ),
        (
            "/v1/chat/completions",
            {**GO_ON, "messages": [*USER, CALLED]},
            "message 1: the conversation ends with tool calls",
        ),
    ],
    ids=["white space", "user", "user by its opposite", "both", "calls"],
)
@pytest.mark.exhaustive(4)
def test_what_cannot_be_continued_is_named(demo: str, path: str, body: Any, said: str) -> None:
    """The status is 400, and the message says what to do."""
    answer = httpx.post(demo + path, json={"model": "demo", "max_tokens": 5, **body})
    assert (answer.status_code, said in answer.text) == (400, True), answer.text


def test_empty_words_begin_a_new_answer(demo: str) -> None:
    """Clients leave an empty message for the answer."""
    found = texts(demo, [*USER, {"role": "assistant", "content": ""}])
    assert set(found.values()) == {"Your name is Bo."}


def test_a_form_holds_words_and_answer_together(demo: str) -> None:
    """Words that begin it are a part of it; others stand before it."""
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    closed = {**schema, "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": closed}}
    for words, whole in (('{"a', True), ("{", True), ("Here it is:", False)):
        messages = [*USER, {"role": "assistant", "content": words}]
        answer = post(demo, "/v1/chat/completions", messages=messages, response_format=form)
        assert "a" in json.loads(words * whole + content_of(answer))
