"""Find out whether a model's answer depends on how its prompt was cut into chunks: then nothing that was evaluated can be reused.

A few tokens are run in one piece and in several, and the logits have to agree. Windows are narrowed for it, cache and mask by as much,
so that they are full after a few tokens. Not seen: what happens only beyond `TOKENS` tokens and is no window of mlx-lm's kind (a
chunked attention, a sparse index, a scale that begins at some position); `mlxrunner verify` looks at those at full length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlxrunner.cache.composite import CompositeCache
from mlxrunner.cache.factory import make_layer_caches
from mlxrunner.cache.layer import LayerCache
from mlxrunner.cache.sliding import SlidingWindowCache

DEPENDS = "this model's answers depend on how a prompt is cut into chunks"
TOKENS = 8
CHUNKS = (4, 3, 1)
"""Against all TOKENS at once; the last one is a decode step."""
NARROW = 2
"""Tokens that a window shows while it is tried."""
TOLERANCE = 0.05
"""Share of the largest logit: more than another order of sums makes in half precision, less than a missing token makes."""
PROMPTS = 3
"""Prompts that all have to differ: in one of them a close choice of an expert may go the other way."""


def depends_on_chunks(model: Any, vocab: int) -> bool:
    """Return True if the answers of `model` depend on how a prompt is cut into chunks. Evaluates TOKENS tokens twice, PROMPTS times."""
    try:
        return all(_gap(model, _prompt(number, vocab)) > TOLERANCE for number in range(PROMPTS))
    except Exception:  # a model that can't be run says so to who runs it
        return False


def _prompt(number: int, vocab: int) -> list[int]:
    return [
        (11 + 7 * number + (13 + number) * place) % max(min(vocab, 251), 2)
        for place in range(TOKENS)
    ]


def _gap(model: Any, prompt: list[int]) -> float:
    """The largest difference of the logits that follow `prompt`, of the largest."""
    whole, parts = (_logits(model, prompt, chunks) for chunks in ((TOKENS,), CHUNKS))
    gap = mx.abs(parts - whole).max() / mx.maximum(mx.abs(whole).max(), 1e-6)
    return float(gap.item())  # type: ignore[arg-type]  # real


def _logits(model: Any, prompt: list[int], chunks: Sequence[int]) -> mx.array:
    caches = [_narrowed(cache) for cache in make_layer_caches(model)]
    for count in chunks:
        tokens, prompt = prompt[:count], prompt[count:]
        for cache in caches:
            cache.begin_forward()
        logits = model(mx.array([tokens]), cache=[cache.model_cache for cache in caches])
        for cache in caches:
            cache.end_forward(count)
    last: mx.array = logits[0, -1].astype(mx.float32)
    return last


def _narrowed(cache: LayerCache) -> LayerCache:
    if isinstance(cache, CompositeCache):
        return CompositeCache([_narrowed(part) for part in cache.parts])
    return _Narrow(cache.window) if isinstance(cache, SlidingWindowCache) else cache


class _Narrow(SlidingWindowCache):
    """A window of NARROW tokens in the place of one of `true`: a mask is as much wider or narrower than it as the one that was asked."""

    def __init__(self, true: int) -> None:
        super().__init__(min(NARROW, true))
        self._true = true

    @property
    def max_size(self) -> int:
        return self._true

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Any:
        asked = window_size or self._true
        return super().make_mask(n, return_array, max(1, asked - self._true + self.window))
