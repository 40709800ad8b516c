"""Write a summary as one HTML file, in light and dark.

The page fetches nothing and runs nothing, and all text of the events is escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mlxrunner.profiling.reasons import REASONS, place_remedy, remedy
from mlxrunner.profiling.report import plots
from mlxrunner.profiling.report.aggregate import OUTCOMES, LossSum, Summary, by_tokens
from mlxrunner.profiling.report.batches import name_of, words
from mlxrunner.profiling.report.formatting import moment, number, percent, rate, seconds
from mlxrunner.profiling.report.plots import safe

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""The policy that makes a browser refuse scripts, fonts, pictures and the network."""
LOST = "Tokens that were evaluated though they need not have been."


def page(summary: Summary, sources: Sequence[str], skipped: int = 0) -> str:
    """Return the whole page.

    `sources` are the names of the files, and `skipped` is the number of their unreadable lines.
    """
    models = ", ".join(f"{name} ({number(count)})" for name, count in summary.models.most_common(5))
    first, last = (
        f'<span class="time">{safe(moment(time))}</span>'
        for time in (summary.first_time, summary.last_time)
    )
    files = safe(", ".join(sources))
    count = f"{number(summary.requests)} request{'s' if summary.requests > 1 else ''}"
    lines = "1 line" if skipped == 1 else f"{number(skipped)} lines"
    left_out = f" {lines} could not be read." if skipped else ""
    body = [
        "<header><h1>What the prefix cache reused</h1>",
        f"<p>{files}: {count}, {first} to {last} UTC. {safe(models)}.{left_out}</p></header>",
        _cards(summary),
        '<main class="panels">',
        plots.timeline(summary),
        _batches(summary),
        plots.first_tokens(summary),
        plots.bytes_over_time(summary),
        _reasons(summary),
        _places(summary),
        _costliest(summary),
        "</main>",
        "<footer>Made by <code>mlxrunner report</code>. Times are UTC; what was saved is an "
        "estimate from this machine's own prefills.</footer>",
    ]
    title = f"mlxrunner report: {percent(summary.hit_rate)} of the prompt tokens reused"
    return document(title, body)


def document(title: str, body: Sequence[str], *, refresh_s: int | None = None) -> str:
    """Return a page with the parts `body`. `refresh_s`: seconds until it is loaded again."""
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
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
    if drafted := summary.drafted.total():
        right = number(summary.accepted.total())
        cards.append(("Guessed right", right, f"of {number(drafted)} guessed tokens of answers"))
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


def _batches(summary: Summary) -> str:
    """Return a panel with a bar for each run of a batch; nothing without any."""
    if not summary.batches.runs:
        return ""
    rows = (
        (
            name_of(run),
            {
                "cached": run.reuse,
                "avoidable": run.avoidable / max(run.prompt, 1),
                "twice": (run.lost - run.avoidable) / max(run.prompt, 1),
                "new": 1 - run.best,
            },
            (
                percent(run.reuse),
                percent(run.best),
                number(run.failed.total() + run.refused),
                number(run.cut),
            ),
            f"{safe(moment(run.time))} UTC: {safe(words(run))}",
        )
        for run in summary.batches.runs
    )
    text = (
        "The prompt tokens of all lines: reused, and evaluated. At best, each part that lines "
        "share is evaluated once: that is the tree of all prefixes."
    )
    columns = ["reused", "at best", "failed", "cut"]
    return plots.panel("Batches", text, plots.bars_table("order", columns, rows), is_wide=True)


def _reasons(summary: Summary) -> str:
    def words(name: str) -> str:
        change = remedy(name) if summary.reasons[name].tokens else ""
        sentence = safe(_sentence(REASONS[name].sentence))
        return f"{sentence} <b>{safe(_sentence(change))}</b>" if change else sentence

    return _losses(
        "Tokens lost, by reason", "reason", LOST, summary.reasons, words, is_wide=not summary.places
    )


def _places(summary: Summary) -> str:
    def words(name: str) -> str:
        return f"<b>{safe(_sentence(place_remedy(name)))}</b>" if place_remedy(name) else ""

    text = "Where prompt and entry part: the role of the message, and the part of it."
    return _losses("Tokens lost, by place", "place", text, summary.places, words)


def _losses(
    title: str,
    first: str,
    text: str,
    losses: Mapping[str, LossSum],
    words: Callable[[str], str],
    *,
    is_wide: bool = False,
) -> str:
    """Return a panel with a bar for each loss, red where it could have been avoided.

    Without losses there is no panel.
    """
    if not losses:
        return ""
    most = max(1, *(loss.tokens for loss in losses.values()))
    rows = (
        (
            name,
            {
                "avoidable": loss.avoidable / most,
                "twice": (loss.tokens - loss.avoidable) / most,
            },
            (number(loss.tokens), seconds(loss.seconds), number(loss.requests)),
            words(name),
        )
        for name, loss in by_tokens(losses)
    )
    return plots.panel(
        title,
        text,
        plots.bars_table(first, ["tokens", "time", "requests"], rows),
        is_wide=is_wide,
    )


def _costliest(summary: Summary) -> str:
    if not summary.costliest:
        return ""
    rows = [
        [m.id, moment(m.time), seconds(m.seconds), number(m.tokens), m.reason, m.place, m.model]
        for m in summary.costliest
    ]
    columns = ["id", "at", "time", "tokens", "reason", "place", "model"]
    return plots.panel(
        "The costliest misses",
        "mlxrunner explain FILE ID shows the two sides of one.",
        plots.table(columns, rows, kind="stack"),
        is_wide=True,
    )


def _sentence(text: str) -> str:
    """Return words as a sentence; empty for none."""
    return text[:1].upper() + text[1:] + "." if text else ""
