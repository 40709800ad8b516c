"""Hold the results of measurements: figures, and comparisons of two backends.

A figure knows the share of a ceiling that it reaches. People get a table; programs get a dictionary
or one line of JSON. No tensors.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Figure:
    """A quantity that was measured once a round."""

    name: str
    unit: str
    values: Sequence[float]
    """The value of each round, in `unit`."""
    share: float | None = None
    """The share of the ceiling that the median reaches; None if there is no ceiling."""
    ceiling: str | None = None
    """The name of the ceiling."""
    evaluated: int | None = None
    """The prompt tokens that the model evaluated, where the entry held some of them; else None."""
    passes: int | None = None
    """The forward passes of the answer, where some of its tokens were guessed; else None."""

    def as_dict(self) -> dict[str, Any]:
        """Return the figure with minimum, median and maximum of its values."""
        low, middle, high = spread(self.values)
        return {
            "name": self.name,
            "unit": self.unit,
            "min": low,
            "median": middle,
            "max": high,
            "share": None if self.share is None else short(self.share),
            "ceiling": self.ceiling,
            "evaluated": self.evaluated,
            "passes": self.passes,
        }


@dataclass(frozen=True)
class Comparison:
    """A quantity that was measured once a round for each of two backends."""

    name: str
    unit: str
    ours: Sequence[float]
    """The value of our backend in each round, in `unit`."""
    other: Sequence[float]
    """The value of the other backend in each round, in `unit`."""
    compared: Sequence[float]
    """The gain of each round (how many times better ours is), or the excess (ours - other)."""
    is_excess: bool = False
    """True if `compared` holds excesses."""
    target: float | None = None
    """The least gain or the largest excess that the median has to reach; None for no target."""

    @property
    def is_met(self) -> bool | None:
        """True if the median meets the target; None without a target."""
        if self.target is None:
            return None
        middle = median(self.compared)
        return middle <= self.target if self.is_excess else middle >= self.target

    @property
    def verdict(self) -> str:
        """The target and the word "met" or "MISSED"; empty without a target."""
        if self.target is None:
            return ""
        bound = "<=" if self.is_excess else ">="
        return f"{bound} {self.target:g} {'met' if self.is_met else 'MISSED'}"

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison with the medians, and the spread of its gain or excess."""
        low, middle, high = spread(self.compared)
        return {
            "name": self.name,
            "unit": self.unit,
            "ours": short(median(self.ours)),
            "other": short(median(self.other)),
            "excess" if self.is_excess else "gain": {"min": low, "median": middle, "max": high},
            "target": self.target,
            "met": self.is_met,
        }


def more_is_better(
    name: str, unit: str, ours: Sequence[float], other: Sequence[float], target: float | None = None
) -> Comparison:
    """Compare by gain: ours / other in each round."""
    gains = [a / b for a, b in zip(ours, other, strict=True)]
    return Comparison(name, unit, ours, other, gains, target=target)


def less_is_better(
    name: str, unit: str, ours: Sequence[float], other: Sequence[float]
) -> Comparison:
    """Compare by gain: other / ours in each round."""
    gains = [b / a for a, b in zip(ours, other, strict=True)]
    return Comparison(name, unit, ours, other, gains)


def excess(
    name: str, unit: str, ours: Sequence[float], other: Sequence[float], target: float | None = None
) -> Comparison:
    """Compare by excess: ours - other in each round."""
    excesses = [a - b for a, b in zip(ours, other, strict=True)]
    return Comparison(name, unit, ours, other, excesses, is_excess=True, target=target)


@dataclass
class Measurements:
    """The results of a bench; all three fields grow while it runs."""

    about: dict[str, Any] = field(default_factory=dict)
    """The model, the machine and the versions that were measured."""
    figures: list[Figure] = field(default_factory=list)
    """The figures of our own backend and of the machine."""
    comparisons: list[Comparison] = field(default_factory=list)
    """The comparisons with mlx-lm."""

    def as_dict(self) -> dict[str, Any]:
        """Return the measurements for programs."""
        return {
            **self.about,
            "figures": [figure.as_dict() for figure in self.figures],
            "versus": [comparison.as_dict() for comparison in self.comparisons],
        }

    def table(self) -> str:
        """Return the measurements as text for people."""
        lines = [", ".join(f"{name} {value}" for name, value in self.about.items())]
        if self.figures:
            width = max(len(figure.name) for figure in self.figures)
            heads = f"{'unit':>7}  {'min':>7}  {'median':>7}  {'max':>7}"
            lines.append(f"{'':{width}}  {heads}  share of the ceiling")
            lines += [_figure_line(figure, width) for figure in self.figures]
        if self.comparisons:
            lines += ["", 'against mlx-lm ("x": how many times better we are)']
            lines += table_of(self.comparisons, "ours", "mlx-lm")
        return "\n".join(lines)


def table_of(
    comparisons: Sequence[Comparison], ours: str = "runner", other: str = "other"
) -> list[str]:
    """Return the lines of a table of comparisons.

    A line has the medians over the rounds, and the spread of the gain ("x") or of the excess ("+").
    `ours` and `other` name the columns of the backends.
    """
    width = max(len(one.name) for one in comparisons)
    heads = f"{'unit':>5}  {ours:>7}  {other:>7}     {'min':>7}  {'median':>7}  {'max':>7}"
    has_target = any(one.target is not None for one in comparisons)
    lines = [f"{'':{width}}  {heads}" + ("  target" if has_target else "")]
    for one in comparisons:
        low, middle, high = spread(one.compared)
        medians = f"{short(median(one.ours)):>7g}  {short(median(one.other)):>7g}"
        sign = "+" if one.is_excess else "x"
        spreads = f"{low:>7g}  {middle:>7g}  {high:>7g}"
        line = f"{one.name:{width}}  {one.unit:>5}  {medians}  {sign}  {spreads}  {one.verdict}"
        lines.append(line.rstrip())
    return lines


def print_table(comparisons: Sequence[Comparison]) -> None:
    """Print a table of comparisons on standard output."""
    print("\n".join(table_of(comparisons)))


def print_json(comparisons: Sequence[Comparison], **about: Any) -> None:
    """Print the comparisons and `about` as one line of JSON on standard output."""
    print(json.dumps({**about, "results": [one.as_dict() for one in comparisons]}))


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return minimum, median and maximum."""
    return short(min(values)), short(median(values)), short(max(values))


def short(value: float) -> float:
    """Round to four digits, more than such a measurement has."""
    return float(f"{value:.4g}")


def _figure_line(figure: Figure, width: int) -> str:
    low, middle, high = spread(figure.values)
    share = "" if figure.share is None else f"{figure.share:6.1%} of {figure.ceiling}"
    evaluated = "" if figure.evaluated is None else f"  ({figure.evaluated} evaluated)"
    passes = "" if figure.passes is None else f"  ({figure.passes} passes)"
    spreads = f"{low:>7g}  {middle:>7g}  {high:>7g}"
    line = f"{figure.name:{width}}  {figure.unit:>7}  {spreads}  {share}{evaluated}{passes}"
    return line.rstrip()
