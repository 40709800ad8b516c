"""`mlxrunner report` as a user meets it."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from collections import defaultdict
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.checks import ends, has, refused
from support.events import afternoon, as_event, example_event

from mlxrunner import cli
from mlxrunner.profiling.report.report import CsvWriter, TraceWriter


def run(*arguments: str | Path, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(cli.main, ["report", *map(str, arguments)], env=env)


def write(file: Path, *events: dict[str, Any], extra: bytes = b"") -> Path:
    file.write_bytes(b"".join(json.dumps(event).encode() + b"\n" for event in events) + extra)
    return file


@pytest.fixture
def events(tmp_path: Path) -> Path:
    return write(tmp_path / "events.jsonl", *afternoon(60))


def test_json_is_one_object(events: Path) -> None:
    found = json.loads(run(events, "--json").stdout)
    has(found, requests=60, files=[str(events)])
    assert found["hit_rate"] == found["tokens"]["cached"] / found["tokens"]["prompt"]
    assert len(found["costliest"]) == 10


def test_a_hit_rate_below_the_wanted_one_is_exit_code_3(events: Path) -> None:
    """The report is printed all the same; the rate itself is enough."""
    found = json.loads(run(events, "--json").stdout)
    rate, tokens = found["hit_rate"], found["tokens"]
    ends(run(events, "--min-hit-rate", str(rate)), 0)
    below = run(events, "--min-hit-rate", str(rate + 0.001))
    share = f"{tokens['saved']:,} of {tokens['prompt']:,}"
    ends(below, 3, f"mlxrunner: {share} prompt tokens were reused, less than ")
    assert "hit rate by token" in below.stdout
    ends(run(events, "--min-hit-rate", "80"), 2)


def test_lines_that_cannot_be_read_are_skipped_with_a_count(tmp_path: Path) -> None:
    """Lines of another version or program, with a wrong field, or cut off."""
    good = example_event()
    broken = [json.dumps(good | {"version": 0}).encode(), b'{"level": "info"}', b"null"]
    broken += [json.dumps(good | {"prompt_tokens": -1}).encode(), json.dumps(good).encode()[:-20]]
    file = write(tmp_path / "events.jsonl", good, extra=b"\n".join(broken))
    result = run(file)
    ends(result, 0, "1 of another version")
    assert result.stderr.startswith("mlxrunner: 5 lines were skipped: ")
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
            "is compressed: unpack it first, gz",
        ),
    ],
    ids=["missing", "directory", "empty", "no event", "gzip"],
)
def test_what_is_no_events_file_is_one_clear_line(tmp_path: Path, make: Any, message: str) -> None:
    path = tmp_path / "events.jsonl"
    make(path)
    result = run(path)
    refused(result, message)
    assert str(path) in result.stderr


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
    page, rows, trace = tmp_path / "p.html", tmp_path / "r.csv", tmp_path / "t.json"
    assert run(events, "--html", page, "--csv", rows, "--trace", trace).exit_code == 0
    assert page.read_text().startswith("<!doctype html>")
    assert len(list(csv.DictReader(rows.open(newline="")))) == 60
    assert json.loads(trace.read_text())["traceEvents"]
    assert {file.stat().st_mode & 0o777 for file in (page, rows, trace)} == {0o600}
    there = " ".join(sorted(file.name for file in tmp_path.iterdir()))
    assert there == "events.jsonl p.html r.csv t.json"


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
    there = {file.name for file in tmp_path.iterdir()}
    assert there - {"o.trace"} == {"events.jsonl"}  # a trace may have been whole before


def test_one_file_for_two_results_is_refused(events: Path, tmp_path: Path, null: Path) -> None:
    """By whatever names; a stream takes any number."""
    (tmp_path / "link").symlink_to("result")
    result = run(events, "--csv", tmp_path / "result", "--html", tmp_path / "link")
    refused(result, "mlxrunner: --html and --csv are the same file")
    assert not (tmp_path / "result").exists()
    assert run(events, "--csv", null, "--trace", null).exit_code == 0


def test_counts_and_rates_that_can_not_be_are_skipped_or_harmless(tmp_path: Path) -> None:
    """Whoever wrote them: the figures stay numbers, and shares stay within all."""
    wrong: dict[str, Any] = {"prefill_rate": 1e-305, "cached_tokens": 65, "missed_tokens": 35}
    wrong |= {"saved_tokens": 29}
    events = [example_event(**{name: value}) for name, value in wrong.items()]
    file = write(tmp_path / "e", example_event(), example_event(ttft_s=5e-324), *events)
    result = run(file, "--json", "--html", tmp_path / "p.html")
    found = json.loads(result.stdout, parse_constant=pytest.fail)
    assert (found["requests"], found["skipped"]) == (2, {"invalid": 4})
    assert 0 <= found["hit_rate"] <= 1
    assert run(file).exit_code == 0


def test_a_pipe_closed_early_is_no_error(events: Path) -> None:
    command = f"{sys.executable} -m mlxrunner report {events} | head -2"
    unbuffered = os.environ | {"PYTHONUNBUFFERED": "1"}
    result = subprocess.run(command, shell=True, capture_output=True, text=True, env=unbuffered)
    assert result.stdout.count("\n") == 2
    assert "Traceback" not in result.stderr


def test_a_report_that_is_told_to_end_leaves_nothing_half_written(
    events: Path, tmp_path: Path
) -> None:
    """In the middle of the events: the file is as it was, and nothing lies beside it."""
    rows = tmp_path / "rows.csv"
    rows.write_text("old")
    code = (
        "import os, signal\n"
        "from mlxrunner.profiling.report import summary\n"
        "summary.Summary.add = lambda *_: os.kill(os.getpid(), signal.SIGTERM)\n"
        "from mlxrunner.cli import main\n"
        f"main({['report', str(events), '--csv', str(rows)]})\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 143
    assert rows.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "rows.csv"]


@pytest.mark.parametrize("command", ["report", "explain", "simulate"])
def test_help_and_reading_need_no_mlx(command: str) -> None:
    code = (
        "import sys; from mlxrunner.cli import main\n"
        f"try: main(['{command}', '--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'mlx', 'numpy', 'rich'} & {n.split('.')[0] for n in sys.modules}\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


NOON = int(datetime(2026, 11, 20, 13, tzinfo=UTC).timestamp()) * 10**6


def requests_of(*events: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for entry in trace_of(*events) if entry.get("cat") == "request"]


def trace_of(*events: dict[str, Any]) -> list[dict[str, Any]]:
    stream = io.StringIO()
    trace = TraceWriter(stream)
    for event in events:
        trace.add(as_event(event))
    trace.close()
    document = json.loads(stream.getvalue())
    assert document["displayTimeUnit"] == "ms"
    entries: list[dict[str, Any]] = document["traceEvents"]
    return entries


def test_a_trace_has_what_the_format_asks_for() -> None:
    """A trace has complete events, metadata and counters with the format's fields and types."""
    for entry in trace_of(*afternoon(50)):
        kinds = [type(entry[name]) for name in ("name", "pid", "tid")]
        assert kinds == [str, int, int]
        assert entry["ph"] in "XMC"
        if entry["ph"] == "X":
            assert min(entry["ts"], entry["dur"]) >= 0
        if entry["ph"] == "C":
            assert all(isinstance(value, int) for value in entry["args"].values())


def test_every_span_is_there_and_lies_in_its_request() -> None:
    entries = [entry for entry in trace_of(example_event()) if entry["ph"] == "X"]
    request, *spans = entries
    assert [span["name"] for span in spans] == ["tokenize", "lookup", "rewind", "prefill", "decode"]
    assert request["dur"] == 37500
    assert request["args"]["reason"] == "diverged"
    for span in spans:
        assert request["ts"] <= span["ts"]
        assert span["ts"] + span["dur"] <= request["ts"] + request["dur"] + 1


def test_requests_lie_where_they_were_in_time() -> None:
    first = example_event(time="2026-11-20T13:00:00.000000Z")
    second = example_event(time="2026-11-20T13:00:01.500000Z", process="00ff00ff", model="other")
    entries = trace_of(first, second)
    begins = [entry["ts"] for entry in entries if entry.get("cat") == "request"]
    assert begins == [NOON, NOON + 1_500_000]
    names = {entry["pid"]: entry["args"]["name"] for entry in entries if entry["ph"] == "M"}
    assert names == {1: "demo (a1b2c3d4)", 2: "other (00ff00ff)"}


def test_a_request_that_began_before_the_first_one_lies_before_it() -> None:
    """The shorter request of several is written first, and files may come in any order."""
    late = example_event(time="2026-11-20T13:00:05.000000Z")
    early = example_event(time="2026-11-20T13:00:00.000000Z", total_s=10.0)
    requests = requests_of(late, early)
    assert [entry["ts"] - NOON for entry in requests] == [5_000_000, 0]
    assert [entry["tid"] for entry in requests] == [1, 2]


def test_requests_that_overlap_get_threads_of_their_own() -> None:
    """Spans of one thread have to be nested: parallel requests are not."""
    begins = [0.0, 0.1, 0.2, 0.9, 1.05]
    events = [
        example_event(time=f"2026-11-20T13:00:0{begin:08.6f}Z", total_s=0.5, spans=[])
        for begin in begins
    ]
    requests = requests_of(*events)
    assert [entry["tid"] for entry in requests] == [1, 2, 3, 1, 2]
    by_thread = defaultdict(list)
    for entry in requests:
        by_thread[entry["tid"]].append((entry["ts"], entry["ts"] + entry["dur"]))
    for spans in by_thread.values():
        assert all(earlier[1] <= later[0] for earlier, later in pairwise(spans))


@pytest.mark.parametrize("time", ["yesterday", "", "9999-99-99", "2026-11-20T13:00:00"])
def test_a_time_that_is_none_breaks_nothing(time: str) -> None:
    """The span is there, with the one before it; a time without a zone is UTC."""
    found = requests_of(example_event(time="2026-11-20T13:00:00.000000Z"), example_event(time=time))
    assert [entry["ts"] for entry in found] == [NOON, NOON]


def test_names_of_a_file_stay_text() -> None:
    entries = trace_of(example_event(model='"}],\n\x1b[31m', reason=None))
    assert entries[0]["args"]["name"] == '"}],\n\x1b[31m (a1b2c3d4)'


def rows_of(*events: dict[str, Any]) -> list[dict[str, str]]:
    stream = io.StringIO(newline="")
    rows = CsvWriter(stream)
    for event in events:
        rows.add(as_event(event))
    return list(csv.DictReader(io.StringIO(stream.getvalue(), newline="")))


def test_a_row_has_every_field_of_the_event() -> None:
    """A row has every field of the event, nested ones as their figures."""
    verify = {"equal": False, "tokens": 3, "first_difference": 1, "logits_difference": 0.5}
    event = example_event(verify=verify | {"tolerance": 0.1, "seconds": 1.0})
    (row,) = rows_of(event)
    for name, value in event.items():
        if name not in ("divergence", "spans", "verify"):
            assert row[name] == ("" if value is None else str(value))
    has(row, divergence_index="30", divergence_role="assistant", divergence_part="text")
    has(row, prefill_chunks="1", verified_equal="False")
    (row,) = rows_of(example_event(divergence=None, ttft_s=None, reason=None))
    assert (row["divergence_index"], row["ttft_s"], row["reason"]) == ("", "", "")


FORMULAS = ["=1+1", "+1", "-1", "@SUM(A1)", "\tx", "\rx", '=HYPERLINK("http://x","y")']


@pytest.mark.parametrize("text", [*FORMULAS, 'a,"b"\nc', "demo", "名前", "x\x00y"])
def test_no_cell_is_a_formula(text: str) -> None:
    """A spreadsheet would run it: it is marked as text. Of other text only NUL is dropped."""
    (row,) = rows_of(example_event(model=text))
    assert row["model"] == ("'" if text in FORMULAS else "") + text.replace("\x00", "")
