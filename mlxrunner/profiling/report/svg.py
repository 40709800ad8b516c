"""Draw small plots as inline SVG.

Colours are classes, so the style of the page decides them for light and dark. No library and no
script is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from mlxrunner.terminal.text import visible

LEFT, RIGHT, TOP, BOTTOM = 66, 20, 12, 42
LEAST = 1e-9
"""The least value that is drawn; no measurement is smaller."""
Format = Callable[[float], str]


def safe(text: str) -> str:
    """Make text of a file safe for a page: no markup, no control or reordering characters."""
    return escape(visible(text))


@dataclass(frozen=True)
class Scale:
    """A map from values between `low` and `high` to coordinates between `begin` and `end`.

    A logarithmic scale shows smaller values as `low`.
    """

    low: float
    high: float
    begin: float
    end: float
    is_log: bool = False

    @classmethod
    def around(
        cls, values: Iterable[float], begin: float, end: float, *, is_log: bool = False
    ) -> Scale:
        """Make a scale that holds `values` and ends at round numbers."""
        known = [max(value, LEAST) for value in values if value > 0] or [1.0]
        if is_log:
            low, high = (
                10.0 ** math.floor(math.log10(min(known))),
                10.0 ** math.ceil(math.log10(max(known))),
            )
            return cls(low, high if high > low else low * 10, begin, end, True)
        step = _step(max(known))
        return cls(0.0, math.ceil(max(known) / step) * step, begin, end)

    def __call__(self, value: float) -> float:
        """Return the coordinate of a value."""
        share = (
            math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
            if self.is_log
            else (value - self.low) / (self.high - self.low)
        )
        return round(self.begin + share * (self.end - self.begin), 1)

    @property
    def ticks(self) -> list[float]:
        """The round values that an axis shows."""
        if not self.is_log:
            step = _step(self.high)
            return [step * i for i in range(round(self.high / step) + 1)]
        powers = range(round(math.log10(self.low)), round(math.log10(self.high)) + 1)
        return [10.0**power for power in powers][:: -(-len(powers) // 7)]


class Plot:
    """Shapes on a picture of `width` x `height`, which the page scales to its room."""

    def __init__(self, width: int = 640, height: int = 270) -> None:
        self.width, self.height = width, height
        self.right, self.bottom = width - RIGHT, height - BOTTOM
        self._shapes: list[str] = []

    def render(self, title: str, description: str) -> str:
        """Return the image, with a name and a description for those who don't see it."""
        name, what = safe(title), safe(description)
        return (
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{name}. {what}">'
            f"<title>{name}</title><desc>{what}</desc>\n" + "\n".join(self._shapes) + "\n</svg>"
        )

    def y_axis(
        self, values: Iterable[float], name: str, text: Format, *, is_log: bool = False
    ) -> Scale:
        """Draw lines across, with their values at the left, and return the scale."""
        scale = Scale.around(values, self.bottom, TOP, is_log=is_log)
        for value in scale.ticks:
            y = scale(value)
            self._add(f'<line class="grid" x1="{LEFT}" x2="{self.right}" y1="{y}" y2="{y}"/>')
            self._text("tick", LEFT - 6, y + 4, text(value), "end")
        middle = (TOP + self.bottom) / 2
        turned = f'transform="translate(12 {middle}) rotate(-90)" text-anchor="middle"'
        self._add(f'<text class="name" {turned}>{safe(name)}</text>')
        return scale

    def x_axis(
        self, values: Iterable[float], name: str, text: Format, *, is_log: bool = False
    ) -> Scale:
        """Draw lines down, with their values below, and return the scale."""
        scale = Scale.around(values, LEFT, self.right, is_log=is_log)
        for value in scale.ticks:
            x = scale(value)
            self._add(f'<line class="grid" x1="{x}" x2="{x}" y1="{TOP}" y2="{self.bottom}"/>')
            self._text("tick", x, self.bottom + 15, text(value), "middle")
        self._name_x(name)
        return scale

    def x_steps(self, labels: Sequence[str], name: str, most: int = 6) -> Callable[[int], float]:
        """Draw at most `most` of the labels below steps of equal width.

        Return a function from the number of a step to where it begins.
        """
        step = (self.right - LEFT) / max(len(labels), 1)
        for index in range(0, len(labels), max(1, -(-len(labels) // most))):
            x = LEFT + (index + 0.5) * step
            anchor = "start" if x < LEFT + 40 else "end" if x > self.right - 40 else "middle"
            self._text(
                "tick", LEFT if anchor == "start" else x, self.bottom + 15, labels[index], anchor
            )
        self._name_x(name)
        return lambda index: LEFT + index * step

    def bar(
        self, kind: str, x: float, y: float, width: float, height: float, hint: str = ""
    ) -> None:
        """Draw a rectangle, with a `hint` for the pointer."""
        title = f"<title>{safe(hint)}</title>" if hint else ""
        place = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}"'
        self._add(f'<rect class="{kind}" {place}>{title}</rect>')

    def line(self, kind: str, points: Sequence[tuple[float, float]]) -> None:
        """Draw a line through points. A single point is drawn as a short dash."""
        if len(points) == 1:
            ((x, y),) = points
            points = [(x - 4, y), (x + 4, y)]
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._add(f'<polyline class="line {kind}" points="{drawn}"/>')

    def mark(self, kind: str, x: float, y: float) -> None:
        """Draw a request: a circle for a hit, a triangle for a partial hit, a square for a miss.

        The shapes can be told apart without colours.
        """
        if kind == "hit":
            self._add(f'<circle class="mark hit" cx="{x}" cy="{y}" r="3.4"/>')
        else:
            shape = (
                f"M{x - 3.2:.1f} {y - 3.2:.1f}h6.4v6.4h-6.4z"
                if kind == "miss"
                else f"M{x} {y - 4:.1f}l4 7h-8z"
            )
            self._add(f'<path class="mark {kind}" d="{shape}"/>')

    def bars_across(
        self, kind: str, rows: Sequence[tuple[str, float, str]], left: float, right: float
    ) -> None:
        """Draw a bar for each (name, value, value in words).

        The bars begin at `left`, and the longest ends at `right`. Names stand before the bars and
        words after them.
        """
        scale = Scale(0, max(value for _, value, _ in rows), left, right)
        step = self.height / len(rows)
        for index, (name, value, words) in enumerate(rows):
            y = (index + 0.5) * step
            self._text("label", left - 8, y + 4, name, "end")
            self.bar(kind, left, y - step * 0.31, scale(value) - left, step * 0.62)
            self._text("tick", scale(value) + 8, y + 4, words, "start")

    def _text(self, kind: str, x: float, y: float, text: str, anchor: str) -> None:
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        self._add(f'<text class="{kind}" {place}>{safe(text)}</text>')

    def _name_x(self, name: str) -> None:
        self._text("name", (LEFT + self.right) / 2, self.height - 6, name, "middle")

    def _add(self, shape: str) -> None:
        self._shapes.append(shape)


def _step(high: float) -> float:
    """Return a round step that gives 3 to 6 ticks."""
    power = 10.0 ** math.floor(math.log10(high))
    return next(power * factor for factor in (0.2, 0.5, 1, 2, 5) if high / (power * factor) <= 6)
