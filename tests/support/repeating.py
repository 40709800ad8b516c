"""An oracle whose answers repeat themselves, so that drafts are often right, and often not."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlxrunner import Runner
from mlxrunner.testing import VOCAB, OracleModel, oracle_runner

ROUND = 40
"""Tokens that it mostly uses."""


class RepeatingModel(OracleModel):
    """Goes round a short text, and leaves it where the oracle says so.

    Each place depends on every (token, position) that is visible through the caches, as the
    oracle's does.
    """

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        told = mx.argmax(super().__call__(tokens, cache)[0], axis=-1)
        usual = (tokens[0].astype(mx.int32) * 5 + 3) % ROUND
        target = mx.where(told % 9 == 0, told % ROUND, usual)
        distance = (mx.arange(VOCAB)[None] - target[:, None]) % VOCAB
        return -distance.astype(mx.float32)[None]


def repeating_runner(kinds: list[str], **options: Any) -> Runner:
    """Return a runner on such a model."""
    return oracle_runner(model=RepeatingModel(kinds), **options)
