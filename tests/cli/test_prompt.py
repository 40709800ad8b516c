"""People type a prompt, a model, a pipe, and options by the names of other programs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from support.checks import ends, refused
from support.command import run
from support.forking import run_program

from mlxrunner import OptionError, Runner, cli
from mlxrunner.config.names import COMMANDS, FLAGS, LETTERS, MEANT, SAME, WAYS

ASKED = "My name is Ana. What is my name?"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The prompts of all requests, without their answers."""
    found: list[Any] = []

    def generate(self: Runner, prompt: Any, **options: Any) -> Any:
        found.append(prompt if isinstance(prompt, str) else prompt[-1]["content"])
        raise OptionError("asked")

    monkeypatch.setattr(Runner, "generate", generate)
    return found


@pytest.mark.exhaustive(20)
@pytest.mark.parametrize(
    ("arguments", "stdin", "prompt"),
    [
        (["Hello!"], "", "Hello!"),
        (["-p", "Hello!"], "", "Hello!"),
        ([], "Hello!\n", "Hello!"),
        (["-"], "Hello!\n", "Hello!"),
        (["-p", "-"], "Hello!\n", "Hello!"),
        (["Summarise"], "a\n\nb\n", "Summarise\n\na\n\nb"),
        (["-p", "Summarise"], "a\n", "Summarise\n\na"),
        (["Summarise"], "\n \n", "Summarise"),
        (["--raw", "Summarise"], "a\n", "Summarise\n\na"),
        (["-p", "demo"], "", "demo"),
        (["--", "--help"], "", "--help"),
    ],
)
def test_a_prompt_and_what_is_piped_are_one(
    asked: list[Any], arguments: list[str], stdin: str, prompt: str
) -> None:
    """The prompt comes first, so that the same question about other texts is reused."""
    run("generate", "--no-reserve", *arguments, stdin=stdin)
    assert asked == [prompt]


@pytest.mark.exhaustive(20)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["demo", "Hello!"], "is demo a model? mlxrunner generate -m demo 'Hello!'; is all of it "
         "the prompt? mlxrunner generate 'demo Hello!'"),
        (["mlx-community/Qwen3-4B-4bit", "hi", "you"],
         "mlxrunner generate -m mlx-community/Qwen3-4B-4bit 'hi you'"),
        (["what", "is", "this"],
         "3 texts, and a prompt is one: mlxrunner generate 'what is this'; -m MODEL"),
        (["demo"], "demo may be a model or a prompt: -m demo names the model, --prompt demo asks"),
        (["a/b"], "a/b may be a model or a prompt"),
        (["Hello!", "-p", "Bye!"], "two prompts: 'Hello!' and --prompt 'Bye!': use one of them"),
        ([], 'the prompt is empty: give one (mlxrunner generate "TEXT")'),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else None,
)  # fmt: skip  # a case a line
def test_what_is_unclear_is_an_error_with_the_right_form(arguments: list[str], said: str) -> None:
    """One line; nothing is loaded and nothing dropped."""
    refused(run("generate", *arguments), said)


def test_a_directory_with_a_model_may_be_one(tmp_path: Path) -> None:
    """A single argument that names it is not asked."""
    (tmp_path / "config.json").write_text("{}")
    assert "may be a model or a prompt" in run("generate", str(tmp_path)).stderr


@pytest.mark.exhaustive(0)
def test_a_pipe_that_is_closed_or_no_text_is_no_traceback(tmp_path: Path) -> None:
    """Standard input that is closed adds nothing; bytes that are not text are refused."""
    words = ["-m", "mlxrunner", "generate", "--no-reserve", "My name is Ana."]
    read, write = os.pipe()
    os.close(write)
    for stdin in (read, subprocess.DEVNULL):
        done = run_program(*words, stdin=stdin, text=True)
        assert (done.returncode, done.stdout) == (0, "Nice to meet you.\n"), done.stderr
    command = ["sh", "-c", '"$@" <&-', "sh", sys.executable, *words]
    closed = subprocess.run(command, capture_output=True, text=True)
    assert (closed.returncode, closed.stdout) == (0, "Nice to meet you.\n"), closed.stderr
    os.close(read)
    broken = run_program(*words, input=b"\xff\xfe")
    assert broken.returncode == 2
    assert broken.stderr.count(b"\n") == 1
    assert b"Traceback" not in broken.stderr


@pytest.mark.exhaustive(20)
@pytest.mark.parametrize(
    ("command", "option", "ours"),
    [
        ("generate", "--temp", "--temperature"),
        ("chat", "--temp", "--temperature"),
        ("batch", "--temp", "--temperature"),
        ("generate", "--n-predict", "--max-tokens"),
        ("generate", "--num_predict", "--max-tokens"),
        ("chat", "-n", "--max-tokens"),
        ("generate", "-c", "--context"),
        ("chat", "--num_ctx", "--context"),
        ("chat", "--ctx-size", "--context"),
        ("plan", "--max-model-len", "--context"),
        ("generate", "--guided_json", "--schema"),
        ("generate", "--guided-choice", "--choices"),
        ("generate", "--repeat-penalty", "--repetition-penalty"),
        ("generate", "--temprature", "--temperature"),
        ("generate", "--system-prompt", "--system"),
        ("chat", "--conversation", "--session"),
    ],
)
def test_an_option_by_its_name_elsewhere_is_answered_with_ours(
    command: str, option: str, ours: str
) -> None:
    """llama.cpp, ollama, vLLM and transformers."""
    assert f"No such option '{option}'. Did you mean '{ours}'?" in refusal(command, option)


@pytest.mark.parametrize(
    ("command", "option", "said"),
    [
        ("chat", "-c", "Did you mean '--context' or '--continue'?"),
        ("generate", "--stream", "Each answer comes as it is made, without an option.\n"),
        ("chat", "--no-stream", "generate --json prints it when it is whole.\n"),
        ("generate", "--option", "has its own flag, such as --temperature 0.8.\n"),
        ("generate", "-o", "stdout gets the answer: `> FILE` keeps it. Each option"),
        ("chat", "--think=false", "turns thinking on, and =false turns it off.\n"),
        ("batch", "--file", "the files of a batch are its arguments;"),
        ("generate", "-f", "can come from standard input (mlxrunner generate < FILE);"),
        ("generate", "-n", "Did you mean '--max-tokens' or '--n'?"),
        ("generate", "--keepalive", "A command unloads its model when it ends;"),
        ("batch", "--template", "the rows of a table: batch --row-template TEXT;"),
        ("batch", "--force", "choose another -o, remove it, or --resume."),
    ],
)
def test_a_flag_without_a_counterpart_is_answered_with_a_way(
    command: str, option: str, said: str
) -> None:
    """No option of ours with similar letters is named instead."""
    assert said in refusal(command, option)


def refusal(command: str, option: str) -> str:
    """Return the error of a command that has no such option."""
    result = run(command, option, "1")
    assert result.exit_code == 2
    return result.stderr


def test_an_option_that_nobody_has_is_not_guessed() -> None:
    """An option whose counterpart the command lacks is not named either."""
    assert "Did you mean" not in run("generate", "--zzz").stderr
    assert "temperature" not in run("show", "--temp", "1").stderr


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["pull", "x"], "Did you mean 'mlxrunner models pull'?"),
        (["ps"], "a server lists its models at"),
        (["-v"], "Did you mean '--version'?"),
        (["version"], "Did you mean 'mlxrunner --version'?"),
        (["sessions", "delete", "x"], "Did you mean 'mlxrunner sessions rm'?"),
        (["server"], "Did you mean 'mlxrunner serve'?"),
        (["why is it so?"], "To ask that, type mlxrunner generate 'why is it so?'"),
        (["genrate"], "Did you mean 'generate'?"),
        (["mistral"], "mlxrunner chat mistral"),
        (["run", "demo", "hi", "--no-such"], "No such option"),
        (
            ["run", "demo", "--format", "json", "hi"],
            'In the file of --schema FILE, {"type": "object"} allows any JSON object.',
        ),
        (["cache", "zzz"], "No such command 'zzz'. cache has export and import.\n"),
        (["cache", "improt"], "Did you mean 'import'?"),
        (["--model", "demo", "chat"], "It comes after a command that has it: mlxrunner chat"),
        (["-m", "demo"], "It comes after a command that has it: mlxrunner chat -m ..."),
        (["chat", "--workers", "2"], "No such option '--workers'. batch has it.\n"),
        (["report", "--since", "1h", "x"], "No such option '--since'.\n"),
        (["report", "--force", "x"], "No such option '--force'.\n"),
        (["report", "--format", "json", "x"], "No such option '--format'. Did you mean '--json'?"),
        (["serve", "--format", "json"], "No such option '--format'.\n"),
        (["chat", "--schema", "{}"], "generate and batch have it.\n"),
        (["show", "--context", "9"], "chat, generate, batch and other commands have it.\n"),
        (["plan", "--context", "8k"], "'8k' is not a whole number: write 8192.\n"),
        (["plan", "--context", "1.5MB"], "'1.5MB' is not a whole number: write 1572864.\n"),
        (["plan", "--context", "big"], "'big' is not a whole number.\n"),
        (["generate", "--temperature", "hot"], "'hot' is not a number.\n"),
        (["chat", "demo", "hi"], "(hi). mlxrunner run MODEL PROMPT answers one prompt.\n"),
        (["sessions", "export", "x"], "Missing FILE: the file to write, or to read.\n"),
    ],
)
def test_a_command_by_its_name_elsewhere_is_answered_with_ours(typed: list[str], said: str) -> None:
    """ollama, llm, and a prompt alone."""
    ends(run(*typed), 2, said)


@pytest.mark.parametrize(
    ("typed", "same"),
    [
        (["help"], ["--help"]),
        (["help", "models", "pull"], ["models", "pull", "--help"]),
        (["models", "list", "--json"], ["models", "--json"]),
        (["models", "ls"], ["models"]),
        (["sessions"], ["sessions", "list"]),
        (["sessions", "--json"], ["sessions", "list", "--json"]),
    ],
    ids=" ".join,
)
def test_a_habit_of_other_programs_is_the_same_as_ours(typed: list[str], same: list[str]) -> None:
    found, expected = run(*typed), run(*same)
    assert (found.exit_code, found.output) == (0, expected.output)


def test_no_command_has_an_option_twice() -> None:
    """click would warn of it each time that the command is used."""
    for command in cli.main.commands.values():
        flags = [flag for one in command.params for flag in (*one.opts, *one.secondary_opts)]
        assert len(flags) == len(set(flags))


def test_the_commands_of_other_programs_lead_to_ours() -> None:
    """Each is a command, or an option of the program."""
    for meant in COMMANDS.values():
        assert run(*meant.split(), "--help").exit_code == 0


def test_the_names_of_other_programs_lead_to_ours() -> None:
    """Each is an option of a command, or a field of a line of a batch."""
    ours = {
        str(option.name)
        for command in cli.main.commands.values()
        for option in command.params
        if isinstance(option, click.Option)
    }
    ours |= {"prompt", "messages", "response_format", "reasoning_effort", "stop_tokens"}
    for table in (SAME, MEANT):
        assert {name.partition(":")[0] for name in table.values()} <= ours
    flags = {
        flag.lstrip("-").replace("-", "_")
        for command in (cli.main, *cli.main.commands.values())
        for one in command.params
        for flag in one.opts
    }
    for names in (*LETTERS.values(), *FLAGS.values()):
        assert {*names} <= flags | {*WAYS}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"temp": 1}, "unknown option 'temp': did you mean 'temperature'? known are "),
        ({"guided_choice": ["a"]}, "unknown option 'guided_choice': did you mean 'choices'? "),
        ({"num_ctx": 4096}, "'context' is a setting of the runner (Runner.load); known are "),
        ({"zzz": 1}, "unknown option 'zzz': known are "),
    ],
)
def test_keywords_of_python_are_answered_with_ours(given: dict[str, Any], said: str) -> None:
    """The error lists the known ones, too."""
    with (
        Runner.load("demo", reserve=False) as runner,
        pytest.raises(OptionError) as error,
    ):
        runner.generate("a", **given)
    assert said in str(error.value)
