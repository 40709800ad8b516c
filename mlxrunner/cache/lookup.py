"""Explain how much of a prompt the entry held, and why not more. No tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from mlxrunner.cache.tokens import TokenArray, common_prefix

Outcome = Literal["hit", "partial", "miss"]
WINDOW = 16
"""Number of dropped tokens to remember, to show where a prompt left the entry."""


@dataclass(frozen=True)
class Lookup:
    """The tokens of a prompt that the entry held, and the reason for the missing ones."""

    prompt_tokens: int
    entry_tokens: int
    """Tokens that the entry held."""
    matched: int
    """Tokens of the longest common prefix of the prompt and the entry."""
    cached: int
    """Tokens reused, at most `matched`."""
    reason: str | None = None
    """The reason for evaluating more than the prompt's new tokens; None if nothing was lost.

    "empty", "no_common_token", "diverged", "prompt_shorter"; "rewind_limited": by a layer of kind
    `limited_by`; "interrupted": the request before ended in its prefill; "restored": the entry came
    from the file `evicted_by`; "evicted": it was given up to make room for `evicted_by`; or
    the reason that freed the entry: "entry_freed", "model_changed", "options_changed",
    "verify_failed".
    """
    limited_by: str | None = None
    """Kind of the layer that could not be rewound further; None if no layer limited the rewind."""
    evicted_by: str | None = None
    checkpoint: int | None = None
    """Offset of the checkpoint that was used; None if none was."""
    known: int = 0
    """First tokens of the prompt that the entry, or one that was lost, had evaluated."""
    dropped: tuple[int, ...] = ()
    """The first tokens of the entry beyond the match."""
    rewind_s: float = 0.0
    """Seconds that the rewind took."""
    is_restored: bool = False
    """True if the entry was just read from a file."""
    restored: int = 0
    """Tokens of `cached` that came back from disk, where the conversation had been parked."""
    ahead: int = 0
    """Tokens of `cached` that were evaluated ahead, since the last request.

    All other fields describe the entry as the last request left it.
    """

    @property
    def reused(self) -> int:
        """Number of tokens reused from the entry of the last request."""
        return self.cached - self.ahead

    def outcome(self, missed: int = 0) -> Outcome:
        """Return "hit" if all that could be reused was, "miss" if no token was, else "partial".

        `missed`: tokens that were evaluated before, and could not be reused.
        """
        if self.reused == 0:
            return "miss"
        is_whole = self.reused == min(self.prompt_tokens - 1, self.entry_tokens)
        return "hit" if is_whole and not missed else "partial"

    def reason_for(self, missed: int, known_reason: str, *, is_restarted: bool) -> str | None:
        """Return the reason for not reusing more, once it is known that `missed` tokens could be.

        `known_reason`: the caller's reason for that, or "". `is_restarted`: the process that had
        evaluated them has ended.
        """
        if not missed or self.reason in _OWN_REASONS:
            return self.reason
        if known_reason or missed < FEW:
            return known_reason or self.reason
        return "restarted" if is_restarted else "evicted"


FEW = 8
"""Tokens of a prefix that are too few to bring anything back for them."""
_OWN_REASONS = (
    "rewind_limited",
    "entry_freed",
    "verify_failed",
    "model_changed",
    "options_changed",
    "evicted",
)
"""The reasons of a lookup that tell why tokens are missed."""


@dataclass(frozen=True)
class Earlier:
    """The part of a prompt that earlier lines of a batch share."""

    tokens: int
    """Tokens from the beginning that an earlier line shares."""
    reason: str = ""
    """The reason why the entry lacks some of these tokens, unless the lookup gives its own."""


@dataclass(frozen=True)
class LostTokens:
    """A loss of tokens that the next lookup reports."""

    reason: str
    """See `Lookup.reason`."""
    by: str | None
    """See `Lookup.evicted_by`."""
    tokens: TokenArray


@dataclass(frozen=True)
class Evicted:
    """A conversation that was given up to make room for a request."""

    tokens: int
    """Number of its tokens."""
    slot: int
    """The number of the slot that held it."""
    cause: Literal["slot", "memory"]
    """The need of the request: a slot of its own, or memory."""
    parked: bool
    """True if the tokens are on disk, from where they come back."""


@dataclass(frozen=True)
class Early:
    """The entry as the last request left it, if tokens were evaluated ahead since then."""

    tokens: TokenArray
    kept: int
    """Tokens, from the beginning, that are still in the entry."""
    by: Lookup | None = None
    """The lookup that dropped the others; None if none was dropped."""

    def after(self, found: Lookup) -> Early:
        """Return the state after evaluating more tokens ahead, starting from the lookup `found`."""
        return self if found.cached >= self.kept else replace(self, kept=found.cached, by=found)

    def described(self, found: Lookup, prompt: TokenArray) -> Lookup:
        """Return the lookup `found`, described against the entry as the last request left it."""
        last = self.after(found)
        matched, reused, by = common_prefix(self.tokens, prompt), last.kept, last.by
        found = replace(
            found,
            entry_tokens=len(self.tokens),
            matched=matched,
            ahead=found.cached - reused,
            limited_by=None,
            dropped=tuple(self.tokens[matched : matched + WINDOW].tolist()),
        )
        if by is None or reused >= min(matched, found.prompt_tokens - 1):
            return found
        if by.limited_by:
            return replace(found, limited_by=by.limited_by, checkpoint=by.checkpoint)
        if matched < min(found.prompt_tokens, found.entry_tokens):
            return found  # the prompt leaves the entry in any case
        evicted_by = (
            by.evicted_by
            if by.reason == "entry_freed"
            else "tokens evaluated in advance that the prompt did not continue"
        )
        return replace(found, reason="entry_freed", evicted_by=evicted_by)


def explained(
    found: Lookup,
    loss: LostTokens | None = None,
    prompt: TokenArray | None = None,
    restored_from: str | None = None,
) -> Lookup:
    """Return `found` with its reason, if it has none yet, and the tokens known to be evaluated.

    `loss`: why the entry lost tokens that `prompt` may share. `restored_from`: the file that the
    entry came from.
    """
    was_lost = 0 if loss is None or prompt is None else common_prefix(loss.tokens, prompt)
    reason, by = found.reason, found.evicted_by
    if reason is None:
        reason, by = _reason_of(found, loss, was_lost, restored_from)
    # Tokens that an interrupted prefill did not reach had to be evaluated anyway.
    known = 0 if loss is not None and loss.reason == "interrupted" else was_lost
    return replace(found, reason=reason, evicted_by=by, known=max(found.matched, known))


def _reason_of(
    found: Lookup, loss: LostTokens | None, was_lost: int, restored_from: str | None
) -> tuple[str | None, str | None]:
    """Return the reason of a lookup that has none yet, and what evicted the tokens, if that is it.

    `was_lost`: first tokens of the prompt that are among those of `loss`.
    """
    before, matched, most = found.entry_tokens, found.matched, found.prompt_tokens - 1
    missing = min(was_lost, most) - found.reused
    lost_to = "" if loss is None else loss.reason
    by = None if loss is None else loss.by
    if lost_to == "evicted" and missing > min(matched, most) - found.reused:
        return lost_to, by  # what is left shares less
    if found.limited_by and matched:
        return "rewind_limited", None
    explains = missing > 0 if lost_to == "interrupted" else before == 0
    if lost_to and matched == before and explains:
        return lost_to, by
    if before == 0:
        return "empty", None
    if matched < min(found.prompt_tokens, before):
        return "diverged" if matched else "no_common_token", None
    if restored_from is not None:
        return "restored", restored_from
    return "prompt_shorter" if found.prompt_tokens < before else None, None
