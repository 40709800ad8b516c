"""Plan the memory of many sequences: cells that they share, states of their own, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlxrunner.cache.layers.factory import CacheOptions
from mlxrunner.errors import MemoryPlanError
from mlxrunner.memory.plan import CHECKPOINT_SHARE, CHECKPOINTS, Demand
from mlxrunner.memory.reserve import demand_of, weights_of
from mlxrunner.terminal.text import size


def demand_of_slots(
    model: Any,
    config: Mapping[str, Any],
    options: CacheOptions,
    *,
    slots: int,
    context: int,
    prefill_step: int,
    checkpoint_budget: int | None,
    offered: int,
) -> Demand:
    """Return the memory that `model` needs for `slots` sequences, as a function of the cells.

    The cells are those of all sequences together; `context` is the most tokens of one of them.
    `checkpoint_budget`: bytes for the checkpoints of all; None chooses the default.
    """
    one = demand_of(model, dict(config), options, prefill_step, weights=weights_of(model))
    windows = slots * options.rewind_slack + prefill_step
    layouts = [
        replace(
            layout,
            most_rows=None
            if layout.most_rows is None
            else slots * (layout.checkpoint_rows + 1) + windows,
            fixed_bytes=slots * layout.fixed_bytes,
        )
        for layout in one.layouts
    ]
    checkpoint = sum(layout.checkpoint_bytes(context) for layout in one.layouts)
    budget = min(slots * CHECKPOINTS * checkpoint, offered // CHECKPOINT_SHARE)
    if checkpoint_budget is not None:
        budget = checkpoint_budget if checkpoint else 0
    return replace(one, layouts=layouts, checkpoint_budget=budget)


def cells_within(demand: Demand, memory: int, most: int) -> int:
    """Return the largest number of cells, at most `most`, whose caches fit into `memory` bytes.

    `memory` is for cells, states and checkpoints, not for weights. Return 0 if none fits.
    """
    caches = replace(demand, weights=0, batch=replace(demand.batch, fixed=0, per_token=0))
    return caches.largest_context(memory, most)


def must_have_cells(cells: int, memory: int, demand: Demand) -> None:
    """Raise MemoryPlanError if `cells`, all that fit into `memory` bytes, are too few to run."""
    if cells < 2:
        caches = replace(demand, weights=0)
        needed = caches.caches(2) + caches.checkpoints(2, memory)
        raise MemoryPlanError(
            f"memory: {size(memory)} is not enough for the states and checkpoints of all, "
            f"which take {size(needed)}: give more, or fewer sequences at a time"
        )
