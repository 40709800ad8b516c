"""Load a model and plan its memory, for `Runner.load` and `plan_model`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Unpack

from mlxrunner.cache.layers.factory import CacheOptions, check_quantized, make_layer_caches
from mlxrunner.engine.draft_model import DraftModel, check_vocabularies
from mlxrunner.errors import MemoryPlanError, ModelError, OptionError
from mlxrunner.memory.plan import Demand, Plan, choose
from mlxrunner.memory.reserve import (
    announce,
    demand_of,
    must_fit,
    must_have_room,
    weights_of,
)
from mlxrunner.memory.reserve import reserve as reserve_memory
from mlxrunner.models.facts import Shapes, is_run_by_mlx_vlm, without_weights
from mlxrunner.models.load import (
    LoadedModel,
    LoadProgress,
    load_model,
    load_vision_model,
    tell_nobody,
    unread_vision_model,
)
from mlxrunner.options import Reserve, RunnerKwargs, RunnerSettings
from mlxrunner.system import device
from mlxrunner.terminal.output import size

if TYPE_CHECKING:
    from mlxrunner.runner import Runner

    Make = Callable[..., Runner]
    """Makes a runner of the loaded model, by its settings and plan: see `_made`."""


def plan_model(
    model: str,
    context: int | None = None,
    *,
    pictures: bool = False,
    **settings: Unpack[RunnerKwargs],
) -> Plan:
    """Return the memory plan of `model`, without loading its weights.

    `context` (in tokens) and the other settings are those of RunnerSettings. `pictures`: with its
    encoder, whose own need is known only once it has run; a model that mlx-lm lacks has it always.
    Raise ModelError if the model is missing or broken, and OptionError if a setting is out of
    range.
    """
    asked = RunnerSettings.of(context=context, **settings)
    return _context_and_plan(model, asked, pictures=pictures)[1]


def context_and_plan(model: str) -> tuple[int, Plan]:
    """Return the context that `model` was made for, in tokens, and the plan of a start without
    options. Raise ModelError if the model is missing or broken.
    """
    return _context_and_plan(model, RunnerSettings())


def _context_and_plan(
    model: str, settings: RunnerSettings, *, pictures: bool = False
) -> tuple[int, Plan]:
    if pictures or is_run_by_mlx_vlm(model):
        unread = unread_vision_model(model)
        return unread.facts.context, _planned_seeing(unread, settings)
    found = without_weights(model)
    return found.facts.context, _planned(found, settings)


def _planned(found: Shapes, settings: RunnerSettings) -> Plan:
    return _chosen(_demand(found, settings, found.weight_bytes), settings, found.facts.context)


def cache_options(
    settings: RunnerSettings, context: int | None = None, *, whole: bool = True
) -> CacheOptions:
    """Return the options of the layer caches.

    `context` (in tokens) is used if the settings have none. `whole` allocates it at once.
    """
    return CacheOptions(settings.context or context, whole, settings.rewind_slack, settings.kv_bits)


def load(
    kind: type[Runner],
    model: str,
    settings: RunnerSettings,
    *,
    reserve: Reserve,
    wire: str,
    trust_remote_code: bool,
    draft_model: str | None,
    pictures: bool,
    progress: LoadProgress,
) -> Runner:
    """Load `model` into a runner of class `kind`; see `Runner.load`."""
    if pictures or is_run_by_mlx_vlm(model):
        refused = {"trust_remote_code": trust_remote_code, "draft_model": draft_model}
        for name, given in refused.items():
            if given:
                raise OptionError(
                    f"{name}: a model that sees pictures runs without it: leave it out"
                )

        def check(unread: LoadedModel) -> None:
            check_quantized(unread.model, cache_options(settings, unread.facts.context))
            must_fit(_planned_seeing(unread, settings))

        loaded = load_vision_model(model, progress=progress, check=check)
        demand = _demand_seeing(loaded, settings, tries=bool(reserve))
    else:
        if reserve:
            wanted = settings if reserve is True else replace(settings, context=None)
            with suppress(ModelError):  # loading the model explains better what is wrong with it
                must_fit(plan_model(model, **vars(wanted)))
        loaded = load_model(model, trust_remote_code=trust_remote_code, progress=progress)
        demand = _demand(loaded, settings, weights_of(loaded.model))
    make, limit = partial(_made, kind, loaded, model), loaded.facts.context
    if reserve is True:
        runner = _reserved(make, settings, demand, limit, progress)
    else:
        runner = _growing(make, settings, demand, limit, per_request=bool(reserve))
    if runner.plan is not None:
        device.wire(loaded.model, runner.plan.wired(wire))
    runner.wire = wire
    if draft_model is not None:
        add_draft_model(runner, draft_model, trust_remote_code=trust_remote_code, progress=progress)
    return runner


def _planned_seeing(unread: LoadedModel, settings: RunnerSettings) -> Plan:
    """Return the plan of a model that sees pictures, before its encoder has run."""
    demand = _demand_seeing(unread, settings, tries=False)
    return _chosen(demand, settings, unread.facts.context)


def _demand_seeing(loaded: LoadedModel, settings: RunnerSettings, *, tries: bool) -> Demand:
    """Return what a model that sees pictures needs; its encoder runs once if `tries`."""
    demand = _demand(loaded, settings, weights_of(loaded.model.inner))
    return replace(demand, pictures=loaded.model.sight.work_bytes(tries=tries))


def _demand(loaded: LoadedModel | Shapes, settings: RunnerSettings, weights: int) -> Demand:
    return demand_of(
        loaded.model,
        loaded.config,
        cache_options(settings, loaded.facts.context),
        settings.prefill_step,
        weights=weights,
        checkpoint_budget=settings.checkpoint_budget,
    )


def add_draft_model(
    runner: Runner,
    name: str,
    *,
    trust_remote_code: bool = False,
    progress: LoadProgress = tell_nobody,
) -> None:
    """Load the model `name`, and let it guess for `runner`.

    Raise ModelError if it is missing or broken, OptionError if its vocabulary is another one, and
    MemoryPlanError if both do not fit into memory together.
    """
    found, own = without_weights(name), RunnerSettings.among(runner.settings)
    context = min(runner.context, found.facts.context)
    settings = replace(own, context=context, kv_bits=None, checkpoint_budget=None)
    plan = _planned(found, settings)
    planned = 0 if runner.plan is None else runner.plan.total
    if plan.total + planned > plan.offered:
        raise MemoryPlanError(
            f"the draft model {name} does not fit into memory beside the model, which takes "
            f"{size(planned)}\n{plan.table()}"
        )
    loaded = load_model(name, trust_remote_code=trust_remote_code, progress=progress)
    check_vocabularies(name, loaded.tokenizer, runner.tokenizer)
    device.wire(loaded.model, plan.wired(runner.wire))
    options = cache_options(settings, whole=False)
    parts = loaded.model, runner.facts.vocab, options, plan.checkpoint_budget, runner.prefill_step
    runner.sources.model = DraftModel(*parts, table=loaded.facts.vocab)


def _growing(
    make: Make, settings: RunnerSettings, demand: Demand, limit: int, *, per_request: bool
) -> Runner:
    """Return a runner that takes memory as the conversation grows.

    `per_request`: each request reserves what it needs, and chooses its prefill step.
    """
    plan = _chosen(demand, settings, limit)
    if per_request:
        plan = replace(plan, prefill_step=settings.prefill_step, asked_step=0)
    runner = make(settings, plan, whole=False)
    runner.growing, runner.reserves_requests = demand, per_request
    must_have_room(demand, 1, plan.prefill_step)
    announce(plan, settings.context, limit)
    runner.plan = plan
    return runner


def _reserved(
    make: Make, settings: RunnerSettings, demand: Demand, limit: int, progress: LoadProgress
) -> Runner:
    """Return a runner that has taken all its memory.

    The worst-case batch may take more than was estimated. A smaller step is tried then, or, if the
    caller asked for no context, a smaller one: the largest that fits by the measured figure.
    """
    offered, asked = device.offered_bytes(), settings
    plan = _chosen(demand, settings, limit, offered)
    while True:
        runner = make(settings, plan, whole=True)
        must_fit(plan)
        progress(f"trying the longest step, at the end of {plan.context} tokens", 0, None)
        batch = demand.batch.of_step(plan.prefill_step)
        demand = replace(demand, batch=batch.measured(_taken(runner), plan.context))
        settings = replace(settings, prefill_step=plan.prefill_step)  # never a longer one again
        measured = _chosen(demand, replace(settings, context=plan.context), limit, offered)
        if measured.fits and not measured.asked_step:
            break
        del runner
        plan = _chosen(demand, settings, limit, offered)
    if measured.prefill_step != asked.prefill_step:
        measured = replace(measured, asked_step=asked.prefill_step)
    device.set_limits(measured.total, demand.batch.nbytes(measured.context))
    announce(measured, asked.context, limit)
    runner.plan = measured
    return runner


def _taken(runner: Runner) -> int:
    """Allocate the caches and run the worst-case batch. Return the bytes that the batch took."""
    caches = runner.cache.empty_caches()
    scratch = make_layer_caches(runner.model, runner.cache.options)
    step = runner.prefill_step
    return reserve_memory(runner.model, caches, runner.context, step, scratch).batch


def _chosen(
    demand: Demand, settings: RunnerSettings, limit: int, offered: int | None = None
) -> Plan:
    offered = device.offered_bytes() if offered is None else offered
    return choose(demand, settings.context, settings.prefill_step, offered=offered, limit=limit)


def _made(
    kind: type[Runner],
    loaded: LoadedModel,
    model: str,
    settings: RunnerSettings,
    plan: Plan,
    *,
    whole: bool,
) -> Runner:
    planned = replace(
        settings,
        context=plan.context,
        checkpoint_budget=plan.checkpoint_budget,
        prefill_step=plan.prefill_step,
    )
    parts = loaded.model, loaded.tokenizer, loaded.facts
    runner = kind(*parts, name=model, whole=whole, **vars(planned))
    runner.suggested_options = dict(loaded.suggested)
    return runner
