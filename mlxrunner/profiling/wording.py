"""Figures as people read them: the same in the terminal and on the page."""

from __future__ import annotations

from mlxrunner.profiling.reasons import REASONS

PLACE_REMEDIES = {
    "system: text": "keep the system prompt the same; what changes (a date, retrieved text) belongs into the last message",
    "text": "send earlier messages back to the letter as they were; what changes belongs into the last message",
    "thinking": "the template leaves out earlier thinking: mlxrunner simulate says what keeping it would do",
    "tools": "send the same tools, in the same order and words, from the first request on",
    "template header": "the template's own text changes (a date, say): fix its variables, or use another template",
    "message end": "a message goes on where it had ended before: send earlier messages back as they were",
    "generation prompt": "the answer had begun otherwise: choose options of the template (thinking or not) once",
}
"""By the part of the message, or by role and part."""


def place_remedy(place: str) -> str:
    """What to change where tokens are lost at `place` (as `summary.place_of` calls it); empty where that is not known."""
    part = place.rpartition(": ")[2]
    return PLACE_REMEDIES.get(place, PLACE_REMEDIES.get(part, ""))


def number(value: int) -> str:
    return f"{value:,}"


def percent(share: float) -> str:
    """Never "100 %" or "0 %" of what is not all or nothing."""
    if 0 < share < 0.001:
        return "< 0.1 %"
    if 0.999 < share < 1:
        return "> 99.9 %"
    return f"{share:.1%}".replace(".0%", "%").replace("%", " %")


def seconds(value: float | None) -> str:
    """Three digits and a unit; "-" where nothing is known."""
    if value is None:
        return "-"
    if value == 0:
        return "0 s"
    if value < 0.001:
        return f"{value * 1e6:.0f} µs"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    if value < 120:
        return f"{value:.3g} s"
    if value < 7200:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:,.1f} h"


def rate(value: float | None) -> str:
    return (
        "-"
        if value is None
        else f"{value:,.0f} tokens/s"
        if value >= 10
        else f"{value:.2g} tokens/s"
    )


def moment(time: str) -> str:
    """RFC 3339 without fractions and zone: all times are UTC."""
    return time[:19].replace("T", " ")


def remedy(reason: str | None) -> str:
    """What to change; empty where there is nothing to mend."""
    return REASONS[reason].remedy if reason is not None else ""


def sentence(reason: str) -> str:
    return REASONS[reason].sentence
