"""What a batch will cost, before anything runs: tokens evaluated in each order, at best, and the time that this takes. No weights needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mlxrunner.batch.order import Cost, cost
from mlxrunner.batch.speed import Speed
from mlxrunner.batch.store import Order, Store
from mlxrunner.cache.tokens import TokenArray


@dataclass(frozen=True)
class BatchPlan:
    """Counts of lines: of the input, `broken` ones (they get an error and are not run), and `done` ones (of a run that is continued).

    Counts of prompt tokens, of the lines that are left to run: `tokens`, and how many are evaluated with one entry in the order of the
    input, in prefix order, and by a cache of any size (`evaluated_at_best`: the nodes of the tree of prefixes). `answer_tokens`: the most
    that are expected. `seconds` for `order`, by the `speed` that was measured last; None where there is none.
    """

    lines: int
    broken: int
    done: int
    tokens: int
    evaluated_in_input_order: int
    evaluated_in_prefix_order: int
    evaluated_at_best: int
    order: Order
    answer_tokens: float | None
    seconds: float | None
    speed: Speed | None

    @property
    def evaluated(self) -> int:
        """Prompt tokens evaluated in the order that was chosen."""
        return self.evaluated_in_prefix_order if self.order == "prefix" else self.evaluated_in_input_order

    @property
    def saved(self) -> float:
        """The share of prompt tokens that this order does not evaluate."""
        return 1 - self.evaluated / self.tokens if self.tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"evaluated": self.evaluated, "saved": self.saved}

    def table(self) -> str:
        """For people: a line per count, with a remark."""
        remarks = [f"{self.broken} can't be run" if self.broken else "", f"{self.done} are done" if self.done else ""]
        rows = [
            ("lines", self.lines, ", ".join(filter(None, remarks))),
            ("prompt tokens", self.tokens, ""),
            ("evaluated in input order", self.evaluated_in_input_order, self._share(self.evaluated_in_input_order)),
            ("evaluated in prefix order", self.evaluated_in_prefix_order, self._share(self.evaluated_in_prefix_order)),
            ("evaluated at best", self.evaluated_at_best, "by a cache of any size"),
        ]
        wide = max(len(f"{count:,}") for _, count, _ in rows)
        text = [f"{what:<25}  {count:>{wide},}  {remark}".rstrip() for what, count, remark in rows]
        return "\n".join([*text, self._time()])

    def _share(self, evaluated: int) -> str:
        return f"{1 - evaluated / self.tokens:.0%} saved" if self.tokens else ""

    def _time(self) -> str:
        if self.seconds is None or self.speed is None:
            return "no estimate of the time: this model's speed is known after its first batch"
        speed = self.speed
        return (
            f"about {duration(self.seconds)} in {self.order} order, as fast as last time: prompts {speed.prefill_rate:.0f} tokens/s, "
            f"answers {speed.decode_rate:.0f} tokens/s and {speed.answer_tokens:.0f} tokens long"
        )


def make_plan(
    store: Store, order: Order = "prefix", *, speed: Speed | None = None, defaults: Mapping[str, Any] | None = None
) -> BatchPlan:
    """The plan for the lines of a complete store that have no result yet. `defaults`: options of lines that don't say otherwise."""
    counts = store.counts
    answers = _Answers(speed, (defaults or {}).get("max_tokens"))
    by_input = cost(_prompts(store, "input", None))
    by_prefix: Cost = cost(_prompts(store, "prefix", answers))
    evaluated = (by_prefix if order == "prefix" else by_input).evaluated
    return BatchPlan(
        lines=counts.lines,
        broken=counts.broken,
        done=counts.done,
        tokens=by_input.tokens,
        evaluated_in_input_order=by_input.evaluated,
        evaluated_in_prefix_order=by_prefix.evaluated,
        evaluated_at_best=by_prefix.nodes,
        order=order,
        answer_tokens=answers.total if speed else None,
        seconds=speed.seconds(evaluated, answers.total) if speed else None,
        speed=speed,
    )


class _Answers:
    """Adds up the expected lengths of answers: as long as the mean was, but no longer than is allowed."""

    def __init__(self, speed: Speed | None, limit: int | None) -> None:
        self._mean = speed.answer_tokens if speed else 0.0
        self._limit = limit
        self.total = 0.0

    def add(self, options: Mapping[str, Any]) -> None:
        limit = options.get("max_tokens", self._limit)
        self.total += self._mean if limit is None else min(self._mean, limit)


def _prompts(store: Store, order: Order, answers: _Answers | None) -> Iterator[TokenArray]:
    for entry in store.pending(order):
        if entry.error is None:
            if answers is not None:
                answers.add(entry.options)
            yield entry.tokens


def duration(seconds: float) -> str:
    """Time for people: 40 s, 3 min 20 s, 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
