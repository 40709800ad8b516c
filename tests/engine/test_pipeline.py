"""Evaluating in advance changes no answer, whether it is finished, cancelled or interrupted."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from support.engine import tell_time_by
from support.reused import Mix, cold, is_consistent, mixes, tokens

from mlxrunner import BusyError, ContextLengthError, PromptError, Runner
from mlxrunner.testing import oracle_runner


def numbers(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 250) for _ in range(count)]


def opened(mix: Mix, **options: Any) -> Runner:
    return mix.runner(prefill_step=5, **options)


class CancelAfter:
    """Lets `chunks` chunks pass."""

    def __init__(self, chunks: int) -> None:
        self.left = chunks

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


@mixes
def test_a_prompt_that_was_evaluated_in_advance_is_a_hit_and_exact(mix: Mix) -> None:
    """All but the token that gives the logits is reused where the layers can go back by one."""
    prompt, runner = numbers(40, 1), opened(mix)
    assert runner.evaluate(prompt[:33]) == 33
    assert list(runner.entry.tokens) == prompt[:33]
    assert runner.entry.is_true
    found = runner.complete(prompt, max_tokens=6)
    assert found.tokens == cold(mix.kinds, prompt)
    assert found.usage.cached_tokens == 33


@mixes
@pytest.mark.parametrize("chunks", [0, 1, 2, 3])
def test_what_was_finished_before_it_was_cancelled_stays(mix: Mix, chunks: int) -> None:
    """Nothing more stays; the next request continues from there, with the tokens of a cold run."""
    prompt, runner = numbers(40, 2), opened(mix)
    done = runner.evaluate(prompt, cancelled=CancelAfter(chunks))
    assert done == len(runner.entry.tokens) < len(prompt)
    assert (done > 0) == (chunks > 0)
    assert tokens(runner, prompt) == cold(mix.kinds, prompt)


@pytest.mark.exhaustive(0)
@mixes
def test_typing_and_deleting_leaves_an_exact_entry(mix: Mix) -> None:
    """Typed and deleted texts, cancelled at random moments, leave an exact entry for the turn."""
    rng, runner, said = random.Random(str(mix.kinds)), opened(mix), numbers(20, 3)
    for _ in range(8):
        said += tokens(runner, said)
        draft: list[int] = []
        for _ in range(12):
            if rng.random() < 0.4:
                draft = draft[: rng.randrange(len(draft) + 1)]
            else:
                draft = draft + numbers(rng.randrange(1, 9), rng.random())
            runner.evaluate([*said, *draft, 7], cancelled=CancelAfter(rng.randrange(4)))
            assert is_consistent(runner)
        said += [*draft, 9]
        assert tokens(runner, said) == cold(mix.kinds, said)


@mixes
def test_an_interrupt_in_a_forward_pass_leaves_an_exact_entry(mix: Mix) -> None:
    prompt = numbers(30, 4)
    for at in range(2, 30, 5):
        runner, calls = opened(mix), count()

        def strike(index: int, calls: Iterator[int] = calls, at: int = at) -> None:
            if next(calls) == at:
                raise KeyboardInterrupt

        tokens(runner, prompt[:8])
        runner.model.on_layer = strike
        with pytest.raises(KeyboardInterrupt):
            while True:
                runner.evaluate(prompt)
                runner.reset()
        runner.model.on_layer = lambda index: None
        assert is_consistent(runner)
        assert tokens(runner, prompt) == cold(mix.kinds, prompt)


def test_an_entry_that_begins_with_it_is_left_alone() -> None:
    """Nothing is trimmed: the next request may still want the rest."""
    runner, prompt = oracle_runner(), numbers(20, 5)
    tokens(runner, prompt)
    before = list(runner.entry.tokens)
    assert runner.evaluate(prompt[:10]) == 0
    assert list(runner.entry.tokens) == before


def test_what_cannot_be_evaluated_is_an_error_that_changes_nothing() -> None:
    """Too long, empty, while a request is running."""
    runner = oracle_runner(context=30)
    runner.evaluate([1, 2, 3])
    with pytest.raises(ContextLengthError, match="30 tokens"):
        runner.evaluate(list(range(1, 40)))
    with pytest.raises(PromptError):
        runner.evaluate([1, 2000])
    assert list(runner.entry.tokens) == [1, 2, 3]
    running = runner.generate([1, 2, 3, 4], stop_tokens=[])
    next(running)
    with pytest.raises(BusyError):
        runner.evaluate([5, 6])
    running.close()  # type: ignore[attr-defined]
    assert runner.evaluate([1, 2, 3, 4, 5, 6, 7, 8]) > 0


def test_chunks_grow_and_shrink_with_the_time_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancel is heard soon on any machine; a chunk is never more than a prefill step."""
    clock = {"now": 0.0, "cost": 0.001}

    def passing() -> float:
        clock["now"] += clock["cost"]
        return clock["now"]

    tell_time_by(passing, monkeypatch)
    runner = oracle_runner(prefill_step=100)
    runner.evaluate(numbers(400, 6))
    assert runner.model.forwards[:5] == [8, 16, 32, 64, 100]
    clock["cost"] = 1.0
    runner.model.forwards.clear()
    runner.reset()
    runner.evaluate(numbers(100, 7))
    assert runner.model.forwards[:4] == [8, 2, 2, 2]
    assert max(runner.model.forwards) == 8
