"""A batch's events say what its order has lost, and what would help."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.events import Lines, run


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
    parallel: int, batch: Path, events: Path, tmp_path: Path, lines: Lines
) -> None:
    """Report, page and explain say the same, and tell nobody to change anything."""
    run("batch", batch, "-o", tmp_path / "out", "--parallel", parallel, "--events", events)
    made, words, page, explained = told(events, tmp_path / "page.html")
    assert made["tokens"]["lost"] <= (0 if parallel == 1 else 16)
    assert {reason for reason, loss in made["reasons"].items() if loss["tokens"]} <= {
        "side_by_side"
    }
    for text in (words, page, explained):
        assert "put what changes" not in text
        assert "send earlier messages back" not in text
    assert "What to change" not in explained
    assert "nothing was lost by that" in explained


def test_a_batch_in_input_order_is_told_to_sort(
    batch: Path, events: Path, tmp_path: Path, lines: Lines
) -> None:
    """The loss is against the tree; its remedy is the order, not the text of the prompts."""
    run(
        "batch",
        batch,
        "-o",
        tmp_path / "out",
        "--parallel",
        1,
        "--order",
        "input",
        "--events",
        events,
    )
    made, words, page, explained = told(events, tmp_path / "page.html")
    plan = json.loads(run("batch", batch, "--plan", "--json").stdout)
    assert made["tokens"]["lost"] == made["tokens"]["evaluated"] - plan["evaluated_at_best"] > 0
    assert made["reasons"]["batch_order"]["tokens"] == made["tokens"]["lost"]
    assert list(made["places"]) == ["(evaluated for other lines)"]
    for text in (words, page, explained):
        assert "run the lines in prefix order" in text
        assert "send earlier messages back" not in text
