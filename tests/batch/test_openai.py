"""OpenAI's batch lines of chats and completions: what they ask for, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from support.batches import HELLO, TOOL, one

from mlxrunner.batch.store import InputLine


def chat(**body: Any) -> InputLine:
    return one(
        {
            "custom_id": "a",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "gpt-4o-mini", "messages": HELLO, **body},
        }
    )


def test_a_line_of_a_chat() -> None:
    """Its messages, its options under our names, its id, and how it wants to be answered."""
    line = chat(
        max_tokens=5,
        temperature=0.5,
        top_p=0.9,
        seed=1,
        stop="\n",
        presence_penalty=1,
        frequency_penalty=-1,
    )
    options = {
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 1,
        "stop": ["\n"],
        "presence_penalty": 1,
        "frequency_penalty": -1,
    }
    assert line == InputLine(0, 1, HELLO, "a", "chat.completion", options)  # type: ignore[arg-type]


def test_a_line_of_a_completion() -> None:
    """Plain text, without a chat template; logprobs is a number there."""
    line = one(
        {
            "custom_id": "a",
            "url": "/v1/completions",
            "body": {"prompt": "Hello", "logprobs": 3, "echo": False},
        }
    )
    assert line == InputLine(0, 1, "Hello", "a", "text_completion", {"logprobs": 3})


@pytest.mark.parametrize(
    ("body", "options"),
    [
        ({"max_completion_tokens": 7}, {"max_tokens": 7}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 4}, {"logprobs": 4}),
        ({"logprobs": False}, {}),
        ({"response_format": {"type": "json_object"}}, {"schema": '{"type": "object"}'}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {}},
                }
            },
            {"schema": "{}"},
        ),
        (
            {
                "n": 1,
                "stream": False,
                "tools": [],
                "tool_choice": "none",
                "logit_bias": {},
                "modalities": ["text"],
            },
            {},
        ),
        (
            {
                "user": "me",
                "metadata": {"a": "b"},
                "store": True,
                "service_tier": "auto",
                "parallel_tool_calls": True,
            },
            {},
        ),
        ({"tools": [TOOL]}, {"tools": [TOOL]}),
        ({"tools": [TOOL], "tool_choice": "auto"}, {"tools": [TOOL]}),
        ({"tools": [TOOL], "tool_choice": "none"}, {}),
        (
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"template": {"enable_thinking": False}},
        ),
        (
            {"reasoning_effort": "high", "chat_template_kwargs": {"a": 1}},
            {"template": {"a": 1, "reasoning_effort": "high"}},
        ),
        (
            {"reasoning_effort": "none"},
            {"template": {"enable_thinking": False, "reasoning_effort": "none"}},
        ),
        ({"documents": [{"text": "a"}]}, {"template": {"documents": [{"text": "a"}]}}),
        ({"guided_json": {"type": "object"}}, {"schema": '{"type": "object"}'}),
        ({"guided_choice": ["a", "b"]}, {"choices": ["a", "b"]}),
        ({"structured_outputs": {"choice": ["a"], "json": None}}, {"choices": ["a"]}),
        ({"structured_outputs": {"choice": ["a"], "disable_fallback": False}}, {"choices": ["a"]}),
        ({"structured_outputs": {"json": None, "regex": "", "json_object": False}}, {}),
        ({"structured_outputs": {}}, {}),
        ({"structured_outputs": {"json_object": True}}, {"schema": '{"type": "object"}'}),
        ({"stop_token_ids": [5]}, {"stop_token_ids": [5]}),
        ({"min_tokens": 0, "ignore_eos": False, "length_penalty": 1.0, "priority": 3}, {}),
        (
            {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1},
            {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1},
        ),
    ],
)
def test_options_of_a_body(body: dict[str, Any], options: dict[str, Any]) -> None:
    """Translated to ours; what asks for nothing and what has no meaning here is left out."""
    line = chat(**body)
    assert (line.prompt, line.id, line.format) == (HELLO, "a", "chat.completion")
    assert (line.options, line.error) == (options, None)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"n": 2}, "n: 2 is not supported, only 1"),
        ({"stream": True}, "stream: True is not supported, only false"),
        (
            {"tools": [{"type": "function"}]},
            'tools: number 0 has to be {"type": "function", "function": {"name": text, ...}}, not',
        ),
        ({"tools": {}}, "tools: it has to be a list of JSON objects"),
        (
            {"tools": [TOOL], "parallel_tool_calls": False},
            "parallel_tool_calls: False is not supported, only true",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice: {'type': 'func"),
        ({"chat_template_kwargs": {"messages": []}}, "template: 'messages' is not free"),
        ({"chat_template_kwargs": {}, "template": {}}, "say the same thing: give one of them"),
        ({"tool_choice": "required"}, "tool_choice: 'required' is not supported, only \"none\""),
        ({"logit_bias": {"5": 1}}, "logit_bias: {'5': 1} is not supported: choose tokens with"),
        ({"modalities": ["text", "audio"]}, "modalities: ['text', 'audio'] is not supported"),
        ({"reasoning_effort": "huge"}, "reasoning_effort: 'huge' is not known: it is one of none,"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            "reasoning_effort is in template, too: give it once",
        ),
        ({"min_tokens": 5}, "min_tokens: 5 is not supported, only 0"),
        (
            {"guided_regex": "a+"},
            "guided_regex: 'a+' is not supported: give a JSON schema in response_format",
        ),
        ({"temprature": 1}, "'temprature' is not supported in a body: did you mean 'temperature"),
        ({"system": "Be brief."}, "system: 'Be brief.' is not supported: send a message"),
        (
            {"structured_outputs": {"regex": "a+"}},
            "structured_outputs: {'regex': 'a+'} is not supp",
        ),
        (
            {"structured_outputs": {"json": {}}, "response_format": {"type": "text"}},
            "response_format and structured_outputs say the same thing",
        ),
        (
            {"max_tokens": 1, "max_completion_tokens": 1},
            "max_tokens and max_completion_tokens say the same thing",
        ),
        ({"logprobs": 5}, "logprobs: 5 is neither true nor false"),
        ({"top_logprobs": 5}, "top_logprobs needs logprobs to be true"),
        ({"logprobs": True, "top_logprobs": 101}, "logprobs: 101 is out of range"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "content of type 'image_url'",
        ),
        (
            {"response_format": {"type": "grammar"}},
            "response_format: {'type': 'grammar'} is not known",
        ),
    ],
)
def test_what_a_body_asks_for_in_vain(body: dict[str, Any], problem: str) -> None:
    """The error names the field and what is supported; the line keeps its id and answer format."""
    line = chat(**body)
    assert line.error is not None
    assert line.error.startswith("line 1: ")
    assert problem in line.error
    assert (line.id, line.format) == ("a", "chat.completion")


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"body": {"messages": HELLO}}, "custom_id has to be a text"),
        ({"custom_id": "a"}, "body has to be an object, not null"),
        ({"custom_id": "a", "body": "Hello"}, "body has to be an object, not a text"),
        (
            {"custom_id": "a", "body": {"messages": HELLO}, "method": "GET"},
            "method 'GET' is not supported, only POST",
        ),
        (
            {"custom_id": "a", "body": {"input": "Hello"}, "url": "/v1/embeddings"},
            "embeddings are not supported: this program generates text",
        ),
        ({"custom_id": "a", "body": {"messages": HELLO}, "url": []}, "url [] is not supported"),
        (
            {"custom_id": "a", "body": {"messages": HELLO}, "prompt": "Hello"},
            "unknown field 'prompt' beside custom_id",
        ),
        (
            {"custom_id": "a", "body": {"prompt": ["a", "b"]}, "url": "/v1/completions"},
            "a list of 2 prompts is not supported in a body: write a line for each",
        ),
        (
            {"custom_id": "a", "body": {}, "url": "/v1/completions"},
            "prompt has to be a text, not null",
        ),
    ],
)
def test_what_is_wrong_around_the_body(record: dict[str, Any], problem: str) -> None:
    """Each error names the field."""
    error = one(record).error
    assert error is not None
    assert problem in error


def test_a_system_prompt_for_all_lines() -> None:
    """Goes in front of a chat that has none, as everywhere, and never in front of plain text."""
    assert one({"custom_id": "a", "body": {"messages": HELLO}}, system="S").prompt == [
        {"role": "system", "content": "S"},
        *HELLO,
    ]
    assert (
        one(
            {"custom_id": "a", "body": {"prompt": "Hello"}, "url": "/v1/completions"}, system="S"
        ).prompt
        == "Hello"
    )
