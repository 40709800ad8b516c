"""A draft model on the command line, and what is refused in its place."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from mlxrunner import GenerateOptions, OptionError, cli


def run(*arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(cli.main, arguments, input=stdin)


def test_generate_and_chat_answer_the_same_with_a_draft_model() -> None:
    """The demo model guesses for itself; its guesses may count for nothing in a short answer."""
    plain, guessing = (
        run("generate", "--json", "--max-tokens", "12", "In the morning", *more)
        for more in ([], ["--draft-model", "demo"])
    )
    assert guessing.exit_code == 0
    assert json.loads(guessing.stdout)["tokens"] == json.loads(plain.stdout)["tokens"]
    talks = [
        run("chat", "--no-save", "--max-tokens", "12", *more, stdin="In the morning\n").stdout
        for more in ([], ["--draft-model", "demo"])
    ]
    assert talks[0] == talks[1] != ""


def test_a_draft_model_that_is_not_there_is_named() -> None:
    result = run("generate", "--draft-model", "/no/such/model", "Hello")
    assert result.exit_code == 2
    assert "/no/such/model: no such model" in result.stderr


def test_several_answers_have_no_draft_model() -> None:
    """They run at the same time, and nothing is guessed there."""
    result = run("generate", "--n", "2", "--draft-model", "demo", "Hello")
    assert result.exit_code == 2
    assert result.stderr.startswith("mlxrunner: --draft-model guesses for one answer at a time")


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("mtp", "mlx-lm drops the heads that predict several tokens"),
        ("draft:other", "a draft model is chosen when the model is loaded"),
        ("draft", "a draft model is chosen when the model is loaded"),
    ],
)
def test_other_ways_to_guess_are_refused_with_the_reason(value: str, why: str) -> None:
    """On the command line and in Python."""
    result = run("generate", "--speculate", value, "Hello")
    assert result.exit_code == 2
    assert why in result.stderr
    with pytest.raises(OptionError, match=f"speculate: {why}"):
        GenerateOptions.of(speculate=value)


def test_an_unknown_way_to_guess_is_refused_with_the_known_ones() -> None:
    result = run("generate", "--speculate", "often", "Hello")
    assert result.exit_code == 2
    assert "'auto', 'lookup', 'off'" in result.stderr
