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
    ahead: int = 0
    """So many of `cached` were evaluated in advance, since the last request. All the rest is said of the entry as that one had left it."""

    @property
    def reused(self) -> int:
        """Tokens of the last request's entry that did not have to be evaluated again."""
        return self.cached - self.ahead

    @property
    def outcome(self) -> Outcome:
        if self.reused == 0:
            return "miss"
        return "hit" if self.reused == min(self.prompt_tokens - 1, self.entry_tokens) else "partial"


@dataclass(frozen=True)
class Earlier:
    """The part of a prompt that earlier lines of a batch have: its first `tokens`; `is_repeat`: one of them was the same prompt.

    `reason`: why the entry lacks some of it, where it says nothing better than what its own last prompt was.
    """

    tokens: int
    is_repeat: bool = False
    reason: str = ""

    def judged(self, found: Lookup, evaluated: int) -> Lookup:
        """`found` with the loss against the tree of all prefixes, of a prompt of which `evaluated` tokens were evaluated.

        What no other line had evaluated had to be; of a prompt that is there twice the last token has to be, for its logits.
        """
        is_whole = found.cached + evaluated == found.prompt_tokens
        lost = max(0, min(self.tokens - found.cached, evaluated) - (self.is_repeat and is_whole))
        is_own = found.reason in (
            "rewind_limited",
            "entry_freed",
            "verify_failed",
            "model_changed",
            "options_changed",
        )
        return replace(
            found, lost=lost, reason=self.reason if lost and not is_own else found.reason
        )


@dataclass(frozen=True)
class Loss:
    """What the next lookup has to say about tokens that were there and are not: `reason` and `by` as in `Lookup`."""

    reason: str
    by: str | None
    tokens: TokenArray


@dataclass(frozen=True)
class Early:
    """The entry as the last request had left it, where something was evaluated in advance since then.

    Of its `tokens` the first `kept` are still there; `by` is the lookup that dropped the others, if any were.
    """

    tokens: TokenArray
    kept: int
    by: Lookup | None = None

    def after(self, found: Lookup) -> Early:
        """Once more was evaluated in advance, on what was `found`."""
        return self if found.cached >= self.kept else replace(self, kept=found.cached, by=found)

    def described(self, found: Lookup, prompt: TokenArray) -> Lookup:
        """What a request `found`, said of the entry as the last request had left it."""
        last = self.after(found)
        matched, reused, by = common_prefix(self.tokens, prompt), last.kept, last.by
        found = replace(
            found, entry_tokens=len(self.tokens), matched=matched, ahead=found.cached - reused, limited_by=None,
            dropped=tuple(self.tokens[matched : matched + WINDOW].tolist()),
        )  # fmt: skip
        if by is None or reused >= min(matched, found.prompt_tokens - 1):
            return found
        if by.limited_by:
            return replace(found, limited_by=by.limited_by, checkpoint=by.checkpoint)
        if matched < min(found.prompt_tokens, found.entry_tokens):
            return found  # it would have left the entry in any case
        freed_by = (
            by.freed_by
            if by.reason == "entry_freed"
            else "what was evaluated in advance and not asked for"
        )
        return replace(found, reason="entry_freed", freed_by=freed_by)


def explained(
    found: Lookup,
    loss: Loss | None = None,
    prompt: TokenArray | None = None,
    restored_from: str | None = None,
) -> Lookup:
    """`found` with its reason, if it has none yet, and what that cost; `loss`: of tokens that are not in the entry any more, which `prompt`
    may share."""
    before, matched, most = found.entry_tokens, found.matched, found.prompt_tokens - 1
    reason, by, lost = found.reason, found.freed_by, 0
    missing = (
        0
        if loss is None or prompt is None
        else min(common_prefix(loss.tokens, prompt), most) - found.reused
    )
    if reason is not None:
        lost = min(matched, most) - found.reused
    elif found.limited_by and matched:
        reason, lost = "rewind_limited", min(matched, most) - found.reused
    elif (
        loss is not None
        and matched == before
        and (before == 0 if loss.reason != "interrupted" else missing > 0)
    ):
        # What an interrupt has left out had to be evaluated anyway.
        reason, by, lost = (
            loss.reason,
            loss.by,
            max(missing, 0) if loss.reason != "interrupted" else 0,
        )
    elif before == 0:
        reason = "empty"
    elif matched < min(found.prompt_tokens, before):
        reason, lost = (
            "diverged" if matched else "no_common_token",
            min(most, before) - found.reused,
        )
    elif restored_from is not None:
        reason, by = "restored", restored_from
    elif found.prompt_tokens < before:
        reason = "prompt_shorter"
    return replace(found, reason=reason, freed_by=by, lost=lost)
