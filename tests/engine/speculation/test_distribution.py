"""Guesses leave the distribution of sampled tokens as it is: chi-square over fixed seeds."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.engine import sample_drafts, sample_drafts_by

from mlxrunner import Runner
from mlxrunner.cache.layers.factory import CacheOptions
from mlxrunner.engine.draft_model import DraftModel
from mlxrunner.engine.drafting import Controller, Drafting, StepController
from mlxrunner.engine.sampling import Sampled
from mlxrunner.testing import VOCAB, OracleModel, oracle_runner

FEW, LONG, ANSWERS = 4, 40, 40
"""Tokens of the small vocabulary, tokens of an answer, and answers of a test."""
BOUND = 32.9
"""The value that chi-square of `FEW * (FEW - 1)` degrees exceeds once in a thousand times."""
TEMPERATURE = 0.8


class Chain(OracleModel):
    """A model of a small vocabulary, whose next token depends on the last one only."""

    table = np.random.default_rng(5).normal(0, 0.8, (FEW, FEW)).astype(np.float32)

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        super().__call__(tokens, cache)
        logits = mx.array(self.table)[tokens % FEW]
        return mx.pad(logits, [(0, 0), (0, 0), (0, VOCAB - FEW)], constant_values=-mx.inf)

    @classmethod
    def probabilities(cls) -> np.ndarray[Any, Any]:
        """Return the probability of each token (column) after each (row)."""
        weights = np.exp(cls.table.astype(float) / TEMPERATURE)
        return np.asarray(weights / weights.sum(1, keepdims=True))


def chi_square(runner: Runner, how: str) -> float:
    """Return how far the answers are from the probabilities, in all pairs of tokens together."""
    seen = np.zeros((FEW, FEW))
    for seed in range(ANSWERS):
        options = {"temperature": TEMPERATURE, "seed": seed, "stop_tokens": []}
        chunks = runner.generate([seed % FEW] * 4, max_tokens=LONG, speculate=how, **options)
        said = [int(chunk.token or 0) for chunk in chunks]
        np.add.at(seen, (said[:-1], said[1:]), 1)
    expected = seen.sum(1, keepdims=True) * Chain.probabilities()
    assert expected.min() > 5
    return float(((seen - expected) ** 2 / expected).sum())


def guess_one_sided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the draft be some tokens more often than others, whatever the text is."""
    dice = random.Random(3)
    monkeypatch.setattr(
        Drafting, "draft", lambda self, most: [dice.choice([0, 0, 1]) for _ in range(min(most, 3))]
    )


@pytest.mark.parametrize("guesses", ["repeats", "one-sided", "model"])
@pytest.mark.parametrize("kind", ["full", "recurrent"])
@pytest.mark.exhaustive(0)
def test_sampled_tokens_are_as_likely_as_the_model_says(
    guesses: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With guesses of each kind, of which a part is right."""
    runner = oracle_runner(model=Chain([kind]))
    if guesses == "one-sided":
        guess_one_sided(monkeypatch)
    if guesses == "model":
        monkeypatch.setattr(Controller, "depth", lambda self, shares, most, first=1.0: min(most, 3))
        monkeypatch.setattr(StepController, "may_draft", True)
        other = Chain(["full"])
        other.table = Chain.table + np.random.default_rng(1).normal(0, 1, (FEW, FEW))
        runner.sources.model = draft_model(other)
    assert chi_square(runner, "auto" if guesses == "model" else "lookup") < BOUND
    assert runner.usage is not None
    drafted = sum(use.drafted for use in runner.usage.drafts)
    right = sum(use.accepted for use in runner.usage.drafts)
    assert 0 < right < 0.9 * drafted


@pytest.mark.parametrize("guesses", ["repeats", "one-sided"])
def test_a_naive_rule_would_be_noticed(guesses: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a guess with the guess's own probability, and samples from all tokens if not."""
    dice = random.Random(1)

    def naive(request: Any, end: int, logits: mx.array, best: Any) -> list[Sampled]:
        sampled: list[Sampled] = sample_drafts(request, end, logits, best)
        likely = mx.softmax(logits / TEMPERATURE, axis=-1).tolist()
        for row, guess in enumerate(request.draft):
            if dice.random() < likely[row][guess]:
                sampled[row] = Sampled(mx.array([guess]))
        return sampled

    sample_drafts_by(naive, monkeypatch)
    if guesses == "one-sided":
        guess_one_sided(monkeypatch)
    assert chi_square(oracle_runner(model=Chain(["full"])), "lookup") > 2 * BOUND


def draft_model(model: Chain) -> DraftModel:
    return DraftModel(model, VOCAB, CacheOptions(None), 10**6, 8)
