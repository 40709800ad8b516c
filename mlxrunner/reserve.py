"""Decide memory before the first token: find out what a model's caches and its worst-case batch take, and take it at start."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxrunner import device
from mlxrunner.cache.checkpoints import HEADER
from mlxrunner.cache.factory import CacheOptions, evaluate, layouts_of, run_lazily
from mlxrunner.cache.layer import LayerCache
from mlxrunner.errors import MemoryPlanError
from mlxrunner.events import logger
from mlxrunner.models.settings import size_of
from mlxrunner.pipeline import SEED_TOKENS
from mlxrunner.plan import SMALLEST_CONTEXT, Batch, Demand, Plan, make_plan
from mlxrunner.terminal import size


def demand_of(
    model: Any,
    config: dict[str, Any],
    options: CacheOptions,
    prefill_step: int,
    *,
    weights: int,
    checkpoint_budget: int | None = None,
) -> Demand:
    """What `model` needs, its batch estimated. `model` may be without weights; `weights`: their bytes."""
    gpu = device.is_gpu()
    batch = estimate_batch(
        config, prefill_step, 2 if gpu else 4, is_fused=gpu, has_sinks=_has_sinks(model)
    )
    return Demand(weights, layouts_of(model, options), batch, checkpoint_budget)


def weights_of(model: Any) -> int:
    """Bytes of a loaded model's parameters."""
    from mlxrunner.cache.arrays import tree_bytes

    return tree_bytes(model.parameters())


def _has_sinks(model: Any) -> bool:
    """Return True if an attention of `model` has sinks: scores beside those of the keys."""
    parameters: Any = tree_flatten(model.parameters())
    return any(name.endswith("sinks") for name, _ in parameters)


def estimate_batch(
    config: dict[str, Any], prefill_step: int, item: int, *, is_fused: bool, has_sinks: bool = False
) -> Batch:
    """A rough guess from the model's dimensions, for a plan without weights.

    Live at once: about eight rows of the hidden size and three of the feed-forward size (five of all experts of a token together, and an
    input and an output for each) per token of the step, and the logits of a prompt's last few tokens. Without a fused attention kernel
    (CPU) also the mask and the scores, heads x step x context in float32, twice; a third time with sinks, which lengthen each row of
    scores by one.
    """
    get = partial(size_of, config)
    hidden, heads, vocab = (
        get("hidden_size", "d_model", "n_embd"),
        get("num_attention_heads", "n_head"),
        get("vocab_size"),
    )
    experts, dense = get("num_experts_per_tok"), get("intermediate_size", "ffn_dim", "n_inner")
    chosen = (get("moe_intermediate_size") or dense) * experts
    wide = max(3 * max(dense, 4 * hidden), 5 * chosen)
    fixed = prefill_step * ((8 + 2 * experts) * hidden + wide) * item + HEADER * vocab * item
    scores = (3 if has_sinks else 2) * heads * prefill_step * 4
    return Batch(fixed, 0 if is_fused else scores + prefill_step)


def choose(
    demand: Demand, context: int | None, prefill_step: int, *, offered: int, limit: int
) -> Plan:
    """The plan for `context`, or for the model's own (`limit`), or for the most that fits."""
    if context is None:
        fitting = demand.largest_context(offered, limit)
        context = (
            fitting if fitting >= min(SMALLEST_CONTEXT, limit) else limit
        )  # none is worth it: the plan says so
    return make_plan(
        demand, context=context, prefill_step=prefill_step, offered=offered, limit=limit
    )


def must_fit(plan: Plan) -> Plan:
    """MemoryPlanError with the plan's table if it does not fit."""
    if not plan.fits:
        raise MemoryPlanError(f"this does not fit into memory\n{plan.table()}")
    return plan


def must_have_room(demand: Demand, tokens: int, prefill_step: int) -> None:
    """MemoryPlanError, in one line, where a limit of the process or its cgroup leaves no room to grow to `tokens` tokens.

    There an allocation that fails ends the process. What the machine has free is not asked: the plan has said it.
    """
    limit = device.hard_limit()
    if limit is None:
        return
    offered = limit.nbytes + mx.get_active_memory() + mx.get_cache_memory()
    needed = demand.growing(tokens, prefill_step, offered)
    if needed > offered:
        most = (
            bisect_right(
                range(tokens), offered, key=lambda n: demand.growing(n, prefill_step, offered)
            )
            - 1
        )
        smaller = f", or a smaller --prefill-step than {prefill_step}" if prefill_step > 64 else ""
        raise MemoryPlanError(
            f"{tokens} tokens need {size(needed)} of memory, and {limit.name} leaves {size(offered)}: "
            f"give at most {max(most, 0)} tokens{smaller}"
        )


def announce(plan: Plan, asked: int | None, limit: int) -> None:
    """Say it in the log if the context is another one than the model's own, `limit`."""
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


@dataclass(frozen=True)
class Reserved:
    """What was taken at start: bytes that stay (`caches`), and the most that a step needs beside them (`batch`)."""

    caches: int
    batch: int


def reserve(
    model: Any,
    caches: Sequence[LayerCache],
    context: int,
    prefill_step: int,
    scratch: Sequence[LayerCache],
) -> Reserved:
    """Allocate `caches` whole, run the worst-case batch once, and leave them empty.

    The batch is a full prefill step at the far end of the context, and then the seed of an answer with its logits, the largest of all
    decode steps. Of the prefill only the first layers are computed, as many as it takes to have met each kind of layer: what one layer needs
    beside its cache is given back before the next one starts, so the others would only cost time. `scratch`: caches like `caches`, for
    the layers that are not computed.
    """
    before = mx.get_active_memory()
    _compute(model, caches, 1)  # allocates every buffer
    taken = mx.get_active_memory()
    mx.reset_peak_memory()
    step, seed = min(prefill_step, context - 1), min(_longest_seed(caches), context - 1)
    first = _layers_of_each_kind(model, caches)
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


def _longest_seed(caches: Sequence[LayerCache]) -> int:
    """Most tokens of a prompt that are evaluated together with their logits."""
    return (
        max(SEED_TOKENS, HEADER)
        if any(cache.needs_checkpoints for cache in caches)
        else SEED_TOKENS
    )


def _layers_of_each_kind(model: Any, caches: Sequence[LayerCache]) -> int:
    """How many layers from the first on hold one of each kind, and one more, whose input is computed from all of theirs.

    Layers are of one kind if they store the same and have weights of the same shapes: some may have experts and others not.
    """
    layers = getattr(model, "layers", ())
    if len(layers) != len(caches):
        return len(caches)
    kinds = [(cache.layouts(), _shapes(layer)) for cache, layer in zip(caches, layers, strict=True)]
    return min(max(map(kinds.index, kinds)) + 2, len(caches))


def _shapes(layer: Any) -> list[tuple[str, tuple[int, ...]]]:
    parameters: Any = tree_flatten(layer.parameters())
    return [(name, array.shape) for name, array in parameters]
