"""Compute which tokens mlx-lm's own layer caches store and how far back they can go.

These serve the layers that this program has no cache of its own for (`stock.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from mlxrunner.cache.layers.extents import Extent

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
class Chunk(Stay):
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
