"""Write the page at `/`: what runs, what was reused over time, and the latest misses.

It is made of the parts of `mlxrunner report --html`: it runs nothing and fetches nothing. The
browser loads it again every few seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlxrunner.profiling.report import page as plots
from mlxrunner.profiling.report.page import document, safe
from mlxrunner.profiling.report.summary import Summary, place_of
from mlxrunner.profiling.schema import Event, remedy
from mlxrunner.terminal.text import moment, number, percent, size

REFRESH_S = 5
"""Seconds after which the browser loads the page again."""
MISSES = 12
"""The most misses that are shown."""


def status_page(models: Sequence[Mapping[str, Any]], events: Sequence[Event]) -> str:
    """Return the page. `models` are those of `/slots`; `events` the last ones, youngest first."""
    summary = Summary()
    for event in reversed(events):
        summary.add(event)
    shown = f"{percent(summary.hit_rate)} of the prompt tokens reused" if events else "no requests"
    body = [
        "<header><h1>mlxrunner serve</h1>",
        f"<p>{_loaded(models)} The last {number(len(events))} requests: {safe(shown)}.</p>",
        "</header>",
        '<main class="panels">',
        _conversations(models),
        plots.timeline(summary) if events else "",
        _misses(events),
        "</main>",
        "<footer>The same as data: <code>/slots</code>, <code>/metrics</code>, "
        "<code>/explain/{request}</code>, <code>/health</code>.</footer>",
    ]
    return document(f"mlxrunner serve: {shown}", body, refresh_s=REFRESH_S)


def _loaded(models: Sequence[Mapping[str, Any]]) -> str:
    if not models:
        return "No model is loaded; a request loads its own."
    return " ".join(
        f"{safe(one['model'])}: {one['busy']} of {one['slots']} slots busy, {one['waiting']} "
        f"waiting, {size(one['bytes'])} of conversations, {size(one['parked_bytes'])} parked."
        for one in models
    )


def _conversations(models: Sequence[Mapping[str, Any]]) -> str:
    """Return a panel with what each slot holds, those that run first."""
    held = [
        (one["state"] != "busy", model["model"], one)
        for model in models
        for one in model["conversations"]
    ]
    rows = [
        [
            one["state"],
            one["client"] or "",
            one["session"] or "",
            number(one["tokens"]),
            size(one["bytes"]),
            one["request"] or "",
            model,
        ]
        for _, model, one in sorted(held, key=lambda found: found[:2])
    ]
    columns = ["state", "client", "session", "tokens", "size", "request", "model"]
    text = "What each slot holds. An idle conversation goes on where it ended."
    table = plots.table(columns, rows, kind="stack")
    return plots.panel("Conversations", text, table, is_wide=True)


def _misses(events: Sequence[Event]) -> str:
    """Return a panel with the latest requests that lost tokens, and what would have helped."""
    lost = [event for event in events if event.lost_tokens][:MISSES]
    rows = [
        [
            "" if event.caller is None else _explained(event.caller.request),
            moment(event.time),
            "" if event.caller is None else event.caller.client,
            number(event.prompt_tokens),
            number(event.cached_tokens),
            number(event.lost_tokens),
            event.reason or "",
            place_of(event),
            _helps(event),
        ]
        for event in lost
    ]
    columns = ["request", "at", "client", "prompt", "cached", "lost", "reason", "place", "remedy"]
    text = "Requests that evaluated tokens again. Each leads to its two sides, in words."
    table = plots.table(columns, rows, kind="stack")
    return plots.panel("The latest misses", text, table, is_wide=True)


def _explained(request: str) -> plots.Link:
    return plots.Link(request, f"/explain/{request}")


def _helps(event: Event) -> str:
    """Return what helps against a miss: against its cause, if that is known."""
    known = None if event.caller is None else event.caller.remedy
    return known or remedy(event.reason)
