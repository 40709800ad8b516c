"""Measure the memory that a model needs, and reserve it at start."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxrunner.cache.entry import HEADER
from mlxrunner.cache.layers.factory import CacheOptions, evaluate, layouts_of, run_lazily
from mlxrunner.cache.protocol import LayerCache
from mlxrunner.engine.request import SEED_TOKENS
from mlxrunner.errors import MemoryPlanError
from mlxrunner.memory.plan import (
    SMALLEST_STEP,
    Demand,
    Plan,
    WorstCaseBatch,
    choose,
    default_checkpoints,
)
from mlxrunner.models.files import size_of
from mlxrunner.options import RunnerSettings
from mlxrunner.results import logger
from mlxrunner.system import device
from mlxrunner.terminal.output import size


def demand_of(
    model: Any,
    config: dict[str, Any],
    options: CacheOptions,
    prefill_step: int,
    *,
    weights: int,
    checkpoint_budget: int | None = None,
) -> Demand:
    """Return the memory that `model` needs, with an estimate for its batch.

    `model` may have no weights loaded. `weights`: their bytes. `checkpoint_budget`: bytes for
    checkpoints; None chooses the default.
    """
    gpu, parameters = device.is_gpu(), dict(tree_flatten(model.parameters()))
    has_sinks = any(name.endswith("sinks") for name in parameters)  # scores beside those of keys
    batch = estimate_batch(config, prefill_step, 2 if gpu else 4, is_fused=gpu, has_sinks=has_sinks)
    return Demand(weights, layouts_of(model, options), batch, checkpoint_budget)


def weights_of(model: Any) -> int:
    """Return the bytes of a loaded model's parameters."""
    from mlxrunner.cache.layers.base import tree_bytes

    return tree_bytes(model.parameters())


def estimate_batch(
    config: dict[str, Any], prefill_step: int, item: int, *, is_fused: bool, has_sinks: bool = False
) -> WorstCaseBatch:
    """Estimate the batch roughly from the model's dimensions, for a plan without weights.

    `item`: bytes of one number. `is_fused`: attention kernels keep no scores in memory.
    """
    get = partial(size_of, config)
    hidden, vocab = get("hidden_size", "d_model", "n_embd"), get("vocab_size")
    heads = get("num_attention_heads", "n_head")
    experts, dense = get("num_experts_per_tok"), get("intermediate_size", "ffn_dim", "n_inner")
    chosen = (get("moe_intermediate_size") or dense) * experts
    wide = max(3 * max(dense, 4 * hidden), 5 * chosen)
    logits = HEADER * vocab * item
    fixed = prefill_step * ((8 + 2 * experts) * hidden + wide) * item + logits
    scores = (3 if has_sinks else 2) * heads * prefill_step * 4
    per_token = 0 if is_fused else scores + prefill_step
    return WorstCaseBatch(fixed, per_token, step=prefill_step, logits=logits)


def must_fit(plan: Plan) -> Plan:
    """Return `plan` if it fits. Raise MemoryPlanError with its table otherwise."""
    if not plan.fits:
        raise MemoryPlanError(f"this does not fit into memory\n{plan.table()}")
    return plan


def must_have_room(demand: Demand, tokens: int, prefill_step: int) -> None:
    """Raise MemoryPlanError if a limit of the process or its cgroup is too low for `tokens` tokens.

    Under such a limit an allocation that fails ends the process. The machine's free memory does not
    count here, because the plan has already compared it.
    """
    limit = device.hard_limit()
    if limit is None:
        return
    offered = limit.nbytes + mx.get_active_memory() + mx.get_cache_memory()

    def needed(tokens: int) -> int:
        return demand.growing(tokens, prefill_step, offered)

    if needed(tokens) > offered:
        most = max(bisect_right(range(tokens), offered, key=needed) - 1, 0)
        smaller = f", or a smaller --prefill-step than {prefill_step}" if prefill_step > 64 else ""
        raise MemoryPlanError(
            f"{tokens} tokens need {size(needed(tokens))} of memory, and {limit.name} leaves "
            f"{size(offered)}: give at most {most} tokens{smaller}"
        )


def must_be_offered(
    demand: Demand, tokens: int, prefill_step: int, *, before: int, shrinks: bool
) -> int:
    """Set MLX's limits for `tokens` tokens, and return the prefill step.

    `shrinks`: it is halved if they do not fit otherwise. A warning says so, unless it was as small
    `before`. Raise MemoryPlanError, with a table, if the device does not offer enough.
    """
    offered, smallest = device.offered_bytes(), SMALLEST_STEP if shrinks else prefill_step
    plan = choose(demand, tokens, prefill_step, offered=offered, limit=tokens, smallest=smallest)
    batch = demand.batch.of_step(must_fit(plan).prefill_step).nbytes(tokens)
    device.set_limits(plan.total, batch)
    if plan.prefill_step != before:
        announce_step(plan)
    return plan.prefill_step


def announce(plan: Plan, asked: int | None, limit: int) -> None:
    """Log a warning if the context is not the model's own, `limit`, or the step is smaller."""
    announce_step(plan)
    if plan.context > limit:
        logger.warning(
            "context: %d tokens, but the model was made for %d: it may answer badly beyond them",
            plan.context,
            limit,
        )
    elif plan.context < limit and asked is None:
        logger.warning(
            "context: %d tokens, the most that fits into %s; the model's own is %d",
            plan.context,
            size(plan.offered),
            limit,
        )


def announce_step(plan: Plan) -> None:
    """Log a warning if the prefill step became smaller than was asked for, and the plan fits."""
    if plan.asked_step and plan.fits:
        logger.warning(
            "prefill step: %d tokens instead of %d, so that %d tokens fit into %s",
            plan.prefill_step,
            plan.asked_step,
            plan.context,
            size(plan.offered),
        )


@dataclass(frozen=True)
class Reserved:
    """Memory that was reserved at start, in bytes."""

    caches: int
    """Bytes that stay allocated."""
    batch: int
    """Most bytes that a step needs in addition."""


def reserve(
    model: Any,
    caches: Sequence[LayerCache],
    context: int,
    prefill_step: int,
    scratch: Sequence[LayerCache],
) -> Reserved:
    """Allocate `caches` whole, run the worst-case batch once, and leave them empty.

    The batch is a full prefill step of `prefill_step` tokens at the far end of the context. The
    seed of an answer follows, with the logits of the largest decode step. The prefill computes only
    the first layers, until each kind of layer was met. The memory of one layer's work is free again
    before the next layer starts. Therefore the other layers would only cost time. `scratch` holds
    caches like `caches`, for the layers that are not computed.
    """
    # The most tokens of a prompt that are evaluated together with their logits.
    longest = HEADER if any(cache.needs_checkpoints for cache in caches) else 0
    step, seed = min(prefill_step, context - 1), min(max(SEED_TOKENS, longest), context - 1)
    first = _layers_of_each_kind(model, caches)
    with device.no_garbage_collected():
        before = mx.get_active_memory()
        _compute(model, caches, 1)  # allocates every buffer
        taken = mx.get_active_memory()
        mx.reset_peak_memory()
        run_lazily(model, scratch, 1)
        batch = [*caches[:first], *scratch[first:]]
        _pretend(batch, context - step)
        run_lazily(model, batch, step)
        evaluate(batch[:first])
        del batch
        _pretend(caches, context - seed)
        _compute(model, caches, seed)
        peak = mx.get_peak_memory()
    for cache in (*caches, *scratch):
        cache.free()
    mx.clear_cache()
    return Reserved(taken - before, max(0, peak - taken))


def _compute(model: Any, caches: Sequence[LayerCache], tokens: int) -> None:
    logits = run_lazily(model, caches, tokens)
    mx.eval(logits[:, -1, :], [cache.state for cache in caches])


def _pretend(caches: Sequence[LayerCache], offset: int) -> None:
    for cache in caches:
        cache.pretend(offset)


def _layers_of_each_kind(model: Any, caches: Sequence[LayerCache]) -> int:
    """Return the number of first layers with one of each kind, and one that is fed by them."""
    layers = getattr(model, "layers", ())
    if len(layers) != len(caches):
        return len(caches)
    pairs = zip(caches, layers, strict=True)
    kinds = [(cache.layouts(), shapes_of(layer)) for cache, layer in pairs]
    return min(max(map(kinds.index, kinds)) + 2, len(caches))


def shapes_of(layer: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Return the names and shapes of a layer's weights, which tell its kind."""
    parameters: Any = tree_flatten(layer.parameters())
    return [(name, array.shape) for name, array in parameters]


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
    layouts = []
    for layout in one.layouts:
        rows = None
        if layout.most_rows is not None:
            rows = slots * (layout.checkpoint_rows + 1) + windows
        fixed = slots * layout.fixed_bytes
        layouts.append(replace(layout, most_rows=rows, fixed_bytes=fixed, draft_rows=0))
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
    """Return the most cells, up to `most`, whose caches fit into `memory` bytes; 0 if none fits."""
    caches = Demand(0, demand.layouts, WorstCaseBatch(0), demand.checkpoint_budget)
    return caches.largest_context(memory, most)


def must_have_cells(cells: int, memory: int, demand: Demand) -> None:
    """Raise MemoryPlanError if `cells`, all that fit into `memory` bytes, are too few to run."""
    if cells < 2:
        needed = demand.caches(2) + demand.checkpoints(2, memory)
        raise MemoryPlanError(
            f"memory: {size(memory)} is not enough for the states and checkpoints of all, "
            f"which take {size(needed)}: give more, or fewer sequences at a time"
        )
