"""A run that was stopped goes on with --resume, without loss or repeated work."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from support.batches import TYPED, resume, run, stop_in_the_middle, unbroken
from support.checks import ends, raising
from support.models import write_model

from mlxrunner.batch.store import Store


@pytest.mark.parametrize("output_order", ["input", "done"])
def test_what_is_left_is_run_and_what_is_there_is_not(folder: Path, output_order: str) -> None:
    """The store has the answers; the file equals that of an unbroken run in the same order."""
    expected = unbroken("--order", "input", "--output-order", output_order)
    stop_in_the_middle("--output-order", output_order)
    result = resume("--order", "input", "--output-order", output_order)
    assert result.exit_code == 3  # of the broken line
    assert "6 lines in " in result.stderr
    assert Path("out.jsonl").read_bytes() == expected
    assert not Path("out.jsonl.run").exists()


def test_the_order_of_running_and_the_number_at_a_time_may_change(folder: Path) -> None:
    """They don't change the answers."""
    expected = unbroken()
    stop_in_the_middle()
    result = resume("--parallel", 3, "--retries", 1, "--timeout", 600)
    assert "3 lines at a time" in result.stderr
    assert Path("out.jsonl").read_bytes() == expected


@pytest.mark.parametrize(
    "kept", [0, 1, 40, 200, -1], ids=["empty", "one byte", "torn", "later", "newline lost"]
)
def test_an_output_that_lost_its_end_gets_it_from_the_store(
    folder: Path, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut after the store was committed; nothing is run for it."""
    expected = unbroken()
    stop_in_the_middle()
    content = Path("out.jsonl").read_bytes()
    Path("out.jsonl").write_bytes(content[:kept])
    with monkeypatch.context() as patched:
        patched.setattr("mlxrunner.batch.work.survey", raising(KeyboardInterrupt))
        assert resume().exit_code == 130
    assert Path("out.jsonl").read_bytes() == content
    resume()
    assert Path("out.jsonl").read_bytes() == expected


def test_an_output_that_somebody_wrote_to_is_not_touched(folder: Path) -> None:
    """It is refused; moved away, it is written again, and nothing is run twice."""
    expected = unbroken()
    stop_in_the_middle()
    with Path("out.jsonl").open("ab") as file:
        file.write(b"a note\n")
    content = Path("out.jsonl").read_bytes()
    result = resume()
    assert "its last lines are not what this run wrote: move it away" in result.stderr
    assert (result.exit_code, Path("out.jsonl").read_bytes()) == (2, content)
    Path("out.jsonl").rename("mine.jsonl")
    assert "6 lines in " in resume().stderr
    assert Path("out.jsonl").read_bytes() == expected


@pytest.mark.parametrize("at", ["begin", "middle", "answers"])
def test_a_damaged_store_says_so_and_offers_no_resume(folder: Path, at: str) -> None:
    """The message says what can be done instead, and the answers stay."""
    stop_in_the_middle()
    store, answers = Path("out.jsonl.run"), Path("out.jsonl").read_bytes()
    if at == "answers":
        with closing(sqlite3.connect(store)) as database:
            database.execute("UPDATE results SET body = 5 WHERE line = 3")
            database.commit()
    else:
        content = bytearray(store.read_bytes())
        begin = {"begin": 0, "middle": len(content) // 2}[at]
        content[begin : begin + 5000] = b"x" * 5000
        store.write_bytes(content)
    result = resume()
    assert result.exit_code == 2, result.stderr
    assert result.stderr.startswith("mlxrunner: out.jsonl.run: is ")
    assert "no run can resume from it. Remove it and begin again with another -o" in result.stderr
    assert "to continue:" not in result.stderr
    assert Path("out.jsonl").read_bytes() == answers
    assert store.exists()


def test_a_plan_leaves_the_run_alone_that_it_is_about(folder: Path) -> None:
    """A plan leaves a killed run's store as it was and refuses what the run refuses."""
    expected = unbroken()
    Store.create(Path("out.jsonl.run")).close()
    plan = [*TYPED, "--resume", "--plan", "--json"]
    before = Path("out.jsonl.run").read_bytes()
    assert json.loads(run(*plan).stdout)["done"] == 0
    assert Path("out.jsonl.run").read_bytes() == before
    Path("out.jsonl.run").unlink()
    stop_in_the_middle()
    before = Path("out.jsonl.run").read_bytes()
    assert json.loads(run(*plan).stdout)["done"] == 6
    ends(run(*plan, "--system", "Be kind."), 2, "was begun with another --system: ")
    ends(
        run(*plan, "--chat-template-var", "enable_thinking=false"),
        2,
        "was begun with another --template-var: not set then, ",
    )
    assert Path("out.jsonl.run").read_bytes() == before
    resume()
    assert Path("out.jsonl").read_bytes() == expected
    planned = json.loads(run(*plan).stdout)
    assert (planned["lines"], planned["done"], planned["tokens"]) == (12, 12, 0)


def test_without_resume_nothing_is_overwritten(folder: Path) -> None:
    """Neither an output nor an unfinished run is overwritten; an empty file is taken."""
    stop_in_the_middle()
    content = Path("out.jsonl").read_bytes()
    result = run("in.jsonl", "-o", "out.jsonl")
    assert (
        "out.jsonl.run: belongs to an unfinished run: continue it with --resume, or remove "
        "it and out.jsonl" in result.stderr
    )
    Path("out.jsonl.run").unlink()
    result = run("in.jsonl", "-o", "out.jsonl")
    assert "out.jsonl: is there already: choose another -o, or remove it" in result.stderr
    assert (result.exit_code, Path("out.jsonl").read_bytes()) == (2, content)
    Path("out.jsonl").write_bytes(b"")
    run("in.jsonl", "-o", "out.jsonl")
    assert len(Path("out.jsonl").read_bytes().splitlines()) == 12


OTHERS = {
    "--max-tokens 3": "another --max-tokens: not set then, 3 now",
    "--temperature 0.5": "another --temperature: 0.0 then, 0.5 now",
    "--system Kind": 'another --system: not set then, "Kind" now',
    "--stop x": 'another --stop: not set then, ["x"] now',
    "--raw": "another --raw: not set then, true now",
    "--context 512": "another --context: not set then, 512 now",
    "--output-order done": 'another --output-order: "input" then, "done" now',
    "-m tiny": "another model: demo then, tiny now",
}


def test_other_options_or_another_model_are_refused_with_the_difference(folder: Path) -> None:
    """Both values; what is there stays, and the right command still goes on."""
    write_model(folder / "tiny")
    expected = unbroken()
    stop_in_the_middle()
    for options, message in OTHERS.items():
        result = resume(*options.split())
        ends(result, 2, f"mlxrunner: out.jsonl was begun with {message}")
        assert "to continue" not in result.stderr  # not with these options
    resume()
    assert Path("out.jsonl").read_bytes() == expected


def test_another_input_is_refused(folder: Path) -> None:
    """By its hash: one byte is enough."""
    stop_in_the_middle()
    with Path("in.jsonl").open("a") as file:
        file.write("\n")
    ends(resume(), 2, "was begun with another input: ")


def test_a_run_from_standard_input_goes_on_with_or_without_it(folder: Path) -> None:
    """The store has the input; if it comes again it has to be the same."""
    expected, text = unbroken(), Path("in.jsonl").read_text()
    for again in ("", text):
        arguments = ["-", "-o", "out.jsonl", "--no-usage", "--parallel", 1]
        assert run(*arguments, "--order", "input", "--max-errors", 1, stdin=text).exit_code == 1
        assert "another input" in run(*arguments, "--resume", stdin="{}").stderr
        run(*arguments, "--resume", stdin=again)
        assert Path("out.jsonl").read_bytes() == expected
        Path("out.jsonl").unlink()


def test_a_refused_resume_keeps_a_store_that_has_no_answer_yet(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was killed before its first answer keeps what came from standard input."""
    expected, text = unbroken(), Path("in.jsonl").read_text()
    arguments = ["-", "-o", "out.jsonl", "--no-usage", "--parallel", 1]
    with monkeypatch.context() as patched:
        patched.setattr("mlxrunner.batch.work.open_output", raising(KeyboardInterrupt))
        patched.setattr(Path, "unlink", lambda self: None)  # a killed process doesn't tidy up
        assert run(*arguments, stdin=text).exit_code == 130
    assert (
        "another --temperature: 0.0 then, 1.0 now"
        in run(*arguments, "--resume", "--temperature", 1).stderr
    )
    assert run(*arguments, "--resume", "--strict").exit_code == 2
    run(*arguments, "--resume")
    assert Path("out.jsonl").read_bytes() == expected


@pytest.mark.exhaustive(0)
def test_a_second_run_at_the_same_time_is_refused(folder: Path) -> None:
    """In one line, with --resume and without; the first one is not disturbed."""
    stop_in_the_middle()
    before = Path("out.jsonl").read_bytes()
    with Store.open(Path("out.jsonl.run")):
        for arguments in ([], ["--resume"]):
            code = [
                sys.executable,
                "-m",
                "mlxrunner",
                *"batch in.jsonl -o out.jsonl".split(),
                *arguments,
            ]
            result = subprocess.run(code, capture_output=True, text=True)
            assert result.returncode == 2
            assert (
                "mlxrunner: out.jsonl.run: another process is using it: wait for its end\n"
                in result.stderr
            )
    assert Path("out.jsonl").read_bytes() == before


def test_an_error_before_the_first_answer_leaves_nothing_behind(folder: Path) -> None:
    """No empty output, no store: the same command without --resume is right again."""
    ends(
        run("in.jsonl", "-o", "out.jsonl", "--strict"),
        2,
        "1 of 12 lines can't be run, the first: line 6: not JSON",
    )
    assert sorted(path.name for path in folder.iterdir()) == ["in.jsonl"]


@pytest.mark.parametrize("limit", [30_000, 200], ids=["the store", "the output"])
def test_a_file_that_may_not_grow_is_one_line_and_loses_nothing(folder: Path, limit: int) -> None:
    """Wherever it is met; the run goes on when there is room."""
    expected = unbroken()
    if limit < 1000:
        stop_in_the_middle()
    code = (
        "import resource; from mlxrunner.cli import main\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, resource.RLIM_INFINITY))\n"
        "main(['batch', 'in.jsonl', '-o', 'out.jsonl', '--no-usage', '--no-reserve', '--parallel', "
        "'1', '--resume'])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == (1 if limit < 1000 else 2)  # cut off, or never begun
    assert "Traceback" not in result.stderr
    assert (
        "disk I/O error; what was committed is kept" in result.stderr
        or "can't be written: File too large" in result.stderr
    )
    resume()
    assert Path("out.jsonl").read_bytes() == expected


@pytest.mark.skipif(sys.platform != "linux", reason="grows a tmpfs, which only Linux has")
def test_a_full_disk_is_one_line_and_loses_nothing(folder: Path) -> None:
    """A disk that gets larger by a page each time it is full, wherever that is."""
    expected = unbroken()
    Path("small").mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "none", "small"], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"mounts a disk, which this user may not: {mounted.stderr.strip()}")
    said = []
    try:
        for pages in range(5, 100):
            result = run(
                "in.jsonl", "-o", "small/out.jsonl", "--no-usage", "--parallel", 1, "--resume"
            )
            said.append(result.stderr)
            if (
                "the disk is full" not in result.stderr
                and "No space left on device" not in result.stderr
            ):
                break
            assert result.exit_code in (1, 2)
            assert expected.startswith(
                Path("small/out.jsonl").read_bytes() if Path("small/out.jsonl").exists() else b""
            )
            subprocess.run(["mount", "-o", f"remount,size={4 * pages}k", "small"], check=True)
        assert Path("small/out.jsonl").read_bytes() == expected
        assert sorted(os.listdir("small")) == ["out.jsonl", "out.jsonl.done"]
    finally:
        subprocess.run(["umount", "small"], check=True)
    assert any("out.jsonl.run: the disk is full" in text for text in said)
    assert any("out.jsonl: can't be written: No space left on device" in text for text in said)
    assert len(said) > 5


def test_killed_after_the_last_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with all answers in its store has nothing left to run and loads no model."""
    expected = unbroken()
    with monkeypatch.context() as patched:
        patched.setattr("mlxrunner.batch.output.AnswerFile.seal", raising(KeyboardInterrupt))
        assert resume().exit_code == 130
    Path("out.jsonl").write_bytes(expected[:-50])
    monkeypatch.setattr(
        "mlxrunner.batch.work.open_runner", lambda *arguments: pytest.fail("a model is loaded")
    )
    ends(resume(), 3, "out.jsonl is complete (12 lines): nothing to do")
    assert Path("out.jsonl").read_bytes() == expected
    assert not Path("out.jsonl.run").exists()


def test_resume_of_a_complete_output_does_nothing_and_says_so(folder: Path) -> None:
    """The exit code is that of the run with its failed line.

    What it was made from is in a private file beside it.
    """
    expected = unbroken()
    result = run("in.jsonl", "-o", "whole.jsonl", "--no-usage", "--parallel", 2, "--resume")
    assert "whole.jsonl is complete (12 lines): nothing to do" in result.stderr
    assert (result.exit_code, Path("whole.jsonl").read_bytes()) == (3, expected)
    assert Path("whole.jsonl.done").stat().st_mode & 0o777 == 0o600


def test_resume_of_a_complete_output_refuses_what_it_was_not_made_from(folder: Path) -> None:
    """Model, options and input, with the difference, also by a plan; the output stays as it is."""
    write_model(folder / "tiny")
    expected, text = unbroken(), Path("in.jsonl").read_text()
    again = ["in.jsonl", "-o", "whole.jsonl", "--no-usage", "--resume"]
    others = OTHERS | {"--temperature 1 --seed 3": "another --temperature: 0.0 then, 1.0 now"}
    for options, message in others.items():
        ends(run(*again, *options.split()), 2, f"whole.jsonl was begun with {message}")
    ends(run(*again, "--plan", "--raw"), 2, "whole.jsonl was begun with another --raw")
    Path("in.jsonl").write_text(text.replace("Ana", "Ann", 1))
    ends(run(*again), 2, "whole.jsonl was begun with another input: ")
    assert Path("whole.jsonl").read_bytes() == expected


def test_resume_of_an_output_that_nothing_is_known_of_is_refused(folder: Path) -> None:
    """Its record is gone or damaged, or the output was written to since.

    Another run at the same place makes a new one.
    """
    expected = unbroken()
    again = ["in.jsonl", "-o", "whole.jsonl", "--no-usage", "--resume"]
    Path("whole.jsonl").write_bytes(expected + b"{}\n")
    ends(
        run(*again),
        2,
        f"has {len(expected) + 3} bytes, and the run that wrote it left {len(expected)}",
    )
    Path("whole.jsonl").write_bytes(expected)
    for broken in (
        "",
        "[1]",
        "{}",
        '{"lines": 1, "failed": 0, "size": 5, "made_from": 5}',
        "[" * 10_000,
    ):
        Path("whole.jsonl.done").write_text(broken)
        ends(run(*again), 2, "and neither whole.jsonl.run nor whole.jsonl.done")
    Path("whole.jsonl").unlink()
    assert run(*again, "--max-tokens", 3).exit_code == 3
    assert "nothing to do" in run(*again, "--max-tokens", 3).stderr


def test_an_output_that_was_changed_and_kept_its_size_is_not_complete(folder: Path) -> None:
    """One letter of an answer: it is not what the run left, and stays as somebody made it."""
    expected = unbroken()
    changed = expected.replace(b"name", b"Name", 1)
    assert changed != expected
    Path("whole.jsonl").write_bytes(changed)
    ends(
        run("in.jsonl", "-o", "whole.jsonl", "--no-usage", "--resume"),
        2,
        "whole.jsonl: was changed after the run: choose another -o, or remove it",
    )
    assert Path("whole.jsonl").read_bytes() == changed
    Path("whole.jsonl").write_bytes(expected)
    assert "nothing to do" in run("in.jsonl", "-o", "whole.jsonl", "--no-usage", "--resume").stderr


def test_killed_between_the_last_two_files(folder: Path) -> None:
    """Both the store and the record are there: the store counts."""
    expected = unbroken()
    stop_in_the_middle()
    Path("out.jsonl.done").write_bytes(Path("whole.jsonl.done").read_bytes())
    resume()
    assert Path("out.jsonl").read_bytes() == expected
    assert "nothing to do" in resume().stderr
