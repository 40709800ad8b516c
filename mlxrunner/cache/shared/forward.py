"""The forward pass under way: where its tokens go, and what they see. Bookkeeping only: numpy.

Each fact is worked out when it is asked for. A step that attends in parts, or that has one
sequence, needs no mask of all queries and all cells.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from mlxrunner.cache.shared.cells import Cells
from mlxrunner.cache.shared.parts import PART_COST, Block, Split
from mlxrunner.cache.shared.runs import Run
from mlxrunner.cache.shared.sequences import Batch
from mlxrunner.cache.shared.sight import Bools, Ints
from mlxrunner.cache.shared.split import WORTH_SPLITTING, blocks_of, history_of, split
from mlxrunner.cache.shared.stretches import Stretches


class Alone(NamedTuple):
    """One sequence, whose cells lie side by side in order: attention as with a cache of its own.

    Those of a single query may have gaps between them, and any order.
    """

    cells: Run
    visible: Bools | None
    """The mask `[queries, cells]`; None: each query sees all cells up to its own."""


@dataclass(frozen=True)
class Forward:
    """A pass of a `batch` that was placed in `places`, and `cells` as they are then."""

    batch: Batch
    cells: Cells
    places: Ints | None
    """The cell of each token; None in a reserve pass, which sees all cells and stores nothing."""
    all_rows: Run
    """The rows of the buffers."""

    @cached_property
    def blocks(self) -> list[Block] | None:
        return None if self.places is None else blocks_of(self.cells, self.batch)

    @cached_property
    def history(self) -> Run:
        """The rows from the first to the last that the batch sees."""
        if self.places is None:
            return self.all_rows
        return history_of(self.cells, self.batch, self.blocks)

    @cached_property
    def visible(self) -> Bools:
        """The mask `[n_tokens, history]`: True where a token sees a cell."""
        if self.places is None:
            return np.ones((len(self.batch), self.all_rows.end), np.bool_)
        return self.cells.mask(self.batch, self.history)

    @cached_property
    def alone(self) -> Alone | None:
        """The cells of the batch's only sequence, if one product over them is least work."""
        if (
            self.places is None
            or self.blocks is None
            or len(self.blocks) > 1
            or not (seen := self.blocks[0].seen)
        ):
            return None
        run, queries = Run(seen[0].begin, seen[-1].end), len(self.batch)
        if sum(stretch.end - stretch.begin for stretch in seen) < run.end - run.begin:
            return _with_gaps(run, seen) if queries == 1 else None
        if queries == 1:  # sees them in any order
            return Alone(run, None)
        if len(seen) > 1:
            return None
        first = self.cells.sight.first_seen(np.array(self.batch.positions[-1:], np.int32))
        if first[0] <= seen[0].position:
            return Alone(run, None)
        return Alone(run, self.cells.mask(self.batch, run))

    def split(self, worth: float) -> Split | None:
        """Split the attention; return None if one product is faster, or may be all there is."""
        if self.blocks is None or self.alone is not None:
            return None
        return split(self.cells, self.batch, self.blocks, worth)


def _with_gaps(run: Run, seen: Stretches) -> Alone | None:
    """Return the cells that a single query sees as one product; None if parts may be less work."""
    length = run.end - run.begin
    own = sum(stretch.end - stretch.begin for stretch in seen)
    if length >= WORTH_SPLITTING * (own + PART_COST * len(seen)):
        return None
    visible = np.zeros((1, length), np.bool_)
    for stretch in seen:
        visible[0, stretch.begin - run.begin : stretch.end - run.begin] = True
    return Alone(run, visible)
