"""`--plan --workers N` says what each worker evaluates, and what the cut costs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.batch_command import run, write
from support.prompts import shared_prefixes

from mlxrunner.batch.options import Order
from mlxrunner.batch.order import LineCosts
from mlxrunner.batch.plan import CutPlan, Speed, WorkerShare, remember_speed
from mlxrunner.batch.records import BriefLine
from mlxrunner.batch.store import Store


def documents(count: int, lines: int) -> LineCosts:
    """`lines` questions of 10 tokens on each of `count` documents of 990, answers of 10."""
    first = np.arange(count * lines) % lines == 0
    reused = np.where(first, 0, 990)
    return LineCosts(1000 - reused, reused, np.full(count * lines, 10))


def test_a_plan_adds_up_to_what_the_workers_evaluate() -> None:
    """The seconds are those of the worker that takes longest."""
    found = CutPlan.of(documents(2, 10), 2, 400.0, Speed(100.0, 10.0, 20.0))
    assert found.parts == [WorkerShare(10, 1090, 30.9), WorkerShare(10, 1090, 30.9)]
    assert (found.evaluated, found.extra, found.seconds) == (2180, 0.0, 30.9)
    found = CutPlan.of(documents(1, 400), 2, 0.0, None)
    assert found.evaluated == 990 + 4000 + 990
    assert found.extra == pytest.approx(990 / 4990)
    assert found.seconds is None


def test_the_text_names_each_of_few_workers_and_the_ends_of_many() -> None:
    assert CutPlan.of(documents(2, 10), 3, 400.0, Speed(100.0, 10.0, 20.0)).lines() == [
        "cut for 3 workers: 2,180 tokens evaluated, 0.0% more than by one machine",
        "  worker 1: 10 lines, 1,090 tokens evaluated, about 31 s",
        "  worker 2: 10 lines, 1,090 tokens evaluated, about 31 s",
        "  1 worker without lines: to split more would cost more than it saves",
        "about 31 s on 3 workers as fast as this machine",
    ]
    assert CutPlan.of(documents(2, 1), 3, 0.0, None).lines()[-1] == "  1 worker without lines"
    many = CutPlan.of(documents(40, 10), 40, 0.0, None).lines()
    assert many == [
        "cut for 40 workers: 43,600 tokens evaluated, 0.0% more than by one machine",
        "  least: 10 lines, 1,090 tokens evaluated",
        "  most: 10 lines, 1,090 tokens evaluated",
    ]


def test_the_command_says_the_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table and --json say the same, and the parts have all lines."""
    monkeypatch.chdir(tmp_path)
    remember_speed("demo", Speed(100.0, 10.0, 20.0))
    names = ("Ana", "Bo", "Mira")
    write(*({"prompt": f"My name is {one}. {n}?", "max_tokens": 3} for one in names for n in "123"))
    table = run("in.jsonl", "--plan", "--workers", 3).stdout
    plan = json.loads(run("in.jsonl", "--plan", "--workers", 3, "--json").stdout)
    parts, whole = plan["cut"]["parts"], plan["cut"]["evaluated"]
    assert sum(part["lines"] for part in parts) == 9
    assert sum(part["evaluated"] for part in parts) == whole
    assert whole == pytest.approx(plan["evaluated"] * (1 + plan["cut"]["extra"]))
    assert plan["cut"]["seconds"] == max(part["seconds"] for part in parts) < plan["seconds"]
    assert f"cut for 3 workers: {whole:,} tokens evaluated" in table
    assert f"  worker 1: {parts[0]['lines']} lines, {parts[0]['evaluated']}" in table
    assert json.loads(run("in.jsonl", "--plan", "--json").stdout)["cut"] is None


def test_a_plan_for_workers_reads_the_lines_no_more_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To read them takes longest: once in each order, for the plan and for the cut."""
    monkeypatch.chdir(tmp_path)
    write({"prompt": "Who are you?"}, {"prompt": "What are you?"})
    orders: list[str] = []
    left = Store.left

    def noted(store: Store, order: Order = "prefix") -> Iterator[BriefLine]:
        orders.append(order)
        return left(store, order)

    monkeypatch.setattr(Store, "left", noted)
    run("in.jsonl", "--plan", "--workers", 2)
    assert sorted(orders) == ["input", "prefix"]


def test_the_plan_for_eight_workers_evaluates_little_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch has 200 prompts over a system prompt and 5 documents, as in benchmarks/batch.py."""
    monkeypatch.chdir(tmp_path)
    write(*({"prompt": prompt.tolist(), "max_tokens": 16} for prompt in shared_prefixes()))
    plan = json.loads(run("in.jsonl", "--plan", "--workers", 8, "--json").stdout)
    assert plan["evaluated"] == 20_393
    assert plan["cut"]["evaluated"] == 20_393 + 4 * 203
    assert round(plan["cut"]["extra"], 3) == 0.040
    assert len(plan["cut"]["parts"]) == 8


def test_the_plan_of_a_shard_is_that_of_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is what the worker of that number gets in the cut."""
    monkeypatch.chdir(tmp_path)
    write(*({"prompt": f"My name is {one}. {n}?"} for one in ("Ana", "Bo") for n in range(20)))
    plan = json.loads(run("in.jsonl", "--plan", "--workers", 2, "--json").stdout)
    for number, part in enumerate(plan["cut"]["parts"], 1):
        own = json.loads(
            run("in.jsonl", "-o", "a", "--plan", "--shard", f"{number}/2", "--json").stdout
        )
        assert (own["lines"], own["evaluated"]) == (part["lines"], part["evaluated"])
