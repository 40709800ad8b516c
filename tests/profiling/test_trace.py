"""Rows of CSV, and traces as chrome://tracing and Perfetto read them."""

from __future__ import annotations

import csv
import io
import json
from collections import defaultdict
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pytest
from support.events import afternoon, as_event, example_event

from mlxrunner.profiling.report.report import CsvWriter, TraceWriter

NOON = int(datetime(2026, 11, 20, 13, tzinfo=UTC).timestamp()) * 10**6


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
        assert isinstance(entry["name"], str)
        assert isinstance(entry["pid"], int)
        assert isinstance(entry["tid"], int)
        assert entry["ph"] in "XMC"
        if entry["ph"] == "X":
            assert entry["ts"] >= 0
            assert entry["dur"] >= 0
        if entry["ph"] == "C":
            assert all(isinstance(value, int) for value in entry["args"].values())


def test_every_span_is_there_and_lies_in_its_request() -> None:
    """tokenize, lookup, rewind, each prefill chunk, decode."""
    entries = [entry for entry in trace_of(example_event()) if entry["ph"] == "X"]
    request, *spans = entries
    assert [span["name"] for span in spans] == ["tokenize", "lookup", "rewind", "prefill", "decode"]
    assert request["dur"] == 37500
    assert request["args"]["reason"] == "diverged"
    for span in spans:
        assert request["ts"] <= span["ts"]
        assert span["ts"] + span["dur"] <= request["ts"] + request["dur"] + 1


def test_requests_lie_where_they_were_in_time() -> None:
    """Each process by itself."""
    first = example_event(time="2026-11-20T13:00:00.000000Z")
    second = example_event(time="2026-11-20T13:00:01.500000Z", process="00ff00ff", model="other")
    entries = trace_of(first, second)
    assert [entry["ts"] for entry in entries if entry.get("cat") == "request"] == [
        NOON,
        NOON + 1_500_000,
    ]
    names = {entry["pid"]: entry["args"]["name"] for entry in entries if entry["ph"] == "M"}
    assert names == {1: "demo (a1b2c3d4)", 2: "other (00ff00ff)"}


def test_a_request_that_began_before_the_first_one_lies_before_it() -> None:
    """The shorter request of several is written first, and files may come in any order."""
    late, early = (
        example_event(time="2026-11-20T13:00:05.000000Z"),
        example_event(time="2026-11-20T13:00:00.000000Z", total_s=10.0),
    )
    requests = [entry for entry in trace_of(late, early) if entry.get("cat") == "request"]
    assert [entry["ts"] - NOON for entry in requests] == [5_000_000, 0]
    assert [entry["tid"] for entry in requests] == [1, 2]


def test_requests_that_overlap_get_threads_of_their_own() -> None:
    """Spans of one thread have to be nested: parallel requests are not."""
    begins = [0.0, 0.1, 0.2, 0.9, 1.05]
    events = [
        example_event(time=f"2026-11-20T13:00:0{begin:08.6f}Z", total_s=0.5, spans=[])
        for begin in begins
    ]
    requests = [entry for entry in trace_of(*events) if entry.get("cat") == "request"]
    assert [entry["tid"] for entry in requests] == [1, 2, 3, 1, 2]
    by_thread = defaultdict(list)
    for entry in requests:
        by_thread[entry["tid"]].append((entry["ts"], entry["ts"] + entry["dur"]))
    for spans in by_thread.values():
        assert all(earlier[1] <= later[0] for earlier, later in pairwise(spans))


@pytest.mark.parametrize("time", ["yesterday", "", "9999-99-99", "2026-11-20T13:00:00"])
def test_a_time_that_is_none_breaks_nothing(time: str) -> None:
    """The span is there, with the one before it; a time without a zone is UTC."""
    entries = trace_of(example_event(time="2026-11-20T13:00:00.000000Z"), example_event(time=time))
    assert [entry["ts"] for entry in entries if entry.get("cat") == "request"] == [NOON, NOON]


def test_names_of_a_file_stay_text() -> None:
    """JSON takes care of quotes and control characters."""
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
    event = example_event(
        verify={
            "equal": False,
            "tokens": 3,
            "first_difference": 1,
            "logits_difference": 0.5,
            "tolerance": 0.1,
            "seconds": 1.0,
        }
    )
    (row,) = rows_of(event)
    assert {name: row[name] for name in event if name not in ("divergence", "spans", "verify")} == {
        name: "" if value is None else str(value)
        for name, value in event.items()
        if name not in ("divergence", "spans", "verify")
    }
    nested = (
        "divergence_index",
        "divergence_role",
        "divergence_part",
        "prefill_chunks",
        "verified_equal",
    )
    assert [row[name] for name in nested] == ["30", "assistant", "text", "1", "False"]


def test_what_is_not_there_is_an_empty_cell() -> None:
    """Not "None"."""
    (row,) = rows_of(example_event(divergence=None, ttft_s=None, reason=None))
    assert (row["divergence_index"], row["ttft_s"], row["reason"]) == ("", "", "")


@pytest.mark.parametrize(
    "text", ["=1+1", "+1", "-1", "@SUM(A1)", "\tx", "\rx", '=HYPERLINK("http://x","y")']
)
def test_no_cell_is_a_formula(text: str) -> None:
    """A spreadsheet would run it: it is marked as text."""
    (row,) = rows_of(example_event(model=text))
    assert row["model"] == "'" + text


@pytest.mark.parametrize("text", ['a,"b"\nc', "demo", "名前", "x\x00y"])
def test_other_text_comes_through(text: str) -> None:
    """Commas, quotes, line ends and all scripts come through; only NUL is dropped."""
    (row,) = rows_of(example_event(model=text))
    assert row["model"] == text.replace("\x00", "")
