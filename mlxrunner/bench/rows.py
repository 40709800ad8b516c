"""Rows of a comparison: a table for people, one line of JSON for programs. Knows nothing about what was measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Row:
    """One measurement: a value a round on each side. `compared`, also a round: the gain (`target`: at least) or the excess (at most)."""

    name: str
    unit: str
    ours: Sequence[float]
    other: Sequence[float]
    compared: Sequence[float]
    is_excess: bool = False
    target: float | None = None

    @property
    def is_met(self) -> bool | None:
        """Whether the median meets the target; None without one."""
        if self.target is None:
            return None
        return (
            median(self.compared) <= self.target
            if self.is_excess
            else median(self.compared) >= self.target
        )

    @property
    def verdict(self) -> str:
        return (
            ""
            if self.target is None
            else f"{'<=' if self.is_excess else '>='} {self.target:g} {'met' if self.is_met else 'MISSED'}"
        )

    def as_dict(self) -> dict[str, Any]:
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
) -> Row:
    return Row(
        name, unit, ours, other, [a / b for a, b in zip(ours, other, strict=True)], target=target
    )


def less_is_better(name: str, unit: str, ours: Sequence[float], other: Sequence[float]) -> Row:
    return Row(name, unit, ours, other, [b / a for a, b in zip(ours, other, strict=True)])


def excess(
    name: str, unit: str, ours: Sequence[float], other: Sequence[float], target: float | None = None
) -> Row:
    return Row(
        name,
        unit,
        ours,
        other,
        [a - b for a, b in zip(ours, other, strict=True)],
        is_excess=True,
        target=target,
    )


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Minimum, median, maximum."""
    return short(min(values)), short(median(values)), short(max(values))


def table_of(rows: Sequence[Row], ours: str = "runner", other: str = "other") -> list[str]:
    """Lines: medians over the rounds, and the spread of the gain ("x") or of the excess ("+")."""
    width = max(len(row.name) for row in rows)
    header = f"{'':{width}}  {'unit':>5}  {ours:>7}  {other:>7}     {'min':>7}  {'median':>7}  {'max':>7}"
    lines = [header + ("  target" if any(row.target is not None for row in rows) else "")]
    for row in rows:
        low, middle, high = spread(row.compared)
        numbers = f"{short(median(row.ours)):>7g}  {short(median(row.other)):>7g}  {'+' if row.is_excess else 'x'}"
        lines.append(
            f"{row.name:{width}}  {row.unit:>5}  {numbers}  {low:>7g}  {middle:>7g}  {high:>7g}  {row.verdict}".rstrip()
        )
    return lines


def print_table(rows: Sequence[Row]) -> None:
    print("\n".join(table_of(rows)))


def print_json(rows: Sequence[Row], **about: Any) -> None:
    print(json.dumps({**about, "results": [row.as_dict() for row in rows]}))


def short(value: float) -> float:
    """Four digits are more than such a measurement has."""
    return float(f"{value:.4g}")
