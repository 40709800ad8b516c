"""Write a summary as one HTML file, in light and dark.

The page fetches nothing and runs nothing, and all text of the events is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from mlxrunner.profiling.reasons import REASONS, place_remedy, remedy
from mlxrunner.profiling.report import svg
from mlxrunner.profiling.report.aggregate import OUTCOMES, Sample, Summary, by_tokens
from mlxrunner.profiling.report.formatting import moment, number, percent, rate, seconds
from mlxrunner.profiling.report.svg import safe
from mlxrunner.terminal.text import size

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""The policy that makes a browser refuse scripts, fonts, pictures and the network."""
FIGURES = frozenset(
    """
    requests at from prompt matched cached evaluated lost tokens time p50 p90 p99 median slowest
    used allocated peak
    """.split()
)
"""The columns of figures, which are aligned at the right."""
WHEN = "request (and when, UTC)"
KEYS = {
    "cached": '<rect class="cached" width="14" height="14"/>',
    "lost": '<rect class="lost" width="14" height="14"/>',
    "new": '<rect class="new" width="14" height="14"/>',
    "matched": '<path class="line matched" d="M0 7h14"/>',
    "used": '<path class="line used" d="M0 7h14"/>',
    "allocated": '<path class="line allocated" d="M0 7h14"/>',
    "peak": '<path class="line peak" d="M0 7h14"/>',
    "hit": '<circle class="mark hit" cx="7" cy="7" r="5"/>',
    "partial": '<path class="mark partial" d="M7 1l6 11h-12z"/>',
    "miss": '<rect class="mark miss" x="2" y="2" width="10" height="10"/>',
}


def page(summary: Summary, sources: Sequence[str], skipped: int = 0) -> str:
    """Return the whole page.

    `sources` are the names of the files, and `skipped` is the number of their unreadable lines.
    """
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    models = ", ".join(f"{name} ({number(count)})" for name, count in summary.models.most_common(5))
    period = f"{moment(summary.first_time)} to {moment(summary.last_time)} UTC"
    left_out = f" {number(skipped)} lines could not be read and were skipped." if skipped else ""
    body = [
        "<header><h1>What the prefix cache reused</h1>",
        f"<p>{safe(', '.join(sources))}: {number(summary.requests)} requests, {safe(period)}. "
        f"{safe(models)}.{left_out}</p></header>",
        _cards(summary),
        '<main class="panels">',
        _timeline(summary),
        _first_tokens(summary),
        _bytes(summary),
        _reasons(summary),
        _places(summary),
        _costliest(summary),
        "</main>",
        "<footer>Made by <code>mlxrunner report</code>. Times are UTC; what was saved is an "
        "estimate from this machine's own prefills.</footer>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>mlxrunner report: {safe(percent(summary.hit_rate))} of the prompt tokens reused"
        "</title>"
        f"<style>\n{style}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _cards(summary: Summary) -> str:
    tokens, outcomes = summary.tokens, summary.outcomes
    counts = ", ".join(f"{number(outcomes[outcome])} {outcome}" for outcome in OUTCOMES)
    known = (
        f" for {number(summary.estimated)} of {number(summary.requests)} requests"
        if summary.estimated < summary.requests
        else ""
    )
    overlap = ", for each of several at a time" if summary.side_by_side else ""
    cards = [
        (
            "Hit rate by token",
            percent(summary.hit_rate),
            f"{number(tokens['saved'])} of {number(tokens['prompt'])} prompt tokens",
        ),
        ("Hit rate by request", percent(summary.request_hit_rate), counts),
        ("Tokens lost", number(tokens["lost"]), "evaluated, though they need not have been"),
        *(
            [("Evaluated in advance", number(tokens["ahead"]), "before their requests came")]
            if tokens["ahead"]
            else []
        ),
        ("Time saved", seconds(summary.saved_s), f"by what was reused, an estimate{known}"),
        ("Prefill", rate(summary.prefill_rate), f"over the tokens that were evaluated{overlap}"),
        ("Decode", rate(summary.decode_rate), f"without each answer's first token{overlap}"),
    ]
    if summary.verified:
        cards.append(
            (
                "Verified cold",
                number(summary.verified),
                f"of which {number(summary.unequal)} differed",
            )
        )
    if summary.untested:
        cards.append(
            ("Untested", number(summary.untested), "one wrong token would be within the tolerance")
        )
    shown = (
        f"<div><dt>{name}</dt><dd>{_with_small_unit(value)}<small>{note}</small></dd></div>"
        for name, value, note in cards
    )
    return f'<dl class="cards">{"".join(shown)}</dl>'


def _with_small_unit(value: str) -> str:
    figure, _, unit = value.rpartition(" ")
    return f"{safe(figure)} <span>{safe(unit)}</span>" if figure else safe(unit)


def _timeline(summary: Summary) -> str:
    bins, width = summary.timeline.bins, summary.timeline.width
    plot = svg.Plot(1300, 300)
    y = plot.y_axis(
        [max(one.prompt, one.matched) / one.requests for one in bins],
        "tokens of the prompt",
        _count,
    )
    x = plot.x_steps(_labels(summary), WHEN, 12)
    gap = min((x(1) - x(0)) * 0.12, 4)
    edge: list[tuple[float, float]] = []
    for index, one in enumerate(bins):
        hint = (
            f"{_name(index, width)}: cached {one.cached:,}, lost {one.lost:,}, new {one.new:,}, "
            f"matched {one.matched:,}"
        )
        low = 0.0
        for kind, tokens in (("cached", one.cached), ("lost", one.lost), ("new", one.new)):
            if tokens:
                high = low + tokens / one.requests
                plot.bar(
                    kind, x(index) + gap / 2, y(high), x(1) - x(0) - gap, y(low) - y(high), hint
                )
                low = high
        matched = y(one.matched / one.requests)
        edge += [(x(index), matched), (x(index + 1), matched)]
    plot.line("matched", edge)
    columns = ["requests", "from", "prompt", "matched", "cached", "evaluated", "lost"]
    rows = (
        [
            _name(i, width),
            moment(one.time),
            *map(number, (one.prompt, one.matched, one.cached, one.lost + one.new, one.lost)),
        ]
        for i, one in enumerate(bins)
    )
    each = "A bar is a request" if width == 1 else f"A bar is the mean of {number(width)} requests"
    return _figure(
        "Each prompt: reused or evaluated",
        f"{each}: its height is the prompt. What was evaluated is either new, or lost: it need not "
        "have been. The line is what the entry had of it.",
        {
            "cached": "cached",
            "lost": "evaluated: lost",
            "new": "evaluated: new",
            "matched": "matched",
        },
        plot,
        _table(columns, rows),
        wide=True,
    )


def _first_tokens(summary: Summary) -> str:
    samples = summary.samples
    plot = svg.Plot()
    y = plot.y_axis(
        [one.ttft_s for one in samples], "time to the first token", seconds, is_log=True
    )
    x = plot.x_axis([one.evaluated for one in samples], "evaluated tokens", _count, is_log=True)
    for one in samples:
        plot.mark(one.outcome, x(one.evaluated), y(one.ttft_s))
    known = sum(len(times.values) for times in summary.ttft.values())
    drawn = (
        f" {number(len(samples))} of {number(known)} requests are drawn, chosen by chance."
        if len(samples) < known
        else ""
    )
    return _figure(
        "Time to the first token against evaluated tokens",
        f"Both scales are logarithmic.{drawn}",
        {outcome: outcome for outcome in OUTCOMES},
        plot,
        _outcomes_table(summary) + _sizes_table(samples),
        is_open=True,
    )


def _outcomes_table(summary: Summary) -> str:
    rows = []
    for outcome in OUTCOMES:
        times = summary.ttft[outcome].as_dict()
        rows.append(
            [
                outcome,
                number(int(times["requests"] or 0)),
                *(seconds(times[name]) for name in ("p50", "p90", "p99")),
            ]
        )
    return _table(["outcome", "requests", "p50", "p90", "p99"], rows)


def _sizes_table(samples: Sequence[Sample]) -> str:
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
    return _table(["evaluated tokens", "requests", "median", "slowest"], rows)


def _bytes(summary: Summary) -> str:
    bins, width = summary.timeline.bins, summary.timeline.width
    columns = {
        "used": [one.used_bytes for one in bins],
        "allocated": [one.cache_bytes for one in bins],
        "peak": [one.peak_bytes for one in bins],
    }
    known = [value for column in columns.values() for value in column if value]
    is_log = bool(known) and max(known) > 20 * min(known)
    plot = svg.Plot()
    y = plot.y_axis(known, "bytes, logarithmic" if is_log else "bytes", size, is_log=is_log)
    x = plot.x_steps(_labels(summary), WHEN)
    for kind, column in columns.items():
        points = [
            (x(index) + (x(1) - x(0)) / 2, y(value))
            for index, value in enumerate(column)
            if value or not is_log
        ]
        if points:
            plot.line(kind, points)
    rows = (
        [
            _name(i, width),
            moment(one.time),
            *map(size, (one.used_bytes, one.cache_bytes, one.peak_bytes)),
        ]
        for i, one in enumerate(bins)
    )
    return _figure(
        "Bytes over time",
        "After each request; of several that share a place in the picture, the most.",
        {
            "used": "used by the entry",
            "allocated": "allocated for caches",
            "peak": "peak of all memory",
        },
        plot,
        _table(["requests", "from", "used", "allocated", "peak"], rows),
    )


def _reasons(summary: Summary) -> str:
    title = "Tokens lost, by reason"
    ordered = by_tokens(summary.reasons)
    columns = ["reason", "requests", "tokens", "time", "what happened", "what to change"]
    table = _table(
        columns,
        (
            [
                name,
                number(loss.requests),
                number(loss.tokens),
                seconds(loss.seconds),
                REASONS[name].sentence,
                remedy(name) if loss.tokens else "",
            ]
            for name, loss in ordered
        ),
    )
    losses = [
        (name, loss.tokens, f"{number(loss.tokens)} tokens, {seconds(loss.seconds)}")
        for name, loss in ordered
        if loss.tokens
    ]
    if not losses:
        return _panel(title, "Nothing was lost.", table, wide=True)
    plot = svg.Plot(1300, 34 * len(losses))
    plot.bars_across("lost", losses, 140, 1100)
    return _figure(
        title, "What had to be evaluated again, and why.", {}, plot, table, wide=True, is_open=True
    )


def _places(summary: Summary) -> str:
    rows = [
        [
            name,
            number(loss.requests),
            number(loss.tokens),
            seconds(loss.seconds),
            place_remedy(name),
        ]
        for name, loss in by_tokens(summary.places)
    ]
    table = _table(["place", "requests", "tokens", "time", "what to change"], rows)
    text = "Where prompt and entry part: the role of the message, and the part of it."
    return _panel("Tokens lost, by place", text, table, wide=True)


def _costliest(summary: Summary) -> str:
    rows = [
        [m.id, moment(m.time), seconds(m.seconds), number(m.tokens), m.reason, m.place, m.model]
        for m in summary.costliest
    ]
    table = _table(["id", "at", "time", "tokens", "reason", "place", "model"], rows)
    return _panel(
        "The costliest misses",
        "mlxrunner explain FILE ID shows the two sides of one.",
        table,
        wide=True,
    )


def _labels(summary: Summary) -> list[str]:
    """Return for each bin the number and the time of its first request."""
    return [
        f"{number(i * summary.timeline.width + 1)} ({moment(one.time)[11:16]})"
        for i, one in enumerate(summary.timeline.bins)
    ]


def _figure(
    title: str,
    text: str,
    legend: dict[str, str],
    plot: svg.Plot,
    table: str,
    *,
    wide: bool = False,
    is_open: bool = False,
) -> str:
    keys = "".join(
        f'<li><svg viewBox="0 0 14 14" aria-hidden="true">{KEYS[kind]}</svg>{name}</li>'
        for kind, name in legend.items()
    )
    listed = f'<ul class="legend">{keys}</ul>' if keys else ""
    return (
        f'<figure class="panel{" wide" if wide else ""}"><figcaption><h2>{title}</h2>'
        f"<p>{safe(text)}</p></figcaption>{listed}{plot.render(title, text)}\n"
        f"<details{' open' if is_open else ''}><summary>The same as a table</summary>"
        f'<div class="scroll">{table}</div></details></figure>'
    )


def _panel(title: str, text: str, table: str, *, wide: bool = False) -> str:
    kind = "panel wide" if wide else "panel"
    head = f'<section class="{kind}"><h2>{title}</h2><p>{safe(text)}</p>'
    return f'{head}<div class="scroll">{table}</div></section>'


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    kinds = [' class="figure"' if name in FIGURES else "" for name in columns]
    head = "".join(
        f'<th scope="col"{kind}>{name}</th>' for name, kind in zip(columns, kinds, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td{k}>{safe(v)}</td>" for v, k in zip(row, kinds, strict=True))
        + "</tr>\n"
        for row in rows
    )
    return (
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        if body
        else "<p>None.</p>"
    )


def _name(index: int, width: int) -> str:
    first = index * width + 1
    return number(first) if width == 1 else f"{number(first)} to {number(first + width - 1)}"


def _count(value: float) -> str:
    return (
        f"{value / 1e6:g} M"
        if value >= 1e6
        else f"{value / 1e3:g} k"
        if value >= 1e3
        else f"{value:g}"
    )
