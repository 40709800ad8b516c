"""Write a summary as one HTML file, in light and dark.

The page fetches nothing and runs nothing, and all text of the events is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import NamedTuple
from urllib.parse import quote

from mlxrunner.profiling.report.summary import (
    OUTCOMES,
    Bin,
    LossFinding,
    Sample,
    Summary,
    Timeline,
    in_requests,
    name_of,
    words,
)
from mlxrunner.profiling.schema import Event
from mlxrunner.terminal.output import moment, number, percent, rate, seconds, size, visible

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""The policy that makes a browser refuse scripts, fonts, pictures and the network."""


def page(summary: Summary, sources: Sequence[str], notes: Sequence[str] = ()) -> str:
    """Return the whole page about files with the names `sources`; `notes` are about the figures."""
    models = ", ".join(f"{name} ({number(count)})" for name, count in summary.models.most_common(5))
    first, last = (
        f'<span class="time">{safe(moment(time))}</span>'
        for time in (summary.first_time, summary.last_time)
    )
    files = safe(", ".join(sources))
    count = in_requests(summary.requests)
    noted = "".join(f" {safe(note)}." for note in notes)
    body = [
        "<header><h1>Prefix cache (KV cache) report</h1>",
        f"<p>{files}: {count}, {first} to {last} UTC. {safe(models)}.{noted}</p></header>",
        "<main>",
        f'<div class="panels">{diagnosis(summary)}</div>',
        _cards(summary),
        '<div class="panels">',
        timeline(summary),
        _batches(summary),
        first_tokens(summary),
        bytes_over_time(summary),
        _costliest(summary),
        "</div></main>",
        "<footer>Made by <code>mlxrunner report</code>. Times are UTC. Times saved and lost are "
        "estimates from this machine's own prompt speed.</footer>",
    ]
    title = f"mlxrunner report: {percent(summary.hit_rate)} of the prompt tokens reused"
    return document(title, body)


def document(title: str, body: Sequence[str], *, refresh_s: int | None = None) -> str:
    """Return a page with the parts `body`. `refresh_s`: seconds until it is loaded again."""
    file = Path(__file__).with_name("page.css")
    style = file.read_text(encoding="utf-8")  # opens: a file of the package
    again = "" if refresh_s is None else f'<meta http-equiv="refresh" content="{refresh_s}">'
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">{again}'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{safe(title)}</title>"
        f"<style>\n{style}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _cards(summary: Summary) -> str:
    tokens, outcomes = summary.tokens, summary.outcomes
    counts = ", ".join(f"{number(outcomes[outcome])} {outcome}" for outcome in OUTCOMES)
    known = ""
    if summary.estimated < summary.requests:
        known = f" for {number(summary.estimated)} of {number(summary.requests)} requests"
    overlap = ", for each of several at a time" if summary.side_by_side else ""
    prompt, asked = max(tokens["prompt"], 1), f"{number(tokens['prompt'])} prompt tokens"
    reused = f"{number(tokens['saved'])} of {asked} were reused"
    cards = [("Cached", percent(summary.hit_rate), reused)]
    for name in ("missed", "displaced", "new"):
        note = f"{number(tokens[name])} tokens: {MEANINGS[name]}"
        cards.append((name.capitalize(), percent(tokens[name] / prompt), note))
    if ahead := tokens["prefetched"]:
        cards.append(("Evaluated in advance", number(ahead), "tokens, while the user typed"))
    saved = f"of prompt processing (prefill), an estimate{known}"
    speeds = rate(summary.prefill_rate), rate(summary.decode_rate)
    cards += [
        ("Requests", number(summary.requests), counts),
        ("Time saved", seconds(summary.saved_s), saved),
        ("Prompt speed", speeds[0], f"prefill of evaluated tokens{overlap}"),
        ("Generation speed", speeds[1], f"after each first token{overlap}"),
    ]
    if drafted := summary.drafted.total():
        right = number(summary.accepted.total())
        cards.append(("Guessed right", right, f"of {number(drafted)} guessed tokens of answers"))
    if summary.verified:
        differed = f"of which {number(summary.unequal)} differed"
        cards.append(("Verified cold", number(summary.verified), differed))
    if summary.untested:
        why = "one wrong token would be within the tolerance"
        cards.append(("Untested", number(summary.untested), why))
    shown = ""
    for name, value, note in cards:
        figure, _, unit = value.rpartition(" ")
        said = f"{safe(figure)} <span>{safe(unit)}</span>" if figure else safe(unit)
        shown += f"<div><dt>{name}</dt><dd>{said}<small>{note}</small></dd></div>"
    return f'<dl class="cards">{shown}</dl>'


def _batches(summary: Summary) -> str:
    """Return a panel with a bar for each run of a batch; nothing without any."""
    if not summary.batches.runs:
        return ""
    rows = []
    for run in summary.batches.runs:
        prompt, failed = max(run.prompt, 1), run.failed.total() + run.refused
        lost = {"missed": run.lost / prompt}
        shares = {"cached": run.reuse, **lost, "new": 1 - run.best}
        figures = percent(run.reuse), percent(run.best), number(failed), number(run.cut)
        said = f"{safe(moment(run.time))} UTC: {safe(words(run))}"
        rows.append((name_of(run), shares, figures, said))
    text = (
        "The prompt tokens of all lines: reused, and evaluated. At best, each part that lines "
        "share is evaluated once: that is the tree of all prefixes."
    )
    columns = ["reused", "at best", "failed", "cut"]
    return panel("Batches", text, bars_table("order", columns, rows), is_wide=True)


def diagnosis(summary: Summary) -> str:
    """Return a panel with what to change: for each client and cause its cost and its remedy."""
    findings, first, rest = summary.diagnosis, summary.headline, summary.unavoidable
    count = in_requests(rest.requests)
    said = ""
    if rest.tokens:
        lost = f"{number(rest.tokens)} more tokens that were evaluated again"
        said = f"Nothing could have saved {lost}, in {count}."
    if first is None:
        said = said.replace(" more tokens", " tokens") or "All that could be reused was."
        return panel("Nothing to change", said, is_wide=True)
    most, seen, rows = max(one.tokens for one in findings), {_advice(first)}, []
    for one in findings[:MOST_FINDINGS]:
        words = _advice(one)
        figures = number(one.tokens), seconds(one.seconds), number(one.requests)
        name, bars = f"{one.client}: {one.cause}", {str(one.kind): one.tokens / most}
        rows.append((name, bars, figures, "" if words in seen else words))
        seen.add(words)
    columns = ["tokens evaluated again", "time for them", "requests"]
    shown = bars_table("client: cause", columns, rows) if len(findings) > 1 else ""
    if (more := len(findings) - MOST_FINDINGS) > 0:
        said = f"{said} {number(more)} smaller causes are left out."
    mend = f'<p class="remedy"><b>What to change:</b> {safe(_sentence(first.remedy))}</p>'
    rest_of_it = f"<p>{said}</p>" if said else ""
    return panel(first.sentence, "", mend, shown, rest_of_it, is_wide=True)


def _advice(one: LossFinding) -> str:
    """Return what happens and what helps, in two sentences."""
    return f"{safe(_sentence(one.headline or one.cause))} <b>{safe(_sentence(one.remedy))}</b>"


def _sentence(text: str) -> str:
    """Return words as a sentence; empty for none."""
    return text[:1].upper() + text[1:].removesuffix(".") + "." if text else ""


def _costliest(summary: Summary) -> str:
    """Return a panel with the requests that lost most, each beside its earlier request."""
    if not summary.costliest:
        return ""
    rows: list[list[str | TableLink]] = []
    for miss in summary.costliest:
        link, when = TableLink(miss.id, f"#{miss.id}"), moment(miss.time)
        cost = seconds(miss.seconds), number(miss.tokens)
        rows.append([link, when, miss.client, *cost, miss.cause, miss.model])
    columns = ["id", "at", "client", "time", "tokens", "cause", "model"]
    text = "Prompt tokens that were evaluated again, and the time for them. A link explains each."
    shown = table(columns, rows, kind="stack")
    told = "".join(_explained(miss.event) for miss in summary.costliest)
    return panel("Requests with most tokens evaluated again", text, shown, told, is_wide=True)


def _explained(event: Event) -> str:
    """Return the explanation of an event, with both sides of the place where its prompt changed."""
    shown, sides = "", event.divergence.compared() if event.divergence else None
    if sides is not None and sides[0]:
        for name, mark, pieces in zip(("earlier", "now"), ("del", "ins"), sides[2:], strict=True):
            text = ""
            for piece, is_same in pieces:
                text += safe(piece) if is_same else f"<{mark}>{safe(piece)}</{mark}>"
            shown += f"<dt>{name}</dt><dd>{safe(sides[1])}{text}</dd>"
        shown = f'<dl class="sides">{shown}</dl>'
    said = f"<h3>{safe(event.id)}</h3><p>{safe(_sentence(event.explain()))}</p>"
    return f'<div class="explained" id="{safe(event.id)}">{said}{shown}</div>'


FIGURES = frozenset(
    """
    requests from prompt matched cached missed displaced new lost tokens time p50 p90 p99
    median slowest used allocated peak lines failed cut at_a_time reused best
    """.split()
)
FOREIGN = frozenset(["cause", "model", "client", "session"])
"""The columns of texts that a file brings, which may have very long words."""


def panel(title: str, text: str, *parts: str, is_wide: bool = False) -> str:
    """Return a panel with a title, a sentence about it, and its parts."""
    kind = "panel wide" if is_wide else "panel"
    said = f"<p>{safe(text)}</p>" if text else ""
    head = f'<section class="{kind}"><h2>{safe(title)}</h2>{said}'
    return head + "\n".join(parts) + "</section>"


def figure(title: str, text: str, legend: str, plot: Plot, table: str, **more: bool) -> str:
    """Return a panel with a plot, its legend, and its figures as a table."""
    return panel(title, text, legend, plot.render(title, text), folded(table), **more)


def folded(table: str, name: str = "The same as a table") -> str:
    """Return a table that is shown when its reader asks for it."""
    inner = f'<div class="scroll">{table}</div>'
    return f"<details><summary>{name}</summary>{inner}</details>"


def legend(names: Mapping[str, str]) -> str:
    """Return a legend; `names` are by the shapes that they explain, as SVG in 14 x 14 pixels."""
    keys = "".join(
        f'<li><svg viewBox="0 0 14 14" aria-hidden="true">{shape}</svg>{name}</li>'
        for shape, name in names.items()
    )
    return f'<ul class="legend">{keys}</ul>'


class TableLink(NamedTuple):
    """A cell of a table that leads to another page."""

    text: str
    path: str


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str | TableLink]], *, kind: str = ""
) -> str:
    """Return a table. One of the kind "stack" becomes a list where there is little room."""
    heads, cells = "", []
    for name in columns:
        align = "figure" if name in FIGURES else "foreign" if name in FOREIGN else ""
        attributes = f' class="{align}"' if align else ""
        heads += f'<th scope="col"{attributes}>{name}</th>'
        cells.append(attributes + (f' data-name="{name}"' if kind == "stack" else ""))
    body = ""
    for row in rows:
        shown = (f"<td{a}>{_cell(value)}</td>" for a, value in zip(cells, row, strict=True))
        body += f"<tr>{''.join(shown)}</tr>\n"
    if not body:
        return "<p>None.</p>"
    of_kind = f' class="{kind}"' if kind else ""
    return f"<table{of_kind}><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: str | TableLink) -> str:
    if isinstance(value, TableLink):
        path = quote(value.path, safe="/#")
        return f'<a href="{safe(path)}">{safe(value.text)}</a>'
    return safe(value)


def bars_table(
    first: str,
    columns: Sequence[str],
    rows: Iterable[tuple[str, Mapping[str, float], Sequence[str], str]],
) -> str:
    """Return a table with a bar, figures in `columns`, and a sentence below for each row."""
    heads = "".join(f'<th scope="col" class="figure">{name}</th>' for name in columns)
    body = ""
    for name, shares, figures, sentence in rows:
        cells = "".join(f'<td class="figure">{safe(one)}</td>' for one in figures)
        more = ' class="more"' if sentence else ""
        body += f'<tr{more}><th scope="row">{safe(name)}</th>'
        body += f'<td class="bars">{bar(shares)}</td>{cells}</tr>\n'
        if sentence:
            body += f'<tr><td class="words" colspan="{2 + len(columns)}">{sentence}</td></tr>\n'
    head = f'<th scope="col">{first}</th><th></th>{heads}'
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


WIDE = 30
"""The least ratio of the largest to the smallest value that makes a scale logarithmic."""
LEAST = 1e-9
"""The least value that is drawn; no measurement is smaller."""
ROUND = (1.0, 2.0, 5.0)
MOST_TICKS = 7
SHORTEST = 0.004
"""The least share of a cell that a part of a bar takes, so that it is seen."""
Format = Callable[[float], str]


def safe(text: str) -> str:
    """Make text of a file safe for a page: no markup, no control or reordering characters."""
    return escape(visible(text))


@dataclass(frozen=True)
class Scale:
    """A map from values between `low` and `high` to shares of an axis; smaller values are `low`."""

    low: float
    high: float
    is_log: bool = False

    @classmethod
    def around(cls, values: Iterable[float], *, from_zero: bool = False) -> Scale:
        """Make the scale that `values` fill for the most part; logarithmic for far ones."""
        known = [max(value, LEAST) for value in values if value > 0] or [1.0]
        low, high = min(known), max(known)
        if high > WIDE * low and not from_zero:
            digits, powers = (*ROUND, 10.0), [_power(low), _power(high)]
            low = max(d * powers[0] for d in ROUND if d * powers[0] <= low * 1.001)
            high = min(d * powers[1] for d in digits if d * powers[1] >= high * 0.999)
            return cls(low, high, True)
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
        ticks: list[float] = []
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for digits in (ROUND, (1.0, 3.0), (1.0,)):
            places = (digit * 10.0**power for power in powers for digit in digits)
            ticks = [at for at in places if 0.999 * self.low <= at <= 1.001 * self.high]
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
    power = _power(high)
    factors = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
    return next(power * factor for factor in factors if high / (power * factor) <= most)


def _power(value: float) -> float:
    return float(10.0 ** math.floor(math.log10(value)))


SHAPES = {"hit": "circle", "partial": "triangle", "miss": "square"}
"""The shape of a mark by its outcome."""
MEANINGS = {
    "cached": "reused",
    "missed": "evaluated before, but not held any more",
    "displaced": "sent before, after a place that changed",
    "new": "never sent before",
}
"""The four kinds of prompt tokens, the parts of a bar from below."""
MOST_FINDINGS = 12
"""The most findings on a page."""
WIDEST = 72
MAX_TIME_TICKS = 10
NEAREST = 0.17
"""The least distance of two times below a plot, as a share of its width."""
BYTES_HEIGHT = 318
"""The height of the plot of bytes: that of the plot beside it and its table of outcomes."""


def timeline(summary: Summary) -> str:
    """Draw a bar for each prompt, or for the mean of several."""
    line = summary.timeline
    plot = Plot(240, WIDEST * len(line.bins))
    y = plot.y_axis(
        Scale.around((max(o.prompt, o.matched) / o.requests for o in line.bins), from_zero=True),
        "tokens of the prompt",
        _count,
    )
    _ticks(plot, line)
    width = 1 / len(line.bins)
    gap = width * 0.12 if len(line.bins) < 100 else 0.0
    edge, drawn = list[tuple[float, float]](), set[str]()
    for index, one in enumerate(line.bins):
        low = 0.0
        for kind, tokens in _drawn(one).items():
            if tokens:
                drawn.add(kind)
                high = low + tokens / one.requests
                place = (index * width + gap / 2, y(high), width - gap, y(low) - y(high))
                plot.bar(kind, *place, _hint(line, index))
                low = high
        edge += [(at * width, y(one.matched / one.requests)) for at in (index, index + 1)]
    plot.line("matched", edge)
    meanings = {kind: f"{kind}: {meaning}" for kind, meaning in MEANINGS.items()}
    meanings["unavoidable"] = "evaluated again: nothing is to be done"
    keys = {
        f'<rect class="{kind}" width="14" height="14"/>': meaning
        for kind, meaning in meanings.items()
        if kind in drawn
    }
    keys['<path class="line matched" d="M0 7h14"/>'] = "held in the cache"
    mean = "" if line.width == 1 else f" the mean of {number(line.width)} requests,"
    return figure(
        "Each prompt: cached or evaluated",
        f"A bar is{mean or ' a request,'} as high as its prompt. Below is the number of the "
        "request, and when it began (UTC).",
        legend(keys),
        plot,
        _prompts_table(line),
        is_wide=True,
    )


def first_tokens(summary: Summary) -> str:
    """Draw the time to the first token of each request against what it evaluated."""
    samples = summary.samples
    plot = Plot()
    y = plot.y_axis(Scale.around(one.ttft_s for one in samples), "time to the first token", seconds)
    x = plot.x_axis(
        Scale.around(one.evaluated for one in samples), "evaluated tokens of the prompt", _count
    )
    for one in samples:
        colour = "cached" if one.outcome == "hit" else "other"
        colour = "displaced" if one.is_avoidable else colour
        plot.mark(colour, SHAPES[one.outcome], x(one.evaluated), y(one.ttft_s))
    known = sum(len(times.values) for times in summary.ttft.values())
    drawn = f" {number(len(samples))} of {number(known)} requests are drawn, chosen by chance."
    keys = {
        '<circle class="mark cached" cx="7" cy="7" r="5"/>': "hit",
        '<path class="mark other" d="M7 1l6 11h-12z"/>': "partial",
        '<rect class="mark other" x="2" y="2" width="10" height="10"/>': "miss",
    }
    if any(one.is_avoidable for one in samples):
        keys['<path class="displaced" d="M0 3h14v8h-14z"/>'] = "red: could have reused more"
    title = "Time to the first token"
    text = "The more of a prompt is evaluated, the later its answer begins."
    text += drawn if len(samples) < known else ""
    shown = [legend(keys), plot.render(title, text)] if len(samples) > 1 else ["", ""]
    sizes = folded(_sizes_table(samples), "By evaluated tokens")
    return panel(title, text, *shown, _outcomes_table(summary), sizes)


def bytes_over_time(summary: Summary) -> str:
    """Draw the memory of caches and of the whole program."""
    line = summary.timeline
    names = {
        "used": "used by cached tokens",
        "allocated": "allocated for caches",
        "peak": "peak of all memory",
    }
    values = [(one.used_bytes, one.cache_bytes, one.peak_bytes) for one in line.bins]
    columns = dict(zip(names, zip(*values, strict=True), strict=True))
    scale = Scale.around(value for column in columns.values() for value in column)
    plot = Plot(BYTES_HEIGHT)
    y = plot.y_axis(scale, "bytes, logarithmic" if scale.is_log else "bytes", size)
    _ticks(plot, line)
    for kind, column in columns.items():
        points = [
            ((index + 0.5) / len(column), y(value))
            for index, value in enumerate(column)
            if value or not scale.is_log
        ]
        if points:
            plot.line(kind, points)
    rows = (
        [_name(line, i), when, *map(size, nbytes)]
        for i, (nbytes, when) in enumerate(zip(values, _clock(line), strict=True))
    )
    most = f"The most of each {number(line.width)} requests."
    return figure(
        "Memory",
        "After each request." if line.width == 1 else most,
        legend({f'<path class="line {k}" d="M0 7h14"/>': name for k, name in names.items()}),
        plot,
        table(["requests", "from", "used", "allocated", "peak"], rows),
    )


def _parts(one: Bin) -> dict[str, int]:
    """Return the tokens of each part of a bar."""
    return {kind: getattr(one, kind) for kind in MEANINGS}


def _drawn(one: Bin) -> dict[str, float]:
    """Return the parts of a bar, from below; one for tokens that nothing could have spared."""
    again = one.missed + one.displaced
    share = one.avoidable / again if again else 0
    avoidable = {"missed": one.missed * share, "displaced": one.displaced * share}
    rest = {"unavoidable": again - one.avoidable, "new": one.new}
    return {"cached": one.cached, **avoidable, **rest}


def _hint(line: Timeline, index: int) -> str:
    one = line.bins[index]
    parts = ", ".join(f"{kind} {tokens:,}" for kind, tokens in _parts(one).items())
    return f"{_name(line, index)}: {parts} tokens; {one.matched:,} held in the cache"


def _ticks(plot: Plot, line: Timeline) -> None:
    """Write round numbers of requests below a plot, and times where they change."""
    requests = sum(one.requests for one in line.bins)
    step = max(1, round(round_step(requests, MAX_TIME_TICKS)))
    numbers = [1, *(at for at in range(step, requests + 1, step) if at > 1)]
    if len(numbers) > 2 and numbers[1] - 1 < step / 2:
        numbers.pop(1)
    places = [((at - 1) // line.width + 0.5) / len(line.bins) for at in numbers]
    for index, (at, place) in enumerate(zip(numbers, places, strict=True)):
        plot.below(place, number(at), is_extra=bool(index % 2))
    clock, before, changes = _clock(line), "", list[tuple[float, str]]()
    for at, place in zip(numbers[::2], places[::2], strict=True):
        shown = clock[(at - 1) // line.width]
        if shown != before and (not changes or place - changes[-1][0] > NEAREST):
            changes.append((place, shown))
        before = shown
    for index, (place, shown) in enumerate(changes):
        plot.below(place, shown, row=1, is_extra=bool(index % 2))


def _clock(line: Timeline) -> list[str]:
    """Return when each bin began, as short as tells them apart: with days, or with seconds."""
    times = [one.time for one in line.bins]
    if len({one[:10] for one in times}) > 1:
        return [f"{one[5:10]} {one[11:16]}" for one in times]
    return [one[11:19] for one in times]


def _prompts_table(line: Timeline) -> str:
    """Return the figures of each bar, which are means of its requests."""
    rows = []
    for index, (one, when) in enumerate(zip(line.bins, _clock(line), strict=True)):
        means = (tokens / one.requests for tokens in (one.prompt, *_parts(one).values()))
        rows.append([_name(line, index), when, *(number(round(mean)) for mean in means)])
    return table(["requests", "from", "prompt", *MEANINGS], rows)


def _outcomes_table(summary: Summary) -> str:
    rows = []
    for outcome in OUTCOMES:
        times = summary.ttft[outcome].as_dict()
        shown = (seconds(times[name]) for name in ("p50", "p90", "p99"))
        rows.append([outcome, number(int(times["requests"] or 0)), *shown])
    return table(["outcome", "requests", "p50", "p90", "p99"], rows)


def _sizes_table(samples: Iterable[Sample]) -> str:
    by_digits: dict[int, list[float]] = {}
    for one in samples:
        by_digits.setdefault(len(str(one.evaluated)), []).append(one.ttft_s)
    rows = []
    for digits, times in sorted(by_digits.items()):
        tokens = f"{number(10 ** (digits - 1))} to {number(10**digits - 1)}"
        rows.append([tokens, number(len(times)), seconds(median(times)), seconds(max(times))])
    return table(["evaluated tokens", "requests", "median", "slowest"], rows)


def _name(line: Timeline, index: int) -> str:
    first = index * line.width + 1
    last = first + line.bins[index].requests - 1
    return number(first) if last == first else f"{number(first)} to {number(last)}"


def _count(value: float) -> str:
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= unit:
            return f"{value / unit:,.4g} {letter}"
    return f"{round(value):,}"
