"""Write figures as people read them, in the same way in the terminal and on the page."""

from __future__ import annotations


def number(value: int) -> str:
    """Write a whole number with commas."""
    return f"{value:,}"


def percent(share: float) -> str:
    """Write a share of 1 in percent; "100 %" and "0 %" only for exactly all and nothing."""
    if 0 < share < 0.001:
        return "< 0.1 %"
    if 0.999 < share < 1:
        return "> 99.9 %"
    return f"{share:.1%}".replace(".0%", "%").replace("%", " %")


def seconds(value: float | None) -> str:
    """Write a time, given in seconds, with three digits and a unit; "-" if it is unknown."""
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
    """Write a rate in tokens per second; "-" if it is unknown."""
    if value is None:
        return "-"
    return f"{value:,.0f} tokens/s" if value >= 10 else f"{value:.2g} tokens/s"


def moment(time: str) -> str:
    """Write a time in RFC 3339 without fractions and zone: all times are UTC."""
    return time[:19].replace("T", " ")
