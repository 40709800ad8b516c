"""Run a request again cold, beside the entry, and hold what the entry made of it against that.

What a device computes is not the same to the last bit when a prompt is cut into other chunks, so what counts as a difference is
measured: by running cold in two ways; and what one wrong token makes, as a tolerance above that certifies nothing. That is done for
one request of a process only, so there is a least difference as well, by the type of the logits; `mlxrunner.verify` measures with every
row and needs none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrunner.cache.entry import PrefixCache
from mlxrunner.cache.factory import evaluate
from mlxrunner.cache.layer import LayerCache
from mlxrunner.cache.tokens import TokenArray

ANSWER_STEP = 32
"""Answer tokens that are evaluated at once: the logits of all of them are looked at, and a vocabulary is wide."""
NOISE = 8.0
"""A difference is one from so many times the measured noise on."""
NEAR_END = 4
"""Where a wrong token is put to see what it changes: a state forgets what is far away."""
_RELATIVE = {mx.float32: 1e-4, mx.float16: 5e-3, mx.bfloat16: 3e-2}
"""And from this share of the largest logit on, whatever was measured."""


@dataclass(frozen=True)
class Warm:
    """What a request on the entry has left: all `tokens` that were evaluated, `prompt` of them the prompt's, and the `logits` that follow
    the last, `[1, vocab]`. `is_greedy`: each answer token was the likeliest."""

    tokens: TokenArray
    prompt: int
    logits: mx.array
    is_greedy: bool


@dataclass(frozen=True)
class Measured:
    """Of a model, by the largest difference of the last logits: cold runs in other chunks, and a cold run with one wrong token."""

    noise: float
    wrong_token: float


class Verifier:
    """Verifies requests of one model. `make_caches`: empty caches like the entry's, but not the entry's."""

    def __init__(
        self,
        model: Any,
        make_caches: Callable[[], list[LayerCache]],
        step: int,
        measured: Measured | None = None,
        *,
        is_rough: bool = False,
    ) -> None:
        """`step`: prompt tokens evaluated at once; `measured`: of this model, if it was already; `is_rough`: keys and values are
        stored with fewer bits than they are computed with."""
        self._model, self._make_caches, self._step = model, make_caches, step
        self._least = _RELATIVE[mx.bfloat16] if is_rough else 0.0
        self.measured = measured

    def verify(self, warm: Warm) -> dict[str, Any]:
        """The `verify` of an event."""
        began = time.perf_counter()
        last, gaps = self._cold(warm, self._step)
        if self.measured is None:
            self.measured = self._measure(warm, last)
        tolerance = self._tolerance(last, self.measured.noise)
        difference = _distance(last, warm.logits)
        wrong = [number for number, gap in enumerate(gaps) if not gap <= tolerance]
        is_equal = not wrong and difference <= tolerance
        return {
            "equal": None if is_equal and not tolerance < self.measured.wrong_token else is_equal,
            "tokens": len(gaps),
            "first_difference": wrong[0] if wrong else None,
            "logits_difference": min(difference, 1e9),
            "tolerance": min(tolerance, 1e9),
            "wrong_token": min(self.measured.wrong_token, 1e9),
            "seconds": round(time.perf_counter() - began, 6),
        }

    def _measure(self, warm: Warm, last: mx.array) -> Measured:
        tokens = warm.tokens.copy()
        place = max(len(tokens) - 1 - NEAR_END, 0)
        tokens[place] = tokens[place] + 1 if tokens[place] < last.shape[-1] - 1 else 0
        halves = self._cold(warm, max(1, min(self._step, warm.prompt) // 2))[0]
        return Measured(
            _distance(last, halves),
            _distance(last, self._cold(replace(warm, tokens=tokens), self._step)[0]),
        )

    def _tolerance(self, logits: mx.array, noise: float) -> float:
        scale = max(1.0, _largest(logits))
        relative = max(self._least, _RELATIVE.get(logits.dtype, _RELATIVE[mx.bfloat16]))
        return max(relative * scale, NOISE * noise)

    def _cold(self, warm: Warm, step: int) -> tuple[mx.array, list[float]]:
        """The last logits, and by how much each answer token was less likely than the likeliest one (none unless greedy)."""
        gaps: list[float] = []
        with PrefixCache(self._make_caches).begin(warm.tokens) as session:

            def forward(count: int) -> mx.array:
                chunk = session.remaining[:count]
                session.begin_forward()
                logits: mx.array = self._model(mx.array(chunk)[None], cache=session.model_caches)
                session.end_forward(len(chunk))
                session.record(chunk)
                return logits

            while session.recorded < warm.prompt - 1:
                forward(min(step, warm.prompt - 1 - session.recorded))
                evaluate(session.caches)
                mx.clear_cache()
            while len(session.remaining):
                following = warm.tokens[session.recorded + 1 :][:ANSWER_STEP]
                logits = forward(ANSWER_STEP)[0]
                last = mx.array(logits[-1:])
                evaluate(session.caches)
                if warm.is_greedy:
                    gaps += _gaps(logits, following)
            mx.eval(last)
        return last, gaps


def _distance(a: mx.array, b: mx.array) -> float:
    """The largest difference; infinite where one of them is not a number."""
    difference = _largest(a.astype(mx.float32) - b.astype(mx.float32))
    return difference if np.isfinite(difference) else float("inf")


def _gaps(logits: mx.array, following: TokenArray) -> list[float]:
    """How far the logit of each token of `following` is below the largest of its row of `logits [n, vocab]`."""
    rows = logits[: len(following)].astype(mx.float32)
    chosen = mx.take_along_axis(rows, mx.array(following)[:, None], axis=1)[:, 0]
    gaps: Any = (rows.max(axis=1) - chosen).tolist() if len(following) else []
    return list(gaps)


def _largest(array: mx.array) -> float:
    found: Any = mx.abs(array.astype(mx.float32)).max().item()
    return float(found)
