"""Find out if a model's answer depends on how its prompt was cut into chunks.

If it does, evaluated tokens can't be reused. The probe runs a few tokens in one piece and in
several, and compares the logits. It narrows windows, caches and masks by the same amount, so that
they are full after a few tokens.

The probe does not see effects that begin beyond `TOKENS` tokens and are not a window of mlx-lm's
kind, such as chunked attention, a sparse index, or a scale that begins at some position. `mlxrunner
verify` looks at those at full length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlxrunner.cache.layers.factory import make_layer_caches

DEPENDS = "this model's answers depend on how a prompt is cut into chunks"
TOKENS = 8
CHUNKS = (4, 3, 1)
"""Tokens of each chunk of the second run; the last one is a decode step."""
NARROW = 2
"""Tokens of a window during the probe."""
TOLERANCE = 0.05
"""Largest accepted difference, as a share of the largest logit.

Half-precision sums in another order differ by less. A missing token makes a larger difference.
"""
PROMPTS = 3
"""Number of prompts that all have to differ.

In a single prompt, a close choice of an expert may differ without a fault.
"""


def depends_on_chunks(model: Any, vocab: int) -> bool:
    """Return True if the answers of `model` depend on how a prompt is cut into chunks.

    Evaluate TOKENS tokens twice, PROMPTS times. Return False for a model that can't be run.
    """
    try:
        return all(_gap(model, _prompt(number, vocab)) > TOLERANCE for number in range(PROMPTS))
    except Exception:  # running the model raises the same error
        return False


def computes_only_nan(model: Any, vocab: int) -> bool:
    """Return True if the logits of `model` are NaN, or all infinite, after each of some prompts.

    Return False for a model that can't be run.
    """
    try:
        prompts = (_prompt(number, vocab) for number in range(PROMPTS))
        if any(mx.isfinite(_logits(model, one, (TOKENS,)).max()).item() for one in prompts):
            return False
        caches = make_layer_caches(model)  # as wide as they are: narrow ones may see nothing
        prompt = mx.array([_prompt(PROMPTS, vocab)])
        logits = model(prompt, cache=[cache.model_cache for cache in caches])
        return not mx.isfinite(logits[0, -1].max()).item()
    except Exception:  # running the model raises the same error
        return False


def _prompt(number: int, vocab: int) -> list[int]:
    return [
        (11 + 7 * number + (13 + number) * place) % max(min(vocab, 251), 2)
        for place in range(TOKENS)
    ]


def _gap(model: Any, prompt: list[int]) -> float:
    """Return the largest difference of the logits after `prompt`.

    The result is a share of the largest logit.
    """
    whole, parts = (_logits(model, prompt, chunks) for chunks in ((TOKENS,), CHUNKS))
    gap = mx.abs(parts - whole).max() / mx.maximum(mx.abs(whole).max(), 1e-6)
    return float(gap.item())  # type: ignore[arg-type]  # real


def _logits(model: Any, prompt: list[int], chunks: Sequence[int]) -> mx.array:
    caches = [cache.narrowed(NARROW) for cache in make_layer_caches(model)]
    for count in chunks:
        tokens, prompt = prompt[:count], prompt[count:]
        for cache in caches:
            cache.begin_forward()
        logits = model(mx.array([tokens]), cache=[cache.model_cache for cache in caches])
        for cache in caches:
            cache.end_forward(count)
        mx.eval(logits)  # in this order on all ranks that share the layers
    last: mx.array = logits[0, -1].astype(mx.float32)
    return last
