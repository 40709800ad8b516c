"""`mlxrunner batch` says what is wrong, how far it is, and what each line reused."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from support.batch_command import answers, run, write
from support.checks import ends

from mlxrunner.batch.work import Tally

pytestmark = pytest.mark.usefixtures("folder")


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
    "no output": (["in.jsonl"], "missing output: give -o FILE"),
    "input is output": (["in.jsonl", "-o", "in.jsonl"], "in.jsonl: is the input"),
    "no input": (["no.jsonl", "-o", "out.jsonl"], "no.jsonl: no such file"),
    "output is in the input": (
        [".", "-o", "out.jsonl"],
        "out.jsonl: is in the input; choose another file",
    ),
    "no folder": (
        ["in.jsonl", "-o", "no/out.jsonl"],
        "mlxrunner: no/out.jsonl: can't be written: there is no folder no",
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
    monkeypatch.setattr("mlxrunner.batch.work.time.monotonic", lambda: now[0])
    tally = Tally(total=20, earlier=8, earlier_failed=1, began=now[0])
    now[0] += 8
    tally.done, tally.answer_tokens, tally.prompt_tokens, tally.cached_tokens = 4, 80, 100, 90
    assert (
        tally.line()
        == "12 of 20 lines, 1 failed, 10 tokens/s, 90.0% of prompt tokens reused, 16 s left"
    )


def test_each_line_leaves_an_event(folder: Path) -> None:
    """With --events: what it reused, one at a time and together; --strict keeps its own meaning."""
    Path("in.jsonl").write_text('{"prompt": "My name is Ana."}\n{"prompt": "My name is Ana."}\n')
    for parallel in ("1", "2"):
        ends(
            run(
                "in.jsonl",
                "-o",
                f"out{parallel}.jsonl",
                "--parallel",
                parallel,
                "--events",
                f"{parallel}.jsonl",
                "--strict",
                "-q",
            ),
            0,
        )
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
    ends(run("in.jsonl", "-o", "out.jsonl", "--verify-cache", "1", "--events", "e.jsonl", "-q"), 0)
    events = [json.loads(line) for line in Path("e.jsonl").read_text().splitlines()]
    assert [event["verify"] and event["verify"]["equal"] for event in events] == [None, True]
    refused = run("in.jsonl", "-o", "other.jsonl", "--verify-cache", "1", "--parallel", "2")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "--verify-cache runs one request at a time" in refused.stderr
