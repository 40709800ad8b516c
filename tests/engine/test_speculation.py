"""Guessed tokens never change an answer of a request that runs beside others."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress
from typing import Any

import mlx.core as mx
import pytest
from support.drafting import steady_costs
from support.engine import (
    BatchBuilder,
    DispatchedStep,
    Engine,
    backend,
    request_of,
)
from support.histories import (
    ARCHITECTURES,
    WITH_WINDOWS,
    GuessedHistory,
    Guesses,
    parts,
    tiny_parts,
)
from support.sample import fewer

from mlxrunner import ParallelRunner
from mlxrunner.cache.protocol import Batch
from mlxrunner.engine.drafting import (
    AT_FIRST,
    DEEPEST,
    FORGOTTEN,
    LOSS,
    DraftBudget,
    PassCosts,
    StepController,
    TextLookup,
)
from mlxrunner.options import ServeSettings
from mlxrunner.results import Result
from mlxrunner.server.models import ModelLoader
from mlxrunner.testing import interrupt_at

STATES = ["qwen3_next", "lfm2", "mamba2", "jamba", "deepseek_v3", "llama4"]
ALIKE = {"qwen3", "mixtral", "phi3", "cohere2"}
"""Their caches are those of llama and gemma3_text. tests/engine/test_stateful.py runs them."""
KINDS = ["llama", "gemma3_text", "qwen3_next", "mamba2"]
"""Full attention, windows, states beside attention, and nothing but states."""
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 3, "top_k": 2},
    "penalties": {"repetition_penalty": 1.1},
    "logprobs": {"logprobs": 2},
}


QUESTION = [{"role": "user", "content": "My name is Bo. What is my name?"}]


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of a pass is none of what these tests are about."""
    steady_costs(monkeypatch)


def prompts(count: int) -> list[list[int]]:
    """Return prompts of few different tokens, which repeat themselves."""
    rng = random.Random(1)
    return [[rng.randrange(5) for _ in range(30)] for _ in range(count)]


def answers(name: str, count: int, **options: Any) -> tuple[list[Result], int]:
    """Return `count` answers beside each other, and the steps that they took."""
    with Engine(*tiny_parts(name), max_sequences=count, context=300) as runner:
        results = runner.run(prompts(count), max_tokens=80, **({"stop_tokens": []} | options))
        return results, runner.steps


def shown(results: list[Result]) -> list[tuple[Any, ...]]:
    return [(one.tokens, one.text, one.finish_reason) for one in results]


def logprobs(results: list[Result]) -> list[float]:
    return [logprob for one in results for logprob, _ in one.logprobs or []]


@pytest.mark.usefixtures("proved_once")
@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("name", sorted({*ARCHITECTURES, *STATES} - ALIKE))
def test_any_history_with_guesses_gives_the_answers_of_cold_single_runs(name: str) -> None:
    """Guesses are right, half right and wrong; requests shift, stop, fail and are interrupted."""
    rng = random.Random(f"{name} 0")
    window = rng.choice([4, 16, 33, 70]) if name in WITH_WINDOWS else 0
    one = GuessedHistory(parts(name, window), rng)
    one.weights = (8.0, 12.0, 1.0, 0.5, 0.5, 0.3, 0.0)
    one.failures = KeyboardInterrupt, RuntimeError
    one.open()
    for _ in range(40):
        rng.choices(one.acts, one.weights)[0](one.runner)
    one.close()
    seen = one.seen
    assert seen["answered"] > 3
    assert min(seen["wrong"], seen["right"]) > 3


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.exhaustive(3)
def test_answers_are_the_same_in_fewer_steps(way: str, count: int) -> None:
    plain, steps = answers("llama", count, speculate="off", **WAYS[way])
    guessed, fewer_steps = answers("llama", count, speculate="lookup", **WAYS[way])
    assert shown(guessed) == shown(plain)
    assert logprobs(guessed) == pytest.approx(logprobs(plain), rel=0, abs=1e-4)
    assert fewer_steps < steps
    assert sum(use.accepted for one in guessed for use in one.usage.drafts) > 0
    assert all(one.usage.draft_passes == 0 for one in plain)


@pytest.mark.usefixtures("costs")
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_what_a_form_leaves_no_other_text_for_is_guessed(name: str) -> None:
    """Both answers of a form, beside each other."""
    form = {"choices": ["yes, please, as soon as you can", "no, thank you very much, not today"]}
    plain, steps = answers(name, 2, speculate="off", **form)
    guessed, fewer_steps = answers(name, 2, **form)
    assert shown(guessed) == shown(plain)
    assert fewer_steps < 0.7 * steps
    assert {use.source for one in guessed for use in one.usage.drafts} == {"form"}


def guessed(
    runner: Engine, prompt: list[int], answer: list[int], wrong: int | None = None, **options: Any
) -> Any:
    """Return the handle of a request whose answer is guessed, with one wrong token or none."""
    handle = runner.submit(prompt, **({"stop_tokens": []} | options))
    told = [*answer]
    if wrong is not None:
        told[wrong] = (told[wrong] + 1) % 290
    drafting: Any = Certain(told, random.Random(0), Counter())
    request_of(handle).drafting = drafting
    return handle


def test_an_answer_that_is_asked_for_again_is_guessed_from_the_other_slot() -> None:
    """Its first draft is what the slot held whose prefix it shares."""
    with Engine.load("demo", max_sequences=2, context=200) as runner:
        plain = runner.complete(QUESTION, speculate="off")
        again = runner.complete(QUESTION, speculate="lookup")
    assert again.tokens == plain.tokens
    assert [use.source for use in again.usage.drafts] == ["earlier"]
    assert again.usage.drafts[0].accepted == len(plain.tokens) - 1


def test_a_request_of_a_parallel_runner_has_guesses_and_counts_them() -> None:
    with ParallelRunner.load("demo", max_sequences=2, context=200) as runner:
        plain = runner.complete(QUESTION, speculate="off")
        handles = [runner.submit(QUESTION, speculate="lookup") for _ in range(2)]
        for handle in handles:
            result = handle.result()
            assert result.tokens == plain.tokens
            assert result.usage.draft_passes > 0


@pytest.mark.parametrize("how", ["lookup", "off", None])
def test_the_server_guesses_where_its_user_says_so(how: str | None) -> None:
    """`serve --speculate` holds for every request."""
    settings = ServeSettings(slots=2, disk_cache=False, memory=2 * 10**8)
    opened = ModelLoader(settings=settings, runner={"context": 200}, speculate=how).load(
        "demo", 2**28
    )
    with opened.runner:
        assert opened.defaults.get("speculate") == how


class Certain(Guesses):
    """Guesses as much as may be guessed."""

    is_worth_waiting = True  # type: ignore[assignment]

    def draft(self, most: int) -> list[int]:
        return self.answer[self.place :][: max(0, most)]


@pytest.mark.parametrize("name", KINDS)
def test_an_answer_may_stop_anywhere_in_an_accepted_run(name: str) -> None:
    """The slot then has what was shown, and each layer has as many tokens."""
    given, prompt = tiny_parts(name), prompts(1)[0]
    with Engine(*given, max_sequences=2, context=200) as runner:
        answer = runner.complete(prompt, max_tokens=30, stop_tokens=[]).tokens
        for wrong in (None, 9):
            for place in {answer.index(token): token for token in answer}:
                one = guessed(runner, prompt, answer, wrong, stop_tokens=[answer[place]])
                result = one.result()
                assert result.tokens == answer[: place + 1]
                slot = request_of(one).slot
                held = list(slot.tokens)
                said = [*prompt, *result.tokens]
                assert held == said[: len(held)]
                assert {cache.offset for cache in slot.cache.current.caches} == {len(held)}
                undone = DEEPEST if name in ("qwen3_next", "mamba2") else 0
                assert len(said) - len(held) <= 1 + undone


@pytest.mark.parametrize("answering", [1, 4, 15, 16])
def test_a_step_has_few_guesses_and_a_full_one_none(answering: int) -> None:
    """All guesses of a step share 15 rows; a step that evaluates a prompt has none."""
    given = tiny_parts("llama")
    texts = [[*prompt, number] for number, prompt in enumerate(prompts(answering))]
    with Engine(*given, max_sequences=answering + 1, context=200) as runner:
        expected = [one.tokens for one in runner.run(texts, max_tokens=24, stop_tokens=[])]
        rows: list[tuple[int, int]] = []
        forward = backend(runner).forward

        def watched(tokens: mx.array, batch: Batch, wanted: Any, **more: Any) -> mx.array:
            rows.append((len(batch), len(batch.by_sequence)))
            return forward(tokens, batch, wanted, **more)

        backend(runner).forward = watched  # type: ignore[method-assign]
        handles = [
            guessed(runner, text, answer, max_tokens=24)
            for text, answer in zip(texts, expected, strict=True)
        ]
        while not all(handle.finished for handle in handles):
            runner.step()
        assert [handle.result().tokens for handle in handles] == expected
        decoding = [tokens - answers for tokens, answers in rows[1:]]
        if answering > DEEPEST:
            assert max(decoding) == 0
        else:
            assert max(decoding) == DEEPEST
            assert len(rows) < 24


def begun(runner: Engine, expected: list[list[int]]) -> list[Any]:
    """Begin requests whose next step has guesses, one of them wrong."""
    handles = [
        guessed(runner, text, answer, 7, max_tokens=20)
        for text, answer in zip(prompts(len(expected)), expected, strict=True)
    ]
    while any(len(request_of(handle).said) < 2 for handle in handles):
        runner.step()
    return handles


@pytest.mark.parametrize("name", KINDS)
def test_an_interrupt_at_any_line_of_a_step_leaves_true_slots(name: str) -> None:
    """The slots hold the beginning of what was said, and later answers are right."""
    texts = prompts(2)
    with Engine(*tiny_parts(name), max_sequences=3, context=200) as runner:
        expected = [one.tokens for one in runner.run(texts, max_tokens=20, stop_tokens=[])]
        handles = begun(runner, expected)
        with interrupt_at(-1) as seen:
            runner.step()
        assert sum(len(request_of(handle).said) for handle in handles) > 6
        for handle in handles:
            handle.cancel()
        for line in range(1, seen[0], max(1, seen[0] // fewer(60, 25))):
            handles = begun(runner, expected)
            with suppress(KeyboardInterrupt), interrupt_at(line):
                runner.step()
            for handle, text, answer in zip(handles, texts, expected, strict=True):
                handle.cancel()
                entry = request_of(handle).slot.cache.current
                held = list(entry.tokens)
                assert entry.is_true or not held, line
                assert held == [*text, *answer][: len(held)], line
        results = runner.run(texts, max_tokens=20, stop_tokens=[])
        assert [one.tokens for one in results] == expected


def test_the_controller_drafts_where_a_step_has_few_answers() -> None:
    """One right guess saves one answer a step: a share of it, the more answers the smaller."""
    controller = StepController(DraftBudget())
    sure = [0.95] * DEEPEST
    depths = []
    for count in (1, 2, 4, 8, 15):
        controller.carry(count)
        for _ in range(3):
            controller.measure(count, 0, 1.0)
            controller.measure(count, 7, 1.6)
        depths.append(controller.depth(sure, DEEPEST))
    assert depths[0] > 0
    assert depths[-1] == 0
    assert depths == sorted(depths, reverse=True)


@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("slope", [0.02, 0.15])
@pytest.mark.exhaustive(0)
def test_steps_whose_guesses_all_fail_take_as_long_as_plain_ones(
    monkeypatch: pytest.MonkeyPatch, count: int, slope: float
) -> None:
    """All answers of a step share one budget: 1 % of the steps and one step, and no more."""
    cost: list[float] = []

    def wait(self: BatchBuilder, step: DispatchedStep) -> float:
        mx.eval(step.awaited)
        if step.planned.prefill:
            return 1.0
        cost.append(1 + slope * step.more)
        return cost[-1]

    monkeypatch.setattr(BatchBuilder, "wait", wait)
    monkeypatch.setattr(TextLookup, "ahead", lambda self, most: [299] * most)
    # Deep drafts are tried beside others where one of them was measured before.
    monkeypatch.setattr(PassCosts, "is_known", True)
    for cost_of in ("ratio", "hoped"):
        monkeypatch.setattr(PassCosts, cost_of, lambda self, depth: 1 + slope * depth)
    length = fewer(150, 100)
    with Engine(*tiny_parts("llama"), max_sequences=count, context=300) as runner:
        for _ in range(2):
            results = runner.run(
                prompts(count), max_tokens=length, stop_tokens=[], speculate="auto"
            )
    guesses = [use for one in results for use in one.usage.drafts]
    assert not sum(use.accepted for use in guesses)
    assert max(cost) > 1 or slope * count > 1
    assert sum(cost) - len(cost) <= AT_FIRST + LOSS * len(cost)


def test_the_guesses_of_one_step_may_not_lose_the_same_passes() -> None:
    """A draft of one answer takes from what is left for the others, until the step has ended."""
    budget = DraftBudget()
    controller, sure = StepController(budget), [0.95] * DEEPEST
    controller.carry(2)
    controller.measure(2, 0, 1.0)
    controller.measure(2, 15, 1.9)
    first = controller.depth(sure, DEEPEST)
    controller.hold(first)
    assert controller.depth(sure, DEEPEST) < first
    controller.settle(2, first, 2 + first, 0.0)
    assert controller.depth(sure, DEEPEST) == first


def test_steps_without_a_guessed_answer_ask_nothing_about_guesses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One guessed answer among others is enough to ask."""
    asked: list[int] = []
    monkeypatch.setattr(StepController, "carry", lambda self, answers: asked.append(answers))
    answers("llama", 3, speculate="off")
    assert asked == []
    answers("llama", 3, speculate="lookup")
    assert 3 in asked


def test_a_badly_measured_cost_is_forgotten() -> None:
    """A step with guesses may have waited for other work the only time that there was one."""
    controller = StepController(DraftBudget())
    controller.carry(2)
    controller.measure(2, 0, 1.0)
    controller.measure(2, 15, 50.0)
    assert controller.depth([0.9] * DEEPEST, DEEPEST) == 0
    for _ in range(FORGOTTEN):
        controller.measure(2, 0, 1.0)
    assert controller.depth([0.9] * DEEPEST, DEEPEST) > 0
