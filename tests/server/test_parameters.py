"""Calls with texts between tags, as Qwen3-Coder writes them, fit the schemas of strict tools."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from support.strict_templates import (
    answered,
    asked,
    calls_of,
    events_of,
    held_of,
    tokenizer_of,
    tool,
)

from mlxrunner.server.events import ApiError
from mlxrunner.server.prompts.builder import PromptBuilder

TEMPLATE = "{% if tools %}<tool_call>\n<function=example>\n<parameter=a>{% endif %}"
"""The part of a template by which the form is known."""
PROPERTIES: dict[str, Any] = {
    "path": {"type": "string", "minLength": 2},
    "how": {"$ref": "#/$defs/how"},
    "count": {"type": "integer", "minimum": 10, "maximum": 99},
    "deep": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]},
    "said": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "most": {"type": ["integer", "null"], "minimum": 0, "maximum": 5},
    "is_on": {"type": "boolean"},
}
SCHEMA = {
    "type": "object",
    "properties": PROPERTIES,
    "required": ["path", "how", "count"],
    "$defs": {"how": {"enum": ["fast", "slow"]}},
}
ANY = tool("move", {"type": "object", "properties": {"to": {"type": "string"}}})
TOOLS = [tool("look", SCHEMA, strict=True), ANY]
GOOD = {"path": "a <b>\n\nc", "how": "slow", "count": 42}
MORE = {"deep": {"a": 2}, "said": None, "most": 3, "is_on": True}


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> PromptBuilder:
    """A maker for a model that writes calls so."""
    folder = tmp_path_factory.mktemp("parameters") / "model"
    return PromptBuilder(tokenizer_of(folder, "qwen3"), TEMPLATE, "qwen3_coder")


def written(name: str, arguments: dict[str, str]) -> str:
    """Return an answer with a call, as the model writes it."""
    parts = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()]
    return f"I look.\n<tool_call>\n<function={name}>\n{''.join(parts)}</function>\n</tool_call>"


def texts(arguments: dict[str, Any]) -> dict[str, str]:
    """Return arguments as texts."""
    words = {None: "null", True: "true"}
    return {
        key: str(words.get(value, value)) if not isinstance(value, dict) else '{"a": 2}'
        for key, value in arguments.items()
    }


def called(maker: PromptBuilder, wish: str, tools: Any = TOOLS) -> list[Any]:
    """Return the calls of a model that wants to say `wish`.

    Where it may not, it continues as in a good call, after the longest text that is there.
    """
    tokenizer, request = maker.tokenizer, asked(tools=tools)
    held, said = held_of(maker, request), list[int]()
    wishes = tokenizer.encode_more(wish)[::-1]
    good = tokenizer.encode_more(written("look", texts(GOOD | MORE)))
    end = min(tokenizer.stop_tokens)
    while not held.is_done and len(said) < 1000:
        allowed = held.mask(tokenizer.vocab_size)
        if wishes and allowed[wishes[-1]]:
            said.append(wishes.pop())
        elif wishes or not allowed[end]:
            wishes = []
            said.append(next(token for token in likely(good, said) if allowed[token]))
        else:
            said.append(end)
        held.advance(said[-1])
    assert held.is_done
    answer = tokenizer.decode([token for token in said if token != end])
    return list(calls_of(events_of(maker, request, answer)))


def likely(good: list[int], said: list[int]) -> Iterator[int]:
    """Yield the tokens that follow in `good` what was said, after the longest end of it first."""
    for count in range(min(len(said), 30), -1, -1):
        tail = said[len(said) - count :]
        for at in range(count, len(good)):
            if good[at - count : at] == tail:
                yield good[at]


@pytest.mark.parametrize("arguments", [GOOD, GOOD | MORE, GOOD | {"said": "nulls </param>"}])
def test_a_good_call_is_as_the_model_writes_it(maker: PromptBuilder, arguments: Any) -> None:
    """Parameters that are not required may be missing."""
    wish = written("look", texts(arguments))
    assert called(maker, wish) == [("look", arguments)]
    request = asked(tools=TOOLS)
    held = held_of(maker, request)
    assert answered(maker, held, wish, random.Random(0)).startswith(wish)


@pytest.mark.parametrize(
    "wrong",
    [
        {"path": "a"},
        {"path": "null"},
        {"path": "a</parameter>b"},
        {"path": "ab</tool_call>"},
        {"how": "slowly"},
        {"count": "5"},
        {"count": '"42"'},
        {"count": "4.5"},
        {"other": "1"},
        {"deep": '{"a": 3}'},
        {"deep": "a"},
        {"most": "9"},
        {"is_on": "yes"},
    ],
)
@pytest.mark.exhaustive(6)
def test_arguments_of_a_strict_tool_fit_its_schema(maker: PromptBuilder, wrong: Any) -> None:
    """The model may want to write anything else."""
    ((name, found),) = called(maker, written("look", texts(GOOD) | wrong))
    assert name == "look"
    assert {"path", "how", "count"} <= found.keys() <= PROPERTIES.keys()
    assert isinstance(found["path"], str)
    assert len(found["path"]) >= 2
    assert found["how"] in ("fast", "slow")
    assert found["count"] in range(10, 100)
    assert found.get("deep", {"a": 1}) in ({"a": 1}, {"a": 2})
    assert found.get("most") in (None, *range(6))
    assert found.get("is_on", True) in (True, False)


@pytest.mark.parametrize("wish", ["<tool_call>\n<function=lock>", "<tool_call>\n{}"])
def test_a_call_names_a_tool(maker: PromptBuilder, wish: str) -> None:
    """There is no call of another one, and none in another form."""
    ((name, _),) = called(maker, wish)
    assert name in ("look", "move")


def test_a_tool_that_is_not_strict_has_any_parameters(maker: PromptBuilder) -> None:
    """They are read as the schema says, if it knows them."""
    wish = written("move", {"to": "12", "far": "off\nthere"})
    assert called(maker, wish) == [("move", {"to": "12", "far": "off\nthere"})]


def test_a_tool_without_parameters(maker: PromptBuilder) -> None:
    """A schema that lists none lets the model choose them."""
    tools = [tool("look", {"type": "object"}, strict=True)]
    assert called(maker, written("look", {}), tools) == [("look", {})]


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "x"}}}, "'pattern'"),
        ({"properties": {"a": {}}}, "one type"),
        ({"properties": {"a": {"type": ["string", "integer"]}}}, "one type"),
        ({"properties": {"a": {"enum": ["x", 1]}}}, "one type"),
        ({"properties": {"a": {"enum": ["x", "null"]}}}, "can't be written"),
        ({"properties": {"a b": {"type": "string"}}}, "'a b' has white space"),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "does not exist"),
        ({"properties": {}, "anyOf": [{"required": ["a"]}]}, "one list"),
    ],
)
@pytest.mark.exhaustive(4)
def test_a_strict_schema_that_can_not_be_held_is_refused(
    maker: PromptBuilder, schema: Any, why: str
) -> None:
    """The message names the tool and the reason. Without `strict` the tool is taken."""
    schema = {"type": "object", **schema}
    with pytest.raises(ApiError, match=why) as error:
        maker.make(asked(tools=[tool("odd", schema, strict=True)]))
    assert (error.value.status, error.value.param) == (400, "tools")
    assert "'odd' is strict" in error.value.message
    maker.make(asked(tools=[tool("look", strict=True), tool("odd", schema)]))
