"""Ctrl-C at any line of a runner of many leaves nothing that is half done."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

import pytest
from support.engine import Engine, StepCosts, backend, scheduler
from support.reused import cold, interrupted_twice
from support.sample import fewer

from mlxrunner.models.facts import ModelFacts
from mlxrunner.testing import VOCAB, ByteTokenizer, OracleModel, interrupt_at

FIRST = [(7 * place) % 200 + 5 for place in range(40)]
OTHER = [(11 * place) % 200 + 3 for place in range(50)]
JOBS = [[*FIRST, 9], [*FIRST[:30], 8, 8], [5, 6, 7, 8] * 9, OTHER]
"""Two prompts that share a prefix with an earlier one, and two others."""
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "paced": {"max_step_ms": None},
    "few-cells": {"kv_cache_tokens": 130},
    "checkpoints": {"checkpoint_budget": 10**5},
}


def opened(kinds: list[str], **settings: Any) -> Engine:
    facts = ModelFacts("oracle", 4096, True, {kind: kinds.count(kind) for kind in kinds}, VOCAB)
    given = {"max_sequences": 2, "context": 120, "prefill_step": 16} | settings
    return Engine(OracleModel(kinds), ByteTokenizer(), facts, **given)


def some_requests(runner: Engine, **options: Any) -> None:
    """Run two requests beside each other, of which one is cancelled, and two others."""
    first = runner.submit(JOBS[0], max_tokens=7, **options)
    second = runner.submit(JOBS[1], max_tokens=7, **options)
    chunks = iter(first)
    next(chunks), next(chunks)
    second.cancel()
    runner.complete(JOBS[2], max_tokens=7, **options)
    list(chunks)
    runner.complete(JOBS[3], max_tokens=3, **options)


def assert_no_slot_is_lost(runner: Engine, where: Any) -> None:
    busy = {request.slot.number for request in scheduler(runner).requests}
    assert all(slot.is_busy == (slot.number in busy) for slot in runner.slots), where


def assert_all_is_well(runner: Engine, kinds: list[str], where: Any, **options: Any) -> None:
    assert_no_slot_is_lost(runner, where)
    for result, job in zip(runner.run(JOBS, max_tokens=7, **options), JOBS, strict=True):
        assert result.tokens == cold(kinds, job, 7, **options), where
    for slot in runner.slots:
        assert not slot.is_busy, where
        assert slot.cache.current.is_true, where
        slot.cache.reset()
    assert not runner.used_bytes, where


@pytest.mark.exhaustive(0)
@pytest.mark.usefixtures("proved_once")
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("kinds", [["full", "sliding"], ["recurrent", "full"]], ids="+".join)
def test_ctrl_c_at_any_line_leaves_a_runner_that_answers_as_if_cold(
    kinds: list[str], settings: dict[str, Any]
) -> None:
    """Ctrl-C comes while requests begin, run, are cancelled, end and make room."""
    options: dict[str, Any] = {"stop_tokens": [], "speculate": "lookup"}
    with opened(kinds, **settings) as runner, interrupt_at(-1) as seen:
        some_requests(runner, **options)
    for line in range(1, seen[0], max(1, seen[0] // fewer(10, 6))):
        with opened(kinds, **settings) as runner:
            runner.complete(FIRST, max_tokens=3, **options)
            with suppress(KeyboardInterrupt), interrupt_at(line):
                some_requests(runner, **options)
            assert_all_is_well(runner, kinds, line, **options)


@pytest.mark.exhaustive(0)
@pytest.mark.usefixtures("proved_once")
@pytest.mark.parametrize("kinds", [["full", "sliding"], ["recurrent", "full"]], ids="+".join)
def test_a_second_ctrl_c_while_the_first_is_mended(kinds: list[str]) -> None:
    """It may come at any line of what ends the requests."""
    options: dict[str, Any] = {"stop_tokens": [], "speculate": "off"}
    for line in count(1, fewer(29, 50)):
        with opened(kinds) as runner:
            runner.complete(FIRST, max_tokens=3, **options)
            with interrupted_twice(backend(runner).model, line) as lines:
                some_requests(runner, **options)
            assert_all_is_well(runner, kinds, line, **options)
        if lines[0][0] < line:
            break
    assert line > 40


def at_each_line(act: Callable[[], object], check: Callable[[int], object]) -> None:
    """Press Ctrl-C at each line of `act`, and call `check` after each."""
    line, hit = 0, True
    while hit:
        line, hit = line + 1, False
        with suppress(KeyboardInterrupt), interrupt_at(line):
            try:
                act()
            except KeyboardInterrupt:
                hit = True
        check(line)
    assert line > 3


def test_ctrl_c_while_the_cost_of_a_step_is_noted_leaves_costs_that_are_numbers() -> None:
    """The first piece of its size makes a line, and later ones change it."""
    costs = StepCosts()

    def measure() -> None:
        costs.measure(0, size, 100 * size, 1e-3)
        costs.measure(2, 0, 40, 1e-3)

    for size in (1, 2, 4, 64, 64, 200):
        at_each_line(
            measure,
            lambda line: [(costs.piece(few, 50), costs.decode(2)) for few in (0, 1, 7, 300)],
        )
    assert costs.largest == 128


@pytest.mark.usefixtures("proved_once")
def test_ctrl_c_at_any_line_of_a_submission_keeps_no_slot_busy() -> None:
    with opened(["full", "full"]) as runner:
        with interrupt_at(-1) as seen:
            runner.submit(JOBS[0], max_tokens=7)
        for line in range(1, seen[0], max(1, seen[0] // fewer(80, 40))):
            for request in list(scheduler(runner).requests):
                runner.cancel(request)
            with suppress(KeyboardInterrupt), interrupt_at(line):
                runner.submit(JOBS[0], max_tokens=7)
            assert_no_slot_is_lost(runner, line)
