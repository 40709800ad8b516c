"""The costs of a batch are those of running it, and need no model."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.batch_command import run, write
from support.batches import entry, filled
from support.prompts import shared_prefixes

from mlxrunner.batch.options import ORDERS, Order
from mlxrunner.batch.order import LineCosts
from mlxrunner.batch.plan import (
    ANSWER,
    SPEEDS,
    BatchPlan,
    CutPlan,
    Speed,
    WorkerShare,
    costs_of,
    known_speed,
    lanes_for,
    make_plan,
    remember_speed,
    survey,
    worth,
)
from mlxrunner.batch.store import BriefLine, Store

FAST, SLOW = Speed(2000, 200, 30.5), Speed(20, 2, 3)
SPEED = Speed(prefill_rate=100, decode_rate=10, answer_tokens=20)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to a new folder. Return the one where measured speeds will be."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def planned(
    store: Store,
    order: Order = "prefix",
    *,
    speed: Speed | None = None,
    context: int = 2048,
    parallel: int = 1,
    **defaults: Any,
) -> BatchPlan:
    found = {name: survey(store.pending(name), defaults, context, speed) for name in ORDERS}
    return make_plan(store.counts, found, order, parallel=parallel, speed=speed)


def plan_of(*arguments: object) -> Any:
    return json.loads(run("in.jsonl", "--plan", "--json", *arguments).stdout)


@pytest.fixture
def store() -> Store:
    """Five lines, one of them broken, one of them twice, one with a limit."""
    limited = entry(2, [1, 2, 5], options={"max_tokens": 5})
    return filled([[1, 2, 3, 4], [9], limited, entry(3, [], error="line 4: empty"), [9]])


def test_the_plan_of_a_small_batch(store: Store) -> None:
    """Every number can be counted by hand, and programs get all of them as JSON."""
    plan = planned(store, speed=SPEED, parallel=4, max_tokens=15)
    assert json.dumps(plan.as_dict()) == (
        '{"lines": 5, "broken": 1, "done": 0, "to_run": 4, "tokens": 9, '
        '"evaluated_in_input_order": 9, "evaluated_in_prefix_order": 7, "evaluated_at_best": 6, '
        '"order": "prefix", "parallel": 4, "answer_tokens": 50.0, "seconds": 5.07, '
        '"speed": {"prefill_rate": 100, "decode_rate": 10, "answer_tokens": 20}, "cut": null, '
        f'"evaluated": 7, "saved": {1 - 7 / 9}}}'
    )
    plan = planned(store, "input", speed=SPEED)
    assert (plan.evaluated, plan.saved) == (9, 0)
    assert plan.seconds == pytest.approx(9 / 100 + (3 * 20 + 5) / 10)


def test_a_plan_for_what_is_left(store: Store) -> None:
    """Only lines without a result count; without a measured speed no seconds are made up."""
    for index in (0, 3, 4):
        store.record(index, b"")
    store.commit()
    plan = planned(store)
    assert (plan.lines, plan.done, plan.tokens, plan.evaluated_at_best) == (5, 3, 4, 4)
    assert (plan.seconds, plan.answer_tokens, plan.speed) == (None, None, None)
    assert "\nno estimate of the time: this model's speed is known" in plan.table()
    with filled([]) as empty:
        plan = planned(empty, speed=SPEED)
    assert (plan.tokens, plan.saved, plan.seconds) == (0, 0, 0)


def test_the_table_says_what_each_number_means(store: Store) -> None:
    """Answers are as long as the lines allow, not as the mean of the last batch."""
    assert planned(store, speed=SPEED).table().splitlines() == [
        "lines                      5  1 can't be run",
        "prompt tokens              9",
        "evaluated in input order   9  0% saved",
        "evaluated in prefix order  7  22% saved",
        "evaluated at best          6  by a cache of any size",
        "these counts take one line at a time and no answers: a prompt that continues the answer "
        "before it costs less",
        "about 6.6 s in prefix order, as fast as last time: prompts 100 tokens/s, answers 10 "
        "tokens/s and 16 tokens long",
        "1 at a time, as far as they fit into memory",
    ]


@pytest.mark.parametrize("keep", [None, 0, 30, 10_000])
def test_of_a_prompt_that_is_shifted_only_what_is_left_counts(keep: int | None) -> None:
    """The plan counts as the runner does, with whatever is kept."""
    prompts = [[7, *range(200)], [7, *range(100, 300)], [1, 2]]
    options = {"keep": keep} if keep is not None else {}
    with filled(entry(n, one, options=options) for n, one in enumerate(prompts)) as store:
        plan = planned(store, context=100, overflow="shift")
        assert planned(store).tokens == 404
    left = 51 + (keep or 0) // 2 if keep != 10_000 else 99
    assert (plan.tokens - 2) / 2 == pytest.approx(left, abs=1)


def test_the_number_at_a_time_is_that_of_the_run() -> None:
    """It is bounded by the lines, by the cache, and by the new tokens of a line."""
    with filled([[index] for index in range(3)]) as store:
        found = survey(store.pending(), {}, 2048)
    why = "--kv-bits stores one sequence only"
    for parallel, settings, expected in (
        (None, {}, (3, "")),
        (50, {}, (3, "")),
        (1, {"kv_bits": 8}, (1, "")),
        (2, {"kv_bits": 8}, (1, why)),
        (None, {"kv_bits": 8}, (1, why)),
    ):
        assert lanes_for(found, parallel, settings) == expected
    assert [worth(tokens * 10, 10) for tokens in (1, 1024, 1025)] == [8, 8, 4]
    assert [worth(5, lines) for lines in (0, 1, 3)] == [1, 1, 3]


def test_a_line_costs_its_new_tokens_and_its_answer() -> None:
    """A prompt that is there twice evaluates its last token; broken lines cost nothing."""
    lines = [
        entry(7, [], error="line 8: broken"),
        entry(2, [1, 2, 3]),
        entry(4, [1, 2, 3], options={"max_tokens": 5}),
        entry(1, [1, 2, 9, 9], options={"max_tokens": 10**6}),
    ]
    indexes, costs = costs_of(lines, {"max_tokens": 20})
    assert list(indexes) == [7, 2, 4, 1]
    assert costs.evaluated.tolist() == [0, 3, 1, 2]
    assert costs.reused.tolist() == [0, 0, 2, 2]
    assert costs.answers.tolist() == [0, 20, 5, ANSWER]
    assert costs_of(lines, {}, answer=3)[1].answers.tolist() == [0, 3, 3, 3]


def cut(
    count: int, lines: int, workers: int, per: float = 0, speed: Speed | None = None
) -> CutPlan:
    """Cut `lines` questions of 10 tokens on each of `count` documents of 990, answers of 10."""
    reused = np.where(np.arange(count * lines) % lines == 0, 0, 990)
    costs = LineCosts(1000 - reused, reused, np.full(count * lines, 10))
    return CutPlan.of(costs, workers, per, speed)


def test_a_cut_adds_up_to_what_the_workers_evaluate() -> None:
    """The seconds are those of the worker that takes longest."""
    found = cut(2, 10, 2, 400, SPEED)
    assert found.parts == [WorkerShare(10, 1090, 30.9), WorkerShare(10, 1090, 30.9)]
    assert (found.evaluated, found.extra, found.seconds) == (2180, 0.0, 30.9)
    found = cut(1, 400, 2)
    assert found.evaluated == 990 + 4000 + 990
    assert (found.extra, found.seconds) == (pytest.approx(990 / 4990), None)


def test_the_text_of_a_cut_names_each_of_few_workers_and_the_ends_of_many() -> None:
    assert cut(2, 10, 3, 400, SPEED).lines() == [
        "cut for 3 workers: 2,180 tokens evaluated, 0.0% more than by one machine",
        "  worker 1: 10 lines, 1,090 tokens evaluated, about 31 s",
        "  worker 2: 10 lines, 1,090 tokens evaluated, about 31 s",
        "  1 worker without lines: to split more would cost more than it saves",
        "about 31 s on 3 workers as fast as this machine",
    ]
    assert cut(2, 1, 3).lines()[-1] == "  1 worker without lines"
    assert cut(40, 10, 40).lines() == [
        "cut for 40 workers: 43,600 tokens evaluated, 0.0% more than by one machine",
        "  least: 10 lines, 1,090 tokens evaluated",
        "  most: 10 lines, 1,090 tokens evaluated",
    ]


def test_the_command_says_the_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table and --json agree, the parts have all lines, and each is that of its shard.

    To read the lines takes longest: once in each order, for the plan and for the cut.
    """
    remember_speed("demo", SPEED)
    names = ("Ana", "Bo", "Mira")
    write(*({"prompt": f"My name is {one}. {n}?", "max_tokens": 3} for one in names for n in "123"))
    plan = plan_of("--workers", 3)
    parts, whole = plan["cut"]["parts"], plan["cut"]["evaluated"]
    assert sum(part["lines"] for part in parts) == 9
    assert sum(part["evaluated"] for part in parts) == whole
    assert whole == pytest.approx(plan["evaluated"] * (1 + plan["cut"]["extra"]))
    assert plan["cut"]["seconds"] == max(part["seconds"] for part in parts) < plan["seconds"]
    assert plan_of()["cut"] is None
    for number, part in enumerate(parts, 1):
        own = plan_of("-o", "a", "--shard", f"{number}/3")
        assert (own["lines"], own["evaluated"]) == (part["lines"], part["evaluated"])
    orders: list[str] = []
    left = Store.left

    def noted(store: Store, order: Order = "prefix") -> Iterator[BriefLine]:
        orders.append(order)
        return left(store, order)

    monkeypatch.setattr(Store, "left", noted)
    table = run("in.jsonl", "--plan", "--workers", 3).stdout
    assert f"cut for 3 workers: {whole:,} tokens evaluated" in table
    assert f"  worker 1: {parts[0]['lines']} lines, {parts[0]['evaluated']}" in table
    assert sorted(orders) == ["input", "prefix"]


def test_the_plan_for_eight_workers_evaluates_little_more() -> None:
    """The batch has 200 prompts over a system prompt and 5 documents, as in benchmarks/batch.py."""
    write(*({"prompt": prompt.tolist(), "max_tokens": 16} for prompt in shared_prefixes()))
    plan = plan_of("--workers", 8)
    assert (plan["evaluated"], plan["cut"]["evaluated"]) == (20_393, 20_393 + 4 * 203)
    assert (round(plan["cut"]["extra"], 3), len(plan["cut"]["parts"])) == (0.040, 8)


def test_what_was_measured_last_is_known(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each model has its own newest speed, a folder by any name; those used last are kept."""
    assert known_speed("demo") is None
    folder.write_text("a file where the folder should be")
    remember_speed("demo", FAST)
    assert known_speed("demo") is None
    folder.unlink()
    for number in range(105):
        remember_speed(f"owner/{number}", SLOW)
    for speed in (SLOW, FAST):
        remember_speed("demo", speed)
    known = [known_speed(name) for name in ("demo", "owner/9", "owner/0")]
    assert known == [FAST, SLOW, None]
    assert SPEEDS.path == folder / "mlxrunner" / "speed.json"
    assert stat.S_IMODE(SPEEDS.path.stat().st_mode) == 0o600
    (tmp_path / "model").mkdir()
    remember_speed("model", FAST)
    assert known_speed("./model/") == known_speed(str(tmp_path / "model")) == FAST
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert SPEEDS.path == tmp_path / ".cache" / "mlxrunner" / "speed.json"


RATE = b'{"demo": {"prefill_rate": 1, "decode_rate": %s, "answer_tokens": 1}}'
DAMAGED = b'|nope|[]|{"demo": 5}|{"demo": []}|{"demo": {}}|' + RATE.replace(b"%s", b"1").replace(
    b', "answer_tokens": 1', b""
)


@pytest.mark.parametrize(
    "content",
    [*DAMAGED.split(b"|"), *(RATE % one for one in b'0 -1 "1" null true NaN Infinity []'.split())],
)
def test_a_damaged_file_is_as_good_as_none(content: bytes) -> None:
    """Nothing is known, and the next measurement makes it whole."""
    SPEEDS.path.parent.mkdir(parents=True)
    SPEEDS.path.write_bytes(content)
    assert known_speed("demo") is None
    remember_speed("demo", FAST)
    assert known_speed("demo") == FAST


def test_a_speed_that_was_changed_is_not_known() -> None:
    """A file of an older version, which has no checksum, is."""
    remember_speed("demo", FAST)
    text = SPEEDS.path.read_text()
    SPEEDS.path.write_text(text.replace("2000", "2001"))
    assert known_speed("demo") is None
    SPEEDS.path.write_text("{" + text.partition(", ")[2])
    assert known_speed("demo") == FAST
