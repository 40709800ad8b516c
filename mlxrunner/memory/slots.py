"""Plan the memory of many sequences: cells that they share, states of their own, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlxrunner.cache.layers.factory import CacheOptions
from mlxrunner.errors import MemoryPlanError
from mlxrunner.memory.plan import Demand, default_checkpoints
from mlxrunner.memory.reserve import demand_of, weights_of
from mlxrunner.options import RunnerSettings
from mlxrunner.terminal.text import size

TOKEN_BYTES = 4
"""Bytes of a token that the entry of a slot holds."""
POSITION_BYTES = 4
"""Bytes of the position of a cell. Each slot has a byte more, which says whether it owns the cell.
"""
COPIES = 3
"""Copies of these notes at a time: of now, of the step before and of the one after."""


def demand_of_slots(
    model: Any,
    config: Mapping[str, Any],
    options: CacheOptions,
    settings: RunnerSettings,
    *,
    slots: int,
    step: int,
    offered: int,
) -> Demand:
    """Return the memory that `model` needs for `slots` sequences, as a function of the cells.

    The cells are those of all sequences together; the context of `settings` is the most tokens of
    one of them, and their checkpoint budget is for all. `step`: most tokens of a step. The notes of
    the host are the tokens of each slot, the owners of each cell, and the mask of one step in which
    each token sees all cells.
    """
    one = demand_of(model, dict(config), options, step, weights=weights_of(model))
    windows = slots * options.rewind_slack + step
    layouts = [
        replace(
            layout,
            most_rows=None
            if layout.most_rows is None
            else slots * (layout.checkpoint_rows + 1) + windows,
            fixed_bytes=slots * layout.fixed_bytes,
            draft_rows=0,
        )
        for layout in one.layouts
    ]
    context = settings.context or 0
    checkpoint = sum(layout.checkpoint_bytes(context) for layout in one.layouts)
    budget = default_checkpoints(checkpoint, context, offered, slots)
    if settings.checkpoint_budget is not None:
        budget = settings.checkpoint_budget if checkpoint else 0
    groups = len({layout.most_rows for layout in one.layouts if layout.row_bytes})
    return replace(
        one,
        layouts=layouts,
        checkpoint_budget=budget,
        host_fixed=TOKEN_BYTES * slots * context,
        host_per_token=groups * COPIES * (POSITION_BYTES + slots) + step,
    )


def cells_within(demand: Demand, memory: int, most: int) -> int:
    """Return the largest number of cells, at most `most`, whose caches fit into `memory` bytes.

    `memory` is for cells, states and checkpoints, not for weights or pictures. Return 0 if none
    fits.
    """
    caches = replace(
        demand,
        weights=0,
        batch=replace(demand.batch, fixed=0, per_token=0),
        host_fixed=0,
        host_per_token=0,
        pictures=0,
    )
    return caches.largest_context(memory, most)


def must_have_cells(cells: int, memory: int, demand: Demand) -> None:
    """Raise MemoryPlanError if `cells`, all that fit into `memory` bytes, are too few to run."""
    if cells < 2:
        caches = replace(demand, weights=0, pictures=0)
        needed = caches.caches(2) + caches.checkpoints(2, memory)
        raise MemoryPlanError(
            f"memory: {size(memory)} is not enough for the states and checkpoints of all, "
            f"which take {size(needed)}: give more, or fewer sequences at a time"
        )
