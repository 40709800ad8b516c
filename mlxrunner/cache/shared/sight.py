"""The range of tokens that a query of a sequence sees. Bookkeeping only: numpy, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Sight:
    """The range that a query sees, and the number of tokens that are stored for it."""

    window: int | None = None
    """Tokens that a query at position p sees, from p - window + 1 on; None: all."""
    memory: int | None = None
    """Tokens of a sequence that are kept, the next one included; at least `window`, the default.

    More than `window` tokens make small rewinds possible.
    """
    chunk: int | None = None
    """Tokens of a chunk, of which a query sees those up to its own; None: no chunks.

    A query at position p sees from p - p % chunk on.
    """

    def __post_init__(self) -> None:
        for name in ("window", "memory", "chunk"):
            if (size := getattr(self, name)) is not None and size < 1:
                raise ValueError(f"{name} has to be at least 1, not {size}")
        reach = self.chunk if self.window is None else self.window
        if self.memory is None:
            object.__setattr__(self, "memory", self.window)
        elif reach is None or self.memory < reach:
            raise ValueError(
                f"a memory of {self.memory} tokens does not hold what a query may see "
                f"({reach or 'everything'})"
            )

    @property
    def is_limited(self) -> bool:
        """True if a query may not see all tokens before it."""
        return self.window is not None or self.chunk is not None

    def first_seen(self, positions: Ints) -> Ints:
        """Return the first position that each query sees."""
        first = (
            np.zeros_like(positions) if self.chunk is None else positions - positions % self.chunk
        )
        return first if self.window is None else np.maximum(first, positions - (self.window - 1))

    def first_kept(self, positions: Ints) -> Ints:
        """Return the first position that is kept when a batch begins at each position."""
        return np.zeros_like(positions) if self.memory is None else positions - (self.memory - 1)

    def num_cells(self, max_sequences: int, capacity: int, max_batch: int) -> int:
        """Return the cells for `max_sequences` sequences of `capacity` tokens each.

        With a memory, each sequence needs only that, and one batch of `max_batch` tokens comes on
        top.
        """
        everything = max_sequences * capacity
        return (
            everything
            if self.memory is None
            else min(everything, max_sequences * self.memory + max_batch)
        )
