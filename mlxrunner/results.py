"""The results of a request: chunks, and the usage, which tells what was reused and what it cost.

This knows nothing about models.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from mlxrunner.config.option import check_kind, listed
from mlxrunner.errors import CancelledError, OptionError

logger = logging.getLogger("mlxrunner")

FinishReason = Literal["stop", "length"]
T = TypeVar("T")
RENAMED = {
    "ahead_tokens": "prefetched_tokens",
    "freed_by": "evicted_by",
    "rewind_limited_by": "trim_limited_by",
    "beside": "scheduling",
}
"""The new names of fields of 0.2, which usages, events and token logs may have until 0.4."""


CAUSED_BY_CLIENT = ("diverged", "no_common_token")
"""The reasons of 0.2 for which it was the client that could change something."""


def with_new_names(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields that 0.2 may have written as they are written today.

    It counted missed and displaced tokens, and new ones among them, as `lost_tokens`.
    """
    found = {RENAMED.get(name, name): value for name, value in fields.items()}
    lost: Any
    prompt: Any
    cached: Any
    lost, prompt, cached = map(found.get, ("lost_tokens", "prompt_tokens", "cached_tokens"))
    if not is_counted(found) and all(type(one) is int for one in (lost, prompt, cached)):
        found["lost_tokens"] = lost = max(min(lost, prompt - cached), 0)
        is_displaced = found.get("reason") in CAUSED_BY_CLIENT
        found["missed_tokens"] = 0 if is_displaced else lost
        found["displaced_tokens"] = lost if is_displaced else 0
        found["new_tokens"] = prompt - cached - lost
    return found


def is_counted(fields: Mapping[str, Any]) -> bool:
    """Return True if missed and displaced tokens are counted, not bounded as 0.2 did."""
    return "missed_tokens" in fields or "displaced_tokens" in fields


@dataclass
class Rate:
    """A measured speed."""

    tokens: float = 0
    """The tokens that were measured."""
    seconds: float = 0.0
    """The seconds that they took."""

    def add(self, tokens: float, seconds: float) -> None:
        """Add a measurement, which weighs as much as its seconds."""
        self.tokens += tokens
        self.seconds += seconds

    @property
    def per_second(self) -> float | None:
        """The tokens per second; None before the first measurement."""
        return self.tokens / self.seconds if self.seconds else None


@dataclass(frozen=True)
class Timing:
    """Seconds that the parts of a request took, and tokens per second."""

    tokenize_s: float
    """Time to render and tokenize the prompt."""
    lookup_s: float
    """Time to find the common prefix and rewind the caches to it."""
    prefill_s: float
    """Time to evaluate the prompt."""
    ttft_s: float
    """Time from the request to the first token of the answer."""
    decode_s: float
    """Time from the first token of the answer to the last."""
    prefill_rate: float = 0.0
    """Evaluated prompt tokens per second."""
    decode_rate: float = 0.0
    """Tokens of the answer per second, without the first one, which belongs to the prefill."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that a request used."""

    cache_bytes: int
    """Bytes allocated for caches and checkpoints."""
    peak_bytes: int
    """The most MLX memory in use during the request, with the weights."""
    used_bytes: int = 0
    """Bytes of `cache_bytes` that hold tokens."""


@dataclass(frozen=True)
class CacheUse:
    """Tokens of the entry that a request found, kept and dropped."""

    matched_tokens: int
    """Longest common prefix of the prompt and the entry as the last request left it."""
    trimmed_tokens: int
    """Tokens dropped from the entry to rewind it to the cached ones."""
    trim_limited_by: str | None
    """Kind of the layer that could not be rewound to the match, or None."""
    checkpoint: int | None
    """Offset of the checkpoint that was used to rewind, or None."""
    evicted_by: str | None
    """Reason for which the entry was freed before this request, or None."""
    shifted_tokens: int
    """Tokens dropped from the middle because the context was full."""
    reevaluated_tokens: int
    """Tokens evaluated again after a shift, because a layer could not move what it stores."""
    lost_tokens: int = 0
    """Deprecated, until 0.4: `missed_tokens + displaced_tokens`."""
    prefetched_tokens: int = 0
    """Tokens of `cached_tokens` that were evaluated in advance since the last request."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return a field by its name of 0.2, with a warning that names the new one."""
            if name not in RENAMED:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            warnings.warn(f"{name} is called {RENAMED[name]}", DeprecationWarning, stacklevel=2)
            return getattr(self, RENAMED[name])


@dataclass(frozen=True)
class DraftUse:
    """Tokens that one source guessed of an answer."""

    source: str
    """"lookup": the text itself, where it repeats; "earlier": the text that the entry held before;
    "form": the only text that a schema or choices leave; "model": a draft model."""
    drafted: int
    """Tokens that were checked."""
    accepted: int
    """Tokens that were right."""


@dataclass(frozen=True)
class Usage:
    """The counts, times and sizes of one request. Counts are in tokens."""

    prompt_tokens: int
    """Tokens of the prompt."""
    completion_tokens: int
    """Tokens of the answer."""
    cached_tokens: int
    """Prompt tokens that were reused, and so not evaluated now."""
    evaluated_tokens: int
    """Prompt tokens that were run through the model."""
    outcome: Literal["hit", "partial", "miss"]
    """"hit": all that can be reused was; "partial": a part of it was; "miss": nothing was."""
    reason: str | None
    """Reason why not more was reused (listed in `mlxrunner.profiling.schema`), or None."""
    timing: Timing
    """Times in seconds, and rates."""
    memory: MemoryUse
    """Sizes in bytes."""
    cache: CacheUse
    """Details of what the entry held, kept and dropped."""
    draft_passes: int = 0
    """Forward passes that checked guessed tokens of the answer, several at once."""
    drafts: tuple[DraftUse, ...] = ()
    """Guessed tokens by their source."""
    missed_tokens: int = 0
    """Prompt tokens on a prefix that was evaluated before, and could not be reused."""
    displaced_tokens: int = 0
    """Prompt tokens that the earlier request of the same conversation had, too, after the place
    where the prompt leaves it."""
    new_tokens: int = 0
    """The other prompt tokens: nothing could have spared them."""

    @property
    def total_tokens(self) -> int:
        """Tokens of the prompt and of the answer."""
        return self.prompt_tokens + self.completion_tokens

    def as_dict(self) -> dict[str, Any]:
        """Return all counts, times and sizes by name, as one flat dictionary without the rates."""
        flat = {**vars(self), **vars(self.cache), **vars(self.timing), **vars(self.memory)}
        for name in ("timing", "memory", "cache", "prefill_rate", "decode_rate"):
            del flat[name]
        return flat | {"drafts": [dict(vars(use)) for use in self.drafts]}

    @classmethod
    def from_dict(cls, flat: Mapping[str, Any]) -> Usage:
        """Return the usage that `as_dict` gave. Counts and times give the rates.

        Raise OptionError if a count or a time is missing.
        """
        try:
            named = with_new_names(flat)
            prefill = Rate(named["evaluated_tokens"], named["prefill_s"]).per_second
            decode = Rate(max(named["completion_tokens"] - 1, 0), named["decode_s"]).per_second
            rates = {"prefill_rate": prefill or 0.0, "decode_rate": decode or 0.0}
            groups: dict[str, Any] = {
                "timing": _part(Timing, {**named, **rates}),
                "memory": _part(MemoryUse, named),
                "cache": _part(CacheUse, named),
                "drafts": tuple(_part(DraftUse, use) for use in named.get("drafts") or ()),
            }
            return _part(cls, {**named, **groups})
        except (KeyError, TypeError) as error:
            raise OptionError(
                f"usage: {error} is wrong in {flat!r:.80}; give what Usage.as_dict returned"
            ) from error


def _part(kind: type[T], values: Mapping[str, Any]) -> T:
    names = kind.__dataclass_fields__  # type: ignore[attr-defined]  # every `kind` is a dataclass
    return kind(**{name: value for name, value in values.items() if name in names})


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of an answer: one token, and the text that became complete with it."""

    text: str
    """New text; empty while a character or a stop string is incomplete."""
    token: int | None
    """The token id."""
    logprob: float | None = None
    """Natural logarithm of the token's probability, if `logprobs` was given."""
    top_logprobs: dict[int, float] | None = None
    """Log-probabilities of the likeliest tokens by token id, if `logprobs` was given."""
    finish_reason: FinishReason | None = None
    """Reason for the end of the answer, in the last chunk only."""
    usage: Usage | None = None
    """The usage of the request, in the last chunk only."""


@dataclass(frozen=True)
class Result:
    """A finished answer."""

    text: str
    """The whole text of the answer."""
    tokens: list[int]
    """The token ids of the answer, with the one that ended it."""
    finish_reason: FinishReason
    """"stop": the model or a stop string ended the answer; "length": a limit did."""
    usage: Usage
    """The counts, times and sizes of the request."""
    logprobs: list[tuple[float, dict[int, float]]] | None = None
    """For each token its log-probability and those of the likeliest tokens by id, if requested."""

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> Result:
        """Join all chunks of a request. Raise CancelledError if the last chunk is missing."""
        for chunk in listed("chunks", chunks, "list(runner.generate(prompt))"):
            check_kind("chunks", chunk, Chunk, "give what Runner.generate yields")
        last = chunks[-1] if chunks else None
        if last is None or last.usage is None or last.finish_reason is None:
            raise CancelledError("the request was cancelled before it ended")
        logprobs = [
            (chunk.logprob, chunk.top_logprobs or {})
            for chunk in chunks
            if chunk.logprob is not None
        ]
        return cls(
            "".join(chunk.text for chunk in chunks),
            [chunk.token for chunk in chunks if chunk.token is not None],
            last.finish_reason,
            last.usage,
            logprobs or None,
        )


def log_lookup(prompt_tokens: int, matched: int, cached: int) -> None:
    """Log how many tokens are left to evaluate, before the first token."""
    logger.debug(
        "lookup prompt_tokens=%d matched_tokens=%d cached_tokens=%d", prompt_tokens, matched, cached
    )
