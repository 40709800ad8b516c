"""The command line as a user meets it: what it prints where, and its exit codes."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pexpect
import pytest
from support.checks import ends, has, output_of, read_lines, refused, write_lines
from support.command import in_shell, run
from support.engine import Engine

from mlxrunner import Profile, Runner, cli
from mlxrunner.models.load import load_model
from mlxrunner.server import supervisor


@pytest.mark.exhaustive(2)
@pytest.mark.parametrize(
    "words",
    [
        "--help",
        "--version",
        *(f"{name} --help" for name in "generate chat show bench verify".split()),
    ],
)
def test_help_and_version_import_neither_mlx_nor_mlx_lm(words: str) -> None:
    code = (
        "import sys; from mlxrunner.cli import main\n"
        f"try: main({words.split()!r})\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {n.split('.')[0] for n in sys.modules} & {'mlx', 'mlx_lm', 'transformers', "
        "'numpy', 'sentencepiece', 'rich', 'prompt_toolkit'}\n"
        "assert not heavy, heavy\n"
    )
    said = output_of(code)
    assert "Usage:" in said or said.startswith("mlxrunner ")


GIVE_ONE = 'give a prompt: mlxrunner generate "TEXT"'


@pytest.mark.exhaustive(2)
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("generate", GIVE_ONE),
        ("generate -p -", GIVE_ONE),
        ("chat", "a chat reads its turns from a terminal, a file or a pipe"),
    ],
)
def test_a_standard_input_that_is_closed_is_one_line(command: str, said: str) -> None:
    result = in_shell(f"{command} <&-")
    line = f"mlxrunner: standard input is closed: {said}\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", line)


@pytest.mark.exhaustive(2)
@pytest.mark.parametrize(
    "command", ["doctor", "--help", "generate -p Hello!", "generate -p Hello! --json", "show demo"]
)
def test_a_standard_output_that_is_closed_or_full_is_one_line(command: str, full: int) -> None:
    """The exit code is 2: the output that was asked for did not come."""
    for redirection, problem in (
        (">&-", "standard output is closed"),
        ("", "standard output can't be written: No space left on device"),
    ):
        result = in_shell(f"{command} {redirection}", stdout=full)
        assert (result.returncode, result.stderr) == (2, f"mlxrunner: {problem}\n")


@pytest.mark.exhaustive(0)
def test_a_standard_error_that_is_closed_or_full_stops_nothing(full: int, tmp_path: Path) -> None:
    """A file that was opened instead of it gets nothing of it."""
    write_lines(tmp_path / "in.jsonl", [{"prompt": "Hello!"}])
    batch = "batch in.jsonl -o out.jsonl --events e.jsonl --no-reserve"
    for redirection in ("2>&-", "", "<&-"):
        result = in_shell(f"{batch} {redirection}", stderr=full, cwd=tmp_path)
        assert (result.returncode, result.stdout) == (0, "")
        (answer,), (event,) = (read_lines(tmp_path / name) for name in ("out.jsonl", "e.jsonl"))
        assert (answer["text"], event["command"]) == ("Hello! How can I help you?", "batch")
        for file in ("out.jsonl", "out.jsonl.done", "e.jsonl"):
            (tmp_path / file).unlink()


@pytest.mark.parametrize(
    "name", ["a\nmlxrunner: all is well", "b\x1b[2J", "zero\u200bwidth", "n" * 5000]
)
def test_a_name_cannot_forge_a_line_of_an_error(name: str) -> None:
    """One line of bounded length, whatever a name has in it."""
    for words, *rest in (
        ("show", f"./{name}"),
        ("batch -o out", name),
        ("report", name),
        ("generate -p x -m", name),
    ):
        result = run(*words.split(), *rest)
        assert result.exit_code == 2
        assert result.stderr.count("\n") == 1, result.stderr
        assert len(result.stderr) < 700
        assert not {"\x1b", "\u200b"} & set(result.stderr)


def test_a_word_too_many_does_not_control_the_terminal() -> None:
    """A shell writes the names of files in the place of a star."""
    for words in (["doctor"], ["chat", "demo"], ["show", "demo"], ["explain", "a", "b"]):
        result = run(*words, "\x1b[2J\u202e")
        assert result.exit_code == 2
        assert not {"\x1b", "\u202e"} & set(result.stderr)
        assert r"(\x1b[2J\u202e)" in result.stderr


@pytest.mark.parametrize(("told", "code"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
def test_an_interrupt_that_python_wraps_is_one_all_the_same(
    told: BaseException, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python wraps it in the body of a class that is being imported."""

    def interrupted(*_: object, **__: object) -> None:
        raise RuntimeError("Error calling __set_name__") from told

    monkeypatch.setattr("mlxrunner.system.device.findings", interrupted)
    result = run("doctor")
    assert (result.exit_code, result.stderr) == (code, "")


def test_generate_prints_the_answer_and_nothing_else() -> None:
    """On stdout, ended by a newline."""
    result = run("generate", "--prompt", "My name is Ana. What is my name?")
    assert (result.stdout, result.stderr, result.exit_code) == ("Your name is Ana.\n", "", 0)


def generated(words: str, *more: str) -> list[Any]:
    """Return the objects that `generate --json` prints."""
    result = run("generate", "--json", *words.split(), *more)
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_generate_json_is_one_object_per_run() -> None:
    """With text, tokens, finish_reason and usage; the second run is a hit."""
    first, second = generated("--repeat 2 --logprobs 2 -p", "My name is Ana.")
    assert first["text"] == second["text"]
    assert first["tokens"] == second["tokens"]
    assert first["finish_reason"] == "stop"
    assert len(first["logprobs"]) == len(first["tokens"])
    assert [first["usage"]["outcome"], second["usage"]["outcome"]] == ["miss", "hit"]
    assert second["usage"]["evaluated_tokens"] == 1
    assert second["usage"]["cached_tokens"] == second["usage"]["prompt_tokens"] - 1


def test_generate_json_of_several_answers_has_log_probabilities() -> None:
    """One line for each of --n, with one entry for each token."""
    answers = generated("--n 2 --logprobs 2 -p", "My name is Ana.")
    assert [answer["index"] for answer in answers] == [0, 1]
    for answer in answers:
        assert len(answer["logprobs"]) == len(answer["tokens"])
        assert {len(token["top"]) for token in answer["logprobs"]} == {2}


def test_generate_shows_each_of_several_answers_one_of_which_fails() -> None:
    """Up to its error, which has a line of its own; the exit code is that of the error."""
    words = "generate -p Hello! --context 34 --temperature 1.5 --no-reserve --overflow error"
    options = words.split()
    alone = [run(*options, "--seed", seed) for seed in (1, 2)]
    assert [one.exit_code for one in alone] == [1, 0]
    error = alone[0].stderr.removeprefix("mlxrunner: ")
    assert "filled the context of 34 tokens" in error
    texts = [one.stdout.removesuffix("\n") for one in alone]
    result = run(*options, "--seed", 1, "--n", 2)
    assert result.exit_code == 1
    assert result.stderr.endswith(f"mlxrunner: answer 1 of 2: {error}")
    assert result.stdout == f"{texts[0]}\n\n{texts[1]}\n"
    result = run(*options, "--seed", 1, "--n", 2, "--json")
    assert result.exit_code == 1
    failed, whole = (json.loads(line) for line in result.stdout.splitlines())
    has(failed, text=texts[0], finish_reason="error", error=error.strip())
    has(whole, text=texts[1], finish_reason="stop")
    assert "error" not in whole


@pytest.mark.parametrize(
    "option", ["--repeat", "--kv-bits", "--rewind-slack", "--checkpoint-budget"]
)
def test_generate_refuses_what_several_answers_would_ignore(option: str) -> None:
    """In one line, before the model is loaded."""
    result = run("generate", "-p", "Hello!", "--n", "2", option, "8")
    ends(result, 2, f"mlxrunner: {option} ", "--n ")


def test_generate_keeps_the_settings_of_several_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """--prefill-step and --no-reserve."""
    seen: list[Any] = []
    monkeypatch.setattr(Profile, "watch", lambda self, runner: seen.append(runner))
    monkeypatch.setattr(Engine, "close", lambda self: None)
    options = ("--max-tokens", "2", "--prefill-step", "5", "--no-reserve", "--context", "64")
    assert run("generate", "-p", "Hello!", "--n", "2", *options).exit_code == 0
    (runner,) = seen
    assert isinstance(runner, Engine)
    assert runner.prefill_step == 5
    assert runner.plan is None


def test_generate_system_stop_and_max_tokens() -> None:
    """A fact from the system prompt; an answer cut before the stop text; a limit."""
    asked = ("generate", "-p", "What is my name?", "--system", "The user's name is Ana.")
    assert run(*asked).stdout == "Your name is Ana.\n"
    assert run(*asked, "--stop", " is").stdout == "Your name\n"
    (cut,) = generated("-p Hello! --max-tokens 2")
    assert (cut["finish_reason"], len(cut["tokens"])) == ("length", 2)


def test_raw_is_continued_without_a_template() -> None:
    """The tokens of the prompt are its text and BOS, nothing more."""
    found = [generated(f"-p Hello --max-tokens 1 {raw}") for raw in ("--raw", "")]
    raw, templated = (one["usage"]["prompt_tokens"] for (one,) in found)
    assert raw < templated


def test_verbose_logs_one_line_a_request() -> None:
    """-v logs what a request reused and its cost; -vv also what is left to evaluate."""
    command = ["generate", "-p", "Hello!", "--repeat", "2"]
    once, twice = (run(*command, flag, COLUMNS="80") for flag in ("-v", "-vv"))
    miss, hit = once.stderr.splitlines()
    assert miss.startswith(
        "command=generate number=1 outcome=miss reason=empty prompt_tokens=19 new_tokens=19 "
    )
    assert hit.startswith(
        "command=generate number=2 outcome=hit reason=prompt_shorter prompt_tokens=19 "
        "matched_tokens=19 cached_tokens=18 "
    )
    assert len(twice.stderr.splitlines()) == 4
    assert twice.stderr.startswith("lookup prompt_tokens=19 matched_tokens=0 cached_tokens=0\n")
    assert once.stdout == twice.stdout


@pytest.mark.parametrize(
    ("words", "more", "message"),
    [
        ("generate -p x -m nowhere", (), "nowhere: no such model"),
        ("generate -p x --top-p 3", (), "top_p: 3.0 is out of range, it has to be between 0 and 1"),
        ("generate -p x --max-tokens 0", (), "max_tokens: 0 is out of range"),
        ("generate -p x --raw --system y", (), "--system needs the chat template"),
        ("generate -p x --logprobs 3", (), "--logprobs needs --json"),
        ("generate -p x --draft-model /no/such/model", (), "/no/such/model: no such model"),
        ("generate -p", ("",), "the prompt is empty"),
        (
            "generate -p",
            ("word " * 3000,),
            "the prompt has 6017 tokens, which leaves no room in the context of 2048",
        ),
        (
            "generate -p",
            ("word " * 30_000,),
            "the prompt has at least 2048 tokens, which leaves no room in the context",
        ),
        ("generate -p x --context 1", (), "context: 1 is out of range"),
        ("generate -p x --prefill-step 0", (), "prefill_step: 0 is out of range"),
        ("show nowhere", (), "nowhere: no such model"),
        (
            "chat --set history=template --set keep_thinking=true",
            (),
            "keep_thinking needs history = exact",
        ),
        (
            "chat",
            ("Who am I?",),
            "Who am I?: no such model; to ask that, type mlxrunner generate 'Who am I?'",
        ),
        ("chat --temperature -1", (), "temperature: -1.0 is out of range"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_is_wrong_is_one_line_and_exit_code_2(
    words: str, more: tuple[str, ...], message: str
) -> None:
    """On stderr, without a traceback."""
    refused(run(*words.split(), *more), f"mlxrunner: {message}")


def test_generate_refuses_parallel_for_one_answer() -> None:
    """It would be ignored; the default of 8 is not. A line before says that it is a former name."""
    result = run("generate", "-p", "x", "--parallel", "2")
    assert "mlxrunner: --parallel is for the answers of --n: use --n K with it\n" in result.stderr
    assert result.exit_code == 2


def test_debug_shows_the_traceback() -> None:
    """The error is the same."""
    result = run("generate", "-p", "x", "-m", "nowhere", "--debug")
    assert "Traceback" in result.stderr
    assert "no such model" in result.stderr


def test_a_bug_is_one_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1, and how to see more."""
    monkeypatch.setattr(Runner, "generate", lambda *a, **k: 1 / 0)
    result = run("generate", "-p", "x")
    said = "internal error: ZeroDivisionError: division by zero (--debug shows where)"
    assert (result.exit_code, result.stderr) == (1, f"mlxrunner: {said}\n")


def test_show_describes_the_demo() -> None:
    """Architecture, layers by kind, context, bytes per token."""
    text = run("show", "demo").stdout
    assert "architecture  llama" in text
    assert "6 full" in text
    facts = json.loads(run("show", "demo", "--json").stdout)
    assert facts["layers"] == {"full": 6}
    assert facts["context"] >= 1024
    assert facts["cache"]["per_token"] == 6 * 2 * 192 * 4


def test_doctor_names_device_versions_and_remedies() -> None:
    """Each with what to do about it where something is missing."""
    found = {finding["name"]: finding for finding in json.loads(run("doctor", "--json").stdout)}
    names = "device backend memory BLAS compiler python mlx mlx-lm mlxrunner"
    assert {*names.split()} <= found.keys()
    assert all(finding["ok"] or finding["advice"] for finding in found.values())
    assert "backend" in run("doctor").stdout


def test_the_doctor_notices_a_slow_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how to get a fast one."""
    from mlxrunner.system import device

    monkeypatch.setattr(device, "is_gpu", lambda: False)
    monkeypatch.setattr(device.platform, "system", lambda: "Linux")
    monkeypatch.setattr(device, "_text", lambda path: "")
    monkeypatch.setattr(device.openblas, "find", lambda: None)
    assert "apt-get install libopenblas0-pthread" in device.blas().advice
    monkeypatch.setattr(device.openblas, "find", lambda: "/usr/lib/libopenblas.so.0")
    assert device.blas().advice.endswith(
        "LD_PRELOAD=/usr/lib/libopenblas.so.0 OPENBLAS_NUM_THREADS=1"
    )
    monkeypatch.setenv("MLXRUNNER_OPENBLAS", "0")
    assert "unset MLXRUNNER_OPENBLAS" in device.blas().advice
    monkeypatch.setattr(device.shutil, "which", lambda name: None)
    assert device.compiler().advice.endswith("install g++")


@pytest.mark.parametrize(("switch", "count"), [("1", 1), ("0", 0)])
def test_a_program_of_the_user_is_told_of_a_slow_blas(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, switch: str, count: int
) -> None:
    """Once, unless it was turned off."""
    from mlxrunner.system import device

    slow = device.Finding("BLAS", "slow ones", ok=False, advice="LD_PRELOAD=this")
    monkeypatch.setattr(device, "blas", lambda: slow)
    monkeypatch.setenv("MLXRUNNER_OPENBLAS", switch)
    device.warn_of_slow_blas.cache_clear()
    for _ in range(2):
        load_model("demo")
    told = ["matrix products run on slow ones; LD_PRELOAD=this"] * count
    assert [one.getMessage() for one in caplog.records if "matrix" in one.getMessage()] == told


def test_models_lists_an_empty_cache(tmp_path: Path) -> None:
    """With a hint on stderr, and an empty list in JSON."""
    env = {**os.environ, "HF_HUB_CACHE": str(tmp_path)}
    text, listed = (in_shell(words, env=env) for words in ("models", "models --json"))
    assert (text.returncode, text.stdout) == (0, "")
    assert "no models in the hub cache yet" in text.stderr
    assert json.loads(listed.stdout) == []


def test_the_version_names_those_of_mlx_and_mlx_lm() -> None:
    """A report of a bug needs the three; none of them is imported for that."""
    expected = ", ".join(f"{name} {version(name)}" for name in ("mlx", "mlx-lm"))
    assert run("--version").stdout == f"mlxrunner {version('mlxrunner')} ({expected})\n"


def test_a_terminal_says_that_the_context_was_full(open_screen: Any) -> None:
    """The limit of --max-tokens is no surprise, and is not mentioned."""
    command = ("-m", "mlxrunner", "generate", "--no-reserve", "My name is Bo. What is my name?")
    screen = open_screen(*command, "--context", "33")
    screen.until("(stopped at the end of the context of 33 tokens: --context N makes it longer")
    screen = open_screen(*command, "--max-tokens", "3")
    screen.until("Your name is")
    screen.child.expect(pexpect.EOF)
    assert "cut off" not in screen.shown + screen.child.before


TAKE_A_MODEL = ["bench", "chat", "config", "plan", "serve", "show", "verify"]


@pytest.mark.parametrize("command", TAKE_A_MODEL)
def test_a_model_is_an_argument_or_an_option(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways reach the same error for a model that is not there; both at once are one, too."""
    # A supervisor starts the command of this process again, which is pytest.
    worker = SimpleNamespace(listening=nullcontext(), journal=None)
    monkeypatch.setattr(supervisor.ServerWorker, "started", lambda: worker)
    said = {run(command, *way).stderr for way in (["./nowhere"], ["-m", "./nowhere"])}
    said.add(run(command, MLXRUNNER_MODEL="./nowhere").stderr)
    (line,) = said
    assert command == "config" or "nowhere" in line
    ends(run(command, "one", "-m", "two"), 2, "two models: one and -m two")


def test_every_command_that_takes_a_model_is_listed() -> None:
    """A new one gets both ways."""
    found = {
        name
        for name, command in cli.main.commands.items()
        if any(parameter.name == "named" for parameter in command.params)
    }
    assert found == set(TAKE_A_MODEL)
    assert not any(
        isinstance(parameter, click.Argument) and parameter.name == "model"
        for command in cli.main.commands.values()
        for parameter in command.params
    )
