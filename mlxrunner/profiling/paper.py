"""Layer caches on paper: how far each kind can be rewound and what its checkpoints weigh, without anything that is stored.

They follow the real ones of `mlxrunner.cache` token by token; the tests hold the two against each other. Layers that store alike behave
alike, so one paper layer stands for all of them. What a layer is like comes from a line of a token log (see TOKENS.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mlxrunner.cache.layer import RewindError, Rewinding, Snapshot, reach
from mlxrunner.cache.layout import Layout
from mlxrunner.cache.saved import Saved
from mlxrunner.overflow import window_closes

STEP = 256
"""Rows that a window's buffer has beyond window and slack, as in `mlxrunner.cache.sliding`."""
DEEPEST = 8
"""Layers that may be in each other."""
STOCK_STEP = 256
"""Rows by which the buffers of mlx-lm's own caches grow."""


def paper_layer(line: Mapping[str, Any], context: int, slack: int | None = None) -> PaperLayer:
    """The layers that `line` describes; `slack`: as if --rewind-slack had been that."""
    kind = line["kind"]
    if line.get("parts"):
        return PaperComposite(
            line,
            [
                paper_layer({**part, "count": line["count"]}, context, slack)
                for part in line["parts"]
            ],
        )
    if not line["needs_checkpoints"]:
        return PaperLayer(line)
    if kind == "sliding" and line["room"] is not None:
        slack = line["slack"] if slack is None else slack
        return PaperWindow(line, slack, min(line["window"] + slack + STEP, max(context, 1)))
    if kind == "recurrent":
        return PaperState(line)
    if kind == "chunked" and line["window"] is not None:
        return PaperChunk(line)
    return PaperStock(line)


def is_layer(line: Any, depth: int = 0) -> bool:
    """Whether `line`, in so many others, has what a paper layer needs."""
    sizes = [line[name] for name in ("row_bytes", "checkpoint_rows", "checkpoint_fixed")]
    optional = [line[name] for name in ("window", "slack", "room") if line[name] is not None]
    numbers = [*sizes, *optional, line.get("count", 1)]
    return (
        isinstance(line["kind"], str)
        and isinstance(line["needs_checkpoints"], bool)
        and all(type(value) is int and 0 <= value <= 2**53 for value in numbers)
        and line["window"] != 0
        and (line["room"] is None or None not in (line["window"], line["slack"]))
        and depth < DEEPEST
        and all(is_layer(part, depth + 1) for part in line.get("parts", []))
    )


class PaperLayer(Rewinding):
    """`count` layers with full attention: they can be rewound to everywhere. The other kinds say what they can't."""

    counts_forwards = True
    needs_checkpoints = False
    model_cache: Any = None
    state: Any = None
    nbytes = 0
    used_bytes = 0

    def __init__(self, line: Mapping[str, Any]) -> None:
        self.line, self.count = line, int(line["count"])
        self.kind = line["kind"]
        self.offset = 0

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        raise TypeError("a layer on paper stores no keys and values")

    def export(self, snapshot: Snapshot | None = None) -> Saved:
        raise TypeError("a layer on paper has nothing to save")

    def adopt(self, saved: Saved, offset: int) -> None:
        raise TypeError("a layer on paper takes nothing over")

    def snapshot_of(self, saved: Saved, offset: int) -> Snapshot:
        raise TypeError("a layer on paper takes nothing over")

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
        return []

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

    needs_checkpoints = True

    def __init__(self, line: Mapping[str, Any], slack: int, room: int) -> None:
        super().__init__(line)
        self.window, self.slack, self.room = int(line["window"]), slack, room
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
        return self.offset >= keep + discard and window_closes(
            self.window, self.offset, keep, discard
        )

    def shift(self, keep: int, discard: int, rotate: Callable[[Any, int], Any]) -> None:
        self.offset -= discard
        self._first = max(0, self.offset - self.window + 1)

    def snapshot(self) -> Snapshot:
        seen = min(self.offset - self._first, self.window - 1)
        return Snapshot(self.offset - seen, self.count * seen * self.line["row_bytes"])

    def restore(self, snapshot: Snapshot, offset: int) -> None:
        self._first, self.offset = snapshot.content, offset

    def free(self) -> None:
        self._first = self.offset = 0


class PaperState(PaperLayer):
    """A state: it undoes the last forward pass, or goes through a checkpoint."""

    needs_checkpoints = True

    def __init__(self, line: Mapping[str, Any]) -> None:
        super().__init__(line)
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
        return Snapshot(None, self.count * self.line["checkpoint_fixed"])

    def restore(self, snapshot: Snapshot, offset: int) -> None:
        self._before = self.offset = offset

    def free(self) -> None:
        self._before = self.offset = 0


class PaperStock(PaperLayer):
    """A layer of which nothing is known: it stays, or goes through a checkpoint of all that it has allocated."""

    needs_checkpoints = True

    def __init__(self, line: Mapping[str, Any]) -> None:
        super().__init__(line)
        self._rows = 0

    def end_forward(self, tokens: int) -> None:
        if self.offset + tokens > self._rows:
            self._rows = self.offset + _round_up(tokens)
        self.offset += tokens

    def decode(self, tokens: int) -> None:
        for _ in range(tokens):
            self.end_forward(1)

    def reachable(self, to: int) -> int:
        return self.offset if to >= self.offset else 0

    def can_shift(self, keep: int, discard: int) -> bool:
        return False

    def snapshot(self) -> Snapshot:
        nbytes = self._rows * self.line["row_bytes"] + self.line["checkpoint_fixed"]
        return Snapshot((self.offset, self._rows), self.count * nbytes)

    def restore(self, snapshot: Snapshot, offset: int) -> None:
        self.offset, self._rows = snapshot.content

    def free(self) -> None:
        self.offset = self._rows = 0


class PaperChunk(PaperStock):
    """Attention within chunks: it can be trimmed as long as the chunk of the next token is stored from its beginning."""

    def __init__(self, line: Mapping[str, Any]) -> None:
        super().__init__(line)
        self.chunk = int(line["window"])
        self._first = 0

    def end_forward(self, tokens: int) -> None:
        stored = self.offset - self._first
        if stored > self.chunk:
            self._first, stored, self._rows = self.offset - self.chunk, self.chunk, self.chunk
        if stored + tokens > self._rows:
            whole_steps = stored if stored % STOCK_STEP else self._rows
            self._rows = whole_steps + _round_up(tokens)
        self.offset += tokens

    def reachable(self, to: int) -> int:
        if to >= self.offset:
            return self.offset
        return to if self._first <= to - to % self.chunk else 0

    def snapshot(self) -> Snapshot:
        return Snapshot((self.offset, self._rows, self._first), super().snapshot().nbytes)

    def restore(self, snapshot: Snapshot, offset: int) -> None:
        self.offset, self._rows, self._first = snapshot.content

    def free(self) -> None:
        super().free()
        self._first = 0


class PaperComposite(PaperLayer):
    """Several of them in one layer, rewound together."""

    def __init__(self, line: Mapping[str, Any], parts: list[PaperLayer]) -> None:
        self.parts = parts
        self.needs_checkpoints = any(part.needs_checkpoints for part in parts)
        super().__init__(line)

    def end_forward(self, tokens: int) -> None:
        super().end_forward(tokens)
        for part in self.parts:
            part.end_forward(tokens)

    def decode(self, tokens: int) -> None:
        super().end_forward(tokens)
        for part in self.parts:
            part.decode(tokens)

    def reachable(self, to: int) -> int:
        return reach(self.parts, to)[0]

    def _go_back(self, to: int) -> None:
        self.offset = to
        for part in self.parts:
            part.rewind(to)

    def can_shift(self, keep: int, discard: int) -> bool:
        return False

    def snapshot(self) -> Snapshot:
        parts = [part.snapshot() for part in self.parts]
        return Snapshot(parts, sum(part.nbytes for part in parts))

    def restore(self, snapshot: Snapshot, offset: int) -> None:
        self.offset = offset
        for part, kept in zip(self.parts, snapshot.content, strict=True):
            if part.needs_checkpoints:
                part.restore(kept, offset)
            else:
                part.rewind(offset)

    def free(self) -> None:
        self.offset = 0
        for part in self.parts:
            part.free()


def _round_up(tokens: int) -> int:
    return -(-tokens // STOCK_STEP) * STOCK_STEP
