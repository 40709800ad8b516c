"""The costs of a batch are those of running it, and need no model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.prompts import shared_prefixes

from mlxrunner.batch.inputs import Inputs
from mlxrunner.batch.options import ORDERS, BatchOptions, Order
from mlxrunner.batch.plan import BatchPlan, Speed, lanes_for, make_plan, survey, worth
from mlxrunner.batch.prompts import cost, tokenize_lines
from mlxrunner.batch.records import StoredLine, sort_key
from mlxrunner.batch.store import Store
from mlxrunner.cache.tokens import as_tokens
from mlxrunner.models.load import tokenizer_of
from mlxrunner.runner import Runner

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
    store = Store.create()
    prompts = [[1, 2, 3, 4], [9], [1, 2, 5], [], [9]]
    for index, tokens in enumerate(prompts):
        options = {"max_tokens": 5} if index == 2 else {}
        store.add(
            StoredLine(
                index,
                index + 1,
                as_tokens(tokens),
                options=options,
                error=None if tokens else "line 4: empty",
            )
        )
    store.finish()
    return store


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
    """Only the lines without a result count in a run that is continued."""
    for index in (0, 3, 4):
        store.record(index, b"")
    store.commit()
    plan = planned(store)
    assert (
        plan.lines,
        plan.done,
        plan.tokens,
        plan.evaluated_in_prefix_order,
        plan.evaluated_at_best,
    ) == (5, 3, 4, 4, 4)


def test_without_a_measured_speed(store: Store) -> None:
    """Nothing is made up: no seconds, and the table says why."""
    plan = planned(store)
    assert (plan.seconds, plan.answer_tokens, plan.speed) == (None, None, None)
    assert (
        "\nno estimate of the time: this model's speed is known after its first batch\n"
        in plan.table()
    )


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
    with Store.create() as store:
        for index, limit in enumerate((6, 6, 6, None)):
            options = {} if limit is None else {"max_tokens": limit}
            store.add(StoredLine(index, index + 1, as_tokens([1, 2, index]), options=options))
        store.finish()
        speed = Speed(prefill_rate=100, decode_rate=10, answer_tokens=10)
        lines = survey(store.pending("prefix"), {}, 100, speed)
        plan = make_plan(
            store.counts, {"input": lines, "prefix": lines}, "prefix", parallel=1, speed=speed
        )
        assert plan.answer_tokens == 6 * 3 + 10
        assert "answers 10 tokens/s and 7 tokens long" in plan.table()


def test_nothing_to_run() -> None:
    """An empty batch costs nothing."""
    with Store.create() as store:
        store.finish()
        plan = planned(store, speed=SPEED)
    assert (plan.tokens, plan.saved, plan.seconds) == (0, 0, 0)
    assert "lines                      0" in plan.table()


def test_two_hundred_prompts() -> None:
    """The case of docs/bench.md: the plan has what the pure functions say."""
    prompts = shared_prefixes()
    with Store.create() as store:
        for index, tokens in enumerate(prompts):
            store.add(StoredLine(index, index + 1, tokens))
        store.finish()
        plan = planned(store)
    assert plan.tokens == 388_000
    assert plan.evaluated_in_input_order == cost(prompts).evaluated
    assert (
        plan.evaluated_in_prefix_order
        == plan.evaluated_at_best
        == cost(sorted(prompts, key=sort_key)).nodes
    )


def test_the_runner_evaluates_what_was_planned(tmp_path: Path) -> None:
    """A run evaluates exactly the prompt tokens that its plan says, with the demo model."""
    names = ["Zorblin", "Mia", "Bo", "Zora", "Mia"]
    file = tmp_path / "input.jsonl"
    file.write_text(
        "".join(
            json.dumps({"prompt": f"My name is {name}. What is my name?"}) + "\n" for name in names
        )
    )
    with Store.create() as store:
        lines = Inputs([str(file)], BatchOptions())
        tokenize_lines(store, lines, tokenizer_of("demo"), context=2048)
        store.finish()
        plan = planned(store)
        runner = Runner.load("demo", 256, reserve=False)
        evaluated = 0
        for entry in store.pending():
            *_, last = runner.generate(
                entry.tokens,  # type: ignore[arg-type]
                max_tokens=1,
                stop_tokens=[],
            )
            assert last.usage is not None
            evaluated += last.usage.evaluated_tokens
    assert evaluated == plan.evaluated_in_prefix_order == plan.evaluated_at_best + 1
    assert evaluated < plan.evaluated_in_input_order


@pytest.mark.parametrize("keep", [None, 0, 30, 10_000])
def test_of_a_prompt_that_is_shifted_only_what_is_left_counts(keep: int | None) -> None:
    """The plan counts as the runner does, with whatever is kept."""
    prompts = [[7, *range(200)], [7, *range(100, 300)], [1, 2]]
    with Store.create() as store:
        for index, tokens in enumerate(prompts):
            store.add(
                StoredLine(
                    index,
                    index + 1,
                    as_tokens(tokens),
                    options={"keep": keep} if keep is not None else {},
                )
            )
        store.finish()
        plan = planned(store, defaults={"overflow": "shift"}, context=100)
        assert planned(store).tokens == 404
    left = 51 + (keep or 0) // 2 if keep != 10_000 else 99
    assert (plan.tokens - 2) / 2 == pytest.approx(left, abs=1)


def test_the_number_at_a_time_is_that_of_the_run() -> None:
    """The plan says how many run at a time, bounded by the lines and the cache, and why."""
    with Store.create() as store:
        for index in range(3):
            store.add(StoredLine(index, index + 1, as_tokens([index])))
        store.finish()
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
