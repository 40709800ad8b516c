"""Open a runner of many requests: how many cells fit, where it parks, and its reservation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlxrunner.cache.layers.factory import CacheOptions
from mlxrunner.cache.shared.sequences import Batch
from mlxrunner.config.arguments import check_path
from mlxrunner.config.option import Option
from mlxrunner.engine.sampling import NextToken, dispatch
from mlxrunner.errors import OptionError
from mlxrunner.memory.plan import Batch as WorstBatch
from mlxrunner.memory.plan import Demand, Plan
from mlxrunner.memory.reserve import choose as choose_plan
from mlxrunner.memory.reserve import must_fit
from mlxrunner.memory.slots import cells_within, demand_of_slots, must_have_cells
from mlxrunner.models.load import LoadedModel
from mlxrunner.options import MOST_TOKENS, GenerateOptions, RunnerKwargs, RunnerSettings
from mlxrunner.parallel.rows.adapt import Adapted
from mlxrunner.parallel.rows.alone import OneAtATime
from mlxrunner.system import device

if TYPE_CHECKING:
    from mlxrunner.stored.parking import Parking

DEFAULT_PREFILL_STEP = 1024
OWN = {"cells", "memory", "step_ms"}
"""The settings that a single runner does not have."""


class SizesKwargs(RunnerKwargs, total=False):
    """The settings of a runner of many requests that is made from loaded parts."""

    context: int | None
    cells: int | None
    memory: int | None
    step_ms: float | None


class SlotsKwargs(SizesKwargs, total=False):
    """The settings of `Stepper.of` and `ParallelRunner.of`, as keyword arguments."""

    park_bytes: int
    park_folder: str | PathLike[str] | None
    reserve: bool


@dataclass(frozen=True)
class Opening:
    """The memory that a runner will need, before anything is allocated."""

    demand: Demand
    offered: int
    """Bytes that the device offers."""
    prefill_step: int
    """The most tokens of a step."""
    most: int
    """Cells that are always enough."""

    @classmethod
    def of(
        cls,
        loaded: LoadedModel,
        max_sequences: int,
        chosen: RunnerSettings,
        prefill_step: int,
        memory: int | None,
    ) -> Opening:
        """Compute the demand of `max_sequences` slots.

        Of `memory` bytes, or of what the device offers, a tenth at most is for checkpoints.
        """
        context = chosen.context or loaded.facts.context
        offered = device.offered_bytes()
        step = min(prefill_step, max_sequences * context)
        demand = demand_of_slots(
            loaded.model,
            loaded.config,
            CacheOptions(rewind_slack=chosen.rewind_slack, kv_bits=chosen.kv_bits),
            slots=max_sequences,
            context=context,
            prefill_step=step,
            checkpoint_budget=chosen.checkpoint_budget,
            offered=offered if memory is None else min(offered, memory),
        )
        return cls(demand, offered, step, max_sequences * context)

    def plan(self, cells: int | None, limit: int | None = None) -> Plan:
        """Return the plan of `cells` cells; None: of as many as fit, at most `limit`."""
        return choose_plan(
            self.demand, cells, self.prefill_step, offered=self.offered, limit=limit or self.most
        )

    def cells(self, cells: int | None, memory: int | None, *, reserve: bool) -> int | None:
        """Return the number of cells to make; None: as many as are always enough.

        Raise MemoryPlanError if too few fit into `memory` bytes, or with `reserve` into what the
        device offers.
        """
        if memory is not None and cells is None:
            cells = cells_within(self.demand, memory, self.most)
            must_have_cells(cells, memory, self.demand)
        elif reserve and cells is None:
            cells = self.plan(None).context
        if reserve:
            made = cells or self.most
            must_fit(self.plan(made, made))
        return cells

    def reserve(self, engine: Adapted | OneAtATime, cells: int, context: int, slots: int) -> Plan:
        """Allocate all cells, run the largest step once to measure it, and return the plan.

        The step sees every cell. Raise MemoryPlanError if it needs more than the device offers.
        """
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        # As in a run, the second step is dispatched before the first is read.
        in_flight = [largest_step(engine, self.prefill_step, slots) for _ in range(2)]
        mx.eval(in_flight, engine.state())
        peak, stored = mx.get_peak_memory(), sum(group.nbytes for group in engine.groups)
        del in_flight
        mx.clear_cache()
        # A shift, between two steps, holds the moved half of a sequence, and its keys once more.
        shifted = stored * context // cells
        batch = WorstBatch(max(0, peak - before - stored, shifted), is_measured=True)
        measured = replace(self, demand=replace(self.demand, batch=batch))
        plan = must_fit(measured.plan(cells, cells))
        device.set_limits(plan.total, batch.fixed)
        return plan


def settings_of(sizes: SizesKwargs) -> RunnerSettings:
    """Return those of `sizes` that a single runner has, too, checked."""
    return RunnerSettings.of(**{name: value for name, value in sizes.items() if name not in OWN})


def check_sizes(max_sequences: int, sizes: Mapping[str, Any]) -> None:
    """Raise OptionError for a number that is out of range."""
    limits = {
        "context": Option(low=2, high=MOST_TOKENS),
        "cells": Option(low=2, high=MOST_TOKENS),
        "memory": Option(low=1),
        "step_ms": Option(float, low=0),
    }
    Option(low=1).check("max_sequences", max_sequences)
    for name, value in sizes.items():
        if name in limits and value is not None:
            limits[name].check(name, value)
    if "prefill_step" in sizes:
        Option(low=max_sequences, high=MOST_TOKENS).check("prefill_step", sizes["prefill_step"])


def must_hold_all(prefill_step: int, max_sequences: int) -> None:
    """Raise OptionError unless a step of `prefill_step` tokens has room for one of each slot."""
    if prefill_step < max_sequences:
        raise OptionError(
            f"max_sequences: {max_sequences} is out of range, a step of {prefill_step} tokens has "
            "to hold one of each"
        )


def largest_step(engine: Adapted | OneAtATime, prefill_step: int, slots: int) -> list[mx.array]:
    """Dispatch a full row that sees every cell, and sample a token for each slot.

    The sampling is the costliest possible. Nothing is stored.
    """
    batch = Batch(list(range(prefill_step)), [0] * prefill_step)
    rows = range(prefill_step - slots, prefill_step)
    logits = engine.forward(mx.zeros((prefill_step,), mx.int32), batch, rows, reserve=True)
    costliest = NextToken(
        GenerateOptions.of(temperature=1.0, top_p=0.9, logprobs=5, seed=0), logits.shape[-1]
    )
    arrays = [
        array for row in range(len(rows)) for array in costliest(logits[row : row + 1]).arrays
    ]
    dispatch(arrays)
    return arrays


def parking_of(
    loaded: LoadedModel, limit: int, folder: str | PathLike[str] | None, settings: RunnerSettings
) -> Parking | None:
    """Open the parking of a model, of at most `limit` bytes; None if that is 0.

    Raise OptionError if `limit` is negative, and SessionError if the folder can't be used.
    """
    Option(low=0).check("park_bytes", limit)
    if folder is not None:
        check_path("park_folder", folder)
    if not limit:
        if folder is not None:
            raise OptionError("park_folder: nothing is parked without park_bytes: give both")
        return None
    from mlxrunner.models.fingerprint import fingerprint
    from mlxrunner.stored.parking import Parking

    stored = {"kv_bits": str(settings.kv_bits), "cells": "shared"}
    place = None if folder is None else Path(folder)
    return Parking(place, fingerprint(loaded.folder) | stored, limit=limit)
