"""The costs of a batch are those of running it, and need no model."""

from __future__ import annotations

import json
import math
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

SPEED = Speed(prefill_rate=100, decode_rate=10, answer_tokens=20)


def planned(
    store: Store, order: Order = "prefix", *, speed: Speed | None = None, **settings: Any
) -> BatchPlan:
    defaults, context = settings.get("defaults", {}), settings.get("context", 2048)
    found = {name: survey(store.pending(name), defaults, context, speed) for name in ORDERS}
    return make_plan(store.counts, found, order, parallel=settings.get("parallel", 1), speed=speed)


@pytest.fixture
def store() -> Store:
    """Five lines, one of them broken, one of them twice, one with a limit."""
    limited = entry(2, [1, 2, 5], options={"max_tokens": 5})
    return filled([[1, 2, 3, 4], [9], limited, entry(3, [], error="line 4: empty"), [9]])


def test_the_plan_of_a_small_batch(store: Store) -> None:
    """Every number can be counted by hand."""
    assert planned(
        store, "prefix", speed=SPEED, defaults={"max_tokens": 15}, parallel=4
    ) == BatchPlan(
        lines=5,
        broken=1,
        done=0,
        to_run=4,
        tokens=4 + 1 + 3 + 1,
        evaluated_in_input_order=4 + 1 + 3 + 1,
        evaluated_in_prefix_order=4 + 1 + 1 + 1,
        evaluated_at_best=6,
        order="prefix",
        parallel=4,
        answer_tokens=3 * 15 + 5,
        seconds=7 / 100 + 50 / 10,
        speed=SPEED,
    )


def test_input_order_and_no_limit(store: Store) -> None:
    """The time is that of the order which was chosen, with answers as long as the mean was."""
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


def test_the_table_and_the_dictionary(store: Store) -> None:
    """People get a table with the meaning of each number; programs get everything as JSON."""
    plan = planned(store, speed=SPEED)
    assert plan.table().splitlines() == [
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
    found = json.loads(json.dumps(plan.as_dict()))
    assert found["evaluated"] == 7
    assert found["saved"] == pytest.approx(2 / 9)
    assert found["speed"] == {"prefill_rate": 100, "decode_rate": 10, "answer_tokens": 20}
    assert found.keys() >= set(BatchPlan.__dataclass_fields__)


def test_the_length_of_answers_is_what_the_lines_allow() -> None:
    """Not the mean of the last batch: the time is made of what the lines may take."""
    limited = (entry(index, [1, 2, index], options={"max_tokens": 6}) for index in range(3))
    with filled([*limited, [1, 2, 3]]) as store:
        speed = Speed(prefill_rate=100, decode_rate=10, answer_tokens=10)
        lines = survey(store.pending("prefix"), {}, 100, speed)
        plan = make_plan(
            store.counts, {"input": lines, "prefix": lines}, "prefix", parallel=1, speed=speed
        )
        assert plan.answer_tokens == 6 * 3 + 10
        assert "answers 10 tokens/s and 7 tokens long" in plan.table()


@pytest.mark.parametrize("keep", [None, 0, 30, 10_000])
def test_of_a_prompt_that_is_shifted_only_what_is_left_counts(keep: int | None) -> None:
    """The plan counts as the runner does, with whatever is kept."""
    prompts = [[7, *range(200)], [7, *range(100, 300)], [1, 2]]
    options = {"keep": keep} if keep is not None else {}
    with filled(entry(n, one, options=options) for n, one in enumerate(prompts)) as store:
        plan = planned(store, defaults={"overflow": "shift"}, context=100)
        assert planned(store).tokens == 404
    left = 51 + (keep or 0) // 2 if keep != 10_000 else 99
    assert (plan.tokens - 2) / 2 == pytest.approx(left, abs=1)


def test_the_number_at_a_time_is_that_of_the_run() -> None:
    """The plan says how many run at a time, bounded by the lines and the cache, and why."""
    with filled([[index] for index in range(3)]) as store:
        found = survey(store.pending(), {}, 2048)
    assert lanes_for(found, None, {}) == (3, "")
    assert lanes_for(found, 50, {}) == (3, "")
    assert lanes_for(found, 1, {"kv_bits": 8}) == (1, "")
    assert (
        lanes_for(found, None, {"kv_bits": 8})
        == lanes_for(found, 2, {"kv_bits": 8})
        == (1, "--kv-bits stores one sequence only")
    )


def test_long_lines_run_fewer_at_a_time() -> None:
    """By the new tokens of a line, and never more than there are."""
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
    """The table and --json agree, the parts have all lines, and each is that of its shard."""
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
    for number, part in enumerate(parts, 1):
        shard = run("in.jsonl", "-o", "a", "--plan", "--shard", f"{number}/3", "--json").stdout
        own = json.loads(shard)
        assert (own["lines"], own["evaluated"]) == (part["lines"], part["evaluated"])


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


FAST, SLOW = Speed(2000, 200, 30.5), Speed(20, 2, 3)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


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
    assert (known_speed("demo"), known_speed("owner/9"), known_speed("owner/0")) == (
        FAST,
        SLOW,
        None,
    )
    assert SPEEDS.path == folder / "mlxrunner" / "speed.json"
    assert stat.S_IMODE(SPEEDS.path.stat().st_mode) == 0o600
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    remember_speed("model", FAST)
    assert known_speed("./model/") == known_speed(str(tmp_path / "model")) == FAST
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert SPEEDS.path == tmp_path / ".cache" / "mlxrunner" / "speed.json"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"nope",
        b"[]",
        b'{"demo": 5}',
        b'{"demo": []}',
        b'{"demo": {}}',
        b'{"demo": {"prefill_rate": 1, "decode_rate": 1}}',
        *(
            json.dumps(
                {"demo": {"prefill_rate": 1, "decode_rate": wrong, "answer_tokens": 1}}
            ).encode()
            for wrong in (0, -1, "1", None, True, math.nan, math.inf, [])
        ),
    ],
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
