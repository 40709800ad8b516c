"""Draw small plots as inline SVG that fill the room they get.

Places along the x-axis are shares of the width, and places along the y-axis are pixels. So a plot
is as wide as its panel, while its text keeps the size of the page's text. matplotlib and Vega draw
at one width instead, and a browser scales their text with the picture: at 500 pixels, the ticks of
a timeline of 1,300 are 4 pixels high. Colours are classes, so the style of the page decides them
for light and dark. No library and no script is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from mlxrunner.terminal.text import visible

WIDE = 30
"""The least ratio of the largest to the smallest value that makes a scale logarithmic."""
LEAST = 1e-9
"""The least value that is drawn; no measurement is smaller."""
ROUND = (1.0, 2.0, 5.0)
"""The round numbers of a decade."""
MOST_TICKS = 7
SHORTEST = 0.004
"""The least share of a cell that a part of a bar takes, so that it is seen."""
Format = Callable[[float], str]


def safe(text: str) -> str:
    """Make text of a file safe for a page: no markup, no control or reordering characters."""
    return escape(visible(text))


@dataclass(frozen=True)
class Scale:
    """A map from values between `low` and `high` to shares between 0 and 1.

    A logarithmic scale shows smaller values as `low`.
    """

    low: float
    high: float
    is_log: bool = False

    @classmethod
    def around(cls, values: Iterable[float], *, from_zero: bool = False) -> Scale:
        """Make the scale on which `values` fill most of the room; it ends at round numbers.

        The scale is logarithmic if the values are far apart, unless it has to begin at zero.
        """
        known = [max(value, LEAST) for value in values if value > 0] or [1.0]
        low, high = min(known), max(known)
        if high > WIDE * low and not from_zero:
            return cls(_round_below(low), _round_above(high), True)
        step = round_step(high, 5)
        return cls(0.0, math.ceil(round(high / step, 9)) * step)

    def __call__(self, value: float) -> float:
        """Return the share of the axis at which a value lies."""
        if self.is_log:
            return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    @property
    def ticks(self) -> list[float]:
        """The round values that an axis shows."""
        if not self.is_log:
            step = round_step(self.high, 5)
            return [step * i for i in range(round(self.high / step) + 1)]
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for digits in (ROUND, (1.0, 3.0), (1.0,)):
            ticks = [
                digit * 10.0**power
                for power in powers
                for digit in digits
                if 0.999 * self.low <= digit * 10.0**power <= 1.001 * self.high
            ]
            if len(ticks) <= MOST_TICKS:
                return ticks
        return ticks[:: -(-len(ticks) // MOST_TICKS)]


class Plot:
    """Shapes above a row of ticks. Places on the x-axis are shares of the width, from 0 to 1."""

    def __init__(self, height: int = 220, widest: int | None = None) -> None:
        """Make a plot of `height` pixels, and of at most `widest`; None for all the room."""
        self.height, self._widest = height, widest
        self._shapes: list[str] = []

    def render(self, title: str, description: str) -> str:
        """Return the image, with a name and a description for those who don't see it."""
        name, what = safe(title), safe(description)
        limit = f' style="max-width:{self._widest}px"' if self._widest else ""
        return (
            f'<div class="plot"><svg height="{self.height}"{limit} role="img" '
            f'aria-label="{name}. {what}"><title>{name}</title><desc>{what}</desc>\n'
            + "\n".join(self._shapes)
            + "\n</svg></div>"
        )

    def y_axis(self, scale: Scale, name: str, text: Format) -> Callable[[float], float]:
        """Draw lines across, with their values at the left, and return a map to pixels."""

        def place(value: float) -> float:
            return round((1 - scale(value)) * self.height, 1)

        for value in scale.ticks:
            y = place(value)
            self._add(f'<line class="grid" x1="0" x2="100%" y1="{y}" y2="{y}"/>')
            self._add(f'<text class="end" x="-8" y="{y + 4}">{safe(text(value))}</text>')
        self._add(f'<text x="-56" y="-12">{safe(name)}</text>')
        return place

    def x_axis(self, scale: Scale, name: str, text: Format) -> Callable[[float], float]:
        """Draw lines down, with their values below, and return the scale itself."""
        for value in scale.ticks:
            x = _percent(scale(value))
            self._add(f'<line class="grid" x1="{x}" x2="{x}" y1="0" y2="{self.height}"/>')
            self.below(scale(value), text(value))
        self.below(0.5, name, row=1)
        return scale

    def below(self, x: float, text: str, *, row: int = 0, is_extra: bool = False) -> None:
        """Write a text below the plot. An extra one is left out where the plot is narrow."""
        anchor = "middle" if not row or 0.05 < x < 0.93 else "start" if x < 0.5 else "end"
        extra = " extra" if is_extra else ""
        place = f'x="{_percent(x)}" y="{self.height + 16 + 17 * row}"'
        self._add(f'<text class="{anchor}{extra}" {place}>{safe(text)}</text>')

    def bar(self, kind: str, x: float, y: float, width: float, height: float, hint: str) -> None:
        """Draw a rectangle, with a `hint` for the pointer."""
        place = f'x="{_percent(x)}" y="{y:.1f}" width="{_percent(width)}" height="{height:.1f}"'
        self._add(f'<rect class="{kind}" {place}><title>{safe(hint)}</title></rect>')

    def line(self, kind: str, points: Sequence[tuple[float, float]]) -> None:
        """Draw a line through points. A single point is drawn across the whole plot."""
        if len(points) == 1:
            points = [(0, points[0][1]), (1, points[0][1])]
        drawn = " ".join(f"{1000 * x:.1f},{y:.1f}" for x, y in points)
        self._add(
            f'<svg viewBox="0 0 1000 {self.height}" preserveAspectRatio="none" width="100%" '
            f'height="{self.height}"><polyline class="line {kind}" points="{drawn}"/></svg>'
        )

    def mark(self, kind: str, shape: str, x: float, y: float) -> None:
        """Draw a mark of a kind: a circle, a triangle or a square, which differ without colours."""
        at = _percent(x)
        if shape == "circle":
            self._add(f'<circle class="mark {kind}" cx="{at}" cy="{y}" r="3.5"/>')
        else:
            path = "M-3.2-3.2h6.4v6.4h-6.4z" if shape == "square" else "M0-4.5l4.2 7.5h-8.4z"
            self._add(f'<svg x="{at}" y="{y}"><path class="mark {kind}" d="{path}"/></svg>')

    def _add(self, shape: str) -> None:
        self._shapes.append(shape)


def bar(shares: Mapping[str, float]) -> str:
    """Return a bar for a cell of a table, with a part for each kind; 1 is the whole cell."""
    parts, begin = "", 0.0
    for kind, share in shares.items():
        if share:
            length = max(share, SHORTEST)
            place = f'x="{_percent(begin)}" width="{_percent(length)}" height="10"'
            parts, begin = f'{parts}<rect class="{kind}" {place}/>', begin + length
    return f'<svg class="bar" height="10" aria-hidden="true">{parts}</svg>'


def _percent(share: float) -> str:
    return f"{100 * share:.2f}".rstrip("0").rstrip(".") + "%"


def round_step(high: float, most: int) -> float:
    """Return the least round step with which at most `most` steps reach `high`."""
    power = 10.0 ** math.floor(math.log10(high))
    factors = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
    return next(power * factor for factor in factors if high / (power * factor) <= most)


def _round_below(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return max(digit * power for digit in ROUND if digit * power <= value * 1.001)


def _round_above(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return min(d * power for d in (*ROUND, 10.0) if d * power >= value * 0.999)
