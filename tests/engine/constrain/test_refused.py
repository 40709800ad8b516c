"""A form that can't be had is refused in one line, before anything is evaluated."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
from support.forms import FewLetters, ask, build, text

from mlxrunner import OptionError, Runner
from mlxrunner.config.option import MAX_SCHEMA
from mlxrunner.engine.constrain import check_form
from mlxrunner.options import GenerateOptions

HOSTILE: dict[str, tuple[Any, str]] = {
    "no json": ("{", "schema: not valid JSON: Expecting property name"),
    "a list": ("[1]", 'schema: it has to be a JSON object, such as {"type": "object"}, not [1]'),
    "a number": (
        5,
        'schema: it has to be a JSON object, such as {"type": "object"}, or its text, not 5',
    ),
    "not writable": ({"const": object()}, "schema: it can't be written as JSON"),
    "too long": (
        {"const": "x" * MAX_SCHEMA},
        f"characters are too many, it may have at most {MAX_SCHEMA}",
    ),
    "deep": ('{"items": ' * 5000 + "{}" + "}" * 5000, "schema: not valid JSON"),
    "rather deep": ('{"items": ' * 200 + "{}" + "}" * 200, "recursion limit exceeded"),
    "not a number": ('{"const": NaN}', "schema: "),
    "huge number": ({"minimum": 10**400}, "number out of range"),
    "half a character": ({"const": "\ud800"}, "schema: "),
    "empty enum": ({"enum": []}, "schema: Unsatisfiable schema: anyOf is empty"),
    "unsatisfiable": (
        {"type": "integer", "minimum": 5, "maximum": 3},
        "minimum (5) is greater than maximum (3)",
    ),
    "itself": (
        {"$ref": "#"},
        "schema: after 0 tokens of the answer, no token of the model fits the schema or choices",
    ),
    "unsupported": ({"not": {"type": "string"}}, 'schema: Unimplemented keys: ["not"]'),
    "unknown type": ({"type": "strin"}, "schema: Invalid type: strin"),
    "unknown format": (
        {"type": "string", "format": "nonsense"},
        "schema: Unknown format: nonsense",
    ),
    "broken pattern": (
        {"type": "string", "pattern": "((("},
        "schema: regex parse error: ((( ^ error: unclosed group",
    ),
    "nobody's reference": ({"$ref": "#/$defs/x"}, "schema: Pointer '/$defs/x' does not exist"),
    "remote": ({"$ref": "http://127.0.0.1:9/x.json"}, "does not fetch resources"),
    "a file": ({"$ref": "file:///etc/passwd"}, "does not fetch resources"),
    "many": ({"enum": [f"{i:x}" for i in range(12_000)]}, ""),
    "explosive": (
        {
            "allOf": [
                {"anyOf": [{"properties": {f"{x}{i}": {"const": i}}} for x in "ab"]}
                for i in range(12)
            ]
        },
        "schema too large",
    ),
}


@pytest.mark.parametrize("more", [0, 1])
def test_choices_that_take_too_long_to_compile_are_refused(more: int) -> None:
    """They are as long together as a schema may be; 20 MB of them took 30 s and 1.8 GB."""
    size = MAX_SCHEMA // 2
    choices = ["x" * size, "y" * (size + more)]
    if not more:
        assert GenerateOptions.of(choices=choices).choices == tuple(choices)
        return
    said = f"choices: {MAX_SCHEMA + 1} characters are too many, they may have at most {MAX_SCHEMA}"
    with pytest.raises(OptionError, match=re.escape(said)):
        GenerateOptions.of(choices=choices)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_schema_that_cannot_be_had_is_refused_in_one_line(name: str) -> None:
    """Before anything is evaluated: the entry is as it was, and the next request is a hit."""
    runner = build()
    ask(runner, [1, 2, 3], max_tokens=2, stop_tokens=[])
    before = list(runner.entry.tokens)
    schema, message = HOSTILE[name]
    if not message:  # large, but possible
        assert json.loads(text(ask(runner, schema=schema))) in schema["enum"]
        return
    with pytest.raises(OptionError, match=re.escape(message)) as raised:
        runner.generate([1, 2, 3], schema=schema)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400
    assert runner.entry.tokens == before
    assert (
        ask(
            runner,
            [1, 2, 3],
            max_tokens=2,
            stop_tokens=[],
        )[-1].usage.outcome  # type: ignore[union-attr]
        == "hit"
    )


def test_a_schema_cannot_loosen_itself(llama: Runner) -> None:
    """llguidance's own settings inside a schema are ignored."""
    with pytest.raises(OptionError, match="Unimplemented"):
        llama.generate([1], schema={"not": {}, "x-guidance": {"lenient": True}})
    assert (
        text(ask(llama, schema={"const": [1, 2], "x-guidance": {"item_separator": "  ,  "}}))
        == "[1, 2]"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"choices": ["a", ""]}, "choices: each one has to be a text of at least one character"),
        ({"choices": ["a", 1]}, "choices: each one has to be a text"),
        ({"choices": 5}, "choices: 5 is not a list"),
        ({"choices": ["\ud800"]}, "choices: '\\ud800' is not valid Unicode"),
        ({"choices": ["a"], "schema": "{}"}, "schema, choices: an answer has one form"),
    ],
    ids=str,
)
def test_choices_are_checked_when_they_are_made(options: dict[str, Any], message: str) -> None:
    """Without the library."""
    with pytest.raises(OptionError, match=re.escape(message)):
        GenerateOptions.of(**options)


def test_without_the_library_only_a_form_is_refused(
    llama: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line, with the command that installs it."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for options in ({"choices": ["yes"]}, {"schema": "{}"}):
        with pytest.raises(OptionError, match=r"not installed: .* install .*llguidance"):
            llama.generate([1, 2], **options)
        with pytest.raises(OptionError, match="pip install"):
            check_form(GenerateOptions.of(**options))
    assert ask(llama, [1, 2], max_tokens=2, stop_tokens=[])


def test_a_vocabulary_that_cannot_spell_a_choice_is_named_with_it() -> None:
    """Before anything is evaluated; what it can spell works."""
    runner = build(tokenizer=FewLetters())
    with pytest.raises(OptionError, match="choices: this model's vocabulary can't spell 'abz'"):
        runner.generate([1, 2, 3], choices=["abc", "abz"])
    assert text(ask(runner, choices=["abc", "dab"])) in ("abc", "dab")
    assert text(ask(runner, schema={"enum": ["abc", "zzz"]})) == '"abc"'
    with pytest.raises(
        OptionError,
        match="schema: after 0 tokens of the answer, no token of the model fits the schema",
    ):
        runner.generate([1, 2, 3], schema={"const": 7})


def test_a_form_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of lines of a batch may have it; a refused one is looked at once, too."""
    from mlxrunner.engine import constrain

    seen = []
    real = constrain.library().LLMatcher.validate_grammar

    class Counting:
        class LLMatcher:
            @staticmethod
            def validate_grammar(grammar: str) -> Any:
                seen.append(grammar)
                return real(grammar)

    monkeypatch.setattr(constrain, "library", lambda: Counting)
    for _ in range(3):
        constrain.check_form(GenerateOptions.of(choices=["once", "and again"]))
        with pytest.raises(OptionError, match="schema: "):
            constrain.check_form(GenerateOptions.of(schema={"not": {}, "title": "looked at once"}))
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        pytest.param({"choices": []}, "choices: the list is empty", id="no-choice"),
        pytest.param({"choices": ()}, "choices: the list is empty", id="no-choice-tuple"),
        pytest.param(
            {"choices": ""},
            "choices: each one has to be a text of at least one character",
            id="an-empty-text",
        ),
        pytest.param(
            {"choices": ["yes", ""]},
            "choices: each one has to be a text of at least one character",
            id="one-empty",
        ),
        pytest.param(
            {"choices": ["yes"], "schema": {}}, "schema, choices: an answer has one form", id="both"
        ),
        pytest.param(
            {"choices": [], "schema": {}}, "choices: the list is empty", id="both-one-empty"
        ),
        pytest.param(
            {"stop": ""},
            "stop: each stop string has to be a text of at least one character",
            id="empty-stop",
        ),
        pytest.param(
            {"stop": ["a", ""]},
            "stop: each stop string has to be a text of at least one character",
            id="one-empty-stop",
        ),
        pytest.param({"schema": ""}, "schema: not valid JSON", id="empty-schema"),
        pytest.param({"max_tokens": 0}, "max_tokens: 0 is out of range", id="no-token"),
    ],
)
def test_what_is_empty_is_an_error(llama: Runner, options: dict[str, Any], complaint: str) -> None:
    """It never gives a free answer."""
    with pytest.raises(OptionError, match=re.escape(complaint)):
        ask(llama, **options)
