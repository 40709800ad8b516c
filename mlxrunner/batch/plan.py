"""What a batch will cost, before anything runs: tokens evaluated in each order, at best, and the time that this takes. No weights needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mlxrunner.batch.order import Cost, cost
from mlxrunner.batch.speed import Speed
from mlxrunner.batch.store import Counts, Entry, Order
from mlxrunner.cache.tokens import TokenArray
from mlxrunner.overflow import Shift

_COUNTED = "all of the prompts alone, one line at a time: one that goes on like the answer before it costs less"


@dataclass(frozen=True)
class BatchPlan:
    """Counts of lines: of the input, `broken` ones (they get an error and are not run), `done` ones (of a run that is continued),
    and those `to_run`.

    Counts of prompt tokens, of the lines that are left to run: `tokens`, and how many are evaluated with one entry in the order of the
    input, in prefix order, and by a cache of any size (`evaluated_at_best`: the nodes of the tree of prefixes). `answer_tokens`: the most
    that are expected; `parallel`: how many lines run at a time, as far as they fit. `seconds` for `order`, by the `speed` that was measured
    last; None where there is none.
    """

    lines: int
    broken: int
    done: int
    to_run: int
    tokens: int
    evaluated_in_input_order: int
    evaluated_in_prefix_order: int
    evaluated_at_best: int
    order: Order
    parallel: int
    answer_tokens: float | None
    seconds: float | None
    speed: Speed | None

    @property
    def evaluated(self) -> int:
        """Prompt tokens evaluated in the order that was chosen."""
        return (
            self.evaluated_in_prefix_order
            if self.order == "prefix"
            else self.evaluated_in_input_order
        )

    @property
    def saved(self) -> float:
        """The share of prompt tokens that this order does not evaluate."""
        return 1 - self.evaluated / self.tokens if self.tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"evaluated": self.evaluated, "saved": self.saved}

    def table(self) -> str:
        """For people: a line per count, with a remark."""
        remarks = [
            f"{self.broken} can't be run" if self.broken else "",
            f"{self.done} are done" if self.done else "",
        ]
        rows = [
            ("lines", self.lines, ", ".join(filter(None, remarks))),
            ("prompt tokens", self.tokens, ""),
            (
                "evaluated in input order",
                self.evaluated_in_input_order,
                self._share(self.evaluated_in_input_order),
            ),
            (
                "evaluated in prefix order",
                self.evaluated_in_prefix_order,
                self._share(self.evaluated_in_prefix_order),
            ),
            ("evaluated at best", self.evaluated_at_best, "by a cache of any size"),
        ]
        wide = max(len(f"{count:,}") for _, count, _ in rows)
        text = [f"{what:<25}  {count:>{wide},}  {remark}".rstrip() for what, count, remark in rows]
        return "\n".join(
            [
                *text,
                _COUNTED,
                self._time(),
                f"{self.parallel} at a time, as far as they fit into memory",
            ]
        )

    def _share(self, evaluated: int) -> str:
        return f"{1 - evaluated / self.tokens:.0%} saved" if self.tokens else ""

    def _time(self) -> str:
        if self.seconds is None or self.speed is None:
            return "no estimate of the time: this model's speed is known after its first batch"
        speed = self.speed
        answers = f"answers {speed.decode_rate:.0f} tokens/s"
        if self.to_run and self.answer_tokens is not None:
            answers += f" and {self.answer_tokens / self.to_run:.0f} tokens long"
        return (
            f"about {duration(self.seconds)} in {self.order} order, as fast as last time: "
            f"prompts {speed.prefill_rate:.0f} tokens/s, {answers}"
        )


def make_plan(
    counts: Counts,
    found: Mapping[Order, Survey],
    order: Order,
    *,
    parallel: int,
    speed: Speed | None = None,
) -> BatchPlan:
    """The plan for lines that were surveyed in both orders. `parallel`: at a time; `speed`: the one with which they were surveyed."""
    by_input, by_prefix, chosen = found["input"].cost, found["prefix"].cost, found[order]
    return BatchPlan(
        lines=counts.lines,
        broken=counts.broken,
        done=counts.done,
        to_run=chosen.lines,
        tokens=by_input.tokens,
        evaluated_in_input_order=by_input.evaluated,
        evaluated_in_prefix_order=by_prefix.evaluated,
        evaluated_at_best=by_prefix.nodes,
        order=order,
        parallel=parallel,
        answer_tokens=chosen.answer_tokens if speed else None,
        seconds=speed.seconds(chosen.evaluated, chosen.answer_tokens) if speed else None,
        speed=speed,
    )


@dataclass(frozen=True)
class Survey:
    """Of the lines that are to be run, in one order: their `cost`, the `longest_prompt` and `longest_answer` (None: no limit) in tokens.

    `answer_tokens`: how long all answers are expected to be: as long as the mean was, but no longer than is allowed.
    """

    cost: Cost
    longest_prompt: int
    longest_answer: int | None
    answer_tokens: float

    @property
    def lines(self) -> int:
        return self.cost.prompts

    @property
    def evaluated(self) -> int:
        """By one entry, one line at a time."""
        return self.cost.evaluated

    @property
    def new_tokens(self) -> float:
        """That a line has beyond what it shares with the one before."""
        return self.evaluated / self.lines if self.lines else 0.0

    def cells(self, lanes: int, context: int) -> int:
        """Tokens that may have to be stored at once, as if nothing was shared."""
        answer = context if self.longest_answer is None else self.longest_answer
        return lanes * min(context, self.longest_prompt + answer)


def survey(
    entries: Iterable[Entry], defaults: Mapping[str, Any], context: int, speed: Speed | None = None
) -> Survey:
    """Of the entries that can be run, in their order. One of them is in memory at a time."""
    mean = speed.answer_tokens if speed else 0.0
    longest = answer = 0
    expected, is_limited = 0.0, True

    def prompts() -> Iterator[TokenArray]:
        nonlocal longest, answer, expected, is_limited
        for entry in entries:
            if entry.error is None:
                options = {**defaults, **entry.options}
                limit, tokens = options.get("max_tokens"), _within(context, entry.tokens, options)
                longest, answer = max(longest, len(tokens)), max(answer, limit or 0)
                expected += mean if limit is None else min(mean, limit)
                is_limited = is_limited and limit is not None
                yield tokens

    found = cost(prompts())
    return Survey(found, longest, answer if is_limited else None, expected)


def _within(context: int, tokens: TokenArray, options: Mapping[str, Any]) -> TokenArray:
    """What is run of a prompt that is shifted because it does not fit."""
    if options.get("overflow") != "shift" or len(tokens) < context:
        return tokens
    shift = Shift(context, min(options.get("keep") or 0, context - 2))
    return np.concatenate([tokens[: shift.keep], tokens[shift.keep + shift.discard(len(tokens)) :]])


def duration(seconds: float) -> str:
    """Time for people: 40 s, 3 min 20 s, 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
