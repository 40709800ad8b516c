"""The section about batches: lines, order, reuse against the optimum, failures, cut answers."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from support.events import as_event, example_event

from mlxrunner import BatchRequest, Profile, Runner, run_batch
from mlxrunner.cli import main
from mlxrunner.profiling.report.page import page
from mlxrunner.profiling.report.summary import MOST_RUNS, Summary, name_of, words
from mlxrunner.profiling.schema import Event


def line_event(number: int, **changes: Any) -> dict[str, Any]:
    """Return the event of a line of a batch of 10 lines, of which 2 can't be run."""
    line = {"number": number, "lines": 10, "refused": 2, "order": "input"}
    return example_event(command="batch", line=line, **changes)


def summary_of(*events: dict[str, Any]) -> Summary:
    summary = Summary()
    for event in events:
        summary.add(as_event(event))
    return summary


def test_a_line_that_is_tried_again_is_one_line() -> None:
    """Its last try says how it ended."""
    (run,) = summary_of(
        line_event(1),
        line_event(2, finish="error", error="TimeLimitError"),
        line_event(3, finish="error", error="MemoryError"),
        line_event(4, finish="length"),
        line_event(2),
        line_event(3, finish="interrupted"),
    ).batches.runs
    assert (run.lines, run.refused, run.answered, run.cut, run.left) == (10, 2, 3, 1, 4)
    assert run.failed == {"interrupted": 1}
    assert run.tries == 6
    assert words(run) == (
        "10 lines, 3 answered, 1 of them cut at their most tokens. 2 lines could not be run (see "
        "the output). 1 line ended early, by a time limit or Ctrl-C. 4 lines not in this run. "
        "2 further tries of lines that had failed."
    )


def test_each_process_is_a_run_of_its_own() -> None:
    """The run that another one continues is one, too. Requests that are no line are left out."""
    first, second = summary_of(
        example_event(),
        line_event(1, max_sequences=8, process="0000000a"),
        line_event(2, process="0000000b"),
        line_event(3, max_sequences=8, process="0000000a"),
    ).batches.runs
    assert (first.answered, second.answered) == (2, 1)
    assert name_of(first) == "input order, 8 at a time"
    assert name_of(second) == "input order, one at a time"


def test_events_that_do_not_name_their_line_are_counted_by_their_command() -> None:
    """Older programs wrote such events. The number of lines is not known."""
    (run,) = summary_of(
        example_event(command="batch", number=1),
        example_event(command="batch", number=2, finish="error", error="TimeLimitError"),
    ).batches.runs
    assert (run.lines, run.left, run.answered, run.failed.total()) == (None, None, 1, 1)
    assert name_of(run) == "a batch, one at a time"
    assert words(run).startswith("2 lines, 1 answered. 1 line ended by a time limit")


def test_the_runs_of_a_report_are_bounded() -> None:
    """A file of any number of runs makes no endless list."""
    many = (line_event(1, process=f"{number:08x}") for number in range(MOST_RUNS + 9))
    assert len(summary_of(*many).batches.runs) == MOST_RUNS


def test_a_page_without_a_batch_has_no_section_for_it() -> None:
    """A page with a batch says how it ran."""
    assert "<h2>Batches</h2>" not in page(summary_of(example_event()), ["e"])
    shown = page(summary_of(line_event(1), line_event(2, finish="length")), ["e"])
    assert "<h2>Batches</h2>" in shown
    assert "10 lines, 2 answered, 1 of them cut" in shown


def test_the_report_of_a_real_batch_knows_the_optimum_of_its_tree(tmp_path: Path) -> None:
    """The best share is that of the plan, in any order; the share reused is that of the order."""
    texts = [f"{'abcdefgh'[number % 2] * 60} question {number}" for number in range(8)]
    lines = [{"prompt": text, "max_tokens": 2} for text in texts]
    given, events, rows = tmp_path / "in.jsonl", tmp_path / "events", tmp_path / "rows.csv"
    given.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"promt": ""}]))
    program, common = CliRunner(), ["batch", str(given), "--parallel", "1"]
    for order in ("prefix", "input"):
        wanted = ["-o", str(tmp_path / order), "--order", order, "--events", str(events), "-q"]
        assert program.invoke(main, [*common, *wanted]).exit_code == 3
    plan = json.loads(program.invoke(main, [*common, "--plan", "--json"]).output)
    told = program.invoke(main, ["report", str(events), "--json", "--csv", str(rows)])
    by_prefix, by_input = json.loads(told.output)["batches"]
    for run in (by_prefix, by_input):
        assert (run["lines"], run["refused"], run["answered"], run["cut"]) == (9, 1, 8, 8)
        best = run["prompt"] - run["reused"] - run["lost"]
        assert best == plan["evaluated_at_best"]
    assert (by_prefix["order"], by_prefix["lost"]) == ("prefix", 0)
    assert by_input["order"] == "input"
    assert by_input["lost"] == plan["evaluated_in_input_order"] - plan["evaluated_at_best"] > 0
    with rows.open(newline="") as stream:
        assert [row["line_number"] for row in csv.DictReader(stream)][8:] == list("12345678")
    shown = " ".join(program.invoke(main, ["report", str(events)]).output.split())
    assert "input order, one at a time" in shown
    assert "9 lines, 8 answered, 8 of them cut at their most tokens" in shown


def test_a_batch_of_a_program_names_its_lines() -> None:
    """By the number of the request, from 1."""
    seen: list[Event] = []
    with Runner.load("demo", reserve=False) as runner, Profile(sinks=[seen.append]).watch(runner):
        requests = [BatchRequest("Hello!", {"max_tokens": 1}), BatchRequest([]), BatchRequest("A")]
        assert [result.error is None for result in run_batch(runner, requests)] == [
            True,
            False,
            True,
        ]
    assert sorted(event.line.number for event in seen if event.line) == [1, 3]
    assert all(event.line and event.line.refused == 1 for event in seen)
    assert all(event.line and event.line.order == "prefix" for event in seen)
