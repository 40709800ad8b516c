"""A draft model on the command line, and what is refused in its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.checks import ends, read_lines, write_lines
from support.command import run
from support.models import write_model

from mlxrunner import GenerateOptions, OptionError
from mlxrunner.engine.drafting import Controller, StepController

WAYS = ([], ["--draft-model", "demo"])


@pytest.mark.parametrize("more", [[], ["--n", "2", "--seed", "1"]], ids=["one", "several"])
def test_generate_answers_the_same_with_a_draft_model(more: list[str]) -> None:
    """The demo model guesses for itself; its guesses may count for nothing in a short answer.

    Each of --n has the seed that it has without.
    """
    words = ["generate", "--json", "--max-tokens", "12", "In the morning", *more]
    plain, guessing = (run(*words, *way) for way in WAYS)
    assert guessing.exit_code == 0
    found = [
        [json.loads(line)["tokens"] for line in one.stdout.splitlines()]
        for one in (plain, guessing)
    ]
    assert found[0] == found[1]
    assert len(found[0]) == (2 if more else 1)


def test_a_chat_answers_the_same_with_a_draft_model() -> None:
    words = ["chat", "--no-save", "--max-tokens", "12"]
    plain, guessing = (run(*words, *way, stdin="In the morning\n").stdout for way in WAYS)
    assert plain == guessing != ""


@pytest.mark.parametrize("parallel", ["1", "2"])
def test_a_batch_answers_the_same_with_a_draft_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch, parallel: str
) -> None:
    """With one line at a time and with two; the usage says what was guessed."""
    monkeypatch.setattr(Controller, "depth", lambda self, shares, most, first=1.0: min(most, 3))
    monkeypatch.setattr(StepController, "may_draft", True)
    write_lines(folder / "in.jsonl", [{"prompt": f"In the morning {n}"} for n in range(2)])
    found = []
    for name, more in zip(("plain.jsonl", "guessing.jsonl"), WAYS, strict=True):
        given = ("--parallel", parallel, "--max-tokens", "24", "-o", name, *more)
        ends(run("batch", "in.jsonl", *given), 0)
        found.append(read_lines(Path(name)))
    plain, guessing = found
    assert [one["text"] for one in guessing] == [one["text"] for one in plain]
    drafts = [use["source"] for one in guessing for use in one["usage"]["drafts"]]
    assert "model" in drafts


def test_the_draft_model_stays_after_another_model_if_it_can(tmp_path: Path) -> None:
    """A line says why it guesses no more, and it does again for the first model."""
    write_model(tmp_path / "other", vocab_size=300)
    typed = f"Hello\n/model {tmp_path / 'other'}\nHello\n/model demo\nHello\n/stats\n"
    chat = run("chat", "--no-save", "--max-tokens", "9", "--draft-model", "demo", stdin=typed)
    assert chat.exit_code == 0
    why = (
        f"demo is not used as draft model of {tmp_path / 'other'}: speculate: a draft "
        "model has to have"
    )
    assert chat.stderr.count(why) == 1
    assert chat.stderr.count("is not used as draft model") == 1
    assert "context of" in chat.stderr.split(why)[1]


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
    ends(run("generate", "--speculate", value, "Hello"), 2, why)
    with pytest.raises(OptionError, match=f"speculate: {why}"):
        GenerateOptions.of(speculate=value)
    assert "'auto', 'lookup', 'off'" in run("generate", "--speculate", "often", "Hello").stderr
