"""Prompts from requests, and answers that are held to a call."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.strict_templates import TEMPLATES, Makers, calls_of, events_of, load_strict, tool
from support.strict_templates import asked as asked_strictly

from mlxrunner import Runner
from mlxrunner.engine.constrain import constraint_of
from mlxrunner.models.load import load_model
from mlxrunner.options import GenerateOptions
from mlxrunner.results import Chunk
from mlxrunner.server.events import (
    AnswerEvent,
    ApiError,
    TextDelta,
    ThinkingDelta,
    ToolCallEvent,
    ToolChoice,
)
from mlxrunner.server.prompts.builder import BuiltPrompt, PromptBuilder
from mlxrunner.tokenizer.prompt import tokenize_prompt

USER: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
TOOLS = [tool("look"), tool("move")]
asked = partial(asked_strictly, tools=TOOLS)
"""A function that returns a request, by default with tools."""


def constrained(maker: PromptBuilder, made: BuiltPrompt, prefer: str) -> str:
    """Return an answer that fits the form of a request: of the letters that may come, the best."""
    tokenizer = maker.tokenizer
    constraint = constraint_of(GenerateOptions.of(**made.options), tokenizer, tokenizer.vocab_size)
    tokens: list[int] = []
    while not constraint.is_done:
        allowed = constraint.mask(tokenizer.vocab_size).nonzero()[0].tolist()
        if set(allowed) & tokenizer.stop_tokens:
            break
        texts = {tokenizer.decode([token]): token for token in allowed}
        best = min(texts, key=lambda text: (prefer.find(text) < 0, prefer.find(text), text))
        tokens.append(texts[best])
        constraint.advance(tokens[-1])
    return tokenizer.decode(tokens)


def text_of(events: Sequence[AnswerEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("mode", ["named", "required"])
def test_a_forced_call_is_a_call_of_a_tool(makers: Makers, family: str, mode: Any) -> None:
    """With arguments by its schema, whatever the model would say, in the family's own form."""
    maker = makers[family]
    request = asked(tool_choice=ToolChoice(mode, "move" if mode == "named" else None))
    made = maker.make(request)
    events = events_of(maker, request, constrained(maker, made, "mslow97"))
    assert [*calls_of(events)] == [("move", {"at": 99, "how": "slow"})]
    assert text_of(events) == ""
    assert made.prompt.text == made.rendered
    assert maker.tokenizer.decode(made.prompt.tokens.tolist()) == made.rendered


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize(
    "described",
    [
        {},
        {"parameters": None},
        {"parameters": {}},
        {"parameters": {"type": "object"}},
        {"parameters": {"type": "object", "properties": {}, "required": []}},
        {"parameters": {"$schema": "s", "title": "t", "properties": None}},
    ],
    ids=["missing", "null", "empty", "object", "no properties", "a title"],
)
@pytest.mark.exhaustive(8)
def test_a_forced_call_of_a_tool_without_parameters_ends(
    makers: Makers, family: str, described: dict[str, Any]
) -> None:
    """It has no arguments, though the model would write them without an end."""
    maker = makers[family]
    tools = [{"type": "function", "function": {"name": "ping", **described}}]
    request = asked(tools=tools, tool_choice=ToolChoice("required"))
    answer = constrained(maker, maker.make(request), '"')
    assert [*calls_of(events_of(maker, request, answer))] == [("ping", {})]


def test_a_forced_call_of_the_own_form_comes_back_as_its_tokens(makers: Makers) -> None:
    """The next prompt begins with the prompt, the call that it opened, and the answer."""
    for family in ("qwen3", "llama3", "gpt-oss"):
        maker = makers[family]
        request = asked(tool_choice=ToolChoice("named", "look"))
        made = maker.make(request)
        answer = constrained(maker, made, "fast1")
        tokens = maker.tokenizer.encode_more(answer)
        pieces = [maker.tokenizer.decode([token]) for token in tokens]
        maker.keep(made, [Chunk(text, one) for text, one in zip(pieces, tokens, strict=True)])
        events = events_of(maker, request, answer)
        (called,) = (event for event in events if isinstance(event, ToolCallEvent))
        call = {"id": "c", "function": {"name": "look", "arguments": called.arguments}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": "c", "content": "seen"}
        after = maker.make(asked(messages=[*USER, said, result]))
        both = [*made.prompt.tokens.tolist(), *tokens]
        assert after.prompt.tokens[: len(both)].tolist() == both, family
        assert after.kept == 1


@pytest.mark.parametrize("family", TEMPLATES)
def test_an_answer_of_a_form_is_no_thinking(family: str, tmp_path: Path) -> None:
    """The form holds from the first token on: thinking that the prompt has opened is ended."""
    opening = "{% if add_generation_prompt %}<think>\n{% endif %}"
    tokenizer = load_strict(tmp_path / family, family, opening=opening)
    maker = PromptBuilder(tokenizer, TEMPLATES[family][0] + opening)
    free = maker.make(asked(tools=()))
    assert free.rendered.endswith("<think>\n")
    for options in ({"schema": '{"const": 7}'}, {"choices": ["7"]}):
        request = asked(tools=(), options=options)
        made = maker.make(request)
        assert made.rendered == free.rendered + "\n</think>\n\n"
        assert maker.tokenizer.decode(made.prompt.tokens.tolist()) == made.rendered
        events = events_of(maker, request, constrained(maker, made, "7"))
        assert text_of(events) == "7"
        assert not any(isinstance(event, ThinkingDelta) for event in events)


def test_an_answer_of_a_form_without_opened_thinking(makers: Makers) -> None:
    """Its prompt is that of any answer."""
    for maker in makers.values():
        free, held = (maker.make(asked(options=one)) for one in ({}, {"choices": ["7"]}))
        assert held.rendered == free.rendered


@pytest.mark.parametrize(
    ("choice", "tools", "message"),
    [
        (ToolChoice("named", "fly"), TOOLS, "tool_choice: .* no tool is called 'fly'"),
        (ToolChoice("required"), [], "tool_choice: .* no tools are given"),
    ],
)
def test_a_choice_that_can_not_be_met_is_refused(
    makers: Makers, choice: ToolChoice, tools: Any, message: str
) -> None:
    """With the field at fault."""
    with pytest.raises(ApiError, match=message) as error:
        makers["qwen3"].make(asked(tool_choice=choice, tools=tools))
    assert (error.value.status, error.value.param) == (400, "tool_choice")


def test_a_schema_that_can_not_be_held_to(makers: Makers) -> None:
    """A strict tool is refused; the arguments of another one may be any object."""
    strange = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    choice = ToolChoice("named", "odd")
    with pytest.raises(ApiError, match="schema"):
        makers["qwen3"].make(asked(tools=[tool("odd", strange, strict=True)], tool_choice=choice))
    made = makers["qwen3"].make(asked(tools=[tool("odd", strange)], tool_choice=choice))
    schema = json.loads(made.options["schema"])
    assert schema["properties"]["arguments"] == {"type": "object"}


def test_thinking_that_the_prompt_opens_is_closed_before_a_forced_call(makers: Makers) -> None:
    """The call is not a part of it."""
    maker = makers["qwen3"]
    request = asked(tool_choice=ToolChoice("required"))

    def render(messages: Any, **variables: Any) -> str:
        return maker.tokenizer.render(messages, **variables) + "<think>\n"

    class Opening:
        def __getattr__(self, name: str) -> Any:
            return render if name == "render" else getattr(maker.tokenizer, name)

    tokenizer: Any = Opening()
    opening = PromptBuilder(tokenizer, TEMPLATES["qwen3"][0])
    made = opening.make(request)
    assert made.rendered.endswith("<think>\n\n</think>\n\n<tool_call>\n")
    events = events_of(opening, request, '{"name": "look", "arguments": {"at": 10}}')
    assert isinstance(events[0], ToolCallEvent)


def test_a_request_without_calls_keeps_its_tools(makers: Makers) -> None:
    """The prompt is the same, so that its tokens are reused; a call ends the answer."""
    none = asked(tool_choice=ToolChoice("none"), options={"stop": "END"})
    for maker in makers.values():
        free, made = maker.make(asked(tool_choice=ToolChoice("auto"))), maker.make(none)
        assert free.rendered == made.rendered
        assert "stop" not in free.options
        assert made.options["stop"] == ["END", maker.form.start]
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    assert text_of(events_of(makers["qwen3"], none, call)) == call


def test_a_raw_prompt_is_what_it_is(makers: Makers) -> None:
    """A text or tokens, without a template and its rules."""
    maker = makers["qwen3"]
    made = maker.make(asked(messages=(), prompt="a text", tools=()))
    assert made.prompt.text == "a text"
    assert maker.make(asked(messages=(), prompt=[5, 6], tools=())).prompt.tokens.tolist() == [5, 6]
    assert made.rules == ()
    before = len(maker.kept)
    maker.keep(made, [])
    assert len(maker.kept) == before


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "the conversation is empty"),
        ([{"role": "user", "content": 3}], "message 0: content"),
        ([{"role": "user", "content": "\ud800"}], "not valid Unicode"),
    ],
)
def test_what_is_wrong_with_messages_is_said(
    makers: Makers, messages: Sequence[Any], message: str
) -> None:
    """The client's request is refused."""
    for maker in makers.values():
        with pytest.raises(ApiError, match=message) as error:
            maker.make(asked(messages=messages))
        assert error.value.status == 400


def test_options_and_variables_are_passed_on(makers: Makers) -> None:
    """Thinking and effort are variables of the template."""
    maker = makers["qwen3"]
    made = maker.make(asked(thinking=False, options={"max_tokens": 3}))
    assert made.options == {"max_tokens": 3}
    assert made.rendered.endswith("<think>\n\n</think>\n\n")
    assert "Reasoning: high" in makers["gpt-oss"].make(asked(effort="high")).rendered


def test_thinking_goes_where_the_template_looks_for_it(makers: Makers) -> None:
    """A field of the message, or tags in its content; or it is left out."""
    call = {"id": "c", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        *USER,
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "seen"},
    ]
    texts = {name: maker.make(asked(messages=messages)).rendered for name, maker in makers.items()}
    assert "<think>\nhm\n</think>" in texts["qwen3"]
    assert "<think>hm</think>" in texts["glm"]
    assert "<|channel|>analysis<|message|>hm<|end|>" in texts["gpt-oss"]
    assert "hm" not in texts["gemma3"].partition("hi")[2]


def test_a_loaded_model_has_a_maker() -> None:
    """The demo's template has no tools, so they are described in the system prompt."""
    loaded = load_model("demo")
    maker = PromptBuilder.of(loaded)
    request = asked(tool_choice=ToolChoice("required"), options={"max_tokens": 200})
    made = maker.make(request)
    assert made.rules == ("tool-keys", "tools-as-text")
    runner = Runner.load("demo", reserve=False)
    splitter = maker.splitter(made, request)
    chunks = list(runner.generate(made.prompt, **made.options))
    events = [event for chunk in chunks for event in splitter.add(chunk)]
    events += splitter.finish()
    ((name, arguments),) = calls_of(events)
    assert name in ("look", "move")
    assert 10 <= arguments["at"] <= 99
    maker.keep(made, chunks)
    assert len(maker.kept) == 1
    plain = tokenize_prompt(loaded.tokenizer, USER)
    assert maker.make(asked(tools=())).prompt.tokens.tolist() == plain.tokens.tolist()


def test_descriptions_without_sense_break_nothing(makers: Makers) -> None:
    """A name that is missing is none; depth has an end."""
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(3000):
        deep = {"type": "object", "properties": {"a": deep}}
    for maker in makers.values():
        odd = [{"type": "function", "function": {}}, {"type": "function"}]
        request = asked(tools=odd)
        with suppress(ApiError):  # a template may ask for a name
            events = events_of(maker, request, '{"name": "look", "parameters": {}}')
            assert any(isinstance(event, TextDelta) for event in events)
        with pytest.raises(ApiError, match="nested too deeply") as error:
            maker.make(asked(tools=[tool("deep", deep)]))
        assert error.value.status == 400


def test_a_text_like_a_place_for_a_system_message_stays(makers: Makers) -> None:
    """Private characters of a client are not taken for the server's own."""
    text = "<tool_response>\ue0f49\ue0f5</tool_response>"
    messages = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": "a"},
        {"role": "system", "content": "later"},
        {"role": "user", "content": "b"},
    ]
    for maker in makers.values():
        rendered = maker.make(asked(messages=messages, tools=())).rendered
        assert text in rendered
        assert rendered.index(text) < rendered.index("later")
