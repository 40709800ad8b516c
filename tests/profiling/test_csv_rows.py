"""Events as CSV."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest
from support.events import as_event, example_event

from mlxrunner.profiling.report.report import CsvWriter


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
