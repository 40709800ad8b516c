"""Layer caches on paper: how far each kind can be rewound and what its checkpoints weigh, without anything that is stored.

They follow the real ones of `mlxrunner.cache` token by token; the tests hold the two against each other. Layers that store alike behave
alike, so one paper layer stands for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mlxrunner.cache.layer import RewindError, Rewinding, Snapshot
from mlxrunner.cache.layout import Layout


class PaperLayer(Rewinding):
    """`count` layers with full attention: they can be rewound to everywhere. The other kinds say what they can't."""

    kind = "full"
    counts_forwards = True
    needs_checkpoints = False
    model_cache: Any = None
    state: Any = None
    nbytes = 0
    used_bytes = 0

    def __init__(self, layout: Layout, count: int = 1) -> None:
        self.layout, self.count = layout, count
        self.offset = 0

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        raise TypeError("a layer on paper stores no keys and values")

    def reserve(self, tokens: int) -> None: ...

    def begin_forward(self) -> None: ...

    def end_forward(self, tokens: int) -> None:
        self.offset += tokens

    def decode(self, tokens: int) -> None:
        """As many forward passes, of one token each."""
        self.end_forward(tokens)

    def reachable(self, to: int) -> int:
        return min(to, self.offset)

    def rewind(self, to: int) -> None:
        if not self.can_rewind(to):
            raise RewindError(self.kind, self.offset, to)
        if to == 0:
            self.free()
        else:
            self._go_back(to)

    def _go_back(self, to: int) -> None:
        self.offset = to

    def can_shift(self, keep: int, discard: int) -> bool:
        return self.offset >= keep + discard

    def shift(self, keep: int, discard: int, rotate: Callable[[Any, int], Any]) -> None:
        self.offset -= discard

    def layouts(self) -> list[Layout]:
        return [self.layout] * self.count

    def pretend(self, offset: int) -> None:
        self.offset = offset

    def snapshot(self) -> Snapshot:
        return Snapshot(None, 0)

    def restore(self, snapshot: Snapshot, offset: int) -> None:
        self.rewind(offset)

    def free(self) -> None:
        self.offset = 0


class PaperWindow(PaperLayer):
    """The last `window` tokens and some slack, in `room` rows; when they are full, the rows worth keeping move to a fresh buffer."""

    kind = "sliding"
    needs_checkpoints = True

    def __init__(self, layout: Layout, count: int = 1, *, slack: int, context: int) -> None:
        super().__init__(layout, count)
        self.window, self.slack = layout.checkpoint_rows + 1, slack
        self.room = layout.rows(max(context, 1))
        self._first = 0

    def end_forward(self, tokens: int) -> None:
        rows, end = self.offset - self._first, self.offset + tokens
        kept = min(rows, self.window - 1 + self.slack)
        if rows + tokens > self.room:
            rows = kept
        if rows + tokens > self.room:
            rows = min(rows + tokens, self.window - 1 + self.slack, self.room) - tokens
        self._first, self.offset = end - rows - tokens, end

    def decode(self, tokens: int) -> None:
        while tokens:
            fitting = min(tokens, max(self.room - (self.offset - self._first), 1))
            self.end_forward(fitting)
            tokens -= fitting

    def reachable(self, to: int) -> int:
        if to >= self.offset:
            return self.offset
        return to if max(0, to - self.window + 1) >= self._first else 0

    def can_shift(self, keep: int, discard: int) -> bool:
        lowest = max(0, self.offset - discard - self.window + 1)
        return self.offset >= keep + discard and (lowest >= keep or self._first <= lowest)

    def shift(self, keep: int, discard: int, rotate: Callable[[Any, int], Any]) -> None:
        self.offset -= discard
        self._first = max(0, self.offset - self.window + 1)

    def snapshot(self) -> Snapshot:
        seen = min(self.offset - self._first, self.window - 1)
        return Snapshot(self.offset - seen, self.count * seen * self.layout.row_bytes)

    def restore(self, snapshot: Snapshot, offset: int) -> None:
        self._first, self.offset = snapshot.content, offset

    def free(self) -> None:
        self._first = self.offset = 0


class PaperState(PaperLayer):
    """A state: it undoes the last forward pass, or goes through a checkpoint."""

    kind = "recurrent"
    needs_checkpoints = True

    def __init__(self, layout: Layout, count: int = 1) -> None:
        super().__init__(layout, count)
        self._before = 0

    def end_forward(self, tokens: int) -> None:
        self._before = self.offset
        self.offset += tokens

    def decode(self, tokens: int) -> None:
        if tokens:
            self.end_forward(tokens)
            self._before = self.offset - 1

    def reachable(self, to: int) -> int:
        if to >= self.offset:
            return self.offset
        return self._before if to >= self._before else 0

    def can_shift(self, keep: int, discard: int) -> bool:
        return False

    def snapshot(self) -> Snapshot:
        return Snapshot(None, self.count * self.layout.checkpoint_fixed)

    def restore(self, snapshot: Snapshot, offset: int) -> None:
        self._before = self.offset = offset

    def free(self) -> None:
        self._before = self.offset = 0
