"""An answer with the logits that it was chosen from, and the difference of two answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlxrunner.results import Usage
from mlxrunner.runner import Runner
from mlxrunner.verify.findings import Difference
from mlxrunner.verify.scenarios import Case

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class AnswerLogits:
    """An answer with the logits that it was chosen from."""

    tokens: list[int]
    logits: Logits
    """The logits from which each token was chosen, `[tokens, vocab]`."""
    epsilon: float
    """The relative rounding step of the type in which the logits were computed."""
    usage: Usage | None

    @property
    def largest(self) -> float:
        """The largest absolute value of a finite logit."""
        return float(np.abs(self.logits[np.isfinite(self.logits)]).max(initial=0))


def ask(runner: Runner, case: Case, count: int) -> AnswerLogits:
    """Return the greedy answer to `case`, of `count` tokens."""
    rows: list[mx.array] = []

    def keep(tokens: mx.array, logits: mx.array) -> mx.array:
        rows.append(logits)
        return logits

    chunks = list(
        runner.generate(
            case.prompt, max_tokens=count, stop_tokens=[], logits_processors=[keep], **case.options
        )
    )
    logits = np.array(mx.concatenate(rows).astype(mx.float32))[: len(chunks)]
    return AnswerLogits(
        [chunk.token or 0 for chunk in chunks],
        logits,
        float(mx.finfo(rows[0].dtype).eps),
        chunks[-1].usage,
    )


def difference(one: AnswerLogits, other: AnswerLogits) -> Difference:
    """Return the difference of two answers, up to and including the first token that differs."""
    equal = same_tokens(one.tokens, other.tokens)
    count = min(equal + 1, len(one.tokens), len(other.tokens))
    return Difference(
        equal,
        max(len(one.tokens), len(other.tokens)),
        largest(one.logits[:count], other.logits[:count]),
    )


def same_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of equal tokens, from the first on."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def largest(one: Logits, other: Logits) -> float:
    """Return the largest difference. Logits masked (minus infinity) in both are equal."""
    with np.errstate(invalid="ignore"):
        return float(np.where(one == other, 0, np.abs(one - other)).max(initial=0))
