"""Run a request again cold, beside the entry, and compare the answers.

Results of a device differ in the last bits if a prompt is cut into other chunks. The tolerance is
therefore measured, by two cold runs with different chunks. The effect of one wrong token is
measured too, since a tolerance above that effect certifies nothing. One request of a process is
measured, so there is also a least tolerance, by the type of the logits. `mlxrunner.verify` measures
every row instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrunner.cache.layers.factory import evaluate
from mlxrunner.cache.layers.protocol import LayerCache
from mlxrunner.cache.prefix import PrefixCache
from mlxrunner.cache.tokens import TokenArray
from mlxrunner.profiling.schema import Verify

ANSWER_STEP = 32
"""The answer tokens that are evaluated at once; all their logits are in memory together."""
NOISE = 8.0
"""The tolerance, in multiples of the measured noise."""
NEAR_END = 4
"""The distance in tokens of the wrong token from the end: a recurrent state forgets the rest."""
_RELATIVE = {mx.float32: 1e-4, mx.float16: 5e-3, mx.bfloat16: 3e-2}
"""The least tolerance by type, as a share of the largest logit."""


@dataclass(frozen=True)
class Warm:
    """The result of a request on the entry."""

    tokens: TokenArray
    """All tokens that were evaluated."""
    prompt: int
    """The number of these tokens that are the prompt."""
    logits: mx.array
    """The logits after the last token, `[1, vocab]`."""
    is_greedy: bool
    """True if each token of the answer was the likeliest one."""


@dataclass(frozen=True)
class Measured:
    """The largest differences of a model's last logits from those of a cold run."""

    noise: float
    """The difference of a cold run in other chunks."""
    wrong_token: float
    """The difference of a cold run with one wrong token."""


class Verifier:
    """A verifier of the requests of one model."""

    def __init__(
        self,
        model: Any,
        make_caches: Callable[[], list[LayerCache]],
        step: int,
        measured: Measured | None = None,
        *,
        is_rough: bool = False,
    ) -> None:
        """Verify requests of `model`.

        `make_caches` makes empty caches like the entry's, and `step` is the number of prompt tokens
        evaluated at once. `measured` holds earlier measurements of this model; None measures at the
        first request. `is_rough` says that keys and values are stored with fewer bits than they are
        computed with.
        """
        self._model, self._make_caches, self._step = model, make_caches, step
        self._least = _RELATIVE[mx.bfloat16] if is_rough else 0.0
        self.measured = measured

    def verify(self, warm: Warm) -> Verify:
        """Run the request cold and compare it with the result on the entry."""
        began = time.perf_counter()
        last, gaps = self._cold(warm, self._step)
        if self.measured is None:
            self.measured = self._measure(warm, last)
        tolerance = self._tolerance(last, self.measured.noise)
        difference = _distance(last, warm.logits)
        wrong = [number for number, gap in enumerate(gaps) if not gap <= tolerance]
        is_equal = not wrong and difference <= tolerance
        return Verify(
            equal=None if is_equal and not tolerance < self.measured.wrong_token else is_equal,
            tokens=len(gaps),
            first_difference=wrong[0] if wrong else None,
            logits_difference=min(difference, 1e9),
            tolerance=min(tolerance, 1e9),
            wrong_token=min(self.measured.wrong_token, 1e9),
            seconds=round(time.perf_counter() - began, 6),
        )

    def _measure(self, warm: Warm, last: mx.array) -> Measured:
        """Measure the noise and the effect of a wrong token with two more cold runs."""
        tokens = warm.tokens.copy()
        place = max(len(tokens) - 1 - NEAR_END, 0)
        tokens[place] = tokens[place] + 1 if tokens[place] < last.shape[-1] - 1 else 0
        halves = self._cold(warm, max(1, min(self._step, warm.prompt) // 2))[0]
        return Measured(
            _distance(last, halves),
            _distance(last, self._cold(replace(warm, tokens=tokens), self._step)[0]),
        )

    def _tolerance(self, logits: mx.array, noise: float) -> float:
        """Return the largest difference of logits that counts as none."""
        scale = max(1.0, _largest(logits))
        relative = max(self._least, _RELATIVE.get(logits.dtype, _RELATIVE[mx.bfloat16]))
        return max(relative * scale, NOISE * noise)

    def _cold(self, warm: Warm, step: int) -> tuple[mx.array, list[float]]:
        """Return the last logits of a cold run, and the gaps of the tokens of a greedy answer.

        A gap is the distance of a token's logit below the largest.
        """
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
    """Return the largest difference; infinite if one of the logits is not a number."""
    difference = _largest(a.astype(mx.float32) - b.astype(mx.float32))
    return difference if np.isfinite(difference) else float("inf")


def _gaps(logits: mx.array, following: TokenArray) -> list[float]:
    """Return for each token of `following` how far its logit is below the largest of its row.

    The rows are those of `logits`, `[n, vocab]`.
    """
    rows = logits[: len(following)].astype(mx.float32)
    chosen = mx.take_along_axis(rows, mx.array(following)[:, None], axis=1)[:, 0]
    gaps: Any = (rows.max(axis=1) - chosen).tolist() if len(following) else []
    return list(gaps)


def _largest(array: mx.array) -> float:
    """Return the largest absolute value."""
    found: Any = mx.abs(array.astype(mx.float32)).max().item()
    return float(found)
