"""What a request gives back: chunks of text, and the usage that says what was reused, why not more, and what it cost."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import Any, Literal

logger = logging.getLogger("mlxrunner")

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Usage:
    """Counts in tokens, times in seconds, sizes in bytes.

    `matched_tokens`: longest common prefix with the entry, as the request before had left it; `cached_tokens`: those not evaluated now,
    `ahead_tokens` of them because they had been evaluated in advance since then; `evaluated_tokens`: prompt tokens run through the model by
    this request; `trimmed_tokens`: tokens dropped from the entry to get back to the cached ones. `ttft_s` runs
    from the request to the first token, `decode_s` from the first token to the last. `outcome`: "hit" (all that could be was reused),
    "partial" or "miss"; `reason` says why not more (see `mlxrunner.profiling.reasons`), `lost_tokens` how much more that would have been
    at most.
    `rewind_limited_by`: kind of the layer that could not go back to the match; `checkpoint`: offset of the one that was used.
    `shifted_tokens`: dropped from the middle because the context was full; `reevaluated_tokens`: evaluated once more for that, where a
    layer could not move what it stores. `cache_bytes`: allocated for caches and checkpoints; `used_bytes`: of the former, what holds
    tokens; `peak_bytes`: of all MLX memory, this request.
    """

    prompt_tokens: int
    matched_tokens: int
    cached_tokens: int
    evaluated_tokens: int
    trimmed_tokens: int
    completion_tokens: int
    outcome: Literal["hit", "partial", "miss"]
    reason: str | None
    rewind_limited_by: str | None
    checkpoint: int | None
    freed_by: str | None
    shifted_tokens: int
    reevaluated_tokens: int
    tokenize_s: float
    lookup_s: float
    prefill_s: float
    ttft_s: float
    decode_s: float
    cache_bytes: int
    peak_bytes: int
    lost_tokens: int = 0
    ahead_tokens: int = 0
    used_bytes: int = 0

    @property
    def prefill_rate(self) -> float:
        """Evaluated prompt tokens per second."""
        return self.evaluated_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first one, which belongs to the prefill."""
        return (
            (self.completion_tokens - 1) / self.decode_s
            if self.decode_s and self.completion_tokens > 1
            else 0.0
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of an answer. `text` may be empty while a character or a stop string is incomplete.

    `logprob` and `top_logprobs` (token id -> log-probability) are there only when asked for; `finish_reason` and `usage` only
    in the last chunk.
    """

    text: str
    token: int | None
    logprob: float | None = None
    top_logprobs: dict[int, float] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None


def log_lookup(prompt_tokens: int, matched: int, cached: int) -> None:
    """Before the first token: how much is left to evaluate."""
    logger.debug(
        "lookup prompt_tokens=%d matched_tokens=%d cached_tokens=%d", prompt_tokens, matched, cached
    )
