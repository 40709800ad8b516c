"""How many bytes a layer's cache takes, as arithmetic. No tensors: the numbers come from a cache that has seen a token."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """What one layer (or one part of a composite layer) stores.

    `row_bytes`: bytes of one stored token. `most_rows`: most tokens stored at once (a window with its slack); None: the whole
    context. `fixed_bytes`: what does not depend on the tokens (states). A checkpoint copies the last `checkpoint_rows` rows and
    `checkpoint_fixed` bytes.
    """

    kind: str
    row_bytes: int = 0
    most_rows: int | None = None
    fixed_bytes: int = 0
    checkpoint_rows: int = 0
    checkpoint_fixed: int = 0

    def rows(self, context: int) -> int:
        return context if self.most_rows is None else min(self.most_rows, context)

    def nbytes(self, context: int) -> int:
        """Bytes allocated for a context of so many tokens."""
        return self.rows(context) * self.row_bytes + self.fixed_bytes

    def checkpoint_bytes(self, context: int) -> int:
        """Bytes of one checkpoint at the far end of the context."""
        return min(self.checkpoint_rows, context) * self.row_bytes + self.checkpoint_fixed
