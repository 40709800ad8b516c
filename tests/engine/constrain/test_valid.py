"""Answers in a form are valid, and readable while they come."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from jsonschema import Draft202012Validator
from support.forms import SCHEMAS, ask, build, text, tokens
from support.sample import fewer

from mlxrunner import Runner


@pytest.mark.parametrize("name", SCHEMAS)
def test_an_answer_is_an_instance_of_the_schema(llama: Runner, demo: Runner, name: str) -> None:
    """An answer is valid whatever the model prefers; a cut one is the beginning of a valid one."""
    validator = Draft202012Validator(
        SCHEMAS[name], format_checker=Draft202012Validator.FORMAT_CHECKER
    )
    whole = 0
    for runner in (llama, demo):
        for options in ({}, *({"temperature": 1.0, "seed": seed} for seed in range(fewer(5, 3)))):
            chunks = ask(runner, schema=SCHEMAS[name], max_tokens=200, **options)
            if chunks[-1].finish_reason == "stop":
                answer = json.loads(text(chunks))
                validator.validate(answer)
                whole += 1
            else:
                assert chunks[-1].finish_reason == "length"
                assert name in ("recursive", "anything", "additional properties")
    assert whole >= fewer(3, 2)


@pytest.mark.parametrize(
    "choices",
    [
        ["yes", "no"],
        ["yes"],
        ["a", "ab", "abc"],
        ["größer", "日本語", "😀", "日本"],
        ["yes, please", 'say "no"', "back\\slash", "two\nlines", "\ttab"],
        ["</s>", "<|im_end|>", "<0x41>", "start: x", "%json", "'", "/"],
        ["A"] * 3,
        [f"number {i}" for i in range(2000)],
    ],
    ids=lambda choices: choices[0],
)
def test_an_answer_is_one_of_the_choices(llama: Runner, demo: Runner, choices: list[str]) -> None:
    """Letter by letter, and it ends with the reason "stop"."""
    seen = set()
    for runner in (llama, demo):
        for options in ({}, *({"temperature": 3.0, "seed": seed} for seed in range(6))):
            chunks = ask(runner, choices=choices, **options)
            assert text(chunks) in choices
            assert chunks[-1].finish_reason == "stop"
            seen.add(text(chunks))
    assert len(seen) > 1 or len(set(choices)) == 1


def test_an_answer_is_written_on_one_line(llama: Runner) -> None:
    """An answer has the spaces that json.dumps puts and no others, so none fills it with them."""
    schema = {"const": {"a": [1, {"b": None}, []], "c": "d e"}}
    assert text(ask(llama, schema=schema)) == json.dumps(schema["const"])


def test_one_choice_may_be_given_as_a_text(llama: Runner) -> None:
    """It is not taken for a list of letters."""
    assert text(ask(llama, choices="maybe")) == "maybe"


def test_a_full_context_shifts_under_an_answer_in_a_form() -> None:
    """It goes on where it was."""
    runner = build(context=40)
    chunks = ask(
        runner,
        range(10),
        schema={"type": "string", "pattern": "^[a-z]{60}$"},
        overflow="shift",
        keep=4,
        max_tokens=100,
    )
    assert len(json.loads(text(chunks))) == 60
    assert chunks[-1].usage.cache.shifted_tokens > 0  # type: ignore[union-attr]
    assert runner.entry.is_true


def test_answers_go_on_while_they_are_read(llama: Runner) -> None:
    """The text of each chunk is there before the next token is chosen: chunks come one by one."""
    answer = llama.generate([1, 2, 3], schema=SCHEMAS["const"])
    shown = [""]
    for chunk in answer:
        shown.append(shown[-1] + chunk.text)
    assert all(after.startswith(before) for before, after in pairwise(shown))
    assert json.loads(shown[-1]) == SCHEMAS["const"]["const"]


def test_a_choice_given_twice_is_one(llama: Runner) -> None:
    """Duplicates, and one that another begins with, change nothing."""
    once, twice = (
        tokens(ask(llama, choices=choices))
        for choices in (["no", "yes", "yes, please"], ["no", "yes", "no", "yes, please", "yes"])
    )
    assert once == twice
