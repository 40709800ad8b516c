"""One request of a Runner under way, and its description when it has ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlxrunner.cache.checkpoints import places_of
from mlxrunner.cache.entry import CacheEntry
from mlxrunner.cache.prefix import EntryLease
from mlxrunner.engine.answer import AnswerStream
from mlxrunner.engine.observation import Observation, finish_of, usage_of
from mlxrunner.engine.pipeline import Pipeline, Progress
from mlxrunner.engine.requests import Request
from mlxrunner.results import FinishReason, Usage
from mlxrunner.speculation.drafting import Drafting


@dataclass
class Run:
    """A prepared request with its lease of the entry."""

    request: Request
    lease: EntryLease
    progress: Progress | None
    """A function called during the prefill with the tokens in the entry and all prompt tokens."""
    active_bytes: int = 0
    """Bytes of MLX memory in use when the request began."""
    usage: Usage | None = None
    """The usage, set when the answer has ended."""
    finish_reason: FinishReason | None = None
    error: str | None = None
    """The name of the exception that ended the request; None if no exception did."""
    is_told: bool = False
    """True once the observers were called."""
    pipeline: Pipeline | None = None
    """The passes of the model; None until the request has the entry."""
    is_over: bool = False
    """True once its iterator has ended."""

    @property
    def shifted(self) -> int:
        """Tokens that were dropped because the context was full."""
        return self.request.discarded + (0 if self.pipeline is None else self.pipeline.shifted)

    def counted(self, answer: AnswerStream, pipeline: Pipeline, entry: CacheEntry) -> Usage:
        """Return the usage of the request after the end of `answer`."""
        request, lookup = self.request, self.lease.lookup
        evaluated = sum(count for _, _, count in pipeline.chunks)
        return usage_of(
            lookup,
            request.clock,
            answer.count,
            request.prompt.earlier,
            evaluated_tokens=min(evaluated, lookup.prompt_tokens - lookup.cached),
            trimmed_tokens=lookup.entry_tokens - lookup.reused,
            shifted_tokens=self.shifted,
            reevaluated_tokens=pipeline.reevaluated,
            prefill_s=pipeline.prefill_s,
            cache_bytes=entry.nbytes,
            used_bytes=entry.used_bytes,
            peak_bytes=mx.get_peak_memory(),
            **drafted(pipeline.drafting),
        )

    def observation(self, usage: Usage, entry: CacheEntry) -> Observation:
        """Return the request as observers see it, with the entry after the request."""
        request, lease, pipeline = self.request, self.lease, self.pipeline
        has_logits = lease.forwarded == len(entry.tokens) and not entry.is_shifted
        return Observation(
            prepared=request.prompt,
            prompt=lease.prompt,
            options=request.options,
            lookup=lease.lookup,
            usage=usage,
            finish=finish_of(self.finish_reason, self.error),
            error=self.error,
            clock=request.clock,
            chunks=pipeline.chunks if pipeline is not None else (),
            entry=entry.tokens,
            active_bytes=self.active_bytes,
            checkpoints=entry.checkpoints.offsets,
            logits=pipeline.logits if pipeline is not None and has_logits else None,
            is_greedy=request.next_token.is_greedy,
        )


def drafted(drafting: Drafting | None) -> dict[str, Any]:
    """Return the fields of a usage that tell of drafts."""
    if drafting is None:
        return {}
    uses = [{"source": name, **vars(counts)} for name, counts in drafting.by_source.items()]
    return {"draft_passes": drafting.passes, "drafts": uses}


def mark(lease: EntryLease, message_ends: NDArray[np.int32]) -> bool:
    """Mark the ends of the prompt's messages, where the next prompt may differ.

    Return True if the caches need checkpoints.
    """
    if lease.needs_checkpoints:
        ends = (np.flatnonzero(np.isin(lease.prompt, message_ends)) + 1).tolist()
        lease.mark(places_of(len(lease.prompt), ends, ahead=lease.is_ahead))
    return lease.needs_checkpoints


def keep_only_what_can_be_evaluated(lease: EntryLease) -> None:
    """Free the entry if its arrays can't be evaluated, which happens after some exceptions."""
    try:
        mx.eval([cache.state for cache in lease.caches])
    except Exception as error:
        lease.free(f"{type(error).__name__} while evaluating")
