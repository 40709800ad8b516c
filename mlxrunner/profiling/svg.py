"""Small plots as inline SVG. Colours are classes, so that the page's style decides them for light and dark; no library, no script."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from mlxrunner.terminal import visible

LEFT, RIGHT, TOP, BOTTOM = 66, 20, 12, 42
LEAST = 1e-9
"""What is smaller is drawn as that: nothing that is measured here is."""
Format = Callable[[float], str]


def safe(text: str) -> str:
    """Text of a file as part of a page: no markup, no control or reordering characters."""
    return escape(visible(text))


@dataclass(frozen=True)
class Scale:
    """Values `low .. high` on the coordinates `begin .. end`; logarithmic ones show nothing below `low`."""

    low: float
    high: float
    begin: float
    end: float
    is_log: bool = False

    @classmethod
    def around(
        cls, values: Iterable[float], begin: float, end: float, *, is_log: bool = False
    ) -> Scale:
        """One that holds `values` and ends at round numbers."""
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
        if self.is_log:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return round(self.begin + share * (self.end - self.begin), 1)

    @property
    def ticks(self) -> list[float]:
        if not self.is_log:
            step = _step(self.high)
            return [step * i for i in range(round(self.high / step) + 1)]
        powers = range(round(math.log10(self.low)), round(math.log10(self.high)) + 1)
        return [10.0**power for power in powers][:: -(-len(powers) // 7)]


class Plot:
    """Shapes on a picture of `width` x `height`; the page scales it to the room there is."""

    def __init__(self, width: int = 640, height: int = 270) -> None:
        self.width, self.height = width, height
        self.right, self.bottom = width - RIGHT, height - BOTTOM
        self._shapes: list[str] = []

    def render(self, title: str, description: str) -> str:
        """An image with a name and a description for those who don't see it."""
        name, what = safe(title), safe(description)
        return (
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{name}. {what}">'
            f"<title>{name}</title><desc>{what}</desc>\n" + "\n".join(self._shapes) + "\n</svg>"
        )

    def y_axis(
        self, values: Iterable[float], name: str, text: Format, *, is_log: bool = False
    ) -> Scale:
        """Lines across, their values at the left."""
        scale = Scale.around(values, self.bottom, TOP, is_log=is_log)
        for value in scale.ticks:
            y = scale(value)
            self._add(f'<line class="grid" x1="{LEFT}" x2="{self.right}" y1="{y}" y2="{y}"/>')
            self._text("tick", LEFT - 6, y + 4, text(value), "end")
        middle = (TOP + self.bottom) / 2
        self._add(
            f'<text class="name" transform="translate(12 {middle}) rotate(-90)" text-anchor="middle">{safe(name)}</text>'
        )
        return scale

    def x_axis(
        self, values: Iterable[float], name: str, text: Format, *, is_log: bool = False
    ) -> Scale:
        """Lines down, their values below."""
        scale = Scale.around(values, LEFT, self.right, is_log=is_log)
        for value in scale.ticks:
            x = scale(value)
            self._add(f'<line class="grid" x1="{x}" x2="{x}" y1="{TOP}" y2="{self.bottom}"/>')
            self._text("tick", x, self.bottom + 15, text(value), "middle")
        self._name_x(name)
        return scale

    def x_steps(self, labels: Sequence[str], name: str, most: int = 6) -> Callable[[int], float]:
        """As many steps of equal width, some of which get their label; gives where each begins."""
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
        title = f"<title>{safe(hint)}</title>" if hint else ""
        place = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}"'
        self._add(f'<rect class="{kind}" {place}>{title}</rect>')

    def line(self, kind: str, points: Sequence[tuple[float, float]]) -> None:
        """A line through points; a single one is drawn as a short dash."""
        if len(points) == 1:
            ((x, y),) = points
            points = [(x - 4, y), (x + 4, y)]
        self._add(
            f'<polyline class="line {kind}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'
        )

    def mark(self, kind: str, x: float, y: float) -> None:
        """Hits are circles, partial hits triangles, misses squares: told apart without colours, too."""
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
        """A bar for each (name, value, value in words) from `left` on, the longest up to `right`; names before, words after them."""
        scale = Scale(0, max(value for _, value, _ in rows), left, right)
        step = self.height / len(rows)
        for index, (name, value, words) in enumerate(rows):
            y = (index + 0.5) * step
            self._text("label", left - 8, y + 4, name, "end")
            self.bar(kind, left, y - step * 0.31, scale(value) - left, step * 0.62)
            self._text("tick", scale(value) + 8, y + 4, words, "start")

    def _text(self, kind: str, x: float, y: float, text: str, anchor: str) -> None:
        self._add(
            f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{safe(text)}</text>'
        )

    def _name_x(self, name: str) -> None:
        self._text("name", (LEFT + self.right) / 2, self.height - 6, name, "middle")

    def _add(self, shape: str) -> None:
        self._shapes.append(shape)


def _step(high: float) -> float:
    """A round step that gives 3 to 6 ticks."""
    power = 10.0 ** math.floor(math.log10(high))
    return next(power * factor for factor in (0.2, 0.5, 1, 2, 5) if high / (power * factor) <= 6)
