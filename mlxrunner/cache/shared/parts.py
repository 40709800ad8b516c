"""The parts of a step's attention: blocks of queries, and the cells that they see."""

from __future__ import annotations

from typing import NamedTuple

from mlxrunner.cache.shared.runs import Run
from mlxrunner.cache.shared.sight import Bools, Ints
from mlxrunner.cache.shared.stretches import Stretches

PART_COST = 500
"""Fixed cost of a part, in pairs of query and cell.

Measured on a CPU by benchmarks/parallel.py; larger models have a lower cost.
"""


class Block(NamedTuple):
    """The queries `begin .. end - 1` of a step: tokens of one sequence, one after another."""

    begin: int
    end: int
    sequence: int
    position: int
    """The position of the first token."""
    seen: Stretches | None
    """The cells that any of the queries sees; None: too many pieces to list."""

    @property
    def num_queries(self) -> int:
        return self.end - self.begin


class Own(NamedTuple):
    """The queries `begin .. end - 1`, which attend by themselves."""

    begin: int
    end: int
    cells: Ints
    """All that they see, in the order of positions."""
    visible: Bools | None
    """The mask `[queries, cells]`; None: each sees all cells up to its own."""


class Part(NamedTuple):
    """Some queries, and a run of cells that they see."""

    queries: tuple[int, ...]
    cells: Run
    visible: Bools | None
    """The mask `[queries, cells]`; None: all are visible."""


class StackedParts(NamedTuple):
    """One query for each of many lanes that follow each other."""

    queries: tuple[int, ...]
    """Indices of the queries, one per lane: `queries[i]` sees some of the first cells of lane i."""
    wanted: tuple[int, ...]
    """Indices of the lanes whose results are used.

    Each other lane gets one of the queries, which sees nothing of it.
    """
    begin: int
    """The first cell of the first lane."""
    size: int
    """Number of cells of each lane."""
    length: int
    """Most cells that a query sees."""
    visible: Bools | None
    """The mask `[lanes, length]`; None: all are visible."""


class Gathered(NamedTuple):
    """One query of each of some sequences, whose cells lie anywhere and are copied."""

    queries: tuple[int, ...]
    cells: Ints
    """The cells that each query sees, `[queries, length]`, filled up with any others."""
    visible: Bools | None
    """The mask `[queries, length]`; None: all are visible."""


AnyPart = Part | StackedParts | Gathered
Level = tuple[AnyPart, ...]
"""Parts of which each query is in at most one."""


class Split(NamedTuple):
    """Attention in parts.

    Each query is in one of `own`, or in one part or more of different `levels`.
    """

    own: tuple[Own, ...]
    levels: tuple[Level, ...]


class Seen(NamedTuple):
    """A run of cells, and which blocks see them, as the bits of a number."""

    cells: Run
    blocks: int

    @property
    def numbers(self) -> list[int]:
        """The numbers of the blocks."""
        return [number for number in range(self.blocks.bit_length()) if self.blocks >> number & 1]
