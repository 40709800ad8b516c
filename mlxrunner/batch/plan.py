"""Estimate what a batch costs before it runs.

A plan has the tokens evaluated in each order, the number of lines at a time, and the seconds. It
needs no weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mlxrunner.batch.options import Order
from mlxrunner.batch.prompts import Cost, cost
from mlxrunner.batch.records import BriefLine, Counts, StoredLine
from mlxrunner.batch.shards.plan import CutPlan
from mlxrunner.batch.speed import Speed
from mlxrunner.cache.tokens import Shift, TokenArray
from mlxrunner.terminal.text import duration

MOST, LONG, FEWER = 8, 1024, 4
"""Run MOST lines at a time, but FEWER if lines have more than LONG new tokens on average.

Measured by benchmarks/lanes.py on MLX's CPU backend: 8 lines bring about as much as 16. The gain
shrinks as the new part gets longer and the answer shorter; the memory grows with both.
"""
_COUNTED = (
    "these counts take one line at a time and no answers: a prompt that continues the answer "
    "before it costs less"
)


@dataclass(frozen=True)
class Survey:
    """The lines that are to be run, in one order."""

    cost: Cost
    """The tokens of the prompts in this order."""
    longest_prompt: int
    """The tokens of the longest prompt."""
    longest_answer: int | None
    """The most tokens of an answer; None if a line has no limit."""
    answer_tokens: float
    """The expected tokens of all answers, each of the mean length or its limit if that is less."""

    @property
    def lines(self) -> int:
        """The number of lines."""
        return self.cost.prompts

    @property
    def evaluated(self) -> int:
        """The prompt tokens that one entry evaluates, one line at a time."""
        return self.cost.evaluated

    @property
    def new_tokens(self) -> float:
        """The mean number of tokens that a line does not share with the line before it."""
        return self.evaluated / self.lines if self.lines else 0.0

    def cells(self, lanes: int, context: int) -> int:
        """Return the most tokens that `lanes` lines store at once, if they share nothing.

        `context` is the most tokens of a prompt and its answer.
        """
        answer = context if self.longest_answer is None else self.longest_answer
        return lanes * min(context, self.longest_prompt + answer)


def survey(
    lines: Iterable[StoredLine | BriefLine],
    defaults: Mapping[str, Any],
    context: int,
    speed: Speed | None = None,
) -> Survey:
    """Survey the lines that can be run, in their order, with two in memory at a time.

    `defaults` are the options of the batch, and `context` is the most tokens of a prompt and its
    answer. Without a `speed` no answer tokens are expected.
    """
    mean = speed.answer_tokens if speed else 0.0
    longest = answer = 0
    expected, is_limited = 0.0, True

    def prompts() -> Iterator[TokenArray]:
        nonlocal longest, answer, expected, is_limited
        for line in lines:
            if line.error is None:
                limit, tokens = limit_of(line, defaults), line.tokens
                if len(tokens) >= context:
                    tokens = _within(context, tokens, {**defaults, **line.options})
                longest, answer = max(longest, len(tokens)), max(answer, limit or 0)
                expected += mean if limit is None else min(mean, limit)
                is_limited = is_limited and limit is not None
                yield tokens

    found = cost(prompts())
    return Survey(found, longest, answer if is_limited else None, expected)


def limit_of(line: StoredLine | BriefLine, defaults: Mapping[str, Any]) -> int | None:
    """Return the most tokens of a line's answer; None without a limit.

    `defaults` are the options of the batch.
    """
    limit: int | None = line.options.get("max_tokens", defaults.get("max_tokens"))
    return limit


def _within(context: int, tokens: TokenArray, options: Mapping[str, Any]) -> TokenArray:
    """Return the tokens that are run of a prompt that does not fit, after a shift if allowed."""
    if options.get("overflow") != "shift":
        return tokens
    shift = Shift(context, min(options.get("keep") or 0, context - 2))
    return np.concatenate([tokens[: shift.keep], tokens[shift.keep + shift.discard(len(tokens)) :]])


def worth(evaluated: int, lines: int) -> int:
    """Return the number of lines at a time that is likely to be fastest.

    `evaluated` is the number of prompt tokens that one entry would evaluate for all `lines`.
    """
    return max(1, min(MOST if evaluated <= LONG * lines else FEWER, lines))


def lanes_for(found: Survey, wanted: int | None, loading: Mapping[str, Any]) -> tuple[int, str]:
    """Return the number of lines at a time, and the reason if the options allow only one.

    The reason is else empty. The number may fall again when the model is loaded and several lines
    do not fit. `wanted` is the number asked for, or None for the fastest; `loading` holds the
    options of `Runner.load`.
    """
    lanes = max(1, min(wanted, found.lines)) if wanted else worth(found.evaluated, found.lines)
    if lanes > 1 and loading.get("kv_bits"):
        return 1, "--kv-bits stores one sequence only"
    return lanes, ""


@dataclass(frozen=True)
class BatchPlan:
    """The cost of a batch. Prompt tokens are those of the lines that are left to run."""

    lines: int
    """The number of lines of the input."""
    broken: int
    """The number of lines that get an error and are not run."""
    done: int
    """The number of lines that a resumed run has answered before."""
    to_run: int
    """The number of lines that are left to run."""
    tokens: int
    """The prompt tokens of the lines to run."""
    evaluated_in_input_order: int
    """The prompt tokens evaluated with one entry in the order of the input."""
    evaluated_in_prefix_order: int
    """The prompt tokens evaluated with one entry in prefix order."""
    evaluated_at_best: int
    """The prompt tokens that a cache of any size evaluates: the nodes of the tree of prefixes."""
    order: Order
    """The order that was chosen."""
    parallel: int
    """The number of lines at a time, if they fit into memory."""
    answer_tokens: float | None
    """The expected answer tokens; None if no speed is known."""
    seconds: float | None
    """The expected seconds in the chosen order; None if no speed is known."""
    speed: Speed | None
    """The speed that was measured last; None if there is none."""
    cut: CutPlan | None = None
    """The parts for several machines, if the user asks for them."""

    @property
    def evaluated(self) -> int:
        """The prompt tokens evaluated in the chosen order."""
        if self.order == "prefix":
            return self.evaluated_in_prefix_order
        return self.evaluated_in_input_order

    @property
    def saved(self) -> float:
        """The share of prompt tokens that the chosen order does not evaluate, from 0 to 1."""
        return 1 - self.evaluated / self.tokens if self.tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return all fields by name, with `evaluated` and `saved`."""
        return asdict(self) | {"evaluated": self.evaluated, "saved": self.saved}

    def table(self) -> str:
        """Return the plan as text for people: a line per count, with remarks."""
        remarks = (
            f"{self.broken} can't be run" if self.broken else "",
            f"{self.done} are done" if self.done else "",
        )
        by_input, by_prefix = self.evaluated_in_input_order, self.evaluated_in_prefix_order
        rows = [
            ("lines", self.lines, ", ".join(filter(None, remarks))),
            ("prompt tokens", self.tokens, ""),
            ("evaluated in input order", by_input, self._share(by_input)),
            ("evaluated in prefix order", by_prefix, self._share(by_prefix)),
            ("evaluated at best", self.evaluated_at_best, "by a cache of any size"),
        ]
        wide = max(len(f"{count:,}") for _, count, _ in rows)
        text = [f"{what:<25}  {count:>{wide},}  {remark}".rstrip() for what, count, remark in rows]
        text += [_COUNTED, self._time()]
        text.append(f"{self.parallel} at a time, as far as they fit into memory")
        return "\n".join([*text, *([] if self.cut is None else self.cut.lines())])

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
    cut: CutPlan | None = None,
) -> BatchPlan:
    """Return the plan for lines that were surveyed in both orders.

    `parallel` is the number of lines at a time, and `speed` the one with which they were surveyed.
    `cut` has the parts for several machines.
    """
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
        cut=cut,
    )
