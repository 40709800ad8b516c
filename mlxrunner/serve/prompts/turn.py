"""An answer as it was generated: its tokens, their text, and what it said."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from mlxrunner.cache.tokens import TokenArray
from mlxrunner.serve.prompts.encoding import Fill
from mlxrunner.serve.prompts.reader import Said
from mlxrunner.templates.segments import common


@dataclass(eq=False)
class Turn:
    """An answer as it was generated."""

    length: int
    """Characters of the text that it continues."""
    before: bytes
    """Digest of that text."""
    text: str
    """The text of its tokens, without the token that ended it."""
    tokens: TokenArray
    ends: Sequence[int]
    """The number of characters up to each token's end."""
    closing: str
    """The text of the token that ended it, or nothing."""
    said: Said
    is_cut: bool = False
    """True if the client left before its end."""
    known: dict[str, Fill] = field(default_factory=dict)
    """Fills by the text that the template writes for this answer, with `closing` behind it."""
    forms: int = 0
    """The number of texts that have been put into `known`."""
    nbytes: int = 0
    """Bytes in memory, at the last look."""

    def after_thinking(self) -> tuple[int, int] | None:
        """Return the number of characters and tokens up to the end of the thinking.

        None if there is none, or if no token ends there.
        """
        at = len(self.text) - len(self.text[self.said.begins :].lstrip())
        index = bisect_left(self.ends, at)
        if self.said.begins == 0 or index >= len(self.ends) or self.ends[index] != at:
            return None
        return at, index + 1

    def fill(self, begin: int, said: str) -> Fill | None:
        """Return the tokens that `said`, at the place `begin`, begins with; None if with none.

        The thinking may be missing there.
        """
        found = []
        for at, first in filter(None, ((0, 0), self.after_thinking())):
            most = bisect_right(self.ends, at + common(self.text[at:], said))
            end = self.ends[most - 1] if most else 0
            count = bisect_left(self.ends, end) + 1  # tokens behind it begin a character
            if end > at:
                whole = self.text[at:end], self.tokens[first:count]
                found.append(Fill(begin, begin + end - at, *whole))
        return max(found, key=lambda fill: fill.end, default=None)
