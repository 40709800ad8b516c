"""OpenAI's batch lines of responses: what they ask for, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from support.batches import HELLO, TOOL, one

from mlxrunner.batch.store import InputLine


def response(**body: Any) -> InputLine:
    return one({"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": body})


CALL = {
    "type": "function_call",
    "call_id": "c1",
    "name": "weather",
    "arguments": '{"town": "Bern"}',
}


CALLED = {
    "type": "function",
    "id": "c1",
    "function": {"name": "weather", "arguments": {"town": "Bern"}},
}


@pytest.mark.parametrize(
    ("body", "messages"),
    [
        ({"input": "Hello"}, HELLO),
        ({"input": HELLO}, HELLO),
        ({"input": [{**HELLO[0], "type": "message"}]}, HELLO),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]},
            HELLO,
        ),
        (
            {"input": "Hello", "instructions": "Be brief."},
            [{"role": "system", "content": "Be brief."}, *HELLO],
        ),
        (
            {
                "input": [
                    *HELLO,
                    {"type": "reasoning", "id": "r1", "summary": []},
                    {
                        "type": "message",
                        "id": "m1",
                        "role": "assistant",
                        "status": "completed",
                        "content": [{"type": "output_text", "text": "Wait.", "annotations": []}],
                    },
                    CALL,
                    {"type": "function_call_output", "call_id": "c1", "output": "rain"},
                ]
            },
            [
                *HELLO,
                {"role": "assistant", "content": "Wait.", "tool_calls": [CALLED]},
                {"role": "tool", "content": "rain", "tool_call_id": "c1", "name": "weather"},
            ],
        ),
        (
            {"input": [*HELLO, CALL, {**CALL, "call_id": "c2"}]},
            [
                *HELLO,
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [CALLED, {**CALLED, "id": "c2"}],
                },
            ],
        ),
    ],
)
def test_the_input_of_a_response(body: dict[str, Any], messages: Any) -> None:
    """A text or items become messages: calls are part of the assistant's, results name theirs."""
    assert response(model="gpt-5", **body) == InputLine(0, 1, messages, "a", "response")


@pytest.mark.parametrize(
    ("body", "options"),
    [
        ({"max_output_tokens": 7, "temperature": 0.5}, {"max_tokens": 7, "temperature": 0.5}),
        ({"text": {"format": {"type": "text"}, "verbosity": "low"}, "truncation": "auto"}, {}),
        ({"text": {"format": {"type": "json_object"}}}, {"schema": '{"type": "object"}'}),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}},
            {"schema": "{}"},
        ),
        (
            {"reasoning": {"effort": "low", "summary": "auto"}},
            {"template": {"reasoning_effort": "low"}},
        ),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 2}, {"logprobs": 2}),
        ({"include": ["reasoning.encrypted_content"], "top_logprobs": 2}, {}),
        (
            {"tools": [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]},
            {"tools": [TOOL]},
        ),
        (
            {
                "truncation": "disabled",
                "store": False,
                "background": False,
                "stream": False,
                "previous_response_id": None,
                "tool_choice": "auto",
                "parallel_tool_calls": True,
            },
            {},
        ),
    ],
)
def test_the_options_of_a_response(body: dict[str, Any], options: dict[str, Any]) -> None:
    """They are those of a chat under other names."""
    line = response(input="Hello", **body)
    assert (line.prompt, line.options, line.error) == (HELLO, options, None)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"input": None}, "input has to be a text or a list of at least one item"),
        ({"input": [5]}, "input 0: 5 is not supported; an item is a message"),
        ({"input": [{"type": "item_reference", "id": "m1"}]}, "input 0: {'type': 'item_reference'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]},
            "input 0: content of type 'input_image' is not supported, only text and pictures",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "c1", "output": "rain"}]},
            "input 0: there is no function_call with the call_id 'c1' before it",
        ),
        ({"input": [{"role": "critic", "content": "a"}]}, "role 'critic' is not known"),
        ({"instructions": 5}, "instructions has to be a text"),
        ({"previous_response_id": "resp_1"}, "previous_response_id: 'resp_1' is not supported"),
        ({"conversation": "c"}, "conversation: 'c' is not supported: send the whole conversation"),
        ({"background": True}, "background: True is not supported: the answer comes with"),
        ({"tools": [{"type": "web_search"}]}, "tools: number 0 has to be"),
        ({"include": ["file_search_call.results"]}, "include: 'file_search_call.results' is not"),
        ({"text": {"format": {"type": "grammar"}}}, "response_format: {'type': 'grammar'} is not"),
        ({"text": {"tone": "low"}}, "text: {'tone': 'low'} is not supported, only format in it"),
        ({"text": "json"}, "text: 'json' is not an object"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning: summary 'detailed' is not supported"),
        ({"reasoning": "low"}, "reasoning: 'low' is not an object"),
        ({"intsructions": "a"}, "'intsructions' is not supported in a body: did you mean"),
    ],
)
def test_what_a_response_asks_for_in_vain(body: dict[str, Any], problem: str) -> None:
    """The error names the field; the line keeps its id and its format."""
    line = response(**{"input": "Hello", **body})
    assert line.error is not None
    assert problem in line.error
    assert (line.id, line.format) == ("a", "response")
