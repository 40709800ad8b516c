"""Calls of strict tools and structured output fit their schemas, and nothing else changes."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import httpx
import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field, SecretStr
from support.actor import calling, playing
from support.managers import open_manager, served
from support.strict_templates import (
    FIRST,
    LONG,
    TEMPLATES,
    Makers,
    answered,
    asked,
    calls_of,
    constraint_of,
    events_of,
    held_of,
    tokenizer_of,
    tool,
)

from mlxrunner.engine.constrain import Constraint
from mlxrunner.options import ServeSettings
from mlxrunner.server.events import (
    AnswerEvent,
    ApiError,
    ServerRequest,
    TextDelta,
    ToolChoice,
)
from mlxrunner.server.manager import ModelNames
from mlxrunner.server.models import ModelLoader
from mlxrunner.server.prompts.builder import PromptBuilder
from mlxrunner.server.tools.constraints import TOOL_CALL_SYNTAXES
from mlxrunner.server.tools.formats import arguments_of

GOOD = '{"at": 42, "how": "slow"}'
CALLS = {
    "qwen3": ["I look.\n<tool_call>\n", '{"name": "NAME", "arguments": ARGS}', "\n</tool_call>"],
    "llama3": ["", '{"name": "NAME", "parameters": ARGS}', ""],
    "mistral": ["[TOOL_CALLS] ", '[{"name": "NAME", "arguments": ARGS, "id": "abcdefgh1"}]', ""],
    "gpt-oss": [
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant",
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGS",
        "<|call|>",
    ],
    "deepseek": [
        "Hm.<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGS<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ],
}
"""The text before a call, the call, and the text after it, as a model of each family writes it."""
TEXTS = {"qwen3": "I look.", "deepseek": "Hm."}


@pytest.fixture(scope="module")
def makers(tmp_path_factory: pytest.TempPathFactory) -> Makers:
    """A maker for each family of templates."""
    root = tmp_path_factory.mktemp("strict")
    return {
        name: PromptBuilder(tokenizer_of(root / name, name), template)
        for name, (template, _) in TEMPLATES.items()
    }


def text_of(family: str, name: str, arguments: str) -> str:
    """Return an answer with a call."""
    return "".join(CALLS[family]).replace("NAME", name).replace("ARGS", arguments)


def fits(arguments: Any) -> bool:
    """Return True if arguments fit the schema."""
    is_whole = set(arguments) == {"at", "how"}
    return is_whole and arguments["at"] in range(10, 100) and arguments["how"] in ("fast", "slow")


@pytest.mark.parametrize("family", CALLS)
@pytest.mark.parametrize(
    "arguments",
    ['{"at": "soon"}', '{"at": 5, "how": "slowly"}', "{}", "[1]", '{"at": 1', '"', "</tool_call>"],
)
def test_arguments_of_a_strict_tool_fit_its_schema(
    makers: Makers, family: str, arguments: str
) -> None:
    """The model may want to write anything else; the text before the call is its own."""
    maker, request = makers[family], asked()
    wish = text_of(family, "look", arguments)
    for seed in range(3):
        answer = answered(maker, held_of(maker, request), wish, random.Random(seed))
        events = events_of(maker, request, answer)
        found = dict(calls_of(events))
        assert found
        assert fits(found["look"]) if "look" in found else "move" in found
        texts = "".join(event.text for event in events if isinstance(event, TextDelta))
        assert texts.strip() == TEXTS.get(family, "")


@pytest.mark.parametrize("family", CALLS)
def test_a_good_call_is_as_the_model_writes_it(makers: Makers, family: str) -> None:
    """A second one, too; each token of them may come."""
    maker, request = makers[family], asked()
    wish = text_of(family, "look", GOOD)
    if family in ("qwen3", "deepseek", "mistral"):
        wish += text_of(family, "move", '{"any": [1, null]}')
    answer = answered(maker, held_of(maker, request), wish, random.Random(0))
    expected = [("look", json.loads(GOOD)), ("move", {"any": [1, None]})]
    assert list(calls_of(events_of(maker, request, answer))) in (expected, expected[:1])
    assert answer == wish.replace("<|call|>", "")


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3", "get%age"),
        ("qwen3", "<tool_call>"),
        ("llama3", "<tool_call>"),
        ("deepseek", "a%dx"),
        ("deepseek", "caf\u00e9"),
        ("gpt-oss", "get%age/a:b"),
        ("gpt-oss", "caf\u00e9"),
    ],
)
def test_a_name_is_spelled_as_it_is(makers: Makers, family: str, name: str) -> None:
    """Also with what stands for other parts in a spelling, and with letters that JSON escapes.

    A name like a tag is meant by its letters, not by the token of the tag.
    """
    maker, request = makers[family], asked(tools=[tool(name, strict=True)])
    wish = text_of(family, name, GOOD)
    answer = answered(maker, held_of(maker, request), wish, random.Random(0))
    ((found, arguments),) = calls_of(events_of(maker, request, answer))
    assert found == name
    assert fits(arguments) if name.startswith("<") else arguments == json.loads(GOOD)


@pytest.mark.parametrize("family", CALLS)
@pytest.mark.parametrize(
    "text",
    [
        "Just a text with é and { and [ and <tool and \x00.",
        '{"names": ["Bo"]}',
        "<think>\nI could write <tool_call>\n{}\n</tool_call> here.\n</think>\n\nNo.",
        '{"a": {"name": "Bo"}}',
    ],
)
def test_a_text_is_not_held(makers: Makers, family: str, text: str) -> None:
    """Every token may come, also those that are not text; calls in thinking are none."""
    maker = makers[family]
    held = constraint_of(maker, asked())
    for token in maker.tokenizer.encode_more(text):
        assert held.mask(maker.tokenizer.vocab_size + 64).all() or _is_near(maker, held)
        held.advance(token)
    assert not held.is_done
    assert held.mask(maker.tokenizer.vocab_size).all() or _is_near(maker, held)


def _is_near(maker: PromptBuilder, held: Constraint) -> bool:
    """Return True if only tokens may not come that end a tag and continue."""
    allowed = held.mask(maker.tokenizer.vocab_size)
    return all(
        any(mark in maker.tokenizer.decode([token])[:-1] for mark in '>]｜"')
        for token in (~allowed).nonzero()[0].tolist()
    )


def test_a_tag_and_what_follows_it_are_no_single_token(makers: Makers) -> None:
    """The first letters of the call would be held by nothing. White space may follow."""
    maker = makers["qwen3"]
    held = constraint_of(maker, asked())
    for letter in "<tool_call":
        (token,) = maker.tokenizer.encode_more(letter)
        held.advance(token)
    space, beyond = FIRST, FIRST + 1
    assert maker.tokenizer.decode([space, beyond]) == "".join(LONG[:2])
    allowed = held.mask(maker.tokenizer.vocab_size)
    assert (allowed[space], allowed[beyond], int((~allowed).sum())) == (True, False, 1)
    held.advance(space)
    allowed = held.mask(maker.tokenizer.vocab_size)
    texts = {maker.tokenizer.decode([token]) for token in allowed.nonzero()[0].tolist()}
    assert texts == {"{", " ", "\n", '{"name": "lo'}


@pytest.mark.parametrize(
    ("family", "text"), [("llama3", '{"name": "lo'), ("mistral", "a[TOOL_CALLS] [{")]
)
def test_a_token_that_has_a_whole_tag_and_goes_on_may_not_come(
    makers: Makers, family: str, text: str
) -> None:
    """Nothing would hold the call. Another text in front of it makes it no call of Llama 3."""
    maker = makers[family]
    held, token = held_of(maker, asked()), FIRST + LONG.index(text)
    assert maker.tokenizer.decode([token]) == text
    allowed = held.mask(maker.tokenizer.vocab_size)
    assert (allowed[token], int((~allowed).sum())) == (False, 1)
    held.advance(maker.tokenizer.encode_more("x")[0])
    assert held.mask(maker.tokenizer.vocab_size)[token] == (family == "llama3")


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("deepseek", "<tool_call>"),
        ("deepseek", "a{"),
        ("gpt-oss", "a b"),
        ("gpt-oss", "a<|message|>"),
        ("mistral", "a%d"),
    ],
)
def test_a_name_that_the_form_has_not_is_refused(makers: Makers, family: str, name: str) -> None:
    """No reader would find the call. Without `strict` the tool is taken."""
    with pytest.raises(ApiError, match="such names") as error:
        makers[family].make(asked(tools=[tool(name, strict=True)]))
    assert (error.value.status, error.value.param) == (400, "tools")
    makers[family].make(asked(tools=[tool(name), tool("look", strict=True)]))


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize(
    "more",
    [
        {"tools": [tool("look"), tool("move", strict=False)]},
        {"tools": ()},
        {"tool_choice": ToolChoice("none")},
        {"tool_choice": ToolChoice("named", "look")},
        {"options": {"schema": {"type": "object"}}},
    ],
    ids=["not strict", "no tools", "none", "forced", "a form of its own"],
)
def test_other_requests_have_no_such_constraint(makers: Makers, family: str, more: Any) -> None:
    """Their answers are what they would be if there were no strict tools."""
    assert constraint_of(makers[family], asked(**more)) is None


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_form_that_can_not_be_held_is_named(makers: Makers, family: str) -> None:
    """The note of the answer says so, if a tool is strict."""
    maker, request = makers[family], asked()
    note = maker.splitter(maker.make(request), request).note
    is_held = maker.form.name in TOOL_CALL_SYNTAXES
    assert (note is None) == (constraint_of(maker, request) is not None) == is_held
    if not is_held:
        assert maker.form.name in str(note)
        assert "can't be held to a schema" in str(note)
    free = asked(tools=[tool("look")])
    assert maker.splitter(maker.make(free), free).note is None


def test_a_strict_schema_that_can_not_be_held_is_refused(makers: Makers) -> None:
    """The message names the tool and the reason. Without `strict` the tool is taken."""
    odd = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    with pytest.raises(ApiError, match=r"'odd' is strict, .*not") as error:
        makers["qwen3"].make(asked(tools=[tool("odd", odd, strict=True)]))
    assert (error.value.status, error.value.param) == (400, "tools")
    makers["qwen3"].make(asked(tools=[tool("look", strict=True), tool("odd", odd)]))


NAMES = {"properties": {"a": {"type": "object", "properties": {"properties": {}}}}}
REST = {"additionalProperties": False}
CLOSED = {"type": "object"} | REST


@pytest.mark.parametrize(
    ("schema", "held"),
    [
        (None, {**CLOSED, "properties": {}}),
        ({"$schema": "x"}, {**CLOSED, "properties": {}}),
        ({"type": "object"}, {**CLOSED, "properties": {}}),
        ({"type": "object", "additionalProperties": True}, {"type": "object"}),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}}, "the same"),
        (NAMES, {**CLOSED, "properties": {"a": {**CLOSED, "properties": {"properties": {}}}}}),
        (
            {"type": "array", "items": {"properties": {}}, "default": {"properties": {}}},
            {"type": "array", "items": {"properties": {}, **REST}, "default": {"properties": {}}},
        ),
        (
            {"anyOf": [{"properties": {}}, {"$ref": "#/$defs/b"}], "$defs": {"b": NAMES}},
            {
                "anyOf": [{"properties": {}, **REST}, {"$ref": "#/$defs/b"}],
                "$defs": {
                    "b": {**REST, "properties": {"a": {**CLOSED, "properties": {"properties": {}}}}}
                },
            },
        ),
        ({"type": "object", "properties": {}, "additionalProperties": True}, "the same"),
        ({"type": "object", "properties": {"a": {"allOf": [NAMES, NAMES]}}}, "the same"),
        ({"type": "object", "properties": {}, "anyOf": [{"required": ["a"]}]}, "the same"),
    ],
)
def test_objects_have_the_properties_that_they_list(schema: Any, held: Any) -> None:
    """They have others only if the schema asks for them; parts of an object stay open."""
    assert arguments_of(tool("look", schema)) == (schema if held == "the same" else held)


def opening_of(script: str) -> ModelLoader:
    """Return a loader of a model that would write `script`."""
    settings = ServeSettings(slots=2, disk_cache=False)
    return playing(lambda text: script)(settings=settings, runner={"context": 4000})


async def answer_of(request: ServerRequest, script: str) -> list[AnswerEvent]:
    """Return what a served model answers that would write `script`."""
    async with open_manager(ModelNames("actor"), opening_of(script)) as manager:
        return [event async for event in manager.answer(request)]


NARROW = {"type": "object", "properties": {"how": {"enum": ["slow"]}}, "required": ["how"]}
NARROW |= {"additionalProperties": False}
LOOSE = "I look." + calling("look", {"how": "slo", "at": 1}) + "Done."
"""An answer whose call does not fit this schema."""


@pytest.mark.parametrize("is_strict", [True, False])
async def test_a_served_model_is_held(is_strict: bool) -> None:
    """The call of a strict tool fits, that of another one comes as the model wrote it."""
    request = asked(tools=[tool("look", NARROW, strict=is_strict)], options={"max_tokens": 200})
    events = await answer_of(request, LOOSE)
    arguments = {"how": "slow"} if is_strict else {"how": "slo", "at": 1}
    assert list(calls_of(events)) == [("look", arguments)]
    assert events[-1].reason == "tool_calls"
    assert events[-1].note is None
    plain = await answer_of(replace(request, tools=[]), "Just text.")
    assert "".join(event.text for event in plain if isinstance(event, TextDelta)) == "Just text."


HI = [{"role": "user", "content": "hi"}]
LOOK = {"type": "function", "name": "look", "parameters": NARROW, "strict": True}
LOOK_OF_ANTHROPIC = {"name": "look", "input_schema": NARROW, "strict": True}
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": HI, "tools": [tool("look", NARROW, strict=True)]},
    "responses": {"input": "hi", "tools": [LOOK]},
    "messages": {"max_tokens": 200, "messages": HI, "tools": [LOOK_OF_ANTHROPIC]},
}
"""A request with a strict tool in each protocol that has them."""


def test_each_protocol_has_strict_tools() -> None:
    """The answer has a call that fits, in the protocol's own form."""
    with served("actor", opening_of(LOOSE)) as (url, _):
        chat, responses, messages = (
            httpx.post(f"{url}/v1/{path}", json=body | {"model": "actor"}).json()
            for path, body in BODIES.items()
        )
    (call,) = chat["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"how": "slow"}
    (item,) = (one for one in responses["output"] if one["type"] == "function_call")
    assert json.loads(item["arguments"]) == {"how": "slow"}
    (block,) = (one for one in messages["content"] if one["type"] == "tool_use")
    assert block["input"] == {"how": "slow"}


SETTINGS = ServeSettings(disk_cache=False, slots=1, memory=300_000_000)
RUNNER = {"context": 1000}
ASK = "My name is Zorblin. What is my name?"


class Found(BaseModel):
    """The name that was asked for."""

    name: str = Field(max_length=12)
    is_sure: bool


def structured(model: str, opening: ModelLoader, method: Any) -> Any:
    """Return what LangChain makes of the answer."""
    with served(model, opening) as (url, _):
        key = SecretStr("x")
        chat = ChatOpenAI(base_url=f"{url}/v1", api_key=key, model=model, max_retries=0)
        return chat.with_structured_output(Found, method=method).invoke(ASK)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_capable_model_answers_as_it_would(method: str) -> None:
    """The schema leaves its answer as it is, as JSON or as a call."""
    found = Found(name="Zorblin", is_sure=True)
    script = calling("Found", found.model_dump())
    if method == "json_schema":
        script = '{"name": "Zorblin", "is_sure": true}'
    opening = playing(lambda text: script)(settings=SETTINGS, runner=RUNNER)
    assert structured("actor", opening, method) == found


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_the_demo_model_comes_to_an_end(method: str) -> None:
    """It ends no text of JSON by itself, so the schema has to bound each."""
    found = structured("demo", ModelLoader(settings=SETTINGS, runner=RUNNER), method)
    assert isinstance(found, Found)
