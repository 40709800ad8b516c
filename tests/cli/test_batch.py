"""`mlxrunner batch` as a user meets it: what it prints where, what it writes, and its exit codes.
Kills are in tests/batch/test_resume.py.
"""

from __future__ import annotations

import gzip
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.architectures import build, settings_of
from support.models import save_model, write_model, write_tokenizer
from support.waiting import PATIENCE_S

from mlxrunner import cli
from mlxrunner.batch.tally import Tally
from mlxrunner.parallel.stepper import Stepper
from mlxrunner.profiling.record.profile import Profile

FACTS = ["My name is Ana.", "My name is Zorblin."]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: object, stdin: str | bytes = "") -> Result:
    return CliRunner().invoke(cli.main, ["batch", *map(str, arguments)], input=stdin)


def write(*lines: Any, file: str = "in.jsonl") -> str:
    Path(file).write_text(
        "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    )
    return file


def answers(file: str = "out.jsonl") -> list[Any]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def test_a_batch_passes_its_memory_and_step_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """To the runner of several lines, whose cells are those that fit into the memory."""
    seen: list[Stepper] = []
    opened = Stepper.of.__func__  # type: ignore[attr-defined]

    def of(cls: Any, *arguments: Any, **settings: Any) -> Stepper:
        seen.append(opened(cls, *arguments, **settings))
        return seen[-1]

    monkeypatch.setattr(Stepper, "of", classmethod(of))
    lines = [{"prompt": f"Line {number}: {'word ' * 20}", "max_tokens": 3} for number in range(6)]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for given in ([], ["--memory", "1500000", "--step-ms", "50"]):
        command = ["batch", str(source), "-o", str(tmp_path / f"{len(given)}.jsonl"), *given]
        result = CliRunner().invoke(cli.main, [*command, "--parallel", "3", "--no-reserve"])
        assert result.exit_code == 0, result.output
    free, bounded = (runner.settings for runner in seen)
    assert (free["memory"], free["step_ms"]) == (None, 0)
    assert (bounded["memory"], bounded["step_ms"]) == (1500000, 50)
    assert bounded["cells"] < free["cells"]
    wrong = CliRunner().invoke(cli.main, [*command[:4], "--memory", "0"])
    assert (wrong.exit_code, wrong.stderr) == (
        2,
        "mlxrunner: memory: 0 is out of range, it has to be at least 1\n",
    )


def test_questions_about_facts_are_answered_in_the_order_of_the_input() -> None:
    """The demo model recalls its facts in input order, in a private file, and the store goes."""
    asked = [
        ("ana", f"{FACTS[0]} What is my name?"),
        ("zorblin", f"{FACTS[1]} What is my name?"),
        ("hello", "Hello!"),
    ]
    result = run(write(*({"id": name, "prompt": text} for name, text in asked)), "-o", "out.jsonl")
    assert (result.exit_code, result.stdout) == (0, "")
    found = answers()
    assert [(line["id"], line["index"], line["text"]) for line in found] == [
        ("ana", 0, "Your name is Ana."),
        ("zorblin", 1, "Your name is Zorblin."),
        ("hello", 2, "Hello! How can I help you?"),
    ]
    assert all(
        line["finish_reason"] == "stop" and line["usage"]["completion_tokens"] > 2 for line in found
    )
    assert "3 lines in " in result.stderr
    assert sorted(path.name for path in Path().iterdir() if path.is_file()) == [
        "in.jsonl",
        "out.jsonl",
        "out.jsonl.done",
    ]


def test_one_at_a_time_each_line_reuses_what_it_shares_with_the_one_before() -> None:
    """The evaluated tokens add up to what --plan says is the best."""
    lines = [
        {"prompt": f"{fact} {question}"}
        for question in ("What is my name?", "How are you?", "Hello!")
        for fact in FACTS
    ]
    run(write(*lines), "-o", "out.jsonl", "--parallel", 1)
    planned = json.loads(run("in.jsonl", "--plan", "--json").stdout)
    evaluated = sum(line["usage"]["evaluated_tokens"] for line in answers())
    assert (
        evaluated
        == planned["evaluated_in_prefix_order"]
        == planned["evaluated_at_best"]
        < planned["evaluated_in_input_order"]
    )


@pytest.mark.exhaustive(2)
@pytest.mark.parametrize("lanes", [None, 1, 2, 8])
def test_any_number_at_a_time_gives_the_same_file(lanes: int | None) -> None:
    """Without usage the file is equal byte for byte; stderr says how many unless one was asked."""
    lines = [
        {"prompt": f"{FACTS[i % 2]} What is my name?", "temperature": 0.9 * (i % 3 == 0), "seed": i}
        for i in range(7)
    ]
    write(*lines)
    run("in.jsonl", "-o", "one.jsonl", "--parallel", 1, "--no-usage")
    result = run(
        "in.jsonl", "-o", "out.jsonl", "--no-usage", *(["--parallel", lanes] if lanes else [])
    )
    assert result.exit_code == 0
    assert Path("out.jsonl").read_bytes() == Path("one.jsonl").read_bytes()
    expected = {None: "7 lines at a time", 1: None, 2: "2 lines at a time", 8: "7 lines at a time"}[
        lanes
    ]
    assert ("at a time" in result.stderr) == bool(expected)
    assert (expected or "") in result.stderr


@pytest.mark.parametrize(
    ("typed", "step"),
    [((), 256), (("--prefill-step", 64), 64), (("--prefill-step", 2048), 2048)],
    ids=str,
)
def test_several_at_a_time_have_steps_as_asked(
    typed: tuple[object, ...], step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --prefill-step they have a default of their own."""
    seen: list[Any] = []
    monkeypatch.setattr(Profile, "watch", lambda self, runner: seen.append(runner.settings))
    lines = write(*[{"prompt": f"{FACTS[0]} What is my name? {i}"} for i in range(2)])
    assert run(lines, "-o", "out.jsonl", "--parallel", 2, *typed).exit_code == 0
    assert [settings["prefill_step"] for settings in seen] == [step]


def test_a_model_that_cannot_run_several_runs_one_at_a_time_and_says_why() -> None:
    """GPT-2 adds the number of a token in its row to a position that is a number."""
    save_model(Path("gpt2"), build("gpt2"), settings_of("gpt2"))
    write_tokenizer(Path("gpt2"))
    result = run(
        write(*[{"prompt": "ab", "max_tokens": 2}] * 3),
        "-o",
        "out.jsonl",
        "-m",
        "gpt2",
        "--parallel",
        3,
        "--context",
        64,
    )
    assert result.exit_code == 0, result.stderr
    assert "one line at a time: layer 0: this model can't run several sequences" in result.stderr
    assert len({line["text"] for line in answers()}) == 1


def test_options_of_the_command_are_those_of_lines_that_do_not_say_otherwise() -> None:
    """A line's own win."""
    lines = [
        {"prompt": "Hello!"},
        {"prompt": "Hello!", "max_tokens": 5},
        {"prompt": "Hello!", "system": "The user's name is Bo."},
    ]
    run(write(*lines), "-o", "out.jsonl", "--max-tokens", 2, "--system", "The user's name is Ana.")
    assert [line["usage"]["completion_tokens"] for line in answers()] == [2, 5, 2]
    assert len({line["usage"]["prompt_tokens"] for line in answers()}) == 2
    run("in.jsonl", "-o", "raw.jsonl", "--raw")
    assert (
        answers("raw.jsonl")[0]["usage"]["prompt_tokens"] < answers()[0]["usage"]["prompt_tokens"]
    )


def test_sampling_options_reach_the_model_and_each_line_has_a_seed_of_its_own() -> None:
    """--seed S is S + i for line number i."""
    write(*[{"prompt": "Hello!"}] * 3, {"prompt": "Hello!", "seed": 9})
    run(
        "in.jsonl",
        "-o",
        "out.jsonl",
        "--temperature",
        3,
        "--seed",
        9,
        "--max-tokens",
        12,
        "--stop",
        "zzz",
    )
    texts = [line["text"] for line in answers()]
    assert texts[0] == texts[3]
    assert len(set(texts)) == 3
    one = CliRunner().invoke(
        cli.main,
        [
            "generate",
            "-p",
            "Hello!",
            "--temperature",
            "3",
            "--seed",
            "10",
            "--max-tokens",
            "12",
            "--json",
        ],
    )
    assert json.loads(one.stdout)["text"] == texts[1]


BROKEN = [
    "{broken",
    {"id": 1},
    {"prompt": "Hello!", "promt": 1},
    {"prompt": "Hello!", "top_p": 3},
    {"prompt": "x " * 3000},
    "[1]",
    '"text"',
]


def test_bad_lines_get_an_error_with_their_number_and_stop_nothing() -> None:
    """Exit code 1, and a summary that shows the first."""
    result = run(write({"prompt": "Hello!"}, *BROKEN, "", {"prompt": "Hello!"}), "-o", "out.jsonl")
    found = answers()
    assert [("error" in line, line["index"]) for line in found] == [
        (0 < i < 8, i) for i in range(9)
    ]
    assert [line["error"].split(":")[0] for line in found[1:8]] == [
        f"line {i}" for i in range(2, 9)
    ]
    for error, said in zip(
        found[1:8],
        ["not JSON", "no", "promt", "top_p: 3", "leaves no room in the context", "", ""],
        strict=True,
    ):
        assert said in error["error"]
    assert result.exit_code == 3
    assert "7 of 9 lines failed, the first: line 2: not JSON" in result.stderr


def test_only_bad_lines_need_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their errors are written."""
    monkeypatch.setattr(
        "mlxrunner.batch.work.open_runner", lambda *arguments: pytest.fail("a model is loaded")
    )
    assert run(write(*BROKEN), "-o", "out.jsonl").exit_code == 3
    assert len(answers()) == len(BROKEN)


def test_strict_runs_nothing_if_a_line_is_bad() -> None:
    """Exit code 2, one line, no files."""
    result = run(write({"prompt": "Hello!"}, *BROKEN), "-o", "out.jsonl", "--strict")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(
        "mlxrunner: 7 of 8 lines can't be run, the first: line 2: not JSON"
    )
    assert not Path("out.jsonl").exists()
    assert not Path("out.jsonl.run").exists()
    assert run(write({"prompt": "Hello!"}), "-o", "out.jsonl", "--strict").exit_code == 0


def test_max_errors_stops_and_can_be_gone_on_with() -> None:
    """With the command that it prints: it counts what failed since."""
    write({"prompt": "Hello!"}, *BROKEN)
    result = run("in.jsonl", "-o", "out.jsonl", "--max-errors", 3, "--order", "input")
    assert result.exit_code == 1
    assert "stopped: 4 of 8 lines are done (--max-errors 3)" in result.stderr
    assert "to go on: " in result.stderr
    assert len(answers()) == 4
    for code, written in ((1, 7), (3, 8)):
        result = run(
            "in.jsonl", "-o", "out.jsonl", "--max-errors", 3, "--order", "input", "--resume"
        )
        assert (result.exit_code, len(answers())) == (code, written)
    assert "to go on: " not in result.stderr


def openai(custom_id: str, content: str, **body: Any) -> dict[str, Any]:
    body = {"model": "gpt", "messages": [{"role": "user", "content": content}], **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def test_openai_batch_files_end_to_end() -> None:
    """Answered in that format, errors too."""
    lines = [
        openai("q1", "Hello!", max_tokens=3),
        openai("q2", "Hello!", max_completion_tokens=3),
        openai("q3", "Hello!", n=2),
    ]
    result = run(write(*lines), "-o", "out.jsonl", "--parallel", 1)
    one, two, three = answers()
    assert result.exit_code == 3
    assert [line["custom_id"] for line in (one, two, three)] == ["q1", "q2", "q3"]
    body = one["response"]["body"]
    assert (one["error"], one["response"]["status_code"], body["object"]) == (
        None,
        200,
        "chat.completion",
    )
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": two["response"]["body"]["choices"][0]["message"]["content"],
    }
    assert body["choices"][0]["finish_reason"] == "length"
    assert {
        line["response"]["body"]["usage"]["prompt_tokens_details"]["cached_tokens"]
        for line in (one, two)
    } == {0, body["usage"]["prompt_tokens"] - 1}
    assert (three["response"]["status_code"], three["error"]["code"]) == (
        400,
        "invalid_request_error",
    )
    assert three["error"]["message"].startswith("line 3: ")


@pytest.mark.parametrize("broken", [0, 1])
def test_a_line_that_cannot_be_read_is_answered_in_the_format_of_the_file(broken: int) -> None:
    """The format is that of the first line that can be read; the answer has no custom_id."""
    lines: list[Any] = [openai("q1", "Hello!", max_tokens=3)]
    lines.insert(broken, "{not JSON")
    run(write(*lines), "-o", "out.jsonl")
    found = answers()[broken]
    assert (found["custom_id"], found["response"]["status_code"]) == (None, 400)
    assert found["error"]["message"].startswith(f"line {broken + 1}: not JSON")


def test_the_first_error_is_that_of_the_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is that of the first line, broken or failed, also in a run that goes on."""

    def fall(deadline: object, *reached: int) -> None:
        raise ValueError("it fell")

    monkeypatch.setattr("mlxrunner.batch.execution.Deadline.__call__", fall)
    lines = [openai("q1", "Hello!"), "{not JSON", openai("q2", "Hello!")]
    result = run(write(*lines), "-o", "out.jsonl", "--parallel", 1, "--max-errors", 2)
    assert "2 of 3 lines failed, the first: line 1: ValueError: it fell" in result.stderr
    result = run("in.jsonl", "-o", "out.jsonl", "--parallel", 1, "--resume")
    assert "3 of 3 lines failed, the first: line 1: ValueError: it fell" in result.stderr


@pytest.mark.exhaustive(2)
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("batch - -o out.jsonl <&-", "mlxrunner: standard input is closed\n"),
        ("batch in.jsonl -o - >&-", "mlxrunner: standard output is closed\n"),
        ("batch in.jsonl -o out.jsonl -q >&-", ""),
        ("batch in.jsonl -o out.jsonl 2>&-", ""),
    ],
)
def test_a_closed_standard_stream_is_one_line(command: str, said: str) -> None:
    """There is no line where the stream is not needed."""
    write({"prompt": "Hello!", "max_tokens": 2})
    result = subprocess.run(
        f"{sys.executable} -m mlxrunner {command}",
        shell=True,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (result.returncode, result.stderr) == (2 if said else 0, said)
    assert Path("out.jsonl").exists() == (not said)


def test_csv_end_to_end() -> None:
    """A template with columns; quotes, commas and line ends in values."""
    Path("in.csv").write_text('id,name,more\nx,Ana,"a, b"\ny,"Zor\nblin",\nbad,row\n')
    result = run(
        "in.csv", "-o", "out.jsonl", "--prompt-template", "My name is {name}. What is my name?"
    )
    assert (answers()[0]["id"], answers()[0]["text"]) == ("x", "Your name is Ana.")
    assert (result.exit_code, len(answers())) == (3, 3)
    assert answers()[2]["error"].startswith("line 5: ")
    result = run("in.csv", "-o", "other.jsonl")
    assert (result.exit_code, "neither a column 'prompt' nor" in result.stderr) == (2, True)
    result = run("in.csv", "-o", "other.jsonl", "--prompt-template", "{town}")
    assert (result.exit_code, "no column 'town'" in result.stderr) == (2, True)
    assert not Path("other.jsonl").exists()
    assert not Path("other.jsonl.run").exists()


def test_standard_input_and_output() -> None:
    """`-` for each; what is on stdout is the answers and nothing else."""
    text = json.dumps({"prompt": "Hello!"}) + "\n"
    result = run("-", "-o", "-", "--no-usage", stdin=text)
    assert json.loads(result.stdout) == {
        "id": None,
        "index": 0,
        "text": "Hello! How can I help you?",
        "finish_reason": "stop",
    }
    run("-", "-o", "out.jsonl", stdin=text)
    assert answers()[0]["text"] == "Hello! How can I help you?"
    result = run("-", "-o", "-", "--resume", stdin=text)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--resume needs an output file" in result.stderr


def test_a_closed_pipe_ends_it_quietly() -> None:
    """`mlxrunner batch ... -o - | head -1`."""
    write(*[{"prompt": "Hello!", "max_tokens": 3}] * 200)
    command = (
        f"{sys.executable} -m mlxrunner batch in.jsonl -o - --no-usage -q --no-reserve --parallel "
        "1 | head -1"
    )
    result = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=PATIENCE_S)
    assert len(result.stdout.splitlines()) == 1
    assert result.stderr == ""


def test_a_stream_on_a_full_disk_is_one_line(full: int) -> None:
    """It is written to as answers come, and such a run can't resume."""
    stream = f"/dev/fd/{full}"
    result = run(write({"prompt": "Hello!"}), "-o", stream, "-q")
    assert (result.exit_code, result.stderr) == (
        1,
        f"mlxrunner: {stream}: can't be written: No space left on device\n",
    )
    refused = run(write({"prompt": "Hello!"}), "-o", stream, "--resume")
    assert (refused.exit_code, refused.stderr) == (
        2,
        "mlxrunner: --resume needs an output file: a run whose answers went to standard output "
        "or a device can't resume\n",
    )


def test_an_output_that_is_no_file_is_refused_at_once(null: Path) -> None:
    """A FIFO and a link are refused at once; the null device is written to and stays one."""
    os.mkfifo("fifo")
    os.symlink("elsewhere", "link")
    for name, why in (
        ("fifo", "it is a FIFO, not a regular file"),
        ("link", "it is a link to elsewhere: name the file itself"),
    ):
        result = run(write({"prompt": "Hello!"}), "-o", name)
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"mlxrunner: {name}: can't be written: {why}" in result.stderr
        assert not os.path.exists(f"{name}.run")
    before = null.lstat()
    assert run("in.jsonl", "-o", null, "-q").exit_code == 0
    assert os.path.samestat(before, null.lstat())


def test_output_order_done_writes_as_they_finish() -> None:
    """In the order in which they ran; each says its index."""
    lines = [
        {"prompt": f"{fact} What is my name?"}
        for fact in ("My name is Zo.", "My name is Al.", "My name is Zo.")
    ]
    run(write(*lines), "-o", "out.jsonl", "--output-order", "done", "--parallel", 1)
    order = [line["index"] for line in answers()]
    assert order != [0, 1, 2]
    assert sorted(order) == [0, 1, 2]
    assert abs(order.index(0) - order.index(2)) == 1


def test_plan_needs_no_weights_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table, or one JSON object; nothing is written."""
    monkeypatch.setattr(
        "mlxrunner.batch.work.open_runner", lambda *arguments: pytest.fail("a model is loaded")
    )
    result = run(
        write({"prompt": "Hello!"}, {"prompt": "Hello!"}, "x"), "--plan", "-o", "out.jsonl"
    )
    assert (result.exit_code, result.stderr) == (0, "")
    assert "evaluated in prefix order" in result.stdout
    assert "2 at a time, as far as they fit into memory" in result.stdout
    planned = json.loads(run("in.jsonl", "--plan", "--json").stdout)
    assert (planned["broken"], planned["parallel"]) == (1, 2)
    for arguments, lanes in (
        (["--kv-bits", 8], 1),
        (["--parallel", 50], 2),
        (["--parallel", 1], 1),
    ):
        assert (
            json.loads(run("in.jsonl", "--plan", "--json", *arguments).stdout)["parallel"] == lanes
        )
    assert [path.name for path in Path().iterdir()] == ["in.jsonl"]


def test_plan_of_a_run_that_is_gone_on_with_is_about_what_is_left() -> None:
    """The measured speed gives a time."""
    write({"prompt": "Hello!"}, "x", *[{"prompt": "Hello!"}] * 3)
    run("in.jsonl", "-o", "out.jsonl", "--max-errors", 1, "--order", "input")
    planned = json.loads(run("in.jsonl", "-o", "out.jsonl", "--plan", "--json", "--resume").stdout)
    assert (planned["lines"], planned["done"]) == (5, 2)
    assert planned["seconds"] > 0
    assert Path("out.jsonl.run").exists()


def test_quiet_says_nothing() -> None:
    """Only an error that stops the batch is said."""
    assert run(write({"prompt": "Hello!"}, "x"), "-o", "out.jsonl", "-q").stderr == ""
    assert run("in.jsonl", "-o", "out.jsonl", "-q").stderr.count("\n") == 1


WRONG: dict[str, tuple[list[object], str]] = {
    "no output": (["in.jsonl"], "where do the answers go? -o FILE"),
    "input is output": (["in.jsonl", "-o", "in.jsonl"], "in.jsonl: is the input"),
    "no input": (["no.jsonl", "-o", "out.jsonl"], "no.jsonl: no such file"),
    "output is in the input": (
        [".", "-o", "out.jsonl"],
        "out.jsonl: is in the input; choose another file",
    ),
    "no folder": (
        ["in.jsonl", "-o", "no/out.jsonl"],
        "mlxrunner: no/out.jsonl: can't be written: no/out.jsonl.run: can't be made: No such",
    ),
    "a folder": (["in.jsonl", "-o", "/"], "mlxrunner: /: can't be written: Is a directory"),
    "output is there": (["in.jsonl", "-o", "list.json"], "list.json: is there already"),
    "no model": (["in.jsonl", "-o", "out.jsonl", "-m", "nowhere"], "nowhere: no such model"),
    "raw and system": (
        ["in.jsonl", "-o", "out.jsonl", "--raw", "--system", "x"],
        "--system needs the chat template",
    ),
    "option": (["in.jsonl", "-o", "out.jsonl", "--top-p", 2], "top_p: 2.0 is out of range"),
    "context": (["in.jsonl", "-o", "out.jsonl", "--context", 1], "context: 1 is out of range"),
    "embeddings": (
        ["in.jsonl", "-o", "out.jsonl", "--embeddings"],
        "--embeddings: embeddings are not supported: this program generates text",
    ),
    "json": (["in.jsonl", "-o", "out.jsonl", "--json"], "--json is for --plan"),
    "no schema": (
        ["in.jsonl", "-o", "out.jsonl", "--schema", "no.json"],
        "--schema no.json: no such file",
    ),
    "bad schema": (
        ["in.jsonl", "-o", "out.jsonl", "--schema", "in.jsonl"],
        "--schema in.jsonl: not valid JSON",
    ),
    "list as schema": (
        ["in.jsonl", "-o", "out.jsonl", "--schema", "list.json"],
        "--schema list.json: it has to be a JSON object",
    ),
}


@pytest.mark.parametrize("which", WRONG)
def test_what_is_wrong_with_the_whole_batch_is_one_line(which: str) -> None:
    """Before anything runs; no file is made."""
    write("not JSON")
    write([], file="list.json")
    arguments, message = WRONG[which]
    result = run(*arguments)
    assert result.exit_code == 2, result.stderr
    assert result.stderr.startswith("mlxrunner: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert sorted(path.name for path in Path().iterdir()) == ["in.jsonl", "list.json"]


def test_an_empty_input_is_an_empty_output() -> None:
    """Exit code 0, and stderr says so."""
    for arguments in ([], ["--resume"]):
        result = run(write(), "-o", "out.jsonl", *arguments)
        assert (result.exit_code, result.stderr) == (0, "in.jsonl has no lines: nothing to do\n")
    assert run("-", "-o", "other.jsonl").stderr == "standard input has no lines: nothing to do\n"
    assert Path("out.jsonl").read_bytes() == b""
    assert not Path("out.jsonl.run").exists()


def test_what_a_file_says_cannot_drive_the_terminal() -> None:
    """Neither in the answers nor on stderr."""
    result = run(
        write({"prompt": "Hello!", "\x1b[2J": 1}, '{"prompt": "\\ud800"}'), "-o", "out.jsonl"
    )
    assert "\x1b" not in result.stderr
    assert b"\x1b" not in Path("out.jsonl").read_bytes()
    assert len(answers()) == 2


@pytest.mark.exhaustive(0)
def test_in_a_terminal_there_is_a_bar_that_is_gone_at_the_end() -> None:
    """Lines done, tokens per second, share reused, time left; then the summary."""
    write(*[{"prompt": f"Hello! {i}", "max_tokens": 20} for i in range(40)])
    master, slave = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "mlxrunner",
        *"batch in.jsonl -o out.jsonl --no-reserve --parallel 1".split(),
    ]
    process = subprocess.Popen(
        command, stdout=slave, stderr=slave, stdin=slave, env={**os.environ, "COLUMNS": "140"}
    )
    os.close(slave)
    seen = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:
            break
        if not part:
            break
        seen += part
    assert process.wait() == 0
    text = seen.decode()
    assert " of 40 lines, " in text
    assert "tokens/s, " in text
    assert "% of prompt tokens reused, " in text
    assert " left" in text
    assert "40 lines in " in text


def test_the_words_of_a_tally(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time left is at the pace of this run."""
    now = [100.0]
    monkeypatch.setattr("mlxrunner.batch.tally.time.monotonic", lambda: now[0])
    tally = Tally(total=20, earlier=8, earlier_failed=1, began=now[0])
    now[0] += 8
    tally.done, tally.answer_tokens, tally.prompt_tokens, tally.cached_tokens = 4, 80, 100, 90
    assert (
        tally.line()
        == "12 of 20 lines, 1 failed, 10 tokens/s, 90.0% of prompt tokens reused, 16 s left"
    )


def test_choices_and_schemas() -> None:
    """For all lines, and for one."""
    Path("schema.json").write_text(
        '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], '
        '"additionalProperties": false}'
    )
    shaped = {"type": "json_schema", "json_schema": {"schema": {"type": "boolean"}}}
    lines = [
        {"prompt": "Hello!"},
        {"prompt": "Hello!", "choices": ["red", "blue"]},
        {"prompt": "Hello!", "response_format": shaped},
    ]
    run(write(*lines), "-o", "out.jsonl", "--choices", "yes,no", "--max-tokens", 30)
    assert [answers()[0]["text"] in ("yes", "no"), answers()[1]["text"] in ("red", "blue")] == [
        True,
        True,
    ]
    run("in.jsonl", "-o", "shaped.jsonl", "--schema", "schema.json", "--max-tokens", 60)
    assert isinstance(json.loads(answers("shaped.jsonl")[0]["text"])["a"], int)
    assert answers("shaped.jsonl")[2]["text"] in ("true", "false")


def test_each_line_leaves_an_event(folder: Path) -> None:
    """With --events: what it reused, one at a time and together; --strict keeps its own meaning."""
    Path("in.jsonl").write_text('{"prompt": "My name is Ana."}\n{"prompt": "My name is Ana."}\n')
    for parallel in ("1", "2"):
        result = run(
            "in.jsonl",
            "-o",
            f"out{parallel}.jsonl",
            "--parallel",
            parallel,
            "--events",
            f"{parallel}.jsonl",
            "--strict",
            "-q",
        )
        assert result.exit_code == 0, result.stderr
        events = [json.loads(line) for line in Path(f"{parallel}.jsonl").read_text().splitlines()]
        assert [event["command"] for event in events] == ["batch", "batch"]
    assert [event["outcome"] for event in events] == ["miss", "hit"]


@pytest.mark.parametrize("parallel", ["1", "2"])
def test_an_event_of_a_line_names_the_place(folder: Path, parallel: str) -> None:
    """Message, role and part of it, as in a chat; one at a time and together."""
    ask = (
        '{{"messages": [{{"role": "system", "content": "Be brief."}}, {{"role": "user", "content": '
        '"My {}"}}]}}\n'
    )
    Path("in.jsonl").write_text(
        ask.format("name is Ana.") + ask.format("dog is Rex.") + '{"prompt": "Hello there!"}\n'
    )
    run(
        "in.jsonl",
        "-o",
        "out.jsonl",
        "--parallel",
        parallel,
        "--max-tokens",
        3,
        "--events",
        "e.jsonl",
        "-q",
    )
    events = [json.loads(line) for line in Path("e.jsonl").read_text().splitlines()]
    assert sorted((event["prompt_kind"], event["messages"]) for event in events) == [
        ("messages", 1),
        ("messages", 2),
        ("messages", 2),
    ]
    (place,) = [
        event["divergence"] for event in events if event["divergence"] and event["messages"] == 2
    ][-1:]
    assert (place["message"], place["role"], place["part"]) == (1, "user", "text")


def test_verified_lines_run_one_at_a_time(folder: Path) -> None:
    """--parallel with --verify is refused."""
    Path("in.jsonl").write_text('{"prompt": "My name is Ana."}\n{"prompt": "My name is Ana."}\n')
    result = run("in.jsonl", "-o", "out.jsonl", "--verify-cache", "1", "--events", "e.jsonl", "-q")
    assert result.exit_code == 0, result.stderr
    events = [json.loads(line) for line in Path("e.jsonl").read_text().splitlines()]
    assert [event["verify"] and event["verify"]["equal"] for event in events] == [None, True]
    refused = run("in.jsonl", "-o", "other.jsonl", "--verify-cache", "1", "--parallel", "2")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "--verify-cache looks at one request at a time" in refused.stderr


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["--choices", "a,b"], {"response_format": {"type": "json_object"}}),
        (["--schema", "schema.json"], {"choices": ["yes", "no"]}),
        (["--choices", "a,b"], {"response_format": {"type": "text"}}),
        (["--schema", "schema.json"], {"response_format": {"type": "text"}}),
    ],
)
def test_the_form_of_a_line_takes_the_place_of_the_batch_s(
    given: list[str], line: dict[str, Any]
) -> None:
    """Also one of the other kind, or none."""
    Path("schema.json").write_text('{"enum": [1]}')
    result = run(write({"prompt": "Hello!"} | line), "-o", "out.jsonl", "--max-tokens", 4, *given)
    assert result.exit_code == 0, result.stderr
    assert answers()[0]["text"] not in ("a", "b", "1")


TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content "
    "}}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}; "
    "{% endfor %}{% if style %}{{ style }}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "weather"}}


def test_template_variables_and_tools_become_part_of_the_prompt() -> None:
    """From the command line, a line of ours and one of OpenAI; each is answered as alone."""
    write_model(Path("tiny"), max_position_embeddings=2048, vocab_size=300)
    write_tokenizer(Path("tiny"), chat_template=TEMPLATE)
    Path("tools.json").write_text(json.dumps([TOOL]))
    talk = [{"role": "user", "content": "Hi"}]
    call = {"function": {"name": "weather", "arguments": "{}"}}
    asked = {"role": "assistant", "tool_calls": [call]}
    body = {"messages": talk, "tools": [TOOL], "chat_template_kwargs": {"style": "brief"}}
    url = "/v1/chat/completions"
    lines = [
        {"id": "default", "messages": talk},
        {"id": "own", "messages": [*talk, asked], "template": {"style": "long"}, "tools": []},
        {"custom_id": "openai", "method": "POST", "url": url, "body": body},
        {"id": "refused", "messages": talk, "tools": ["weather"]},
    ]
    options = ("--max-tokens", 3, "--template-var", "style=terse", "--tools", "tools.json")
    result = run(write(*lines), "-o", "out.jsonl", "-m", "tiny", "--events", "events", *options)
    assert result.exit_code == 3, result.stderr
    default, own, openai, refused = answers()
    listed = json.dumps([TOOL])
    lengths = [
        len(text)
        for text in (
            f"{listed}user:Hi; terse",
            "user:Hi; assistant:{}; long",
            f"{listed}user:Hi; brief",
        )
    ]
    usages = [default["usage"], own["usage"], openai["response"]["body"]["usage"]]
    assert [usage["prompt_tokens"] for usage in usages] == lengths
    assert "tools: number 0 has to be a JSON object" in refused["error"]


def test_raw_prompts_have_no_template_to_set_variables_of() -> None:
    """Refused before anything is read."""
    for option in (("--template-var", "a=1"), ("--tools", "tools.json")):
        Path("tools.json").write_text(json.dumps([TOOL]))
        result = run(write({"prompt": "a"}), "-o", "out.jsonl", "--raw", *option)
        assert result.exit_code == 2
        assert f"{option[0]} needs the chat template, which --raw leaves out" in result.stderr


def test_lines_of_the_responses_api_are_answered_with_its_response_object() -> None:
    """With output items and usage; a line that can't be run has the error of the API."""
    body = {"model": "m", "input": "My name is Ana. What is my name?"}
    cut = {"max_output_tokens": 2, "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/responses", "body": {**body, **more}}
        for name, more in (("a", {}), ("b", cut), ("c", {"background": True}))
    ]
    run(write(*lines, "no json"), "-o", "out.jsonl")
    whole, short, refused, broken = answers()
    found = whole["response"]["body"]
    assert (whole["custom_id"], whole["response"]["status_code"]) == ("a", 200)
    assert (found["object"], found["status"], found["model"]) == ("response", "completed", "demo")
    (item,) = found["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [
        {"type": "output_text", "text": "Your name is Ana.", "annotations": []}
    ]
    usage = found["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
    found = short["response"]["body"]
    assert (found["status"], found["max_output_tokens"]) == ("incomplete", 2)
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    (content,) = found["output"][0]["content"]
    assert [len(token["top_logprobs"]) for token in content["logprobs"]] == [1, 1]
    assert refused["response"]["status_code"] == 400
    assert "background: True is not supported" in refused["error"]["message"]
    assert broken["response"]["status_code"] == 400


def test_token_ids_and_lists_of_prompts_are_answered() -> None:
    """A list has an answer for each of its prompts, with its number behind the id."""
    run(write({"prompt": "Hello!"}), "-o", "plain.jsonl", "--raw", "--max-tokens", 3)
    from mlxrunner.models.load import tokenizer_of

    tokens = [int(token) for token in tokenizer_of("demo").encode("Hello!")]
    lines = [{"id": "t", "prompt": tokens}, {"id": "l", "prompt": ["Hello!", tokens, [2**31 - 1]]}]
    run(write(*lines), "-o", "out.jsonl", "--raw", "--max-tokens", 3)
    (plain,) = answers("plain.jsonl")
    *good, bad = answers()
    assert [(line["id"], line["text"]) for line in good] == [
        (name, plain["text"]) for name in ("t", "l/0", "l/1")
    ]
    assert (bad["id"], bad["index"]) == ("l/2", 3)
    assert "beyond the model's vocabulary" in bad["error"]


def table(file: str = "out.parquet") -> list[dict[str, Any]]:
    import pyarrow.parquet

    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(file).to_pylist()
    return rows


@pytest.mark.exhaustive(0)
def test_answers_become_a_parquet_file_when_all_are_there() -> None:
    """Its rows have the text, the counts and the whole line, for every format of lines."""
    pytest.importorskip("pyarrow")
    ours = [{"id": "a", "prompt": "Hello!"}, {"id": 5, "prompt": "Hello!"}, {"promt": "a"}]
    theirs = [
        {"custom_id": "c", "body": {"messages": [{"role": "user", "content": "Hello!"}]}},
        {"custom_id": "t", "url": "/v1/completions", "body": {"prompt": "Hello!", "max_tokens": 2}},
        {"custom_id": "r", "url": "/v1/responses", "body": {"input": "Hello!"}},
    ]
    result = run(write(*ours, *theirs), "-o", "out.parquet")
    assert result.exit_code == 3
    rows = table()
    assert [row["id"] for row in rows] == ["a", "5", None, "c", "t", "r"]
    assert [row["index"] for row in rows] == [0, 1, 2, 3, 4, 5]
    text = "Hello! How can I help you?"
    assert [row["text"] for row in rows[:4]] == [text, text, None, text]
    assert rows[5]["text"] == text
    assert [row["finish_reason"] for row in rows] == [
        "stop",
        "stop",
        None,
        "stop",
        "length",
        "stop",
    ]
    assert "unknown field 'promt'" in rows[2]["error"]
    counts = ("prompt_tokens", "cached_tokens", "completion_tokens")
    assert all(isinstance(row[name], int) for row in rows if row["text"] for name in counts)
    assert [row["line"] for row in rows] == Path("out.parquet.jsonl").read_text().splitlines()
    assert Path("out.parquet").stat().st_mode & 0o777 == 0o600
    again = run("in.jsonl", "-o", "out.parquet")
    assert (again.exit_code, "out.parquet: is there already" in again.stderr) == (2, True)


def test_a_parquet_file_comes_with_the_end_of_a_run_that_is_resumed() -> None:
    """Until then there are the lines only; --resume of a finished run makes the file again."""
    pytest.importorskip("pyarrow")
    write(*({"id": number, "prompt": "Hello!", "max_tokens": 3} for number in range(4)), "no json")
    stopped = run("in.jsonl", "-o", "out.parquet", "--max-errors", 1, "--no-usage")
    assert stopped.exit_code == 1
    assert not Path("out.parquet").exists()
    assert run("in.jsonl", "-o", "out.parquet", "--no-usage", "--resume").exit_code == 3
    first = Path("out.parquet").read_bytes()
    assert [row["id"] for row in table()] == [0, 1, 2, 3, None]
    Path("out.parquet").unlink()
    assert run("in.jsonl", "-o", "out.parquet", "--no-usage", "--resume").exit_code == 3
    assert Path("out.parquet").read_bytes() == first


def test_several_inputs_are_one_batch_that_can_be_resumed_with_the_same_ones() -> None:
    """Errors name the input; other inputs, and other columns, are refused with both values."""
    write({"id": "a", "prompt": "Hello!"})
    Path("more.csv").write_text("key,question\na,Hello!\nb,Hello!\n")
    names = ("in.jsonl", "more.csv", "-o", "out.jsonl", "--prompt-column", "question")
    result = run(*names, "--id-column", "key")
    assert result.exit_code == 3
    first, again, last = answers()
    assert (first["id"], last["id"], first["text"]) == ("a", "b", last["text"])
    assert again["error"] == "more.csv line 2: id 'a' was there before, on in.jsonl line 1"
    assert run(*names, "--id-column", "key", "--resume").exit_code == 3
    result = run(*names, "--resume")
    assert (result.exit_code, 'another --id-column: "key" then' in result.stderr) == (2, True)
    Path("more.csv").write_text("key,question\na,Hello!\n")
    result = run(*names, "--id-column", "key", "--resume")
    assert (result.exit_code, "was begun with another input" in result.stderr) == (2, True)


def test_an_output_in_the_folder_of_the_input_is_refused() -> None:
    """The next run would read it."""
    Path("texts").mkdir()
    Path("texts/a.txt").write_text("Hello!")
    result = run("texts", "-o", "texts/out.jsonl")
    assert (result.exit_code, "is in the input" in result.stderr) == (2, True)
    assert run("texts", "-o", "out.jsonl").exit_code == 0
    assert [(line["id"], line["text"]) for line in answers()] == [
        ("a.txt", "Hello! How can I help you?")
    ]


def test_a_compressed_input_that_is_cut_off_leaves_nothing_behind() -> None:
    """Nothing is run, and the error is one line."""
    Path("in.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "Hello!"}\n' * 50)[:-9])
    result = run("in.jsonl.gz", "-o", "out.jsonl")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith(
        "mlxrunner: in.jsonl.gz: can't be read to its end as gzip: it is cut off"
    )
    assert [path.name for path in Path().iterdir() if path.is_file()] == ["in.jsonl.gz"]


def test_each_option_is_declared_once() -> None:
    """click warns before every run of a command that has an option twice."""
    from mlxrunner.cli.batch import batch

    flags = [flag for one in batch.params for flag in (*one.opts, *one.secondary_opts)]
    assert len(flags) == len(set(flags))
