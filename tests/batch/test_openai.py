"""OpenAI's batch lines: what they ask for, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from support.batches import HELLO, TOOL, one
from support.checks import json_rows

from mlxrunner.batch.store import InputLine


def chat(**body: Any) -> InputLine:
    body = {"model": "gpt-4o-mini", "messages": HELLO, **body}
    return one({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body})


def test_a_line_of_a_chat() -> None:
    """Its messages, its options under our names, its id, and how it wants to be answered."""
    options = {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "seed": 1, "stop": ["\n"]}
    options |= {"presence_penalty": 1, "frequency_penalty": -1}
    line = chat(**options | {"stop": "\n"})
    assert line == InputLine(0, 1, HELLO, "a", "chat.completion", options)  # type: ignore[arg-type]


def test_a_line_of_a_completion() -> None:
    """Plain text, without a chat template; logprobs is a number there."""
    body = {"prompt": "Hello", "logprobs": 3, "echo": False}
    line = one({"custom_id": "a", "url": "/v1/completions", "body": body})
    assert line == InputLine(0, 1, "Hello", "a", "text_completion", {"logprobs": 3})


@pytest.mark.parametrize(
    ("body", "options"),
    [
        *json_rows(r"""
{"max_completion_tokens": 7} -> {"max_tokens": 7}
{"logprobs": true} -> {"logprobs": 0}
{"logprobs": true, "top_logprobs": 4} -> {"logprobs": 4}
{"logprobs": false} -> {}
{"response_format": {"type": "json_object"}} -> {"schema": "{\"type\": \"object\"}"}
{"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}}
 -> {"schema": "{}"}
{"chat_template_kwargs": {"enable_thinking": false}} -> {"template": {"enable_thinking": false}}
{"reasoning_effort": "high", "chat_template_kwargs": {"a": 1}}
 -> {"template": {"a": 1, "reasoning_effort": "high"}}
{"reasoning_effort": "none"} -> {"template": {"enable_thinking": false, "reasoning_effort": "none"}}
{"documents": [{"text": "a"}]} -> {"template": {"documents": [{"text": "a"}]}}
{"guided_json": {"type": "object"}} -> {"schema": "{\"type\": \"object\"}"}
{"guided_choice": ["a", "b"]} -> {"choices": ["a", "b"]}
{"structured_outputs": {"choice": ["a"], "json": null}} -> {"choices": ["a"]}
{"structured_outputs": {"choice": ["a"], "disable_fallback": false}} -> {"choices": ["a"]}
{"structured_outputs": {"json": null, "regex": "", "json_object": false}} -> {}
{"structured_outputs": {}} -> {}
{"structured_outputs": {"json_object": true}} -> {"schema": "{\"type\": \"object\"}"}
{"stop_token_ids": [5]} -> {"stop_token_ids": [5]}
{"min_tokens": 0, "ignore_eos": false, "length_penalty": 1.0, "priority": 3} -> {}
{"n": 1, "stream": false, "tools": [], "tool_choice": "none", "logit_bias": {}} -> {}
{"modalities": ["text"], "user": "me", "metadata": {"a": "b"}, "store": true} -> {}
{"service_tier": "auto", "parallel_tool_calls": true} -> {}
{"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}
 -> {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}
"""),
        ({"tools": [TOOL]}, {"tools": [TOOL]}),
        ({"tools": [TOOL], "tool_choice": "auto"}, {"tools": [TOOL]}),
        ({"tools": [TOOL], "tool_choice": "none"}, {}),
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
        *json_rows("""
{"n": 2} -> n: 2 is not supported, only 1
{"stream": true} -> stream: True is not supported, only false
{"tools": [{"type": "function"}]}
 -> tools: number 0 has to be {"type": "function", "function": {"name": text, ...}}, not
{"tools": {}} -> tools: it has to be a list of JSON objects
{"chat_template_kwargs": {"messages": []}} -> template: 'messages' is not free
{"chat_template_kwargs": {}, "template": {}} -> say the same thing: give one of them
{"tool_choice": "required"} -> tool_choice: 'required' is not supported, only "none"
{"logit_bias": {"5": 1}} -> logit_bias: {'5': 1} is not supported: choose tokens with
{"modalities": ["text", "audio"]} -> modalities: ['text', 'audio'] is not supported
{"reasoning_effort": "huge"} -> reasoning_effort: 'huge' is not known: it is one of none,
{"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}
 -> reasoning_effort is in template, too: give it once
{"min_tokens": 5} -> min_tokens: 5 is not supported, only 0
{"guided_regex": "a+"} -> guided_regex: 'a+' is not supported: give a JSON schema in response_format
{"temprature": 1} -> 'temprature' is not supported in a body: did you mean 'temperature
{"system": "Be brief."} -> system: 'Be brief.' is not supported: send a message
{"structured_outputs": {"regex": "a+"}} -> structured_outputs: {'regex': 'a+'} is not supp
{"structured_outputs": {"json": {}}, "response_format": {"type": "text"}}
 -> response_format and structured_outputs say the same thing
{"max_tokens": 1, "max_completion_tokens": 1}
 -> max_tokens and max_completion_tokens say the same thing
{"logprobs": 5} -> logprobs: 5 is neither true nor false
{"top_logprobs": 5} -> top_logprobs needs logprobs to be true
{"logprobs": true, "top_logprobs": 101} -> logprobs: 101 is out of range
{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}
 -> content of type 'image_url'
{"response_format": {"type": "grammar"}} -> response_format: {'type': 'grammar'} is not known
"""),
        (
            {"tools": [TOOL], "parallel_tool_calls": False},
            "parallel_tool_calls: False is not supported, only true",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice: {'type': 'func"),
    ],
)
def test_what_a_body_asks_for_in_vain(body: dict[str, Any], problem: str) -> None:
    """The error names the field and what is supported; the line keeps its id and answer format."""
    line = chat(**body)
    assert str(line.error).startswith("line 1: ")
    assert problem in str(line.error)
    assert (line.id, line.format) == ("a", "chat.completion")


@pytest.mark.parametrize(
    ("record", "problem"),
    json_rows("""
{"body": {"messages": [{"role": "user", "content": "Hello"}]}} -> custom_id has to be a text
{"custom_id": "a"} -> body has to be an object, not null
{"custom_id": "a", "body": "Hello"} -> body has to be an object, not a text
{"custom_id": "a", "body": {"messages": [{"role": "user", "content": "Hello"}]}, "method": "GET"}
 -> method 'GET' is not supported, only POST
{"custom_id": "a", "body": {"input": "Hello"}, "url": "/v1/embeddings"}
 -> embeddings are not supported: this program generates text
{"custom_id": "a", "body": {"messages": [{"role": "user", "content": "Hello"}]}, "url": []}
 -> url [] is not supported
{"custom_id": "a", "body": {"messages": [{"role": "user", "content": "Hello"}]}, "prompt": "Hello"}
 -> unknown field 'prompt' beside custom_id
{"custom_id": "a", "body": {"prompt": ["a", "b"]}, "url": "/v1/completions"}
 -> a list of 2 prompts is not supported in a body: write a line for each
{"custom_id": "a", "body": {}, "url": "/v1/completions"} -> prompt has to be a text, not null
"""),
)
def test_what_is_wrong_around_the_body(record: dict[str, Any], problem: str) -> None:
    """Each error names the field."""
    assert problem in str(one(record).error)


def test_a_system_prompt_for_all_lines() -> None:
    """Goes in front of a chat that has none, as everywhere, and never in front of plain text."""
    message = {"role": "system", "content": "S"}
    assert one({"custom_id": "a", "body": {"messages": HELLO}}, system="S").prompt == [
        message,
        *HELLO,
    ]
    text = {"custom_id": "a", "body": {"prompt": "Hello"}, "url": "/v1/completions"}
    assert one(text, system="S").prompt == "Hello"


def response(**body: Any) -> InputLine:
    return one({"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": body})


NAMED: Any = {"name": "weather", "arguments": '{"town": "Bern"}'}
CALL = {"type": "function_call", "call_id": "c1", **NAMED}
CALLED = {"type": "function", "id": "c1", "function": NAMED | {"arguments": {"town": "Bern"}}}
THOUGHT = {"type": "reasoning", "id": "r1", "summary": []}
SAID = [{"type": "output_text", "text": "Wait.", "annotations": []}]
MESSAGE = {"type": "message", "id": "m1", "role": "assistant", "status": "completed"}


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        *json_rows("""
{"input": "Hello"} -> [{"role": "user", "content": "Hello"}]
{"input": [{"role": "user", "content": "Hello"}]} -> [{"role": "user", "content": "Hello"}]
{"input": [{"role": "user", "content": "Hello", "type": "message"}]}
 -> [{"role": "user", "content": "Hello"}]
{"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]}
 -> [{"role": "user", "content": "Hello"}]
{"input": "Hello", "instructions": "Be brief."}
 -> [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
"""),
        (
            [
                *(*HELLO, THOUGHT, MESSAGE | {"content": SAID}, CALL),
                {"type": "function_call_output", "call_id": "c1", "output": "rain"},
            ],
            [
                *HELLO,
                {"role": "assistant", "content": "Wait.", "tool_calls": [CALLED]},
                {"role": "tool", "content": "rain", "tool_call_id": "c1", "name": "weather"},
            ],
        ),
        (
            [*HELLO, CALL, {**CALL, "call_id": "c2"}],
            [
                *HELLO,
                {"role": "assistant", "content": "", "tool_calls": [CALLED, CALLED | {"id": "c2"}]},
            ],
        ),
    ],
)
def test_the_input_of_a_response(given: Any, messages: Any) -> None:
    """A text or items become messages: calls are part of the assistant's, results name theirs."""
    body = given if isinstance(given, dict) else {"input": given}
    assert response(model="gpt-5", **body) == InputLine(0, 1, messages, "a", "response")


@pytest.mark.parametrize(
    ("body", "options"),
    [
        *json_rows(r"""
{"max_output_tokens": 7, "temperature": 0.5} -> {"max_tokens": 7, "temperature": 0.5}
{"text": {"format": {"type": "text"}, "verbosity": "low"}, "truncation": "auto"} -> {}
{"text": {"format": {"type": "json_object"}}} -> {"schema": "{\"type\": \"object\"}"}
{"text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}} -> {"schema": "{}"}
{"reasoning": {"effort": "low", "summary": "auto"}} -> {"template": {"reasoning_effort": "low"}}
{"include": ["message.output_text.logprobs"], "top_logprobs": 2} -> {"logprobs": 2}
{"include": ["reasoning.encrypted_content"], "top_logprobs": 2} -> {}
{"truncation": "disabled", "store": false, "background": false, "stream": false} -> {}
{"previous_response_id": null, "tool_choice": "auto", "parallel_tool_calls": true} -> {}
"""),
        (
            {"tools": [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]},
            {"tools": [TOOL]},
        ),
    ],
)
def test_the_options_of_a_response(body: dict[str, Any], options: dict[str, Any]) -> None:
    """They are those of a chat under other names."""
    line = response(input="Hello", **body)
    assert (line.prompt, line.options, line.error) == (HELLO, options, None)


@pytest.mark.parametrize(
    ("body", "problem"),
    json_rows("""
{"input": null} -> input has to be a text or a list of at least one item
{"input": [5]} -> input 0: 5 is not supported; an item is a message
{"input": [{"type": "item_reference", "id": "m1"}]} -> input 0: {'type': 'item_reference'
{"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]}
 -> input 0: content of type 'input_image' is not supported, only text and pictures
{"input": [{"type": "function_call_output", "call_id": "c1", "output": "rain"}]}
 -> input 0: there is no function_call with the call_id 'c1' before it
{"input": [{"role": "critic", "content": "a"}]} -> role 'critic' is not known
{"instructions": 5} -> instructions has to be a text
{"previous_response_id": "resp_1"} -> previous_response_id: 'resp_1' is not supported
{"conversation": "c"} -> conversation: 'c' is not supported: send the whole conversation
{"background": true} -> background: True is not supported: the answer comes with
{"tools": [{"type": "web_search"}]} -> tools: number 0 has to be
{"include": ["file_search_call.results"]} -> include: 'file_search_call.results' is not
{"text": {"format": {"type": "grammar"}}} -> response_format: {'type': 'grammar'} is not
{"text": {"tone": "low"}} -> text: {'tone': 'low'} is not supported, only format in it
{"text": "json"} -> text: 'json' is not an object
{"reasoning": {"summary": "detailed"}} -> reasoning: summary 'detailed' is not supported
{"reasoning": "low"} -> reasoning: 'low' is not an object
{"intsructions": "a"} -> 'intsructions' is not supported in a body: did you mean
"""),
)
def test_what_a_response_asks_for_in_vain(body: dict[str, Any], problem: str) -> None:
    """The error names the field; the line keeps its id and its format."""
    line = response(**{"input": "Hello", **body})
    assert problem in str(line.error)
    assert (line.id, line.format) == ("a", "response")
