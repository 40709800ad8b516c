"""`mlxrunner report` as a user meets it."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.events import afternoon, example_event

from mlxrunner import cli


def run(*arguments: str | Path, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(cli.main, ["report", *map(str, arguments)], env=env)


def write(file: Path, *events: dict[str, Any], extra: bytes = b"") -> Path:
    file.write_bytes(b"".join(json.dumps(event).encode() + b"\n" for event in events) + extra)
    return file


@pytest.fixture
def events(tmp_path: Path) -> Path:
    return write(tmp_path / "events.jsonl", *afternoon(60))


def test_json_is_one_object(events: Path) -> None:
    """With the same figures and nothing else on stdout."""
    found = json.loads(run(events, "--json").stdout)
    assert found["requests"] == 60
    assert found["files"] == [str(events)]
    assert found["hit_rate"] == found["tokens"]["cached"] / found["tokens"]["prompt"]
    assert len(found["costliest"]) == 10


def test_a_hit_rate_below_the_wanted_one_is_exit_code_3(events: Path) -> None:
    """The report is printed all the same; the rate itself is enough."""
    rate = json.loads(run(events, "--json").stdout)["hit_rate"]
    assert run(events, "--min-hit-rate", str(rate)).exit_code == 0
    below = run(events, "--min-hit-rate", str(rate + 0.001))
    assert below.exit_code == 3
    found = json.loads(run(events, "--json").stdout)["tokens"]
    assert (
        f"mlxrunner: {found['saved']:,} of {found['prompt']:,} prompt tokens were reused, less "
        "than " in below.stderr
    )
    assert "hit rate by token" in below.stdout
    assert run(events, "--min-hit-rate", "80").exit_code == 2


def test_lines_that_cannot_be_read_are_skipped_with_a_count(tmp_path: Path) -> None:
    """Lines of another version or program, with a wrong field, or cut off."""
    good = example_event()
    broken = [json.dumps(good | {"version": 0}).encode(), b'{"level": "info"}', b"null"]
    broken += [json.dumps(good | {"prompt_tokens": -1}).encode(), json.dumps(good).encode()[:-20]]
    file = write(tmp_path / "events.jsonl", good, extra=b"\n".join(broken))
    result = run(file)
    assert result.exit_code == 0
    assert result.stderr.startswith("mlxrunner: 5 lines were skipped: ")
    assert "1 of another version" in result.stderr
    found = json.loads(run(file, "--json").stdout)
    assert (found["requests"], found["skipped"]["version"]) == (1, 1)


def test_counts_of_an_earlier_program_are_called_upper_bounds(tmp_path: Path) -> None:
    """Those of 0.2: on the screen, in the JSON and on the page. Those of today are not."""
    earlier = Path(__file__).with_name("earlier.jsonl")
    result = run(earlier, "--html", str(tmp_path / "report.html"))
    note = "1 event of version 0.2 counted missed and displaced tokens as an upper bound"
    assert result.stderr == f"mlxrunner: {note}: new ones are among them\n"
    assert note in (tmp_path / "report.html").read_text()
    assert json.loads(run(earlier, "--json").stdout)["bounded"] == 1
    event = example_event()
    lost = event["lost_tokens"]
    new = event["prompt_tokens"] - event["cached_tokens"] - lost
    counted = event | {"missed_tokens": lost, "new_tokens": new}
    assert run(write(tmp_path / "events.jsonl", counted)).stderr == ""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "no such file"),
        (lambda path: path.mkdir(), "is a directory, not a regular file"),
        (lambda path: path.write_bytes(b""), "nothing has been logged yet"),
        (lambda path: path.write_bytes(b"hello\n"), "1 line was skipped: 1 broken or cut off"),
        (
            lambda path: path.write_bytes(b"\x1f\x8b\x08 packed"),
            "is compressed: unpack it first, gzip -dk",
        ),
    ],
    ids=["missing", "directory", "empty", "no event", "gzip"],
)
def test_what_is_no_events_file_is_one_clear_line(tmp_path: Path, make: Any, message: str) -> None:
    """Exit code 2, the file's name, and nothing on stdout."""
    path = tmp_path / "events.jsonl"
    make(path)
    result = run(path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert str(path) in result.stderr
    assert result.stderr.count("\n") == 1


def test_rotated_files_are_read_too_and_none_twice(tmp_path: Path) -> None:
    """FILE.1 is older than FILE; a shell's events.jsonl* names both."""
    first, second = list(afternoon(6))[:3], list(afternoon(6))[3:]
    write(tmp_path / "e.jsonl.1", *first)
    file = write(tmp_path / "e.jsonl", *second)
    found = json.loads(run(file, "--json").stdout)
    assert found["requests"] == 6
    assert found["files"] == [f"{file}.1", str(file)]
    assert json.loads(run(file, f"{file}.1", "--json").stdout)["requests"] == 6


def test_all_results_are_written_in_one_go_for_their_owner_only(
    events: Path, tmp_path: Path
) -> None:
    """A page, rows and a trace; files of users are 0600."""
    page, rows, trace = tmp_path / "p.html", tmp_path / "r.csv", tmp_path / "t.json"
    assert run(events, "--html", page, "--csv", rows, "--trace", trace).exit_code == 0
    assert page.read_text().startswith("<!doctype html>")
    assert len(list(csv.DictReader(rows.open(newline="")))) == 60
    assert json.loads(trace.read_text())["traceEvents"]
    assert {file.stat().st_mode & 0o777 for file in (page, rows, trace)} == {0o600}
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "events.jsonl",
        "p.html",
        "r.csv",
        "t.json",
    ]


def test_what_cannot_be_written_is_one_clear_line(events: Path, tmp_path: Path, full: int) -> None:
    """A missing folder, a full disk or the events as output is one line that loses nothing."""
    before = events.read_bytes()
    for option, target, message in (
        ("--html", tmp_path / "no" / "p.html", "can't be written: No such file"),
        ("--csv", tmp_path, "can't be written: Is a directory"),
        ("--trace", f"/dev/fd/{full}", "can't be written: No space left"),
        ("--csv", f"/dev/fd/{full}", f"/dev/fd/{full}: can't be written: No space left"),
        ("--csv", events, "is an input"),
    ):
        other = [] if option == "--trace" else ["--trace", tmp_path / "o.trace"]
        result = run(events, option, target, *other)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.stderr
        assert message in result.stderr
        assert "o.trace" not in result.stderr
    assert events.read_bytes() == before
    assert {file.name for file in tmp_path.iterdir()} - {"o.trace"} == {
        "events.jsonl"
    }  # a trace may have been whole before


def test_one_file_for_two_results_is_refused(events: Path, tmp_path: Path, null: Path) -> None:
    """By whatever names; a stream takes any number."""
    (tmp_path / "link").symlink_to("result")
    result = run(events, "--csv", tmp_path / "result", "--html", tmp_path / "link")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "mlxrunner: --html and --csv are the same file" in result.stderr
    assert not (tmp_path / "result").exists()
    assert run(events, "--csv", null, "--trace", null).exit_code == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"ttft_s": 5e-324},
        {"prefill_rate": 1e-305},
        {"cached_tokens": 65},
        {"missed_tokens": 35},
        {"saved_tokens": 29},
    ],
    ids=["time", "rate", "cached", "missed", "saved"],
)
def test_counts_and_rates_that_can_not_be_are_skipped_or_harmless(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Whoever wrote them: the figures stay numbers, and shares stay within all."""
    file = write(tmp_path / "e", example_event(), example_event(**changes))
    result = run(file, "--json", "--html", tmp_path / "p.html")
    found = json.loads(result.stdout, parse_constant=pytest.fail)
    assert found["requests"] == (2 if "ttft_s" in changes else 1)
    assert 0 <= found["hit_rate"] <= 1
    assert run(file).exit_code == 0


def test_a_pipe_closed_early_is_no_error(events: Path) -> None:
    """report | head ends quietly."""
    command = f"{sys.executable} -m mlxrunner report {events} | head -2"
    result = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert result.stdout.count("\n") == 2
    assert "Traceback" not in result.stderr


def test_a_report_that_is_told_to_end_leaves_nothing_half_written(
    events: Path, tmp_path: Path
) -> None:
    """In the middle of the events: the file is as it was, and nothing lies beside it."""
    rows = tmp_path / "rows.csv"
    rows.write_text("old")
    code = (
        "import os, signal, sys\n"
        "from mlxrunner.profiling.report import summary\n"
        "def told(*given): os.kill(os.getpid(), signal.SIGTERM)\n"
        "summary.Summary.add = told\n"
        f"from mlxrunner.cli import main; main(['report', {str(events)!r}, '--csv', "
        f"{str(rows)!r}])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 143
    assert rows.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "rows.csv"]


@pytest.mark.parametrize("command", ["report", "explain", "simulate"])
def test_help_and_reading_need_no_mlx(command: str) -> None:
    """Help imports nothing heavy."""
    code = (
        "import sys; from mlxrunner.cli import main\n"
        f"try: main(['{command}', '--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'mlx', 'numpy', 'rich'} & {n.split('.')[0] for n in sys.modules}\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
