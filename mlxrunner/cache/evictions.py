"""Remember what was given up to make room, and explain what a prompt lost by it. No tensors."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Literal

from mlxrunner.cache.lookup import Lookup, LostTokens
from mlxrunner.cache.tokens import TokenArray, common_prefix

MOST_TOKENS = 2**20
"""The most tokens to remember, four bytes each. The oldest are forgotten first."""


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


class Evictions:
    """The conversations that were given up without being parked."""

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._most, self._tokens = most_tokens, 0
        self._lost: deque[LostTokens] = deque()

    def add(self, tokens: TokenArray, by: int) -> None:
        """Remember that `tokens` were given up for request number `by` of the runner."""
        self._lost.append(LostTokens("evicted", f"request {by}", tokens.copy()))
        self._tokens += len(tokens)
        while self._tokens > self._most:
            self._tokens -= len(self._lost.popleft().tokens)

    def explained(self, found: Lookup, prompt: TokenArray) -> Lookup:
        """Return `found`, with the eviction as its reason if that cost the prompt a longer match.

        `lost` is then what the longest conversation given up would have saved.
        """
        matches = [(common_prefix(lost.tokens, prompt), lost) for lost in self._lost]
        longest, lost = max(matches, key=lambda match: match[0], default=(0, None))
        if lost is None or min(longest, found.prompt_tokens - 1) <= found.matched:
            return found
        return replace(
            found,
            reason=lost.reason,
            freed_by=lost.by,
            lost=min(longest, found.prompt_tokens - 1) - found.reused,
        )
