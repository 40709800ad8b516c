"""Wrong guesses cost a bounded share of plain decoding, by counted passes and rows.

The clock is that of the model: it continues by what each pass costs, and by nothing else.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.engine import clock_passes_by
from support.reused import RepeatingModel

from mlxrunner import Runner
from mlxrunner.cache.entry import TokenArray, common_prefix
from mlxrunner.cache.layers.factory import CacheOptions
from mlxrunner.engine import drafting
from mlxrunner.engine.draft_model import DraftModel
from mlxrunner.engine.drafting import (
    AT_FIRST,
    DEEPEST,
    LOSS,
    SLOPE,
    Controller,
    DraftBudget,
    TextLookup,
)
from mlxrunner.system import device
from mlxrunner.testing import VOCAB, OracleModel, oracle_runner

PROMPT = list(range(1, 30))
SLOPES = [0.0, 0.05, 0.15, 0.4, 1.0]
"""Costs of a further row, in passes of one row. A row can't cost more than a pass."""


class Clocked(RepeatingModel):
    """A model whose passes take the time that their rows cost."""

    def __init__(self, kinds: list[str], slope: float) -> None:
        super().__init__(kinds)
        self.slope, self.now = slope, 0.0

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        self.now += 1 + self.slope * (tokens.shape[1] - 1)
        return super().__call__(tokens, cache)

    def process_time(self) -> float:
        return self.now

    perf_counter = process_time

    def thread_time(self) -> float:
        """Return a constant: preparing a pass takes no time."""
        return 0.0


def taken(runner: Runner, model: Clocked, prompt: list[int], count: int, **options: Any) -> float:
    """Return the time of an answer after its first token."""
    given = {"max_tokens": count, "stop_tokens": [], "speculate": "auto"} | options
    chunks = runner.generate(prompt, **given)
    next(chunks)
    began = model.now
    for _ in chunks:
        pass
    return model.now - began


def clocked_runner(
    monkeypatch: pytest.MonkeyPatch, kinds: list[str], slope: float
) -> tuple[Runner, Clocked]:
    model = Clocked(kinds, slope)
    monkeypatch.setattr(device, "time", model)
    clock_passes_by(model, monkeypatch)
    return oracle_runner(model=model), model


@pytest.mark.parametrize("slope", SLOPES)
@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_a_source_that_is_trusted_and_always_wrong_costs_no_more_than_the_budget(
    slope: float, share: float
) -> None:
    """At every token: what was lost so far is bounded, and drafts are tried again and again."""
    budget = DraftBudget()
    controller, lost, drafts = Controller(budget), 0.0, 0
    for count in range(1, 5000):
        depth = controller.depth([share] * DEEPEST, DEEPEST)
        seconds = 1 + slope * depth
        if depth:
            controller.verified(depth, seconds)
            drafts += 1
        else:
            controller.passed(seconds)
        budget.pay(controller.costs.ratio(depth), 1)
        lost += seconds - 1
        # The first draft has one token, whose cost is not known before.
        assert lost <= AT_FIRST + LOSS * count + max(slope - AT_FIRST, 0)
    assert drafts or controller.costs.ratio(1) > 1 + share


@pytest.mark.parametrize("slope", SLOPES)
@pytest.mark.parametrize("kinds", [["full"], ["sliding", "full"], ["recurrent", "full"]])
@pytest.mark.exhaustive(0)
def test_an_answer_whose_guesses_all_fail_takes_as_long_as_a_plain_one(
    monkeypatch: pytest.MonkeyPatch, kinds: list[str], slope: float
) -> None:
    """The text repeats itself, so that guesses are trusted; what is then drafted is wrong."""
    monkeypatch.setattr(TextLookup, "ahead", lambda self, most: [VOCAB - 1] * most)
    runner, model = clocked_runner(monkeypatch, kinds, slope)
    count, whole = 300, 0
    rows = slope + 1 if "recurrent" in kinds else 0.0  # the tokens that are evaluated again
    for turn in range(3):
        prompt = [turn + 1, *PROMPT]
        lost = taken(runner, model, prompt, count) - (count - 1)
        whole += count
        assert runner.usage is not None
        assert not sum(use.accepted for use in runner.usage.drafts)
        assert runner.usage.draft_passes or slope == max(SLOPES)
        assert lost <= AT_FIRST + LOSS * whole + rows


@pytest.mark.parametrize("slope", [0.05, 0.15, 0.4])
@pytest.mark.parametrize("kinds", [["full"], ["recurrent", "full"]])
def test_an_answer_whose_guesses_are_right_takes_less(
    monkeypatch: pytest.MonkeyPatch, kinds: list[str], slope: float
) -> None:
    """The budget does not stand in the way of what pays."""
    runner, model = clocked_runner(monkeypatch, kinds, slope)
    assert taken(runner, model, PROMPT, 400, speculate="off") == 399
    runner, model = clocked_runner(monkeypatch, kinds, slope)
    assert taken(runner, model, PROMPT, 400) < (0.8 if slope < 0.4 else 0.98) * 399


def test_what_was_gained_may_be_lost_again_but_only_a_little() -> None:
    """A long gain must not pay for a long loss, and an earlier answer for none in the next."""
    budget = DraftBudget()
    for _ in range(100):
        budget.pay(2, 10)
    assert 1 < budget.left < 10
    budget.begin()
    assert budget.left == AT_FIRST
    budget.pay(5, 1)
    owed = budget.left
    budget.begin()
    assert budget.left == owed < 0


def test_nothing_is_drafted_before_a_pass_was_measured() -> None:
    """Without that nobody knows what a draft costs."""
    controller = Controller(DraftBudget())
    assert controller.depth([0.99] * DEEPEST, DEEPEST) == 0
    controller.passed(1.0)
    assert controller.depth([0.99] * DEEPEST, DEEPEST) == 1


def test_one_slow_pass_of_a_size_is_no_reason_to_guess_no_more() -> None:
    """A device prepares its kernels in the first pass of a size. The budget counts that, too."""
    budget = DraftBudget()
    controller, sure = Controller(budget), [0.99] * DEEPEST
    controller.passed(1.0)
    assert controller.depth(sure, DEEPEST) == 1
    controller.verified(1, 2.7)
    budget.pay(controller.costs.ratio(1), 2)
    tokens = 0
    while not controller.depth(sure, DEEPEST):
        assert controller.costs.ratio(1) > 1 + budget.left
        controller.passed(1.0)
        budget.pay(1, 1)
        tokens += 1
    assert tokens
    controller.verified(1, 1.1)
    budget.pay(controller.costs.ratio(1), 2)
    assert controller.costs.hoped(1) == controller.costs.ratio(1) == 1.1
    assert controller.depth(sure, DEEPEST) > 1


def test_a_pass_that_was_measured_too_cheap_makes_no_long_one_cheap() -> None:
    """Other work may have disturbed the pass of one row that it is compared with."""
    controller = Controller(DraftBudget())
    controller.passed(1.0)
    controller.verified(1, 0.9)
    for depth in (3, 7, 15):
        assert controller.costs.ratio(depth) == pytest.approx(1 + (depth - 1) * SLOPE)
    controller.verified(3, 1.1)
    assert controller.costs.ratio(15) == pytest.approx(1.1 + 12 * SLOPE / 3)


@pytest.mark.parametrize("cost", [0.1, 0.4, 0.9])
def test_a_draft_model_that_is_wrong_leaves_the_earlier_answer_its_guesses(
    monkeypatch: pytest.MonkeyPatch, cost: float
) -> None:
    """It may lose a part of the budget, and its first guess tells nothing of what it costs."""
    runner, model = clocked_runner(monkeypatch, ["full"], 0.05)
    runner.sources.model = _Wrong(model, cost)
    answers = []
    for turn in range(2):
        chunks = list(runner.generate(PROMPT, max_tokens=60, stop_tokens=[]))
        answers.append([chunk.token for chunk in chunks])
        usage = chunks[-1].usage
        assert usage is not None
        drafts = {use.source: use for use in usage.drafts}
        assert turn or drafts["model"].drafted < 8
        assert turn or not drafts["model"].accepted
    assert answers[0] == answers[1]
    assert drafts["earlier"].accepted > 50
    assert usage.draft_passes < 10


@pytest.mark.parametrize("cost", [0.3, 0.6])
def test_a_draft_model_that_is_wrong_does_not_read_the_answer_again_and_again(
    monkeypatch: pytest.MonkeyPatch, cost: float
) -> None:
    """Where it was silent for long it has much to read, which costs more than its guess."""
    monkeypatch.setattr(drafting, "FEWEST", drafting.MOST + 1)  # only the draft model guesses
    runner, model = clocked_runner(monkeypatch, ["full"], 0.05)
    runner.sources.model = draft = _Wrong(model, cost, reading=0.04)
    prompt, whole, lost = PROMPT * 7, 0, 0.0
    for turn in range(4):
        lost += taken(runner, model, [turn + 1, *prompt], 600) - 599
        whole += 600
        assert lost <= AT_FIRST + LOSS * whole + 0.04 * (len(prompt) + 1)
    assert len(draft.read)


class _Wrong(DraftModel):
    """A draft model whose guesses are wrong."""

    def __init__(self, model: Clocked, cost: float, reading: float = 0.0) -> None:
        """Each guess takes `cost` passes of `model`, each token that is read `reading`."""
        super().__init__(OracleModel(["full"]), VOCAB, CacheOptions(), 10**6, 64)
        self._clocked, self._cost, self._reading = model, cost, reading
        self.read: TokenArray = np.array([], np.int32)

    def draft(self, tokens: TokenArray, most: int, guess: Any) -> list[int]:
        new = len(tokens) - common_prefix(self.read, tokens)
        self.read = tokens
        self._clocked.now += self._cost * most + self._reading * new
        return [VOCAB - 1] * most
