"""The memory plan: what a model needs for a context, what the device offers, and the largest context that fits. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mlxrunner.cache.layout import Layout
from mlxrunner.terminal import size

CHECKPOINTS = 8
"""Checkpoints that the default budget has room for: a system prompt, the last few messages and some in between."""
CHECKPOINT_SHARE = 10
"""... but they get at most one part in so many of what the device offers."""
SMALLEST_CONTEXT = 256
"""Tokens; nobody is advised to try less."""


@dataclass(frozen=True)
class Batch:
    """Bytes of the worst-case batch, one prefill step at the far end of the context: `fixed + per_token * context`.

    `is_measured`: run on the device, and not estimated from the model's dimensions.
    """

    fixed: int
    per_token: int = 0
    is_measured: bool = False

    def nbytes(self, context: int) -> int:
        return self.fixed + self.per_token * context

    def measured(self, nbytes: int, context: int) -> Batch:
        """What took `nbytes` with `context` tokens, growing with them as it was estimated to."""
        per_token = min(self.per_token, nbytes // context)
        return Batch(nbytes - per_token * context, per_token, is_measured=True)


@dataclass(frozen=True)
class Demand:
    """What a model needs, whatever the context: its weights, its layers' layouts, its batch. `checkpoint_budget`: None = default."""

    weights: int
    layouts: Sequence[Layout]
    batch: Batch
    checkpoint_budget: int | None = None

    def caches(self, context: int) -> int:
        return sum(layout.nbytes(context) for layout in self.layouts)

    def checkpoints(self, context: int, offered: int) -> int:
        """The budget: CHECKPOINTS at the far end of the context, at most a tenth of what the device offers; 0 where none are needed."""
        one = sum(layout.checkpoint_bytes(context) for layout in self.layouts)
        if self.checkpoint_budget is not None or not one:
            return (self.checkpoint_budget or 0) if one else 0
        return min(CHECKPOINTS * one, offered // CHECKPOINT_SHARE)

    def growing(self, tokens: int, prefill_step: int, offered: int) -> int:
        """Bytes with `tokens` tokens, where memory is taken as they come: a shorter step than `prefill_step` needs less."""
        batch = self.batch.nbytes(tokens) * min(tokens, prefill_step) // prefill_step
        return self.weights + self.caches(tokens) + self.checkpoints(tokens, offered) + batch

    def total(self, context: int, offered: int) -> int:
        return (
            self.weights
            + self.caches(context)
            + self.checkpoints(context, offered)
            + self.batch.nbytes(context)
        )

    def largest_context(self, offered: int, limit: int) -> int:
        """The largest context up to `limit` that fits into `offered` bytes; 0 if none does."""
        if self.total(limit, offered) <= offered:
            return limit
        low, high = 0, limit
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.total(middle, offered) <= offered else (low, middle)
        return low


@dataclass(frozen=True)
class Line:
    """One line of the table. `rows` tokens of `row_bytes` in each of `layers` layers, and `fixed` bytes; `total` of all."""

    what: str
    total: int
    layers: int = 0
    rows: int = 0
    row_bytes: int = 0
    fixed: int = 0


@dataclass(frozen=True)
class Plan:
    """Bytes for one context. `largest_context`: that would fit, up to the model's own or to this one; 0 if none does."""

    context: int
    prefill_step: int
    lines: tuple[Line, ...]
    total: int
    offered: int
    largest_context: int
    checkpoint_budget: int
    batch_is_measured: bool

    @property
    def fits(self) -> bool:
        return self.total <= self.offered

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"fits": self.fits}

    def table(self) -> str:
        """For people: a line per item, the sum, and what would fit."""
        rows = [(line.what, _detail(line), size(line.total)) for line in self.lines]
        rows += [("total", "", size(self.total)), ("device offers", "", size(self.offered))]
        wide = [max(len(row[i]) for row in rows) for i in range(3)]
        text = [
            f"{what:<{wide[0]}}  {detail:<{wide[1]}}  {nbytes:>{wide[2]}}"
            for what, detail, nbytes in rows
        ]
        return "\n".join([*text, self.advice()])

    def advice(self) -> str:
        if self.fits:
            return f"a context of {self.context} tokens fits; the largest that would: {self.largest_context}"
        if self.largest_context >= SMALLEST_CONTEXT:
            return f"a context of {self.context} tokens does not fit; this would: --context {self.largest_context}"
        smaller = (
            f", a smaller --prefill-step than {self.prefill_step}" if self.prefill_step > 64 else ""
        )
        return f"not even a short context fits: try a smaller or quantized model{smaller}"


def make_plan(demand: Demand, *, context: int, prefill_step: int, offered: int, limit: int) -> Plan:
    """The plan for `context` tokens. `limit`: the model's own context, the most that `largest_context` can be if `context` isn't more."""
    budget = demand.checkpoints(context, offered)
    batch = demand.batch.nbytes(context)
    lines = [
        Line("weights", demand.weights),
        *_layer_lines(demand.layouts, context),
        *([Line("checkpoints", budget)] if budget else []),
        Line(
            f"batch of {prefill_step} tokens ({'measured' if demand.batch.is_measured else 'estimated'})",
            batch,
        ),
    ]
    total = sum(line.total for line in lines)
    largest = demand.largest_context(offered, max(limit, context))
    return Plan(
        context,
        prefill_step,
        tuple(lines),
        total,
        offered,
        largest,
        budget,
        demand.batch.is_measured,
    )


def _layer_lines(layouts: Sequence[Layout], context: int) -> list[Line]:
    """Layers that are alike in one line."""
    counts: dict[Layout, int] = {}
    for layout in layouts:
        counts[layout] = counts.get(layout, 0) + 1
    return [
        Line(
            f"{layout.kind} layers",
            n * layout.nbytes(context),
            n,
            layout.rows(context),
            layout.row_bytes,
            layout.fixed_bytes,
        )
        for layout, n in counts.items()
    ]


def _detail(line: Line) -> str:
    if not line.layers:
        return ""
    stored = f"{line.rows} tokens x {size(line.row_bytes)}" if line.row_bytes else ""
    fixed = f"{size(line.fixed)} whatever the length" if line.fixed else ""
    return f"{line.layers} x " + " + ".join(filter(None, (stored, fixed)))
