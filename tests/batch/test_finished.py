"""--resume of a finished output compares what it was made from, and does nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.batches import complete, resume, run, stop_in_the_middle, unbroken
from support.models import write_model


def test_killed_after_the_last_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with all answers in its store has nothing left to run and loads no model."""
    expected = unbroken()
    with monkeypatch.context() as patched:
        patched.setattr(
            "mlxrunner.batch.output.AnswerFile.seal",
            lambda self: (_ for _ in ()).throw(KeyboardInterrupt),
        )
        assert resume().exit_code == 130
    Path("out.jsonl").write_bytes(expected[:-50])
    monkeypatch.setattr(
        "mlxrunner.batch.work.open_runner", lambda *arguments: pytest.fail("a model is loaded")
    )
    result = resume()
    assert (
        result.exit_code,
        "out.jsonl is complete (12 lines): nothing to do" in result.stderr,
    ) == (3, True)
    assert Path("out.jsonl").read_bytes() == expected
    assert not Path("out.jsonl.run").exists()


def test_resume_of_a_complete_output_does_nothing_and_says_so(folder: Path) -> None:
    """The exit code is that of the run with its failed line.

    What it was made from is in a private file beside it.
    """
    expected = complete()
    result = run("in.jsonl", "-o", "whole.jsonl", "--no-usage", "--parallel", 2, "--resume")
    assert "whole.jsonl is complete (12 lines): nothing to do" in result.stderr
    assert (result.exit_code, Path("whole.jsonl").read_bytes()) == (3, expected)
    assert Path("whole.jsonl.done").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", 1, "--seed", 3], "another --temperature: 0.0 then, 1.0 now"),
        (["-m", "tiny"], "another model: demo then, tiny now"),
        (["--system", "a"], 'another --system: not set then, "a" now'),
        (["--plan", "--max-tokens", 3], "another --max-tokens: not set then, 3 now"),
    ],
)
def test_resume_of_a_complete_output_refuses_what_it_was_not_made_from(
    folder: Path, arguments: list[object], message: str
) -> None:
    """Model, options and input, with the difference; the output stays as it is."""
    write_model(folder / "tiny")
    expected, text = complete(), Path("in.jsonl").read_text()
    again: list[object] = ["in.jsonl", "-o", "whole.jsonl", "--no-usage", "--resume"]
    result = run(*again, *arguments)
    assert (result.exit_code, f"whole.jsonl was begun with {message}" in result.stderr) == (2, True)
    Path("in.jsonl").write_text(text.replace("Ana", "Ann", 1))
    result = run(*again)
    assert (result.exit_code, "whole.jsonl was begun with another input: " in result.stderr) == (
        2,
        True,
    )
    assert Path("whole.jsonl").read_bytes() == expected


def test_resume_of_an_output_that_nothing_is_known_of_is_refused(folder: Path) -> None:
    """Its record is gone or damaged, or the output was written to since.

    Another run at the same place makes a new one.
    """
    expected = complete()
    again = ["in.jsonl", "-o", "whole.jsonl", "--no-usage", "--resume"]
    Path("whole.jsonl").write_bytes(expected + b"{}\n")
    result = run(*again)
    assert (
        result.exit_code,
        f"has {len(expected) + 3} bytes, and the run that wrote it left {len(expected)}"
        in result.stderr,
    ) == (2, True)
    Path("whole.jsonl").write_bytes(expected)
    for broken in (
        "",
        "[1]",
        "{}",
        '{"lines": 1, "failed": 0, "size": 5, "made_from": 5}',
        "[" * 10_000,
    ):
        Path("whole.jsonl.done").write_text(broken)
        result = run(*again)
        assert (
            result.exit_code,
            "and neither whole.jsonl.run nor whole.jsonl.done" in result.stderr,
        ) == (2, True)
    Path("whole.jsonl").unlink()
    assert run(*again, "--max-tokens", 3).exit_code == 3
    assert "nothing to do" in run(*again, "--max-tokens", 3).stderr


def test_an_output_that_was_changed_and_kept_its_size_is_not_complete(folder: Path) -> None:
    """One letter of an answer: it is not what the run left, and stays as somebody made it."""
    expected = complete()
    changed = expected.replace(b"name", b"Name", 1)
    assert changed != expected
    Path("whole.jsonl").write_bytes(changed)
    result = run("in.jsonl", "-o", "whole.jsonl", "--no-usage", "--resume")
    assert result.exit_code == 2
    assert (
        "whole.jsonl: is not what the run left, somebody has changed it: choose another -o, or "
        "remove it" in result.stderr
    )
    assert Path("whole.jsonl").read_bytes() == changed
    Path("whole.jsonl").write_bytes(expected)
    assert "nothing to do" in run("in.jsonl", "-o", "whole.jsonl", "--no-usage", "--resume").stderr


def test_killed_between_the_last_two_files(folder: Path) -> None:
    """Both the store and the record are there: the store counts."""
    expected = complete()
    stop_in_the_middle()
    Path("out.jsonl.done").write_bytes(Path("whole.jsonl.done").read_bytes())
    resume()
    assert Path("out.jsonl").read_bytes() == expected
    assert "nothing to do" in resume().stderr
