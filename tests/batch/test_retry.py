"""`--retry-failed` runs the failed lines of a finished output, and nothing else changes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from support import batches
from support.checks import ends, raising, read_lines

from mlxrunner.runner import Runner

FAILING = (2, 5)
"""The indexes of the lines that fail while `ill` is there."""
BROKEN = 7


TYPED = ("--parallel", 1, "-o", "out.jsonl")


def run(*arguments: object, source: str = "in.jsonl", stdin: str = "") -> Result:
    return batches.run(source, *TYPED, *arguments, stdin=stdin)


@pytest.fixture(autouse=True)
def ill(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_input()
    generate = Runner.generate

    def ill(self: Runner, prompt: Any, **options: Any) -> Any:
        if Path("ill").exists() and f"seed{options.get('seed')}" in Path("ill").read_text():
            raise OSError("out of paper")
        if Path("stop").exists() and f"seed{options.get('seed')}" in Path("stop").read_text():
            raise KeyboardInterrupt
        return generate(self, prompt, **options)

    monkeypatch.setattr(Runner, "generate", ill)


def write_input(form: str = "plain") -> None:
    lines = []
    for index in range(9):
        talk = [{"role": "user", "content": f"My name is {'AB'[index % 2]}o. What is my name?"}]
        own: dict[str, Any] = {"messages": talk, "seed": index, "max_tokens": 3, "temperature": 1.0}
        line = {"id": index, **own} if form == "plain" else {"custom_id": f"{index}", "body": own}
        lines.append("no JSON" if index == BROKEN else json.dumps(line))
    Path("in.jsonl").write_text("\n".join(lines) + "\n")


def some_fail(*arguments: object) -> list[bytes]:
    """Finish a run in which three lines fail, and return its lines."""
    Path("ill").write_text("".join(f"seed{index} " for index in FAILING))
    ends(batches.once("in.jsonl", *TYPED, *arguments), 3, "3 of 9 lines failed")
    Path("ill").unlink()
    return Path("out.jsonl").read_bytes().splitlines()


def changed(before: list[bytes]) -> list[int]:
    """Return the indexes of the lines that are not as before."""
    after = Path("out.jsonl").read_bytes().splitlines()
    return [index for index in range(9) if before[index] != after[index]]


def files() -> set[str]:
    return {path.name for path in Path().iterdir()}


@pytest.mark.parametrize("form", ["plain", "openai"])
def test_only_the_failed_lines_run_and_the_others_keep_their_bytes(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With their usage and times; a line that is wrong in itself fails again, and the code is 3."""
    write_input(form)
    before = some_fail()
    result = run("--retry-failed")
    assert (result.exit_code, "3 lines in " in result.stderr) == (3, True), result.stderr
    after = read_lines(Path("out.jsonl"))
    assert changed(before) == list(FAILING)
    assert all(not after[index].get("error") for index in FAILING)
    assert "1 of 9 lines failed, the first: line 8: not JSON" in result.stderr
    assert files() == {"in.jsonl", "out.jsonl", "out.jsonl.done"}
    assert Path("out.jsonl").stat().st_mode & 0o777 == 0o600
    ends(run("--resume"), 3, "is complete (9 lines)")
    monkeypatch.setattr(
        "mlxrunner.batch.work.open_runner", lambda *arguments: pytest.fail("a model is loaded")
    )
    assert run("--retry-failed").exit_code == 3  # no model is loaded for a line that is no JSON


def test_the_whole_is_what_an_unbroken_run_writes() -> None:
    """Without usage, byte for byte; then nothing is left to do, and the exit code is 0."""
    lines = Path("in.jsonl").read_text().splitlines()
    Path("in.jsonl").write_text("\n".join([*lines[:BROKEN], *lines[BROKEN + 1 :]]))
    assert run("--no-usage").exit_code == 0
    expected = Path("out.jsonl").read_bytes()
    Path("out.jsonl").unlink()
    Path("ill").write_text("seed2 seed5")
    assert run("--no-usage").exit_code == 3
    Path("ill").unlink()
    assert run("--no-usage", "--retry-failed", "--timeout", 600).exit_code == 0
    assert Path("out.jsonl").read_bytes() == expected
    ends(run("--no-usage", "--retry-failed"), 0, "nothing to do")


def test_with_done_order_the_new_answers_come_last() -> None:
    """In the order in which they ended; the others keep bytes and order."""
    before = some_fail("--output-order", "done")
    assert run("--output-order", "done", "--retry-failed").exit_code == 3
    after = Path("out.jsonl").read_bytes().splitlines()
    good = [line for line in before if b'"error"' not in line]
    assert after[: len(good)] == good
    assert {json.loads(line)["index"] for line in after[len(good) :]} == {*FAILING, BROKEN}


def test_a_retry_that_was_stopped_goes_on_and_the_output_waits_for_it() -> None:
    """The old output stays whole until the new one is; an answer that is there is not run again."""
    before = some_fail("--order", "input")
    old = Path("out.jsonl").read_bytes()
    Path("stop").write_text("seed5")
    result = run("--retry-failed", "--order", "input")
    ends(result, 130, "to continue: mlxrunner")
    assert "--resume" not in result.stderr
    assert Path("out.jsonl").read_bytes() == old
    Path("stop").write_text("seed2")
    ends(run("--retry-failed", "--order", "input"), 3, "2 lines in ")
    assert changed(before) == list(FAILING)
    assert files() == {"in.jsonl", "out.jsonl", "out.jsonl.done", "stop"}


STEPS = {
    "before the new name": "mlxrunner.batch.output.AnswerFile.rename",
    "before the record": "mlxrunner.batch.job.Completion.write",
    "before the store goes": "pathlib.Path.unlink",
    "before the input is there": "mlxrunner.batch.store.Store.finish",
}


@pytest.mark.parametrize("step", STEPS)
def test_killed_at_any_step_of_the_exchange(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output is the old or the new one, whole; the same command goes on."""
    before = some_fail("--no-usage")
    with monkeypatch.context() as patched:
        patched.setattr(STEPS[step], raising(KeyboardInterrupt))
        if step == "before the input is there":  # a killed process does not tidy up
            patched.setattr(Path, "unlink", lambda self: None)
        assert run("--no-usage", "--retry-failed").exit_code == 130
    assert Path("out.jsonl.retry").exists()
    found = Path("out.jsonl").read_bytes().splitlines()
    assert len(found) == 9
    assert (found == before) == (step in ("before the new name", "before the input is there"))
    if step == "before the record":
        ends(run("--no-usage", "--resume"), 2, "repeat --retry-failed")
    assert run("--no-usage", "--retry-failed").exit_code == 3
    assert changed(before) == list(FAILING)
    assert files() == {"in.jsonl", "out.jsonl", "out.jsonl.done"}
    assert run("--no-usage", "--resume").exit_code == 3


def test_no_journal_is_left_by_a_run_that_is_killed_as_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store and its journal go together, before the model is given up."""
    left: list[set[str]] = []
    monkeypatch.setattr(
        "mlxrunner.batch.work.remember_speed", lambda *arguments: left.append(files())
    )
    some_fail("--timeout", 600)
    run("--retry-failed")
    assert left == [
        {"in.jsonl", "out.jsonl", "out.jsonl.done"} | extra for extra in ({"ill"}, set())
    ]


def test_a_retry_of_other_answers_is_begun_anew() -> None:
    """The rest of an earlier retry belongs to an output that is not there any more."""
    some_fail()
    Path("stop").write_text("seed5")
    run("--retry-failed")
    Path("stop").unlink()
    Path("out.jsonl").unlink()
    before = some_fail("--retries", 0)  # with other times
    assert run("--retry-failed").exit_code == 3
    assert changed(before) == list(FAILING)
    assert files() == {"in.jsonl", "out.jsonl", "out.jsonl.done"}


def test_an_input_on_standard_input_has_to_come_again() -> None:
    """A finished run keeps no input: it is compared by its hash."""
    text = Path("in.jsonl").read_text()
    Path("ill").write_text("seed2")
    assert run(source="-", stdin=text).exit_code == 3
    Path("ill").unlink()
    ends(run("--retry-failed", source="-"), 2, "was begun with another input: ")
    assert run("--retry-failed", source="-", stdin=text).exit_code == 3
    assert sum(b'"error"' in line for line in Path("out.jsonl").read_bytes().splitlines()) == 1


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no output", "out.jsonl: is not there: --retry-failed is for a finished output"),
        ("no record", "out.jsonl.done is missing or damaged, which says what the answers were"),
        ("changed", "out.jsonl: was changed after the run"),
        ("running", "out.jsonl.run: belongs to an unfinished run: continue it with"),
        ("input", "out.jsonl was begun with another input: "),
        ("options", "out.jsonl was begun with another --max-tokens: not set then, 4 now"),
        ("taken", "out.jsonl.retried: is there already: remove it"),
        ("stream", "--retry-failed needs an output file"),
    ],
)
def test_what_is_missing_is_said_and_nothing_is_changed(what: str, message: str) -> None:
    """In one line, with exit code 2."""
    some_fail()
    match what:
        case "no output":
            Path("out.jsonl").unlink()
        case "no record":
            Path("out.jsonl.done").unlink()
        case "changed":
            Path("out.jsonl").write_bytes(Path("out.jsonl").read_bytes()[:-2] + b" \n")
        case "running":
            Path("out.jsonl.run").touch()
        case "input":
            Path("in.jsonl").write_text(Path("in.jsonl").read_text() + "\n")
        case "taken":
            Path("out.jsonl.retried").write_text("mine")
    before = {path.name: path.read_bytes() for path in Path().iterdir()}
    more = {"options": ["--max-tokens", 4], "stream": ["-o", "-"]}.get(what, [])
    result = run("--retry-failed", *more)
    ends(result, 2, message)
    assert result.stderr.count("\n") == 1
    assert {path.name: path.read_bytes() for path in Path().iterdir()} == before


def test_a_plan_is_about_the_failed_lines() -> None:
    """It keeps nothing."""
    some_fail()
    before = files()
    planned = json.loads(run("--retry-failed", "--plan", "--json").stdout)
    assert (planned["lines"], planned["done"], planned["to_run"]) == (9, 6, 2)
    assert files() == before


def test_a_plan_of_a_retry_that_was_cut_off_is_about_what_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if the new output has taken the old one's place, and the record is still the old one."""
    some_fail()
    Path("stop").write_text("seed5 ")
    assert run("--retry-failed", "--order", "input").exit_code in (1, 130)
    Path("stop").unlink()
    assert json.loads(run("--retry-failed", "--plan", "--json").stdout)["to_run"] == 1
    with monkeypatch.context() as patched:
        patched.setattr("mlxrunner.batch.job.Completion.write", raising(KeyboardInterrupt))
        assert run("--retry-failed").exit_code == 130
    planned = run("--retry-failed", "--plan", "--json")
    assert planned.exit_code == 0, planned.stderr
    assert json.loads(planned.stdout)["to_run"] == 0
    assert run("--retry-failed").exit_code == 3


def test_a_full_disk_leaves_the_old_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1, and the same command goes on when there is room."""
    before = some_fail()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", raising(OSError(28, "No space")))
        result = run("--retry-failed")
    ends(result, 1, "out.jsonl.retried: can't be written: No space")
    assert Path("out.jsonl").read_bytes().splitlines() == before
    assert run("--retry-failed").exit_code == 3
    assert changed(before) == list(FAILING)
