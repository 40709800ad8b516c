"""The rules for a full context, without tensors or text."""

from __future__ import annotations

from dataclasses import dataclass

from mlxrunner.errors import OptionError


def window_closes(window: int, tokens: int, keep: int, discard: int) -> bool:
    """Return True if a window has all it needs after `discard` of `tokens` tokens are dropped.

    The dropped tokens lie right behind the first `keep`. The next token sees `window` tokens,
    itself included. These are there if no token has left the window yet, or if the tokens behind
    the gap fill it. Rows that happen to be stored beyond the window don't count: an answer must not
    depend on reuse.
    """
    return tokens < window or max(0, tokens - discard - window + 1) >= keep


@dataclass(frozen=True)
class Shift:
    """The rule that keeps the first `keep` tokens, drops half of the rest, and moves up the end."""

    context: int
    keep: int

    def __post_init__(self) -> None:
        if self.keep > self.context - 2:
            raise OptionError(
                f"keep: {self.keep} tokens leave no room in the context of {self.context} tokens"
            )

    @property
    def target_free(self) -> int:
        """Number of tokens that are free after a shift."""
        return max((self.context - self.keep) // 2, 1)

    def discard(self, tokens: int) -> int:
        """Return how many of `tokens` tokens are dropped, right behind the first `keep`."""
        return max(tokens - (self.context - self.target_free), 0)
