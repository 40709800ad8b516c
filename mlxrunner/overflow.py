"""What happens when the context is full: the rules, without tensors or text."""

from __future__ import annotations

from dataclasses import dataclass

from mlxrunner.errors import OptionError


def window_closes(window: int, tokens: int, keep: int, discard: int) -> bool:
    """Return True if a window can close the gap where `discard` of `tokens` tokens were dropped.

    They lay right behind the first `keep`. The next token sees `window` tokens with itself: these
    are there if nothing has left the window yet, or if what lies behind the gap fills it. Rows that
    happen to be stored beyond the window don't count: an answer must not depend on what was reused.
    """
    return tokens < window or max(0, tokens - discard - window + 1) >= keep


@dataclass(frozen=True)
class Shift:
    """Keep the first `keep` tokens, drop half of the rest, move the others up."""

    context: int
    keep: int

    def __post_init__(self) -> None:
        if self.keep > self.context - 2:
            raise OptionError(
                f"keep: {self.keep} tokens leave no room in the context of {self.context} tokens"
            )

    @property
    def target_free(self) -> int:
        """Tokens that are free after a shift."""
        return max((self.context - self.keep) // 2, 1)

    def discard(self, tokens: int) -> int:
        """How many of `tokens` tokens go, right after the first `keep`."""
        return max(tokens - (self.context - self.target_free), 0)
