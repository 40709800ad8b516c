"""A run that was stopped continues with --resume, without loss or repeated work."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import Result
from support.batches import OUT, STORE, TYPED, WHOLE, resume, run, stop_in_the_middle, unbroken
from support.checks import ends, raising
from support.models import write_model

from mlxrunner.batch.store import Store

pytestmark = pytest.mark.usefixtures("folder")


def again(*arguments: object) -> Result:
    """Resume the complete run of `unbroken`."""
    return run("in.jsonl", "-o", WHOLE, "--no-usage", "--resume", *arguments)


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("output_order", ["input", "done"])
def test_what_is_left_is_run_and_what_is_there_is_not(output_order: str) -> None:
    """The store has the answers; the file equals that of an unbroken run in the same order."""
    expected = unbroken("--order", "input", "--output-order", output_order)
    stop_in_the_middle("--output-order", output_order)
    ends(resume("--order", "input", "--output-order", output_order), 3, "6 lines in ")
    assert OUT.read_bytes() == expected
    assert not STORE.exists()


def test_the_order_of_running_and_the_number_at_a_time_may_change() -> None:
    """They don't change the answers."""
    expected = unbroken()
    stop_in_the_middle()
    ends(resume("--parallel", 3, "--retries", 1, "--timeout", 600), 3, "3 lines at a time")
    assert OUT.read_bytes() == expected


@pytest.mark.parametrize(
    "kept", [0, 1, 40, 200, -1], ids=["empty", "one byte", "torn", "later", "newline lost"]
)
def test_an_output_that_lost_its_end_gets_it_from_the_store(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut after the store was committed; nothing is run for it."""
    expected = unbroken()
    stop_in_the_middle()
    content = OUT.read_bytes()
    OUT.write_bytes(content[:kept])
    with monkeypatch.context() as patched:
        patched.setattr("mlxrunner.batch.work.survey", raising(KeyboardInterrupt))
        assert resume().exit_code == 130
    assert OUT.read_bytes() == content
    resume()
    assert OUT.read_bytes() == expected


def test_an_output_that_somebody_wrote_to_is_not_touched() -> None:
    """It is refused; moved away, it is written again, and nothing is run twice."""
    expected = unbroken()
    stop_in_the_middle()
    content = OUT.read_bytes() + b"a note\n"
    OUT.write_bytes(content)
    ends(resume(), 2, "its last lines are not what this run wrote: move it away")
    assert OUT.read_bytes() == content
    OUT.rename("mine.jsonl")
    ends(resume(), 3, "6 lines in ")
    assert OUT.read_bytes() == expected


@pytest.mark.parametrize("at", ["begin", "middle", "answers"])
def test_a_damaged_store_says_so_and_offers_no_resume(at: str) -> None:
    """The message says what can be done instead, and the answers stay."""
    stop_in_the_middle()
    answers = OUT.read_bytes()
    if at == "answers":
        with closing(sqlite3.connect(STORE)) as database:
            database.execute("UPDATE results SET body = 5 WHERE line = 3")
            database.commit()
    else:
        content = bytearray(STORE.read_bytes())
        begin = {"begin": 0, "middle": len(content) // 2}[at]
        content[begin : begin + 5000] = b"x" * 5000
        STORE.write_bytes(content)
    result = resume()
    ends(result, 2, "no run can resume from it. Remove it and begin again with another -o")
    assert result.stderr.startswith("mlxrunner: out.jsonl.run: is ")
    assert "to continue:" not in result.stderr
    assert OUT.read_bytes() == answers
    assert STORE.exists()


def test_a_plan_leaves_the_run_alone_that_it_is_about() -> None:
    """A plan leaves a killed run's store as it was and refuses what the run refuses."""
    expected = unbroken()
    plan = [*TYPED, "--resume", "--plan", "--json"]
    refused = "was begun with another "
    for begin, done in ((lambda: Store.create(STORE).close(), 0), (stop_in_the_middle, 6)):
        STORE.unlink(missing_ok=True)
        begin()
        before = STORE.read_bytes()
        assert json.loads(run(*plan).stdout)["done"] == done
        assert STORE.read_bytes() == before
    ends(run(*plan, "--system", "Be kind."), 2, f"{refused}--system: ")
    variable = ("--chat-template-var", "enable_thinking=false")
    ends(run(*plan, *variable), 2, f"{refused}--template-var: not set then, ")
    assert STORE.read_bytes() == before
    resume()
    assert OUT.read_bytes() == expected
    planned = json.loads(run(*plan).stdout)
    assert (planned["lines"], planned["done"], planned["tokens"]) == (12, 12, 0)


def test_without_resume_nothing_is_overwritten() -> None:
    """Neither an output nor an unfinished run is overwritten; an empty file is taken."""
    stop_in_the_middle()
    content = OUT.read_bytes()
    begin = ("in.jsonl", "-o", OUT)
    unfinished = "belongs to an unfinished run: continue it with --resume, or remove it and "
    ends(run(*begin), 2, f"out.jsonl.run: {unfinished}out.jsonl")
    STORE.unlink()
    ends(run(*begin), 2, "out.jsonl: is there already: choose another -o, or remove it")
    assert OUT.read_bytes() == content
    OUT.write_bytes(b"")
    run(*begin)
    assert len(OUT.read_bytes().splitlines()) == 12


OTHERS = {
    "--max-tokens 3": "another --max-tokens: not set then, 3 now",
    "--temperature 0.5": "another --temperature: 0.0 then, 0.5 now",
    "--temperature 1 --seed 3": "another --temperature: 0.0 then, 1.0 now",
    "--system Kind": 'another --system: not set then, "Kind" now',
    "--stop x": 'another --stop: not set then, ["x"] now',
    "--raw": "another --raw: not set then, true now",
    "--context 512": "another --context: not set then, 512 now",
    "--output-order done": 'another --output-order: "input" then, "done" now',
    "-m tiny": "another model: demo then, tiny now",
}


@pytest.mark.parametrize("is_complete", [False, True])
def test_other_options_another_model_or_input_are_refused_with_the_difference(
    is_complete: bool,
) -> None:
    """Both values; what is there stays, and the right command still continues.

    One byte of the input is enough. A plan refuses the same.
    """
    write_model(Path("tiny"))
    expected, text = unbroken(), Path("in.jsonl").read_text()
    if not is_complete:
        stop_in_the_middle()
    output, command = (WHOLE, again) if is_complete else (OUT, resume)
    before = output.read_bytes()
    for options, message in [*OTHERS.items(), ("--plan --raw", "another --raw")]:
        result = command(*options.split())
        ends(result, 2, f"mlxrunner: {output} was begun with {message}")
        assert "to continue" not in result.stderr  # not with these options
    for other in (text + "\n", text.replace("Ana", "Ann", 1)):
        Path("in.jsonl").write_text(other)
        ends(command(), 2, f"{output} was begun with another input: ")
    assert output.read_bytes() == before
    Path("in.jsonl").write_text(text)
    ends(command(), 3)
    assert output.read_bytes() == expected


PIPED = ("-", "-o", OUT, "--no-usage", "--parallel", 1)


def test_a_run_from_standard_input_goes_on_with_or_without_it() -> None:
    """The store has the input; if it comes again it has to be the same."""
    expected, text = unbroken(), Path("in.jsonl").read_text()
    for repeated in ("", text):
        assert run(*PIPED, "--order", "input", "--max-errors", 1, stdin=text).exit_code == 1
        assert "another input" in run(*PIPED, "--resume", stdin="{}").stderr
        run(*PIPED, "--resume", stdin=repeated)
        assert OUT.read_bytes() == expected
        OUT.unlink()


def test_a_refused_resume_keeps_a_store_that_has_no_answer_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run that was killed before its first answer keeps what came from standard input."""
    expected = unbroken()
    with monkeypatch.context() as patched:
        patched.setattr("mlxrunner.batch.work.open_output", raising(KeyboardInterrupt))
        patched.setattr(Path, "unlink", lambda self: None)  # a killed process doesn't tidy up
        assert run(*PIPED, stdin=Path("in.jsonl").read_text()).exit_code == 130
    other = run(*PIPED, "--resume", "--temperature", 1)
    ends(other, 2, "another --temperature: 0.0 then, 1.0 now")
    assert run(*PIPED, "--resume", "--strict").exit_code == 2
    run(*PIPED, "--resume")
    assert OUT.read_bytes() == expected


@pytest.mark.exhaustive(0)
def test_a_second_run_at_the_same_time_is_refused() -> None:
    """In one line, with --resume and without; the first one is not disturbed."""
    stop_in_the_middle()
    before = OUT.read_bytes()
    second = [sys.executable, "-m", "mlxrunner", "batch", "in.jsonl", "-o", "out.jsonl"]
    with Store.open(STORE):
        for command in (second, [*second, "--resume"]):
            result = subprocess.run(command, capture_output=True, text=True)
            assert result.returncode == 2
            refused = "mlxrunner: out.jsonl.run: another process is using it: wait for its end\n"
            assert refused in result.stderr
    assert OUT.read_bytes() == before


def test_an_error_before_the_first_answer_leaves_nothing_behind() -> None:
    """No empty output, no store: the same command without --resume is right again."""
    refused = "1 of 12 lines can't be run, the first: line 6: not JSON"
    ends(run("in.jsonl", "-o", OUT, "--strict"), 2, refused)
    assert os.listdir() == ["in.jsonl"]


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("limit", [30_000, 200], ids=["the store", "the output"])
def test_a_file_that_may_not_grow_is_one_line_and_loses_nothing(limit: int) -> None:
    """Wherever it is met; the run continues when there is room."""
    expected = unbroken()
    if limit < 1000:
        stop_in_the_middle()
    command = ["batch", *map(str, TYPED), "--no-reserve", "--resume"]
    code = (
        "import resource; from mlxrunner.cli import main\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, resource.RLIM_INFINITY))\n"
        f"main({command})"
    )
    no_bytecode = "-B"  # a module's file would be cut off, and break each later import of it
    child = [sys.executable, no_bytecode, "-c", code]
    result = subprocess.run(child, capture_output=True, text=True)
    assert result.returncode == (1 if limit < 1000 else 2)  # cut off, or never begun
    assert "Traceback" not in result.stderr
    problems = "disk I/O error; what was committed is kept", "can't be written: File too large"
    assert any(problem in result.stderr for problem in problems)
    resume()
    assert OUT.read_bytes() == expected


@pytest.mark.skipif(sys.platform != "linux", reason="grows a tmpfs, which only Linux has")
def test_a_full_disk_is_one_line_and_loses_nothing() -> None:
    """A disk that gets larger by a page each time it is full, wherever that is."""
    expected, output = unbroken(), Path("small/out.jsonl")
    output.parent.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "none", "small"]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mounts a disk, which this user may not: {mounted.stderr.strip()}")
    full = "the disk is full", "No space left on device"
    said = []
    try:
        for pages in range(5, 100):
            result = run("in.jsonl", "-o", output, "--no-usage", "--parallel", 1, "--resume")
            said.append(result.stderr)
            if not any(text in result.stderr for text in full):
                break
            assert result.exit_code in (1, 2)
            assert expected.startswith(output.read_bytes() if output.exists() else b"")
            subprocess.run(["mount", "-o", f"remount,size={4 * pages}k", "small"], check=True)
        assert output.read_bytes() == expected
        assert sorted(os.listdir("small")) == ["out.jsonl", "out.jsonl.done"]
    finally:
        subprocess.run(["umount", "small"], check=True)
    assert any("out.jsonl.run: the disk is full" in text for text in said)
    assert any("out.jsonl: can't be written: No space left on device" in text for text in said)
    assert len(said) > 5


def test_killed_after_the_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with all answers in its store has nothing left to run and loads no model."""
    expected = unbroken()
    with monkeypatch.context() as patched:
        patched.setattr("mlxrunner.batch.output.AnswerFile.seal", raising(KeyboardInterrupt))
        assert resume().exit_code == 130
    OUT.write_bytes(expected[:-50])
    monkeypatch.setattr(
        "mlxrunner.batch.work.open_runner", lambda *arguments: pytest.fail("a model is loaded")
    )
    ends(resume(), 3, "out.jsonl is complete (12 lines): nothing to do")
    assert OUT.read_bytes() == expected
    assert not STORE.exists()


def test_resume_of_a_complete_output_does_nothing_and_says_so() -> None:
    """The exit code is that of the run with its failed line.

    What it was made from is in a private file beside it.
    """
    expected = unbroken()
    ends(again("--parallel", 2), 3, "whole.jsonl is complete (12 lines): nothing to do")
    assert WHOLE.read_bytes() == expected
    assert Path("whole.jsonl.done").stat().st_mode & 0o777 == 0o600


def test_resume_of_an_output_that_nothing_is_known_of_is_refused() -> None:
    """Its record is gone or damaged, or the output was written to since.

    One letter of an answer is enough. Another run at the same place makes a new one.
    """
    expected = unbroken()
    size = len(expected)
    for content, message in (
        (expected + b"{}\n", f"has {size + 3} bytes, and the run that wrote it left {size}"),
        (
            expected.replace(b"name", b"Name", 1),
            "whole.jsonl: was changed after the run: choose another -o, or remove it",
        ),
    ):
        WHOLE.write_bytes(content)
        ends(again(), 2, message)
        assert WHOLE.read_bytes() == content != expected
    WHOLE.write_bytes(expected)
    ends(again(), 3, "nothing to do")
    record = '{"lines": 1, "failed": 0, "size": 5, "made_from": 5}'
    for broken in ("", "[1]", "{}", record, "[" * 10_000):
        Path("whole.jsonl.done").write_text(broken)
        ends(again(), 2, "and neither whole.jsonl.run nor whole.jsonl.done")
    WHOLE.unlink()
    ends(again("--max-tokens", 3), 3)
    ends(again("--max-tokens", 3), 3, "nothing to do")


def test_killed_between_the_last_two_files() -> None:
    """Both the store and the record are there: the store counts."""
    expected = unbroken()
    stop_in_the_middle()
    Path("out.jsonl.done").write_bytes(Path("whole.jsonl.done").read_bytes())
    resume()
    assert OUT.read_bytes() == expected
    ends(resume(), 3, "nothing to do")
