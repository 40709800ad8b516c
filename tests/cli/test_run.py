"""`mlxrunner run`, the list of known models, and what is said about commands of other programs."""

from __future__ import annotations

import json

import click
import pytest
from support.checks import ends
from support.command import run

from mlxrunner import cli
from mlxrunner.cli.chat import _Argument, _meant
from mlxrunner.config.names import ADVICE


class _Terminal:
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("typed", "command", "given"),
    [
        ("m", "chat", "m"),
        ("", "chat", ""),
        ("m --continue", "chat", "m --continue"),
        ("m hi", "generate", "-m m -p hi"),
        ("m -v --temperature 0.5 why is", "generate", "-m m -p why\\ is -v --temperature 0.5"),
        ("m --stop m m", "generate", "-m m -p m --stop m"),
    ],
)
def test_run_is_chat_and_with_a_prompt_generate(
    typed: str, command: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Words after the model are the prompt; options stay as they are."""
    import shlex

    monkeypatch.setattr("sys.stdin", _Terminal())
    meant, arguments = _meant([_Argument(one) for one in shlex.split(typed)])
    assert (meant.name, arguments) == (command, shlex.split(given))


def test_run_answers_a_prompt_and_standard_input() -> None:
    assert run("run", "demo", "My name is Bo. What is my name?").stdout == "Your name is Bo.\n"
    for model in (["demo"], []):
        piped = run("run", *model, stdin="My name is Bo. What is my name?\n")
        assert (piped.exit_code, piped.stdout) == (0, "Your name is Bo.\n")


@pytest.mark.parametrize("command", ["report", "explain", "simulate", "batch", "sessions show"])
def test_a_missing_argument_is_explained(command: str) -> None:
    ends(run(*command.split(), MLXRUNNER_EVENTS=""), 2, "Missing ", ": a ")


def test_known_models_are_listed_with_sizes_and_fit() -> None:
    shown = run("models", "--known")
    assert shown.exit_code == 0
    assert "llama3.2:1b" in shown.stdout
    assert "have not tried" in shown.stderr
    rows = json.loads(run("models", "--known", "--json").stdout)
    assert {"name", "model", "bytes", "fits", "downloaded"} == set(rows[0])
    assert [row["bytes"] for row in rows] == sorted(row["bytes"] for row in rows)


@pytest.mark.parametrize("name", ADVICE)
def test_a_command_without_a_counterpart_is_answered_with_what_to_do(name: str) -> None:
    ends(run(name), 2, ADVICE[name])
    assert isinstance(cli.main, click.Group)
    assert name not in cli.main.commands
