"""Say what a cut costs: the work of each machine, against that of one machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from mlxrunner.batch.shards.cut import Costs, cut, extra_of
from mlxrunner.batch.speed import Speed
from mlxrunner.terminal.text import count_of, duration

MOST_SHOWN = 16
"""The most workers of which each has a line in the table."""


@dataclass(frozen=True)
class Part:
    """The work of one worker."""

    lines: int
    """The lines that it runs."""
    evaluated: int
    """The prompt tokens that it evaluates."""
    seconds: float | None
    """The seconds that it is expected to take; None if no speed is known."""


@dataclass(frozen=True)
class CutPlan:
    """The parts of a batch for several workers."""

    parts: Sequence[Part]
    """The work of each worker, in the order of the shards."""
    evaluated: int
    """The prompt tokens that all workers evaluate."""
    extra: float
    """The tokens that are evaluated again, as a share of those that one machine evaluates."""
    seconds: float | None
    """The seconds of the worker that takes longest; None if no speed is known."""

    @classmethod
    def of(cls, costs: Costs, workers: int, answers: float, speed: Speed | None) -> CutPlan:
        """Cut lines with these costs for `workers` that all have the `speed` of this machine.

        `answers` are the expected tokens of all answers.
        """
        places = cut(costs, workers)
        expected = int(costs.answers.sum()) or 1

        def part(first: int, end: int) -> Part:
            evaluated = costs.evaluated_of(first, end)
            own = answers * int(costs.answers[first:end].sum()) / expected
            return Part(end - first, evaluated, speed.seconds(evaluated, own) if speed else None)

        parts = [part(first, end) for first, end in pairwise(places)]
        evaluated = sum(one.evaluated for one in parts)
        alone = evaluated - extra_of(costs, places)
        seconds = [one.seconds for one in parts if one.seconds is not None]
        extra = evaluated / alone - 1 if alone else 0.0
        return cls(parts, evaluated, extra, max(seconds, default=None))

    def lines(self) -> list[str]:
        """Return the plan as lines of text for people."""
        busy = [(number, part) for number, part in enumerate(self.parts, 1) if part.lines]
        count = count_of(len(self.parts), "worker")
        text = [
            f"cut for {count}: {self.evaluated:,} tokens evaluated, "
            f"{self.extra:.1%} more than by one machine"
        ]
        if len(busy) <= MOST_SHOWN:
            text += [f"  worker {n}: {_described(part)}" for n, part in busy]
        else:
            least = min((part for _, part in busy), key=lambda part: part.evaluated)
            most = max((part for _, part in busy), key=lambda part: part.evaluated)
            text += [f"  least: {_described(least)}", f"  most: {_described(most)}"]
        if len(busy) < len(self.parts):
            idle = count_of(len(self.parts) - len(busy), "worker")
            text.append(f"  {idle} without lines: to split more would cost more than it saves")
        if self.seconds is not None:
            text.append(f"about {duration(self.seconds)} on {count} as fast as this machine")
        return text


def _described(part: Part) -> str:
    seconds = "" if part.seconds is None else f", about {duration(part.seconds)}"
    return f"{count_of(part.lines, 'line')}, {part.evaluated:,} tokens evaluated{seconds}"
