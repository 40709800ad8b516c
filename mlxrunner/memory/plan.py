"""Plan memory: compare the model's need for a context with the device's offer. Pure arithmetic."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mlxrunner.cache.entry import SPACING
from mlxrunner.cache.protocol import Layout
from mlxrunner.terminal.output import size

CHECKPOINTS, CHECKPOINT_SHARE = 8, 10
"""Number of checkpoints of a sequence in the default budget, if they are one part in 10 of the
device's offer at most.

They cover a system prompt, the last few messages and some places in between.
"""
SMALL_CHECKPOINTS, SMALL_SHARE = 64, 100
"""The same for checkpoints that are one part in 100 at most, so that an edit anywhere goes back to
one nearby. A context has no more of them than one every SPACING tokens.
"""
SMALLEST_CONTEXT = 256
"""Fewest tokens of a context that the advice recommends."""
SMALLEST_STEP = 256
"""Fewest tokens of a prefill step that a plan chooses by itself: smaller ones are slow."""


def default_checkpoints(nbytes: int, context: int, offered: int, sequences: int = 1) -> int:
    """Return the bytes for checkpoints of `nbytes` each, on a device that offers `offered`.

    `context` is the most tokens of one of the `sequences`.
    """
    small = min(SMALL_CHECKPOINTS, context // SPACING)
    return max(
        min(sequences * CHECKPOINTS * nbytes, offered // CHECKPOINT_SHARE),
        min(sequences * small * nbytes, offered // SMALL_SHARE),
    )


@dataclass(frozen=True)
class WorstCaseBatch:
    """Memory of the worst-case batch in bytes: `fixed + per_token * context`.

    The batch is one prefill step at the far end of the context. A shorter one takes less.
    """

    fixed: int
    per_token: int = 0
    is_measured: bool = False
    step: int = 0
    """Tokens of the prefill step; 0: not known, and the bytes are those of every step."""
    logits: int = 0
    """The part of `fixed` that does not grow with the step."""

    def nbytes(self, context: int) -> int:
        """Return the bytes of the batch with `context` tokens, of which it has no more itself."""
        batch = self.of_step(min(self.step, context))
        return batch.fixed + batch.per_token * context

    def measured(self, nbytes: int, context: int) -> WorstCaseBatch:
        """Return a batch that took `nbytes` with `context` tokens, with the estimated growth."""
        per_token = min(self.per_token, nbytes // context)
        fixed = nbytes - per_token * context
        step = min(self.step, context)
        return replace(self, fixed=fixed, per_token=per_token, is_measured=True, step=step)

    def of_step(self, step: int) -> WorstCaseBatch:
        """Return the batch with a prefill step of `step` tokens, by proportion."""
        if step == self.step or not self.step:
            return self
        logits = min(self.logits, self.fixed)
        return WorstCaseBatch(
            logits + (self.fixed - logits) * step // self.step,
            self.per_token * step // self.step,
            step=step,
            logits=logits,
        )


@dataclass(frozen=True)
class Demand:
    """The memory that a model needs, as functions of the context. All sizes are in bytes."""

    weights: int
    layouts: Sequence[Layout]
    """The layout of each layer's cache."""
    batch: WorstCaseBatch
    checkpoint_budget: int | None = None
    """Bytes for checkpoints; None chooses the default."""
    host_fixed: int = 0
    """Bytes that the program itself needs to note the tokens of many sequences."""
    host_per_token: int = 0
    """Bytes that it needs in addition for each token."""
    pictures: int = 0
    """Bytes for pictures: what is kept of them, and the most that one takes until it is seen."""

    def host(self, context: int) -> int:
        """Return the bytes of the program's own notes for `context` tokens."""
        return self.host_fixed + self.host_per_token * context

    def caches(self, context: int) -> int:
        """Return the bytes of all caches for `context` tokens."""
        return sum(layout.nbytes(context) for layout in self.layouts)

    def drafts(self, context: int) -> int:
        """Return the bytes that layers have twice while a draft of `context` tokens is checked."""
        return sum(layout.draft_bytes(context) for layout in self.layouts)

    def checkpoints(self, context: int, offered: int) -> int:
        """Return the checkpoint budget in bytes; 0 if no layer needs checkpoints.

        The default is `default_checkpoints` of the size at the far end of the context.
        """
        one = sum(layout.checkpoint_bytes(context) for layout in self.layouts)
        if self.checkpoint_budget is not None or not one:
            return (self.checkpoint_budget or 0) if one else 0
        return default_checkpoints(one, context, offered)

    def growing(self, tokens: int, prefill_step: int, offered: int) -> int:
        """Return the bytes in use after `tokens` tokens if memory is allocated as they come."""
        return self._used(tokens, self.batch.of_step(prefill_step), offered)

    def _used(self, tokens: int, batch: WorstCaseBatch, offered: int) -> int:
        caches = self.caches(tokens) + self.drafts(tokens) + self.checkpoints(tokens, offered)
        return self.weights + caches + batch.nbytes(tokens) + self.pictures

    def total(self, context: int, offered: int) -> int:
        """Return all bytes for `context` tokens on a device that offers `offered` bytes."""
        return self._used(context, self.batch, offered) + self.host(context)

    def largest_context(self, offered: int, limit: int) -> int:
        """Return the most tokens, up to `limit`, that fit into `offered` bytes; 0 if none fits."""
        longer = range(1, limit + 1)
        return bisect_right(longer, offered, key=lambda context: self.total(context, offered))


@dataclass(frozen=True)
class PlanLine:
    """One line of the plan's table. All sizes are in bytes."""

    what: str
    total: int
    layers: int = 0
    rows: int = 0
    """Tokens that each of the layers stores."""
    row_bytes: int = 0
    """Bytes of one token in one layer."""
    fixed: int = 0
    """Bytes that do not depend on the tokens."""

    @property
    def detail(self) -> str:
        """The layers, and the bytes of each, in words; empty for other lines."""
        stored = f"{self.rows} tokens x {size(self.row_bytes)}" if self.row_bytes else ""
        fixed = f"{size(self.fixed)} whatever the length" if self.fixed else ""
        parts = " + ".join(filter(None, (stored, fixed)))
        return f"{self.layers} x {parts}" if self.layers else ""


@dataclass(frozen=True)
class Plan:
    """A memory plan for one context. All sizes are in bytes."""

    context: int
    prefill_step: int
    lines: tuple[PlanLine, ...]
    total: int
    offered: int
    largest_context: int
    """Largest context that fits, up to the model's own or to this one; 0 if none fits."""
    checkpoint_budget: int
    batch_is_measured: bool
    asked_step: int = 0
    """The prefill step that was asked for, if a smaller one was chosen so that the context fits."""

    @property
    def fits(self) -> bool:
        """True if the total is at most the device's offer."""
        return self.total <= self.offered

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"fits": self.fits}

    def wired(self, wire: str) -> int:
        """Return the bytes to wire, by one of WIRE in `mlxrunner.options`."""
        return {"weights": self.lines[0].total, "all": self.total, "none": 0}[wire]

    def table(self) -> str:
        """Return a line for each item, the sum, and the largest context that fits."""
        rows = [(line.what, line.detail, size(line.total)) for line in self.lines]
        rows[0] = ("weights in memory", *rows[0][1:])
        rows += [("total", "", size(self.total)), ("device offers", "", size(self.offered))]
        wide = [max(len(row[i]) for row in rows) for i in range(3)]
        text = [
            f"{what:<{wide[0]}}  {detail:<{wide[1]}}  {nbytes:>{wide[2]}}"
            for what, detail, nbytes in rows
        ]
        return "\n".join([*text, self.advice()])

    def advice(self) -> str:
        """Return a sentence about the largest context that fits."""
        said, step, largest = f"a context of {self.context} tokens", "", self.largest_context
        if self.fits:
            if self.asked_step:
                step = f", with a prefill step of {self.prefill_step} tokens instead of "
                step += str(self.asked_step)
            return f"{said} fits{step}; the largest that would: {largest}"
        if largest >= SMALLEST_CONTEXT:
            return f"{said} does not fit; this would: --context {largest}"
        if self.prefill_step > 64:
            step = f", a smaller --prefill-step than {self.prefill_step}"
        return f"not even a short context fits: try a smaller or quantized model{step}"


def make_plan(demand: Demand, *, context: int, prefill_step: int, offered: int, limit: int) -> Plan:
    """Return the plan for `context` tokens.

    `prefill_step`: tokens per chunk. `offered`: bytes that the device offers. `limit`: the model's
    own context in tokens. `largest_context` of the plan is at most the larger of `limit` and
    `context`.
    """
    budget, is_measured = demand.checkpoints(context, offered), demand.batch.is_measured
    batch = f"batch of {prefill_step} tokens ({'measured' if is_measured else 'estimated'})"
    optional = [
        PlanLine("checkpoints", budget),
        PlanLine("copies while a draft is checked", demand.drafts(context)),
        PlanLine(batch, demand.batch.nbytes(context)),
        PlanLine("places of the tokens, and a mask", demand.host(context)),
        PlanLine("pictures", demand.pictures),
    ]
    lines = [
        PlanLine("weights", demand.weights),
        *(_layer_line(*layers, context) for layers in Counter(demand.layouts).items()),
        *(line for line in optional if line.total or line.what == batch),
    ]
    total = sum(line.total for line in lines)
    largest = demand.largest_context(offered, max(limit, context))
    sizes = tuple(lines), total, offered, largest, budget
    return Plan(context, prefill_step, *sizes, is_measured)


def choose(
    demand: Demand,
    context: int | None,
    prefill_step: int,
    *,
    offered: int,
    limit: int,
    smallest: int = SMALLEST_STEP,
) -> Plan:
    """Return the plan for `context` tokens, with a step of at most `prefill_step`.

    If `context` is None, the plan is for the model's own context (`limit`), or for the largest that
    fits into `offered` bytes. The step is halved, down to `smallest`, until the context fits. Where
    the model's own fits with no step, the longest step is chosen that costs at most a tenth of the
    longest context that fits.
    """
    plans, smallest = list[Plan](), smallest if demand.batch.step else prefill_step
    step = prefill_step
    while not plans or step >= smallest:
        plans.append(_with_step(demand, context, step, prefill_step, offered=offered, limit=limit))
        step //= 2
    fitting = [plan for plan in plans if plan.fits]
    if not fitting:
        return plans[-1]
    longest = max(plan.context for plan in fitting)
    enough = longest if context is not None or longest == limit else longest * 9 // 10
    return next(plan for plan in fitting if plan.context >= enough)


def _with_step(
    demand: Demand, context: int | None, step: int, asked: int, *, offered: int, limit: int
) -> Plan:
    """Return the plan with a prefill step of `step` tokens where `asked` were asked for."""
    demand = replace(demand, batch=demand.batch.of_step(step))
    if context is None:
        fitting = demand.largest_context(offered, limit)
        is_useful = fitting >= min(SMALLEST_CONTEXT, limit)  # else the plan reports it
        context = fitting if is_useful else limit
    plan = make_plan(demand, context=context, prefill_step=step, offered=offered, limit=limit)
    return plan if step == asked else replace(plan, asked_step=asked)


def _layer_line(layout: Layout, count: int, context: int) -> PlanLine:
    """Return the line of a group of equal layers."""
    rows, total = layout.rows(context), count * layout.nbytes(context)
    sizes = total, count, rows, layout.row_bytes, layout.fixed_bytes
    return PlanLine(f"{layout.kind} layers", *sizes)
