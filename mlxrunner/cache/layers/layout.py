"""Compute the bytes that a layer's cache takes.

No tensors: the numbers come from a cache that has stored a token.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """The storage of one layer, or of one part of a composite layer."""

    kind: str
    row_bytes: int = 0
    """Bytes of one stored token."""
    most_rows: int | None = None
    """Most tokens stored at once (a window with its slack); None: the whole context."""
    fixed_bytes: int = 0
    """Bytes that do not depend on the number of tokens, such as those of states."""
    checkpoint_rows: int = 0
    """Most rows that a checkpoint copies."""
    checkpoint_fixed: int = 0
    """Bytes that a checkpoint copies in addition to those rows."""
    draft_rows: int = 0
    """Most rows that are kept twice while a draft is checked, because nothing else can undo it."""

    def rows(self, context: int) -> int:
        """Return the most tokens stored at once in a context of `context` tokens."""
        return context if self.most_rows is None else min(self.most_rows, context)

    def nbytes(self, context: int) -> int:
        """Return the bytes allocated for a context of `context` tokens."""
        return self.rows(context) * self.row_bytes + self.fixed_bytes

    def checkpoint_bytes(self, context: int) -> int:
        """Return the bytes of one checkpoint at the far end of the context."""
        return min(self.checkpoint_rows, context) * self.row_bytes + self.checkpoint_fixed

    def draft_bytes(self, context: int) -> int:
        """Return the bytes that checking a draft takes at the far end of the context."""
        return min(self.draft_rows, context) * self.row_bytes
