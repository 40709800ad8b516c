"""The section about batches: lines, order, reuse against the optimum, failures, cut answers."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from support.events import example_event, run, summary_of

from mlxrunner import BatchRequest, Profile, Runner, run_batch
from mlxrunner.profiling.report.page import page
from mlxrunner.profiling.report.summary import MOST_RUNS, name_of, words
from mlxrunner.profiling.schema import Event


def line_event(number: int, **changes: Any) -> dict[str, Any]:
    """Return the event of a line of a batch of 10 lines, of which 2 can't be run."""
    line = {"number": number, "lines": 10, "refused": 2, "order": "input"}
    return example_event(command="batch", line=line, **changes)


def test_a_line_that_is_tried_again_is_one_line() -> None:
    (made,) = summary_of(
        line_event(1),
        line_event(2, finish="error", error="TimeLimitError"),
        line_event(3, finish="error", error="MemoryError"),
        line_event(4, finish="length"),
        line_event(2),
        line_event(3, finish="interrupted"),
    ).batches.runs
    assert (made.lines, made.refused, made.answered, made.cut, made.left) == (10, 2, 3, 1, 4)
    assert made.failed == {"interrupted": 1}
    assert made.tries == 6
    assert words(made) == (
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
    (made,) = summary_of(
        example_event(command="batch", number=1),
        example_event(command="batch", number=2, finish="error", error="TimeLimitError"),
    ).batches.runs
    assert (made.lines, made.left, made.answered, made.failed.total()) == (None, None, 1, 1)
    assert name_of(made) == "a batch, one at a time"
    assert words(made).startswith("2 lines, 1 answered. 1 line ended by a time limit")


def test_the_runs_of_a_report_are_bounded() -> None:
    many = (line_event(1, process=f"{number:08x}") for number in range(MOST_RUNS + 9))
    assert len(summary_of(*many).batches.runs) == MOST_RUNS


def test_a_page_without_a_batch_has_no_section_for_it() -> None:
    assert "<h2>Batches</h2>" not in page(summary_of(example_event()), ["e"])
    shown = page(summary_of(line_event(1), line_event(2, finish="length")), ["e"])
    assert "<h2>Batches</h2>" in shown
    assert "10 lines, 2 answered, 1 of them cut" in shown


def test_the_report_of_a_real_batch_knows_the_optimum_of_its_tree(
    batch: Path, events: Path, tmp_path: Path
) -> None:
    """The best share is that of the plan, in any order; the share reused is that of the order."""
    rows, common = tmp_path / "rows.csv", ["batch", batch, "--parallel", 1]
    batch.write_text(batch.read_text() + '{"promt": ""}\n')
    for order in ("prefix", "input"):
        wanted = ["-o", tmp_path / order, "--order", order, "--events", events, "-q"]
        run(*common, *wanted, code=3)
    plan = json.loads(run(*common, "--plan", "--json").stdout)
    made = run("report", events, "--json", "--csv", rows).stdout
    by_prefix, by_input = json.loads(made)["batches"]
    for one in (by_prefix, by_input):
        assert (one["lines"], one["refused"], one["answered"], one["cut"]) == (9, 1, 8, 8)
        best = one["prompt"] - one["reused"] - one["lost"]
        assert best == plan["evaluated_at_best"]
    assert (by_prefix["order"], by_prefix["lost"]) == ("prefix", 0)
    assert by_input["order"] == "input"
    assert by_input["lost"] == plan["evaluated_in_input_order"] - plan["evaluated_at_best"] > 0
    with rows.open(newline="") as stream:
        assert [row["line_number"] for row in csv.DictReader(stream)][8:] == list("12345678")
    shown = " ".join(run("report", events).stdout.split())
    assert "input order, one at a time" in shown
    assert "9 lines, 8 answered, 8 of them cut at their most tokens" in shown


def test_a_batch_of_a_program_names_its_lines() -> None:
    """By the number of the request, from 1."""
    seen: list[Event] = []
    with Runner.load("demo", reserve=False) as runner, Profile(sinks=[seen.append]).watch(runner):
        requests = [BatchRequest("Hello!", {"max_tokens": 1}), BatchRequest([]), BatchRequest("A")]
        answered = [result.error is None for result in run_batch(runner, requests)]
    assert answered == [True, False, True]
    lines = [event.line for event in seen if event.line]
    assert sorted(line.number for line in lines) == [1, 3]
    assert {(line.refused, line.order) for line in lines} == {(1, "prefix")}


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    """Return lines about two documents in turn: in input order each prefix is evaluated again."""
    file = tmp_path / "in.jsonl"
    texts = [f"{'abcdefgh'[number % 2] * 60} question {number}" for number in range(8)]
    file.write_text("".join(json.dumps({"prompt": text, "max_tokens": 2}) + "\n" for text in texts))
    return file


def told(events: Path, page: Path) -> tuple[dict[str, Any], str, str, str]:
    """The report as JSON, in words and as a page, and all that `explain` says of each event."""
    made = json.loads(run("report", events, "--json").stdout)
    words = " ".join(run("report", events, "--html", page).stdout.split())
    ids = [json.loads(line)["id"] for line in events.read_text().splitlines()]
    explained = " ".join(" ".join(run("explain", events, one).stdout for one in ids).split())
    return made, words, page.read_text().lower(), explained


@pytest.mark.parametrize("parallel", [1, 4])
def test_a_batch_that_evaluates_the_tree_has_lost_nothing(
    parallel: int, batch: Path, events: Path, tmp_path: Path
) -> None:
    """Report, page and explain say the same, and tell nobody to change anything."""
    run("batch", batch, "-o", tmp_path / "out", "--parallel", parallel, "--events", events)
    made, words, page, explained = told(events, tmp_path / "page.html")
    assert made["tokens"]["lost"] <= (0 if parallel == 1 else 16)
    lost = {reason for reason, loss in made["reasons"].items() if loss["tokens"]}
    assert lost <= {"side_by_side"}
    for text in (words, page, explained):
        assert "put changing text" not in text
        assert "send earlier messages back" not in text
    assert "What to change" not in explained
    assert "nothing was lost by that" in explained


def test_a_batch_in_input_order_is_told_to_sort(batch: Path, events: Path, tmp_path: Path) -> None:
    """The loss is against the tree; its remedy is the order, not the text of the prompts."""
    options = f"--parallel 1 --order input --events {events}".split()
    run("batch", batch, "-o", tmp_path / "out", *options)
    made, words, page, explained = told(events, tmp_path / "page.html")
    plan = json.loads(run("batch", batch, "--plan", "--json").stdout)
    assert made["tokens"]["lost"] == made["tokens"]["evaluated"] - plan["evaluated_at_best"] > 0
    assert made["reasons"]["batch_order"]["tokens"] == made["tokens"]["lost"]
    assert list(made["places"]) == ["(evaluated for other lines)"]
    for text in (words, page, explained):
        assert "run the lines in prefix order" in text
        assert "send earlier messages back" not in text
