"""The report in terminals of all sizes."""

from __future__ import annotations

import io
import re

import pytest
from support.events import afternoon, as_event, example_event, summary_of

from mlxrunner.profiling.report.screen import console, show_report, sparkline
from mlxrunner.profiling.report.summary import NOWHERE, Summary, place_of
from mlxrunner.profiling.schema import PARTS, place_remedy
from mlxrunner.terminal.output import number, percent, rate, seconds

HOSTILE = "\x1b[31m[bold red]evil[/]\x1b]8;;http://x\x07:smile:\u202e"


def printed(summary: Summary, width: int, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, errors="backslashreplace")
    to = console(stream)
    to.width = width
    show_report(summary, to)
    stream.flush()
    return raw.getvalue().decode(encoding)


@pytest.fixture(scope="module")
def summary() -> Summary:
    return summary_of(*afternoon(300))


@pytest.mark.parametrize("width", [30, 40, 60, 80, 120, 200])
def test_every_figure_is_there_at_every_width(summary: Summary, width: int) -> None:
    """Nothing is cut with an ellipsis, and no line is longer than the terminal is wide."""
    text = printed(summary, width)
    together = re.sub(r"\s", "", text)
    wanted = [percent(summary.hit_rate), percent(summary.request_hit_rate)]
    wanted += [number(summary.tokens[name]) for name in ("cached", "missed", "displaced", "new")]
    wanted += [number(one.tokens) for one in summary.diagnosis]
    wanted += [
        seconds(summary.ttft[outcome].as_dict()[part])
        for outcome in ("hit", "partial", "miss")
        for part in ("p50", "p90", "p99")
    ]
    wanted += [miss.id for miss in summary.costliest]
    if width >= 40:
        assert [figure for figure in wanted if re.sub(r"\s", "", figure) not in together] == []
    assert not set(text) & {"…", "\x1b"}  # a pipe gets no colours
    assert max(map(len, text.splitlines())) <= width


def test_what_is_not_known_is_not_called_nothing() -> None:
    """Savings are not known before a prefill is measured; times of parallel requests overlap."""
    made = Summary()
    parallel = example_event(saved_s=None, max_sequences=4)
    made.add(as_event({**parallel, "prefill_s": None}))
    assert re.search(r"time saved +- *\n", printed(made, 200))
    assert "decode 438 tokens/s for each of several at a time" in printed(made, 200)
    made.add(as_event(example_event(saved_s=1.0, prefetched_tokens=7, saved_tokens=23)))
    text = printed(made, 200)
    assert "1 s, as estimated from this machine's own prefills, in 1 of the requests" in text
    assert "(7 of these evaluated in advance)" in text
    assert made.as_dict()["saved_s"] == 1.0


def test_a_terminal_that_knows_ascii_only_gets_no_blocks(summary: Summary) -> None:
    text = printed(summary, 100, "ascii")
    assert not set(text) & set("█▁▂▃▄▅▆▇\\")


def test_text_of_a_file_drives_nothing() -> None:
    """Escape sequences, rich's markup and emoji codes come out as the characters they are."""
    divergence = example_event()["divergence"] | {"role": HOSTILE}
    text = printed(summary_of(example_event(model=HOSTILE, divergence=divergence)), 300)
    assert "\x1b" not in text
    assert "\\x1b[31m[bold red]evil[/]" in text
    assert ":smile:\\u202e" in text


def test_a_sparkline_goes_from_nothing_to_all() -> None:
    """The lowest mark is for the lowest eighth, the highest for the highest."""
    assert sparkline([0, 0.125, 0.5, 0.99, 1], is_ascii=False) == "▁▂▅██"
    assert sparkline([0, 1], is_ascii=True) == "_@"


def test_figures_are_honest() -> None:
    """Nearly all is not all, little is not nothing, unknown is not zero."""
    shares, times = (0, 0.0001, 0.5, 0.123, 0.9999, 1), (None, 0, 1.23e-5, 0.0123, 1.234, 119)
    assert ", ".join(map(percent, shares)) == "0 %, < 0.1 %, 50 %, 12.3 %, > 99.9 %, 100 %"
    assert ", ".join(map(seconds, times)) == "-, 0 s, 12 µs, 12.3 ms, 1.23 s, 119 s"
    assert ", ".join(map(seconds, (600, 9000))) == "10 min, 2.5 h"
    rates = ", ".join(map(rate, (None, 1.234, 2345.6)))
    assert rates == "-, 1.2 tokens/s, 2,346 tokens/s"


def test_every_place_has_a_remedy() -> None:
    """Each part of a message has a remedy, a system prompt its own, an unknown place none."""
    divergence = example_event()["divergence"]
    for part in PARTS:
        event = as_event(example_event(divergence=divergence | {"part": part}))
        assert place_remedy(place_of(event))
    assert place_remedy("system: text") != place_remedy("user: text") == place_remedy("a: b: text")
    assert place_remedy(NOWHERE) == place_remedy("somewhere") == ""
