"""Open a runner of many requests: how many cells fit, where it parks, and its reservation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlxrunner.cache.layers.factory import CacheOptions, check_quantized, make_layer_caches
from mlxrunner.cache.protocol import Batch
from mlxrunner.engine.backends.backend import SequentialModel
from mlxrunner.engine.backends.batched import BatchedModel
from mlxrunner.engine.draft_model import DraftCachePool, DraftModel, check_vocabularies
from mlxrunner.engine.drafting import MOST_ANSWERS
from mlxrunner.engine.sampling import NextToken, dispatch
from mlxrunner.errors import MemoryPlanError, OptionError
from mlxrunner.loading import cache_options
from mlxrunner.memory.plan import (
    SMALLEST_CONTEXT,
    SMALLEST_STEP,
    Demand,
    Plan,
    WorstCaseBatch,
)
from mlxrunner.memory.plan import choose as choose_plan
from mlxrunner.memory.reserve import (
    announce_step,
    cells_within,
    demand_of,
    demand_of_slots,
    must_fit,
    must_have_cells,
    reserve,
)
from mlxrunner.models.facts import without_weights
from mlxrunner.models.load import LoadedModel, LoadProgress, load_model, tell_nobody
from mlxrunner.options import GenerateOptions, OpenSettings
from mlxrunner.system import device
from mlxrunner.terminal.output import size

if TYPE_CHECKING:
    from mlxrunner.cache.disk.disk_cache import DiskCache


SAMPLED = 16
"""Most tokens that are sampled to measure a step: more take turns in the same memory."""


@dataclass(frozen=True)
class EngineConfig:
    """The memory that a runner will need, before anything is allocated."""

    asked: OpenSettings
    """The settings, with the context in use."""
    demand: Demand
    offered: int
    """Bytes that the device offers."""
    beside: int = 0
    """Bytes of a draft model, which are not among those offered."""

    @classmethod
    def of(
        cls,
        loaded: LoadedModel,
        asked: OpenSettings,
        beside: int = 0,
        *,
        is_read: bool = True,
    ) -> EngineConfig:
        """Compute the demand of all slots, with a draft model of `beside` bytes.

        Of the memory asked for, or of what the device offers, a tenth at most is for checkpoints.
        `is_read`: the weights are there, so that the work on a picture can be measured.
        """
        sight = getattr(loaded.model, "sight", None)
        asked = replace(asked, context=asked.context or loaded.facts.context)
        offered = max(0, device.offered_bytes() - beside)
        demand = demand_of_slots(
            loaded.model,
            loaded.config,
            replace(cache_options(asked, whole=False), context=None),
            asked,
            slots=asked.max_sequences,
            step=asked.step,
            offered=offered if asked.cache_memory is None else min(offered, asked.cache_memory),
        )
        if sight is not None:
            work = sight.work_bytes(tries=asked.reserve and is_read)
            demand = replace(demand, pictures=work)
        return cls(asked, demand, offered, beside)

    def plan(self, cells: int | None, limit: int | None = None, step: int | None = None) -> Plan:
        """Return the plan of `cells` cells; None: of as many as fit, at most `limit`.

        `step`: most tokens of a step, by default those of the settings.
        """
        return choose_plan(
            self.demand,
            cells,
            step or self.asked.step,
            offered=self.offered,
            limit=limit or self.asked.most_cells,
            smallest=max(SMALLEST_STEP, self.asked.max_sequences),
        )

    def settings(self) -> OpenSettings:
        """Return the settings with the number of cells to make, and the bytes of checkpoints.

        Raise MemoryPlanError if too few cells fit into the memory asked for, or with `reserve` into
        what the device offers.
        """
        asked = self.asked
        cells = asked.kv_cache_tokens
        if asked.cache_memory is not None:
            cells = cells_within(self.demand, asked.cache_memory, cells or asked.most_cells)
            must_have_cells(cells, asked.cache_memory, self.demand)
        elif asked.reserve and cells is None:
            cells = self.plan(None).context
        if asked.reserve:
            made = cells or asked.most_cells
            plan = must_fit(self.plan(made, made))
            announce_step(plan)
            asked = replace(asked, prefill_step=plan.prefill_step)
        return replace(
            asked, kv_cache_tokens=cells, checkpoint_budget=self.demand.checkpoint_budget
        )

    def reserve(self, engine: BatchedModel | SequentialModel, cells: int) -> Plan:
        """Allocate all cells, run the largest step once to measure it, and return the plan.

        The step sees as much as any. If it needs more than the device offers, smaller ones are
        tried. Raise MemoryPlanError if none fits.
        """
        step = replace(self.asked, kv_cache_tokens=cells).complete(cells).step
        while True:
            demand = replace(self.demand, batch=self._measured(engine, cells, step))
            plan = replace(self, demand=demand).plan(cells, cells, step)
            if not plan.asked_step:
                break
            step = plan.prefill_step
            announce_step(plan)
        device.set_limits(must_fit(plan).total + self.beside, demand.batch.fixed)
        return plan

    def _measured(
        self, engine: BatchedModel | SequentialModel, cells: int, step: int
    ) -> WorstCaseBatch:
        """Run a step of `step` tokens that sees as much as any, and return what memory it takes."""
        with device.no_garbage_collected():
            before = mx.get_active_memory() - sum(group.nbytes for group in engine.groups)
            mx.reset_peak_memory()
            # As in a run, the second step is dispatched before the first is read.
            context = self.asked.context or cells
            in_flight = [
                largest_step(engine, step, self.asked.max_sequences, context) for _ in range(2)
            ]
            mx.eval(in_flight, engine.state())
            peak, stored = mx.get_peak_memory(), sum(group.nbytes for group in engine.groups)
            del in_flight
        mx.clear_cache()
        # A shift, between two steps, holds the moved half of a sequence, and its keys once more.
        shifted = stored * (self.asked.context or 0) // cells
        batch = max(0, peak - before - stored, shifted)
        return replace(self.demand.batch, fixed=batch, per_token=0, is_measured=True, step=step)


def largest_step(
    engine: BatchedModel | SequentialModel, tokens: int, slots: int, context: int
) -> list[mx.array]:
    """Dispatch a row of `tokens` tokens that sees as much as any, and sample for the slots.

    Each token sees what one of a sequence of `context` tokens may see, in the costliest ways. Where
    all layers lie in shared cells, the row runs through one of each kind: the memory of a layer's
    work is free again before the next one starts. All layers get a row of the slots that sees every
    cell. The sampling is the costliest possible, for SAMPLED slots at most. Nothing is stored.
    """
    wanted, arrays = min(slots, engine.most_sequences or slots), list[mx.array]()
    if isinstance(engine, BatchedModel):
        arrays += engine.first_layers(*_row(tokens), context)
        tokens = wanted
    logits = engine.forward(*_row(tokens), range(tokens - wanted, tokens), reserve=True)
    costliest = NextToken(
        GenerateOptions.of(temperature=1.0, top_p=0.9, logprobs=5, seed=0), logits.shape[-1]
    )
    for row in range(min(wanted, SAMPLED)):
        arrays += costliest(logits[row : row + 1]).arrays
    dispatch(arrays)
    return arrays


def _row(tokens: int) -> tuple[mx.array, Batch]:
    return mx.zeros((tokens,), mx.int32), Batch(list(range(tokens)), [0] * tokens)


def seeing(
    name: str,
    asked: OpenSettings,
    progress: LoadProgress = tell_nobody,
    *,
    trust_remote_code: bool,
) -> LoadedModel:
    """Load the model `name` with its encoder of pictures.

    Raise ModelError if it can't be used, OptionError for settings that it can't have, and
    MemoryPlanError, before a weight is read, if it does not fit.
    """
    from mlxrunner.models.load import load_vision_model

    def check(loaded: LoadedModel) -> None:
        check_seeing(loaded.model, asked)
        EngineConfig.of(loaded, asked, is_read=False).settings()

    _refuse({"trust_remote_code": trust_remote_code, **_unseen(asked)})
    return load_vision_model(name, progress=progress, check=check)


def check_seeing(model: Any, asked: OpenSettings) -> None:
    """Raise OptionError for settings that a model that sees pictures can't have."""
    if hasattr(model, "look"):
        _refuse(_unseen(asked))
        check_quantized(model, cache_options(asked, whole=False))


def _unseen(asked: OpenSettings) -> dict[str, Any]:
    return {"draft_model": asked.draft_model}


def _refuse(given: dict[str, Any]) -> None:
    for name, value in given.items():
        if value:
            raise OptionError(f"{name}: a model that sees pictures runs without it: leave it out")


def parking_of(loaded: LoadedModel, settings: OpenSettings) -> DiskCache | None:
    """Open the parking of a model; None without `disk_cache_bytes`.

    Raise SessionError if the folder can't be used.
    """
    if not settings.disk_cache_bytes:
        return None
    from mlxrunner.cache.disk.disk_cache import DiskCache
    from mlxrunner.models.fingerprint import fingerprint
    from mlxrunner.pictures.table import PictureNames
    from mlxrunner.system import mlx_vlm_internals as internals

    place = None if settings.disk_cache_dir is None else Path(settings.disk_cache_dir)
    stored = {**cache_options(settings).kept_as, "cells": "shared"}
    sight, pictures = getattr(loaded.model, "sight", None), None
    if sight is not None:
        pictures, stored = PictureNames(sight.table), stored | {"eyes": internals.version()}
    model = fingerprint(loaded.folder) | stored
    return DiskCache(
        place,
        model,
        limit=settings.disk_cache_bytes,
        daily=settings.disk_write_bytes,
        pictures=pictures,
    )


PIECE = 256
"""Most tokens of a text that a draft model reads between two steps, for each answer."""
SHARE = 10
"""Its entries take at most this part of the device's offer: one in 10."""


@dataclass(frozen=True)
class DraftPlan:
    """The memory of a draft model, before it is loaded."""

    name: str
    demand: Demand
    """The memory of its weights and of one entry."""
    options: CacheOptions
    """The options of its layer caches, with its context."""
    entries: int
    room: int
    """Most bytes of an entry."""
    wire: str
    """See `OpenSettings.wire`."""

    @classmethod
    def of(cls, name: str, context: int, asked: OpenSettings) -> DraftPlan:
        """Plan the draft model `name` for answers of at most `context` tokens.

        Its own context is the longest that fits. Raise ModelError if it is missing or broken, and
        MemoryPlanError if it does not fit.
        """
        found, entries = without_weights(name), min(MOST_ANSWERS, asked.max_sequences)
        offered, limit = device.offered_bytes(), min(context, found.facts.context)
        options = CacheOptions(limit, asked.reserve, asked.rewind_slack)
        demand = demand_of(found.model, found.config, options, PIECE, weights=found.weight_bytes)
        plan = cls(name, demand, options, entries, offered // SHARE // entries, asked.wire)
        fitting = plan._entry.largest_context(plan.room, limit)
        if fitting < min(SMALLEST_CONTEXT, limit):
            raise MemoryPlanError(
                f"the draft model {name} has {size(plan.room)} for what it keeps of an answer, and "
                f"{min(SMALLEST_CONTEXT, limit)} tokens do not fit into that"
            )
        plan = replace(plan, options=replace(options, context=fitting))
        if plan.nbytes > offered:
            raise MemoryPlanError(
                f"the draft model {name} takes {size(plan.nbytes)}, and the device offers "
                f"{size(offered)}"
            )
        return plan

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer for which the draft model can guess."""
        return self.options.context or 0

    @property
    def nbytes(self) -> int:
        """Bytes of its weights, its entries and its longest pass."""
        entries = self.entries * self._entry.total(self.context, self.room)
        return self.demand.weights + self.demand.batch.nbytes(self.context) + entries

    @property
    def _entry(self) -> Demand:
        return replace(self.demand, weights=0, batch=WorstCaseBatch(0))

    def load(self, own: LoadedModel) -> DraftCachePool:
        """Load the draft model for the model `own`, and allocate its entries if they are whole.

        Raise OptionError if its vocabulary is another one.
        """
        loaded = load_model(self.name)
        check_vocabularies(self.name, loaded.tokenizer, own.tokenizer)
        budget = self._entry.checkpoints(self.context, self.room)
        parts = loaded.model, own.facts.vocab, self.options, budget, PIECE
        more: dict[str, Any] = {"table": loaded.facts.vocab, "in_pieces": True}
        entries = [DraftModel(*parts, **more) for _ in range(self.entries)]
        plan = self
        if self.options.whole:
            batch = max(self._reserve(loaded.model, entry) for entry in entries)
            plan = replace(self, demand=replace(self.demand, batch=WorstCaseBatch(batch)))
        wired = {"weights": plan.demand.weights, "all": plan.nbytes, "none": 0}
        device.wire(loaded.model, wired[self.wire])
        return DraftCachePool(entries, plan.nbytes)

    def _reserve(self, model: Any, entry: DraftModel) -> int:
        """Allocate an entry, and return the bytes that its longest pass takes."""
        scratch = make_layer_caches(model, self.options)
        return reserve(model, entry.empty_caches(), self.context, PIECE, scratch).batch


def seats_of(own: LoadedModel, asked: OpenSettings) -> DraftCachePool | None:
    """Load the draft model that is asked for beside the model `own`; None if none is."""
    if asked.draft_model is None:
        return None
    context = asked.context or own.facts.context
    return DraftPlan.of(asked.draft_model, context, asked).load(own)
