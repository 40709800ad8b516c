"""Compute which tokens a layer stores and how far back it can go: offsets only, no tensors.

A layer cache answers these questions through its extent, and a replay
(`mlxrunner.profiling.replay`) runs on extents alone. Therefore the two can't disagree. Extents are
immutable: a forward pass or a rewind makes another one.

A token log names each layer's extent and its parameters (`describe`). `read_extent` reads them. The
extents of mlx-lm's own caches stand at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from mlxrunner.cache.protocol import EXTENTS, Everything, Extent

STEP = 256
"""Rows that a window's buffer has beyond the window and its slack."""


@dataclass(frozen=True)
class Window(Extent):
    """A layer that stores the last tokens, from position `first` on.

    They lie in a buffer of `room` rows. When it is full, the last `window - 1 + slack` rows move to
    the front of a fresh one.
    """

    first: int = 0
    window: int = 1
    """Tokens that a query sees, itself included."""
    slack: int = 0
    """Tokens kept beyond the window, so that small rewinds stay possible."""
    room: int = 1
    """Rows of the buffer."""

    name = "window"
    parameters = ("window", "slack", "room")
    undoes_a_pass = True

    @classmethod
    def sized(cls, window: int, slack: int, context: int | None = None) -> Self:
        """Make an empty window with the rows that it needs in a context of `context` tokens.

        `window`: tokens that a query sees. `slack`: tokens kept beyond the window. `context` None:
        the context is not known.
        """
        room = window + slack + STEP
        room = room if context is None else min(room, max(context, 1))
        return cls(window=window, slack=slack, room=room)

    @classmethod
    def read(cls, line: Mapping[str, Any], context: int, slack: int | None) -> Self:
        return cls.sized(line["window"], line["slack"] if slack is None else slack, context)

    def at(self, first: int, offset: int) -> Self:
        """Return the extent of the same layer that stores the positions `first .. offset - 1`."""
        return type(self)(offset, first, self.window, self.slack, self.room)

    @property
    def rows(self) -> int:
        """Number of tokens stored."""
        return self.offset - self.first

    @property
    def seen(self) -> int:
        """Number of stored tokens that the first query of the next chunk sees."""
        return min(self.offset - self.first, self.window - 1)

    def reachable(self, to: int) -> int:
        if to >= self.offset:
            return self.offset
        return to if max(0, to - self.window + 1) >= self.first else 0

    def moved(self) -> Self:
        """Return the extent with only the rows that move to a fresh buffer."""
        return self.at(self.offset - min(self.rows, self.window - 1 + self.slack), self.offset)

    def after(self, tokens: int) -> Self:
        ready = self if self.rows + tokens <= self.room else self.moved()
        end = self.offset + tokens
        if ready.rows + tokens <= self.room:
            return self.at(ready.first, end)
        # A chunk longer than the room: only its last rows are stored.
        kept = min(ready.rows + tokens, self.window - 1 + self.slack, self.room)
        return self.at(end - kept, end)

    def decoded(self, tokens: int) -> Self:
        extent = self
        while tokens:
            fitting = min(tokens, max(self.room - extent.rows, 1))
            extent, tokens = extent.after(fitting), tokens - fitting
        return extent

    def rewound(self, to: int) -> Self:
        return self.at(self.first, to)

    def can_shift(self, keep: int, discard: int) -> bool:
        """Return True if the window of the next token is complete after the shift."""
        is_there = self.offset >= keep + discard
        return is_there and window_closes(self.window, self.offset, keep, discard)

    def shifted(self, keep: int, discard: int) -> Self:
        end = self.offset - discard
        return self.at(max(0, end - self.window + 1), end)

    def checkpoint(self) -> Self:
        return self.at(self.offset - self.seen, self.offset)

    @property
    def checkpoint_rows(self) -> int:
        return self.seen


@dataclass(frozen=True)
class LastPass(Extent):
    """A layer that stores its state, and the state before the last forward pass.

    Therefore the last forward pass can be undone.
    """

    before: int = 0
    """Offset before the last forward pass."""

    name = "last_pass"
    undoes_a_pass = True

    def reachable(self, to: int) -> int:
        if to >= self.offset:
            return self.offset
        return self.before if to >= self.before else 0

    def after(self, tokens: int) -> Self:
        return replace(self, offset=self.offset + tokens, before=self.offset)

    def decoded(self, tokens: int) -> Self:
        return self.after(tokens - 1).after(1) if tokens else self

    def rewound(self, to: int) -> Self:
        return replace(self, offset=to)

    def checkpoint(self) -> Self:
        return replace(self, before=self.offset)

    def saved(self) -> Self:
        return self.checkpoint()


@dataclass(frozen=True)
class CompositeExtent(Extent):
    """The parts of a composite layer, which go back together."""

    parts: tuple[Extent, ...] = ()

    name = "several"

    @classmethod
    def of(cls, parts: Sequence[Extent]) -> Self:
        offsets = {part.offset for part in parts}
        return cls(offsets.pop() if len(offsets) == 1 else -1, tuple(parts))

    @property
    def needs_checkpoints(self) -> bool:  # type: ignore[override]  # here it depends on the parts
        return any(part.needs_checkpoints for part in self.parts)

    def reachable(self, to: int) -> int:
        while (lowest := min(part.reachable(to) for part in self.parts)) < to:
            to = lowest
        return to

    def after(self, tokens: int) -> Self:
        return self.of([part.after(tokens) for part in self.parts])

    def decoded(self, tokens: int) -> Self:
        return self.of([part.decoded(tokens) for part in self.parts])

    def rewound(self, to: int) -> Self:
        return self.of([part.rewound(to) for part in self.parts])

    def empty(self) -> Self:
        return self.of([part.empty() for part in self.parts])

    def checkpoint(self) -> Self:
        return self.of([part.checkpoint() for part in self.parts])

    def saved(self) -> Self:
        return self.of([part.saved() for part in self.parts])

    def checkpoint_bytes(self, line: Mapping[str, Any]) -> int:
        pairs = zip(self.parts, line["parts"], strict=True)
        return sum(part.checkpoint_bytes(of_part) for part, of_part in pairs)


STOCK_STEP = 256
"""Rows by which the buffers of mlx-lm's own caches grow."""


@dataclass(frozen=True)
class Stay(Extent):
    """A layer of unknown content, which can only stay where it is.

    Its size is estimated as that of an mlx-lm cache with a row per token, in buffers that grow by
    steps.
    """

    rows: int = 0
    """Rows allocated. A checkpoint copies all of them."""

    name = "stay"

    def reachable(self, to: int) -> int:
        return self.offset if to >= self.offset else 0

    def after(self, tokens: int) -> Self:
        end = self.offset + tokens
        # mlx-lm cuts off what is not used before it grows, unless it ends with a step.
        kept = self.offset if self.offset % STOCK_STEP else self.rows
        rows = kept + _whole_steps(tokens) if end > self.rows else self.rows
        return replace(self, offset=end, rows=rows)

    def rewound(self, to: int) -> Self:
        return replace(self, offset=to)

    @property
    def checkpoint_rows(self) -> int:
        return self.rows


@dataclass(frozen=True)
class Torn(Stay):
    """A layer whose forward pass was begun and never ended. It can only start over."""

    name = "torn"

    def reachable(self, to: int) -> int:
        return 0


@dataclass(frozen=True)
class Filling(Stay):
    """A ring of `window` rows, as in mlx-lm. It can go back until the ring is full."""

    window: int = 1
    """Rows of the ring."""

    name = "filling"
    parameters = ("window",)

    def reachable(self, to: int) -> int:
        return to if to < self.offset < self.window else super().reachable(to)

    def after(self, tokens: int) -> Self:
        rows = self.rows
        if tokens > 1:
            rows = min(rows, self.offset, self.window - 1) + tokens
        elif rows <= self.offset and rows < self.window:
            rows += min(STOCK_STEP, self.window - self.offset)
        return replace(
            self,
            offset=self.offset + tokens,
            rows=rows if tokens > 1 else min(rows, self.window),
        )


@dataclass(frozen=True)
class ChunkExtent(Stay):
    """A layer with attention within chunks of `window` tokens, as in mlx-lm.

    It can go back while the chunk of the next token is stored from its beginning.
    """

    first: int = 0
    """Position of the first token stored."""
    window: int = 1
    """Tokens of a chunk."""

    name = "chunk"
    parameters = ("window",)
    undoes_a_pass = True

    def reachable(self, to: int) -> int:
        if to >= self.offset:
            return self.offset
        return to if self.first <= to - to % self.window else 0

    def after(self, tokens: int) -> Self:
        first, rows, stored = self.first, self.rows, self.offset - self.first
        if stored > self.window:
            first, rows, stored = self.offset - self.window, self.window, self.window
        if stored + tokens > rows:
            rows = (stored if stored % STOCK_STEP else rows) + _whole_steps(tokens)
        return replace(self, offset=self.offset + tokens, rows=rows, first=first)


def _whole_steps(rows: int) -> int:
    return -(-rows // STOCK_STEP) * STOCK_STEP


DEEPEST = 8
"""Levels of composite layers that a token log may nest."""


def read_extent(line: Mapping[str, Any], context: int, slack: int | None = None) -> Extent:
    """Make the empty extent of a layer that a token log describes (see docs/profiling.md).

    `line`: a line that `is_layer` has checked. `context`: tokens of the context. `slack`: the
    rewind slack of windows in tokens, in place of the logged one; None: the logged one.
    """
    if parts := line.get("parts"):
        return CompositeExtent.of([read_extent(part, context, slack) for part in parts])
    return EXTENTS[_extent_name(line)].read(line, context, slack)


def is_layer(line: Any, depth: int = 0) -> bool:
    """Return True if `line`, which may come from a stranger, describes a layer for `read_extent`.

    `depth`: the number of composite layers around it, less than DEEPEST.
    """
    optional = [line[name] for name in ("window", "slack", "room") if line[name] is not None]
    sizes = [line[name] for name in ("row_bytes", "checkpoint_rows", "checkpoint_fixed")]
    known = EXTENTS.get(_extent_name(line))
    return (
        isinstance(line["kind"], str)
        and isinstance(line["needs_checkpoints"], bool)
        and known is not None
        and (known is CompositeExtent) == bool(line.get("parts"))
        and all(map(_is_size, [*sizes, *optional, line.get("count", 1)]))
        and all(_is_size(line[name]) for name in known.parameters)
        and line["window"] != 0
        and depth < DEEPEST
        and all(is_layer(part, depth + 1) for part in line.get("parts", []))
    )


def _extent_name(line: Mapping[str, Any]) -> str:
    """Return the name of a layer's extent. Logs of version 0.2 give only the kind of layer."""
    if line.get("parts"):
        return CompositeExtent.name
    if isinstance(line.get("extent"), str):
        return str(line["extent"])
    if not line["needs_checkpoints"]:
        return Everything.name
    if line["kind"] == "sliding" and line["room"] is not None:
        return Window.name
    if line["kind"] == "chunked" and line["window"] is not None:
        return ChunkExtent.name
    return LastPass.name if line["kind"] == "recurrent" else Stay.name


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= 2**53


def window_closes(window: int, tokens: int, keep: int, discard: int) -> bool:
    """Return True if a window has all it needs after `discard` of `tokens` tokens are dropped.

    The dropped tokens lie right after the first `keep`. The next token sees `window` tokens,
    itself included. These are there if no token has left the window yet, or if the tokens behind
    the gap fill it. Rows that happen to be stored beyond the window don't count: an answer must not
    depend on reuse.
    """
    return tokens < window or max(0, tokens - discard - window + 1) >= keep
