"""`--retry-failed` runs the failed lines of a finished output, and nothing else changes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from support import batches
from support.batches import OUT
from support.checks import ends, raising, read_lines, refused

from mlxrunner.runner import Runner

FAILING = (2, 5)
"""The indexes of the lines that fail while `ill` is there."""
BROKEN = 7
TYPED = ("--parallel", 1, "-o", "out.jsonl")
DONE = {"in.jsonl", "out.jsonl", "out.jsonl.done"}
"""The files after a run that has ended."""


def run(*arguments: object, source: str = "in.jsonl", stdin: str = "") -> Result:
    return batches.run(source, *TYPED, *arguments, stdin=stdin)


def retry(*arguments: object, **more: Any) -> Result:
    return run("--retry-failed", *arguments, **more)


@pytest.fixture(autouse=True)
def ill(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the lines fail whose seeds are in the file `ill`, and those in `stop` interrupt."""
    write_input()
    generate = Runner.generate

    def ill(self: Runner, prompt: Any, **options: Any) -> Any:
        for name, error in (("ill", OSError("out of paper")), ("stop", KeyboardInterrupt)):
            if Path(name).exists() and str(options["seed"]) in Path(name).read_text().split():
                raise error
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
    Path("ill").write_text("2 5")
    ends(batches.once("in.jsonl", *TYPED, *arguments), 3, "3 of 9 lines failed")
    Path("ill").unlink()
    return OUT.read_bytes().splitlines()


def changed(before: list[bytes]) -> list[int]:
    """Return the indexes of the lines that are not as before."""
    after = OUT.read_bytes().splitlines()
    return [index for index in range(9) if before[index] != after[index]]


def files() -> set[str]:
    return {*os.listdir()}


@pytest.mark.parametrize("form", ["plain", "openai"])
def test_only_the_failed_lines_run_and_the_others_keep_their_bytes(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With their usage and times; a line that is wrong in itself fails again, and the code is 3."""
    write_input(form)
    before = some_fail()
    ends(retry(), 3, "3 lines in ", "1 of 9 lines failed, the first: line 8: not JSON")
    after = read_lines(OUT)
    assert changed(before) == list(FAILING)
    assert all(not after[index].get("error") for index in FAILING)
    assert files() == DONE
    assert OUT.stat().st_mode & 0o777 == 0o600
    ends(run("--resume"), 3, "is complete (9 lines)")
    monkeypatch.setattr(
        "mlxrunner.batch.work.open_runner", lambda *arguments: pytest.fail("a model is loaded")
    )
    assert retry().exit_code == 3  # no model is loaded for a line that is no JSON


def test_the_whole_is_what_an_unbroken_run_writes() -> None:
    """Without usage, byte for byte; then nothing is left to do, and the exit code is 0."""
    lines = Path("in.jsonl").read_text().splitlines()
    Path("in.jsonl").write_text("\n".join([*lines[:BROKEN], *lines[BROKEN + 1 :]]))
    assert run("--no-usage").exit_code == 0
    expected = OUT.read_bytes()
    OUT.unlink()
    Path("ill").write_text("2 5")
    assert run("--no-usage").exit_code == 3
    Path("ill").unlink()
    assert retry("--no-usage", "--timeout", 600).exit_code == 0
    assert OUT.read_bytes() == expected
    ends(retry("--no-usage"), 0, "nothing to do")


def test_with_done_order_the_new_answers_come_last() -> None:
    """In the order in which they ended; the others keep bytes and order."""
    before = some_fail("--output-order", "done")
    assert retry("--output-order", "done").exit_code == 3
    after = OUT.read_bytes().splitlines()
    good = [line for line in before if b'"error"' not in line]
    assert after[: len(good)] == good
    assert {json.loads(line)["index"] for line in after[len(good) :]} == {*FAILING, BROKEN}


def test_a_retry_that_was_stopped_goes_on_and_the_output_waits_for_it() -> None:
    """The old output stays whole until the new one is; an answer that is there is not run again."""
    before = some_fail("--order", "input")
    old = OUT.read_bytes()
    Path("stop").write_text("5")
    result = retry("--order", "input")
    ends(result, 130, "to continue: mlxrunner")
    assert "--resume" not in result.stderr
    assert OUT.read_bytes() == old
    Path("stop").write_text("2")
    ends(retry("--order", "input"), 3, "2 lines in ")
    assert changed(before) == list(FAILING)
    assert files() == {*DONE, "stop"}


STEPS = {
    "before the new name": "mlxrunner.batch.output.AnswerFile.rename",
    "before the record": "mlxrunner.batch.job.Completion.write",
    "before the store goes": "pathlib.Path.unlink",
    "before the input is there": "mlxrunner.batch.store.Store.finish",
}


@pytest.mark.parametrize("step", STEPS)
def test_killed_at_any_step_of_the_exchange(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output is the old or the new one, whole; the same command continues."""
    before = some_fail("--no-usage")
    with monkeypatch.context() as patched:
        patched.setattr(STEPS[step], raising(KeyboardInterrupt))
        if step == "before the input is there":  # a killed process does not tidy up
            patched.setattr(Path, "unlink", lambda self: None)
        assert retry("--no-usage").exit_code == 130
    assert Path("out.jsonl.retry").exists()
    found = OUT.read_bytes().splitlines()
    assert len(found) == 9
    assert (found == before) == (step in ("before the new name", "before the input is there"))
    if step == "before the record":
        ends(run("--no-usage", "--resume"), 2, "repeat --retry-failed")
    assert retry("--no-usage").exit_code == 3
    assert changed(before) == list(FAILING)
    assert files() == DONE
    assert run("--no-usage", "--resume").exit_code == 3


def test_no_journal_is_left_by_a_run_that_is_killed_as_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store and its journal go together, before the model is given up."""
    left: list[set[str]] = []
    remember = "mlxrunner.batch.work.remember_speed"
    monkeypatch.setattr(remember, lambda *arguments: left.append(files()))
    some_fail("--timeout", 600)
    retry()
    assert left == [{*DONE, "ill"}, DONE]


def test_a_retry_of_other_answers_is_begun_anew() -> None:
    """The rest of an earlier retry belongs to an output that is not there any more."""
    some_fail()
    Path("stop").write_text("5")
    retry()
    Path("stop").unlink()
    OUT.unlink()
    before = some_fail("--retries", 0)  # with other times
    assert retry().exit_code == 3
    assert changed(before) == list(FAILING)
    assert files() == DONE


def test_an_input_on_standard_input_has_to_come_again() -> None:
    """A finished run keeps no input: it is compared by its hash."""
    text = Path("in.jsonl").read_text()
    Path("ill").write_text("2")
    assert run(source="-", stdin=text).exit_code == 3
    Path("ill").unlink()
    ends(retry(source="-"), 2, "was begun with another input: ")
    assert retry(source="-", stdin=text).exit_code == 3
    assert sum(b'"error"' in line for line in OUT.read_bytes().splitlines()) == 1


NOT_SET = "out.jsonl was begun with another --max-tokens: not set then, 4 now"


@pytest.mark.parametrize(
    ("name", "change", "given", "message"),
    [
        ("out.jsonl", None, "", "out.jsonl: is not there: --retry-failed is for a finished output"),
        ("out.jsonl.done", None, "", "out.jsonl.done is missing or damaged, which says what the"),
        ("out.jsonl", lambda old: old[:-2] + b" \n", "", "out.jsonl: was changed after the run"),
        ("out.jsonl.run", bytes, "", "out.jsonl.run: belongs to an unfinished run: continue it"),
        ("out.jsonl.retried", bytes, "", "out.jsonl.retried: is there already: remove it"),
        ("in.jsonl", lambda old: old + b"\n", "", "out.jsonl was begun with another input: "),
        ("in.jsonl", bytes, "--max-tokens 4", NOT_SET),
        ("in.jsonl", bytes, "-o -", "--retry-failed needs an output file"),
    ],
)
def test_what_is_missing_is_said_and_nothing_is_changed(
    name: str, change: Callable[[bytes], bytes] | None, given: str, message: str
) -> None:
    """In one line, with exit code 2."""
    some_fail()
    path = Path(name)
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes() if path.exists() else b""))
    before = {path.name: path.read_bytes() for path in Path().iterdir()}
    refused(retry(*given.split()), message)
    assert {path.name: path.read_bytes() for path in Path().iterdir()} == before


def test_a_plan_is_about_the_failed_lines_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps nothing. Also if the new output has taken the old one's place already."""
    some_fail()
    before = files()
    planned = json.loads(retry("--plan", "--json").stdout)
    assert (planned["lines"], planned["done"], planned["to_run"]) == (9, 6, 2)
    assert files() == before
    Path("stop").write_text("5")
    assert retry("--order", "input").exit_code in (1, 130)
    Path("stop").unlink()
    assert json.loads(retry("--plan", "--json").stdout)["to_run"] == 1
    with monkeypatch.context() as patched:
        patched.setattr("mlxrunner.batch.job.Completion.write", raising(KeyboardInterrupt))
        assert retry().exit_code == 130
    result = retry("--plan", "--json")
    ends(result, 0)
    assert json.loads(result.stdout)["to_run"] == 0
    assert retry().exit_code == 3


def test_a_full_disk_leaves_the_old_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1, and the same command continues when there is room."""
    before = some_fail()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", raising(OSError(28, "No space")))
        result = retry()
    ends(result, 1, "out.jsonl.retried: can't be written: No space")
    assert OUT.read_bytes().splitlines() == before
    assert retry().exit_code == 3
    assert changed(before) == list(FAILING)
