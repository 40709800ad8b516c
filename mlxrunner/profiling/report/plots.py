"""Draw the plots of the page: prompts and bytes over time, and first tokens. Each has its table."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from mlxrunner.profiling.report import elements, svg
from mlxrunner.profiling.report.aggregate import OUTCOMES, Bin, Sample, Summary, Timeline
from mlxrunner.profiling.report.formatting import number, seconds
from mlxrunner.profiling.report.svg import Scale
from mlxrunner.terminal.text import size

SHAPES = {"hit": "circle", "partial": "triangle", "miss": "square"}
"""The shape of a mark by its outcome."""
BARS = {
    "cached": "reused",
    "avoidable": "evaluated: avoidable",
    "twice": "evaluated: side by side",
    "new": "evaluated: new",
}
"""The parts of a bar, from below, and their names."""
WIDEST = 72
"""The most pixels of a bar."""
MOST_TICKS = 10
BYTES_HEIGHT = 318
"""The height of the plot of bytes: that of the plot beside it and its table of outcomes."""


def timeline(summary: Summary) -> str:
    """Draw a bar for each prompt, or for the mean of several."""
    line = summary.timeline
    plot = svg.Plot(240, WIDEST * len(line.bins))
    y = plot.y_axis(
        Scale.around((max(o.prompt, o.matched) / o.requests for o in line.bins), from_zero=True),
        "tokens of the prompt",
        _count,
    )
    _ticks(plot, line)
    width = 1 / len(line.bins)
    gap = width * 0.12 if len(line.bins) < 100 else 0.0
    edge: list[tuple[float, float]] = []
    for index, one in enumerate(line.bins):
        low = 0.0
        for kind, tokens in _parts(one).items():
            if tokens:
                high = low + tokens / one.requests
                place = (index * width + gap / 2, y(high), width - gap, y(low) - y(high))
                plot.bar(kind, *place, _hint(line, index))
                low = high
        edge += [(at * width, y(one.matched / one.requests)) for at in (index, index + 1)]
    plot.line("matched", edge)
    drawn = [kind for kind in BARS if any(_parts(one)[kind] for one in line.bins)]
    keys = {f'<rect class="{kind}" width="14" height="14"/>': BARS[kind] for kind in drawn}
    keys['<path class="line matched" d="M0 7h14"/>'] = "held by the entry"
    mean = "" if line.width == 1 else f" the mean of {number(line.width)} requests,"
    return elements.figure(
        "Each prompt: reused or evaluated",
        f"A bar is{mean or ' a request,'} as high as its prompt. Below is the number of the "
        "request, and when it began (UTC).",
        elements.legend(keys),
        plot,
        _prompts_table(line),
        is_wide=True,
    )


def first_tokens(summary: Summary) -> str:
    """Draw the time to the first token of each request against what it evaluated."""
    samples = summary.samples
    plot = svg.Plot()
    y = plot.y_axis(Scale.around(one.ttft_s for one in samples), "time to the first token", seconds)
    x = plot.x_axis(
        Scale.around(one.evaluated for one in samples), "evaluated tokens of the prompt", _count
    )
    for one in samples:
        plot.mark(_colour(one), SHAPES[one.outcome], x(one.evaluated), y(one.ttft_s))
    known = sum(len(times.values) for times in summary.ttft.values())
    drawn = (
        f" {number(len(samples))} of {number(known)} requests are drawn, chosen by chance."
        if len(samples) < known
        else ""
    )
    keys = {
        '<circle class="mark cached" cx="7" cy="7" r="5"/>': "hit",
        '<path class="mark other" d="M7 1l6 11h-12z"/>': "partial",
        '<rect class="mark other" x="2" y="2" width="10" height="10"/>': "miss",
    }
    if any(one.is_avoidable for one in samples):
        keys['<path class="avoidable" d="M0 3h14v8h-14z"/>'] = "red: could have reused more"
    text = f"The more of a prompt is evaluated, the later its answer begins.{drawn}"
    return elements.panel(
        "Time to the first token",
        text,
        elements.legend(keys) if len(samples) > 1 else "",
        plot.render("Time to the first token", text) if len(samples) > 1 else "",
        _outcomes_table(summary),
        elements.folded(_sizes_table(samples), "By evaluated tokens"),
    )


def bytes_over_time(summary: Summary) -> str:
    """Draw the memory of caches and of the whole program."""
    line = summary.timeline
    columns = {
        "used": [one.used_bytes for one in line.bins],
        "allocated": [one.cache_bytes for one in line.bins],
        "peak": [one.peak_bytes for one in line.bins],
    }
    scale = Scale.around(value for column in columns.values() for value in column)
    plot = svg.Plot(BYTES_HEIGHT)
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
    names = {"used": "used by the entry", "allocated": "allocated for caches"}
    names["peak"] = "peak of all memory"
    rows = (
        [_name(line, i), when, *map(size, (one.used_bytes, one.cache_bytes, one.peak_bytes))]
        for i, (one, when) in enumerate(zip(line.bins, _clock(line), strict=True))
    )
    return elements.figure(
        "Memory",
        "After each request."
        if line.width == 1
        else f"The most of each {number(line.width)} requests.",
        elements.legend(
            {f'<path class="line {k}" d="M0 7h14"/>': name for k, name in names.items()}
        ),
        plot,
        elements.table(["requests", "from", "used", "allocated", "peak"], rows),
    )


def _parts(one: Bin) -> dict[str, int]:
    """Return the tokens of each part of a bar."""
    return {
        "cached": one.cached,
        "avoidable": one.avoidable,
        "twice": one.lost - one.avoidable,
        "new": one.new,
    }


def _colour(one: Sample) -> str:
    return "avoidable" if one.is_avoidable else "cached" if one.outcome == "hit" else "other"


def _hint(line: Timeline, index: int) -> str:
    one = line.bins[index]
    return (
        f"{_name(line, index)}: reused {one.cached:,}, lost {one.lost:,}, new {one.new:,}, "
        f"matched {one.matched:,}"
    )


def _ticks(plot: svg.Plot, line: Timeline) -> None:
    """Write round numbers of requests below a plot, and times where they change."""
    requests = sum(one.requests for one in line.bins)
    step = max(1, round(svg.round_step(requests, MOST_TICKS)))
    numbers = [1, *(at for at in range(step, requests + 1, step) if at > 1)]
    if len(numbers) > 2 and numbers[1] - 1 < step / 2:
        numbers.pop(1)
    places = [((at - 1) // line.width + 0.5) / len(line.bins) for at in numbers]
    for index, (at, place) in enumerate(zip(numbers, places, strict=True)):
        plot.below(place, number(at), is_extra=bool(index % 2))
    clock, before, changes = _clock(line), "", []
    for at, place in zip(numbers[::2], places[::2], strict=True):
        shown = clock[(at - 1) // line.width]
        if shown != before:
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
    columns = ["requests", "from", "prompt", "matched", "cached", "evaluated", "lost"]
    rows = (
        [
            _name(line, index),
            when,
            *(
                number(round(tokens / one.requests))
                for tokens in (one.prompt, one.matched, one.cached, one.lost + one.new, one.lost)
            ),
        ]
        for index, (one, when) in enumerate(zip(line.bins, _clock(line), strict=True))
    )
    return elements.table(columns, rows)


def _outcomes_table(summary: Summary) -> str:
    rows = []
    for outcome in OUTCOMES:
        times = summary.ttft[outcome].as_dict()
        shown = (seconds(times[name]) for name in ("p50", "p90", "p99"))
        rows.append([outcome, number(int(times["requests"] or 0)), *shown])
    return elements.table(["outcome", "requests", "p50", "p90", "p99"], rows)


def _sizes_table(samples: Iterable[Sample]) -> str:
    by_digits: dict[int, list[float]] = {}
    for one in samples:
        by_digits.setdefault(len(str(one.evaluated)), []).append(one.ttft_s)
    rows = (
        [
            f"{number(10 ** (digits - 1))} to {number(10**digits - 1)}",
            number(len(times)),
            seconds(median(times)),
            seconds(max(times)),
        ]
        for digits, times in sorted(by_digits.items())
    )
    return elements.table(["evaluated tokens", "requests", "median", "slowest"], rows)


def _name(line: Timeline, index: int) -> str:
    first = index * line.width + 1
    last = first + line.bins[index].requests - 1
    return number(first) if last == first else f"{number(first)} to {number(last)}"


def _count(value: float) -> str:
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= unit:
            return f"{value / unit:,.4g} {letter}"
    return f"{round(value):,}"
