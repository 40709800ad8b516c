"""The model's own sampling: who says how tokens are chosen, and what is recorded of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from support.checks import ends
from support.command import run

import mlxrunner
from mlxrunner.sessions.store import SessionStore

DEMO = Path(mlxrunner.__file__).parent / "models" / "demo"
ASKED = "My name is Ana. What is my name?"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the demo model that suggests a high temperature."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    suggest(folder, temperature=90.0, top_k=50)
    return folder


def suggest(model: Path, **values: Any) -> None:
    (model / "generation_config.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("arguments", "temperature", "top_k", "penalty"),
    [
        ((), 90.0, 50, 1.5),
        (("--temperature", "0.5"), 0.5, 50, 1.5),
        (("--temperature", "0"), 0.0, 50, 1.5),
        (("--top-k", "0"), 90.0, 0, 1.5),
        (("--greedy",), 0.0, 50, None),
        (("--greedy", "--repetition-penalty", "1"), 0.0, 50, None),
    ],
    ids=["none", "temperature", "zero", "neutral", "greedy", "both"],
)
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_an_option_overrides_the_model(
    model: Path,
    asked: list[tuple[Any, dict[str, Any]]],
    command: str,
    arguments: tuple[str, ...],
    temperature: float,
    top_k: int,
    penalty: float | None,
) -> None:
    """A value that was typed holds even if it is the built-in default."""
    suggest(model, temperature=90.0, top_k=50, repetition_penalty=1.5)
    result = run(
        command, "-m", model, "--no-reserve", "--max-tokens", 2, *arguments, stdin=f"{ASKED}\n"
    )
    if arguments[-1:] == ("1",):
        assert result.exit_code == 2
        assert "--greedy takes the most likely token, and --repetition-penalty 1.0" in result.stderr
        return
    assert result.exit_code == 0, result.stderr
    ((_, options),) = asked
    assert (options["temperature"], options["top_k"]) == (temperature, top_k)
    assert options["repetition_penalty"] == penalty


def test_greedy_is_what_the_demo_model_answers_without_a_suggestion(model: Path) -> None:
    """`--greedy` on a model that suggests sampling is the answer of one that suggests nothing."""
    greedy = run("generate", "-m", model, "--no-reserve", "--greedy", "-p", ASKED)
    plain = run("generate", "--no-reserve", "-p", ASKED)
    assert greedy.stdout == plain.stdout == "Your name is Ana.\n"


def batch(model: Path, *arguments: object) -> Result:
    return run("batch", "in.jsonl", "-o", "out.jsonl", "--no-usage", "--no-reserve", "-m", model,
               "--max-tokens", 6, "--parallel", 1, *arguments)  # fmt: skip  # as it is typed


def test_a_batch_samples_as_the_model_suggests_and_repeats_itself(
    model: Path, asked: list[tuple[Any, dict[str, Any]]]
) -> None:
    """Line i has seed i, so that a second run writes the same bytes; a line may say otherwise."""
    lines: list[dict[str, Any]] = [
        {"prompt": ASKED}, {"prompt": ASKED}, {"prompt": ASKED, "temperature": 0},
    ]  # fmt: skip  # a line each
    Path("in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert batch(model, "--order", "input").exit_code == 0
    chosen = [(one["temperature"], one["top_k"], one["seed"]) for _, one in asked]
    assert chosen == [(90.0, 50, 0), (90.0, 50, 1), (0, 50, 2)]
    first = Path("out.jsonl").read_bytes()
    texts = [json.loads(line)["text"] for line in first.splitlines()]
    assert texts[0] != texts[1]
    assert texts[2] == "Your name is An"
    Path("out.jsonl").rename("first.jsonl")
    assert batch(model).exit_code == 0
    assert Path("out.jsonl").read_bytes() == first


def test_resume_says_that_the_model_suggests_something_else_now(model: Path) -> None:
    """Answers of both are never mixed; the old value on the command line continues."""
    Path("in.jsonl").write_text(f"{json.dumps({'prompt': ASKED})}\n" * 2)
    assert batch(model).exit_code == 0
    suggest(model, temperature=0.5, top_k=50)
    ends(batch(model, "--resume"), 2, "another --temperature: 90.0 then, 0.5 now")
    assert batch(model, "--resume", "--temperature", "90").exit_code == 0


def test_a_session_keeps_what_was_set_and_not_what_was_suggested(
    model: Path, asked: list[tuple[Any, dict[str, Any]]]
) -> None:
    """A session that continues follows the model; a value that equals the default is kept, too."""
    chat = ("chat", "-m", model, "--no-reserve", "--session", "s", "--set", "no_cache_file=true")
    assert run(*chat, stdin="/set max_tokens 2\n/set top_k 0\nHello!\n").exit_code == 0
    assert SessionStore().load("s").settings["options"] == {"max_tokens": 2, "top_k": 0}
    suggest(model, temperature=0.5, top_k=9)
    assert run(*chat, stdin="Hello!\n").exit_code == 0
    assert run(*chat, "--greedy", stdin="Hello!\n").exit_code == 0
    chosen = [(one["temperature"], one.get("top_k"), one["max_tokens"]) for _, one in asked]
    assert chosen == [(90.0, 0, 2), (0.5, 0, 2), (0.0, 0, 2)]


def test_another_model_in_a_chat_samples_in_its_own_way(
    model: Path, asked: list[tuple[Any, dict[str, Any]]]
) -> None:
    """`/model` takes the sampling of the one it loads."""
    said = f"Hello!\n/model {model}\nHello!\n/model demo\nHello!\n"
    assert run("chat", "--no-reserve", "--max-tokens", 2, stdin=said).exit_code == 0
    assert [one.get("temperature") for _, one in asked] == [None, 90.0, None]
