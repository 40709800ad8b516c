"""What a prompt found in the entry, and why not more. Bookkeeping only: no tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from mlxrunner.cache.tokens import TokenArray, common_prefix

Outcome = Literal["hit", "partial", "miss"]
WINDOW = 16
"""So many of the dropped tokens are remembered, to show what lay where a prompt left the entry."""


@dataclass(frozen=True)
class Lookup:
    """What a prompt found in the entry, and why not more.

    `reason`: None when nothing was lost, else "empty", "no_common_token", "diverged", "prompt_shorter", "rewind_limited" (by the
    layer kind `limited_by`), "interrupted" (the request before was ended in its prefill), "restored" (from the file `freed_by`), or why
    the entry was given up: "entry_freed", "model_changed", "options_changed", "verify_failed", each by what `freed_by` says.
    `lost`: how many more tokens would have been reused at most without that.
    """

    prompt_tokens: int
    entry_tokens: int
    matched: int
    cached: int
    reason: str | None = None
    limited_by: str | None = None
    freed_by: str | None = None
    checkpoint: int | None = None
    """Offset of the checkpoint that was used, if one was."""
    lost: int = 0
    dropped: tuple[int, ...] = ()
    """The first tokens of the entry beyond the match."""
    rewind_s: float = 0.0
    is_restored: bool = False
    """Whether the entry had just come from a file."""

    @property
    def outcome(self) -> Outcome:
        if self.cached == 0:
            return "miss"
        return "hit" if self.cached == min(self.prompt_tokens - 1, self.entry_tokens) else "partial"


@dataclass(frozen=True)
class Loss:
    """What the next lookup has to say about tokens that were there and are not: `reason` and `by` as in `Lookup`."""

    reason: str
    by: str | None
    tokens: TokenArray


def explained(
    found: Lookup, loss: Loss | None = None, prompt: TokenArray | None = None, restored_from: str | None = None
) -> Lookup:
    """`found` with its reason and what that cost; `loss`: of tokens that are not in the entry any more, which `prompt` may share."""
    before, matched, most = found.entry_tokens, found.matched, found.prompt_tokens - 1
    reason, by, lost = None, None, 0
    missing = 0 if loss is None or prompt is None else min(common_prefix(loss.tokens, prompt), most) - found.cached
    if found.limited_by and matched:
        reason, lost = "rewind_limited", min(matched, most) - found.cached
    elif loss is not None and matched == before and (before == 0 if loss.reason != "interrupted" else missing > 0):
        reason, by, lost = loss.reason, loss.by, max(missing, 0)
    elif before == 0:
        reason = "empty"
    elif matched < min(found.prompt_tokens, before):
        reason, lost = "diverged" if matched else "no_common_token", min(most, before) - found.cached
    elif restored_from is not None:
        reason, by = "restored", restored_from
    elif found.prompt_tokens < before:
        reason = "prompt_shorter"
    return replace(found, reason=reason, freed_by=by, lost=lost)
