"""What a bench found: figures with their share of a ceiling, a table for people and a dictionary for programs. No tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxrunner.bench.rows import Row, short, spread, table_of


@dataclass(frozen=True)
class Figure:
    """A value per round. `share`: of the ceiling named `ceiling` that the median reaches; None where there is none. `evaluated`: prompt
    tokens that were run through the model, where some were in the entry."""

    name: str
    unit: str
    values: Sequence[float]
    share: float | None = None
    ceiling: str | None = None
    evaluated: int | None = None

    def as_dict(self) -> dict[str, Any]:
        low, middle, high = spread(self.values)
        share = None if self.share is None else short(self.share)
        return {
            "name": self.name, "unit": self.unit, "min": low, "median": middle, "max": high, "share": share, "ceiling": self.ceiling,
            "evaluated": self.evaluated,
        }  # fmt: skip


@dataclass
class Findings:
    """`about`: what was measured on what; `rows`: against mlx-lm. Both grow while the bench runs."""

    about: dict[str, Any] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.about,
            "figures": [figure.as_dict() for figure in self.figures],
            "versus": [row.as_dict() for row in self.rows],
        }

    def table(self) -> str:
        lines = [", ".join(f"{name} {value}" for name, value in self.about.items())]
        if self.figures:
            width = max(len(figure.name) for figure in self.figures)
            lines.append(
                f"{'':{width}}  {'unit':>7}  {'min':>7}  {'median':>7}  {'max':>7}  share of the ceiling"
            )
            lines += [_line(figure, width) for figure in self.figures]
        if self.rows:
            lines += [
                "",
                'against mlx-lm ("x": how many times better we are)',
                *table_of(self.rows, "ours", "mlx-lm"),
            ]
        return "\n".join(lines)


def _line(figure: Figure, width: int) -> str:
    low, middle, high = spread(figure.values)
    share = "" if figure.share is None else f"{figure.share:6.1%} of {figure.ceiling}"
    evaluated = "" if figure.evaluated is None else f"  ({figure.evaluated} evaluated)"
    return f"{figure.name:{width}}  {figure.unit:>7}  {low:>7g}  {middle:>7g}  {high:>7g}  {share}{evaluated}".rstrip()
