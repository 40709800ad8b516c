"""`mlxrunner batch` says what is wrong, how far it is, and what each line reused."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.batch_command import answers, run, run_lines, write
from support.checks import ends, refused

from mlxrunner.batch.work import Tally

pytestmark = pytest.mark.usefixtures("folder")


def plan(words: str = "") -> Any:
    return json.loads(run(f"in.jsonl --plan --json {words}").stdout)


def test_plan_needs_no_weights_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table, or one JSON object; nothing is written."""
    monkeypatch.setattr(
        "mlxrunner.batch.work.open_runner", lambda *arguments: pytest.fail("a model is loaded")
    )
    result = run_lines("--plan", {"prompt": "Hello!"}, {"prompt": "Hello!"}, "x")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "evaluated in prefix order" in result.stdout
    assert "2 at a time, as far as they fit into memory" in result.stdout
    assert (plan()["broken"], plan()["parallel"]) == (1, 2)
    lanes = [plan(words)["parallel"] for words in ("--kv-bits 8", "--parallel 50", "--parallel 1")]
    assert lanes == [1, 2, 1]
    assert [path.name for path in Path().iterdir()] == ["in.jsonl"]


def test_plan_of_a_run_that_is_gone_on_with_is_about_what_is_left() -> None:
    """The measured speed gives a time."""
    lines = [{"prompt": "Hello!"}, "x", *[{"prompt": "Hello!"}] * 3]
    run_lines("--max-errors 1 --order input", *lines)
    planned = plan("-o out.jsonl --resume")
    assert (planned["lines"], planned["done"]) == (5, 2)
    assert planned["seconds"] > 0
    assert Path("out.jsonl.run").exists()


def test_quiet_says_nothing() -> None:
    """Only an error that stops the batch is said."""
    assert run_lines("-q", {"prompt": "Hello!"}, "x").stderr == ""
    assert run("in.jsonl -o out.jsonl -q").stderr.count("\n") == 1


TO_OUT = "in.jsonl -o out.jsonl"
WRONG = {
    "no output": ("in.jsonl", "missing output: give -o FILE"),
    "input is output": ("in.jsonl -o in.jsonl", "in.jsonl: is the input"),
    "no input": ("no.jsonl -o out.jsonl", "no.jsonl: no such file"),
    "output is in the input": (
        ". -o out.jsonl",
        "out.jsonl: is in the input; choose another file",
    ),
    "no folder": (
        "in.jsonl -o no/out.jsonl",
        "mlxrunner: no/out.jsonl: can't be written: there is no folder no",
    ),
    "a folder": ("in.jsonl -o /", "mlxrunner: /: can't be written: Is a directory"),
    "output is there": ("in.jsonl -o list.json", "list.json: is there already"),
    "no model": (f"{TO_OUT} -m nowhere", "nowhere: no such model"),
    "raw and system": (f"{TO_OUT} --raw --system x", "--system needs the chat template"),
    "option": (f"{TO_OUT} --top-p 2", "top_p: 2.0 is out of range"),
    "context": (f"{TO_OUT} --context 1", "context: 1 is out of range"),
    "embeddings": (
        f"{TO_OUT} --embeddings",
        "--embeddings: embeddings are not supported: this program generates text",
    ),
    "json": (f"{TO_OUT} --json", "--json is for --plan"),
    "no schema": (f"{TO_OUT} --schema no.json", "--schema no.json: no such file"),
    "bad schema": (f"{TO_OUT} --schema in.jsonl", "--schema in.jsonl: not valid JSON"),
    "list as schema": (
        f"{TO_OUT} --schema list.json",
        "--schema list.json: it has to be a JSON object",
    ),
}


@pytest.mark.parametrize("which", WRONG)
def test_what_is_wrong_with_the_whole_batch_is_one_line(which: str) -> None:
    """Before anything runs; no file is made."""
    write("not JSON")
    write([], file="list.json")
    words, message = WRONG[which]
    refused(run(words), message)
    assert sorted(path.name for path in Path().iterdir()) == ["in.jsonl", "list.json"]


def test_what_a_file_says_cannot_drive_the_terminal() -> None:
    """Neither in the answers nor on stderr."""
    result = run_lines("", {"prompt": "Hello!", "\x1b[2J": 1}, '{"prompt": "\\ud800"}')
    assert "\x1b" not in result.stderr
    assert b"\x1b" not in Path("out.jsonl").read_bytes()
    assert len(answers()) == 2


@pytest.mark.exhaustive(0)
def test_in_a_terminal_there_is_a_bar_that_is_gone_at_the_end() -> None:
    """Lines done, tokens per second, share reused, time left; then the summary."""
    write(*[{"prompt": f"Hello! {i}", "max_tokens": 20} for i in range(40)])
    master, slave = pty.openpty()
    command = f"{sys.executable} -m mlxrunner batch {TO_OUT} --no-reserve --parallel 1".split()
    with subprocess.Popen(
        command, stdout=slave, stderr=slave, stdin=slave, env={**os.environ, "COLUMNS": "140"}
    ) as process:
        os.close(slave)
        seen = b""
        with suppress(OSError):
            while part := os.read(master, 65536):
                seen += part
    assert process.returncode == 0
    said = (" of 40 lines, ", "tokens/s, ", "% of prompt tokens reused, ", " left", "40 lines in ")
    assert [text for text in said if text not in seen.decode()] == []


def test_the_words_of_a_tally(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time left is at the pace of this run."""
    now = [100.0]
    monkeypatch.setattr("mlxrunner.batch.work.time.monotonic", lambda: now[0])
    tally = Tally(total=20, earlier=8, earlier_failed=1, began=now[0])
    now[0] += 8
    tally.done, tally.answer_tokens, tally.prompt_tokens, tally.cached_tokens = 4, 80, 100, 90
    said = "12 of 20 lines, 1 failed, 10 tokens/s, 90.0% of prompt tokens reused, 16 s left"
    assert tally.line() == said


ANA = {"prompt": "My name is Ana."}


def events(file: str = "e.jsonl") -> list[Any]:
    return answers(file)


def test_each_line_leaves_an_event() -> None:
    """With --events: what it reused, one at a time and together; --strict keeps its own meaning."""
    write(ANA, ANA)
    for parallel in "12":
        given = f"--parallel {parallel} --events {parallel}.jsonl --strict -q"
        ends(run(f"in.jsonl -o out{parallel}.jsonl {given}"), 0)
        found = events(f"{parallel}.jsonl")
        assert [event["command"] for event in found] == ["batch", "batch"]
    assert [event["outcome"] for event in found] == ["miss", "hit"]


@pytest.mark.parametrize("parallel", ["1", "2"])
def test_an_event_of_a_line_names_the_place(parallel: str) -> None:
    """Message, role and part of it, as in a chat; one at a time and together."""
    system = {"role": "system", "content": "Be brief."}
    lines: list[Any] = [
        {"messages": [system, {"role": "user", "content": f"My {words}"}]}
        for words in ("name is Ana.", "dog is Rex.")
    ]
    given = f"--parallel {parallel} --max-tokens 3 --events e.jsonl -q"
    run_lines(given, *lines, {"prompt": "Hello there!"})
    kinds = sorted((event["prompt_kind"], event["messages"]) for event in events())
    assert kinds == [("messages", 1), ("messages", 2), ("messages", 2)]
    places = [one["divergence"] for one in events() if one["divergence"] and one["messages"] == 2]
    place = places[-1]
    assert (place["message"], place["role"], place["part"]) == (1, "user", "text")


def test_verified_lines_run_one_at_a_time() -> None:
    """--parallel with --verify is refused."""
    ends(run_lines("--verify-cache 1 --events e.jsonl -q", ANA, ANA), 0)
    assert [one["verify"] and one["verify"]["equal"] for one in events()] == [None, True]
    result = run("in.jsonl -o other.jsonl --verify-cache 1 --parallel 2")
    refused(result, "--verify-cache runs one request at a time")
