"""The report in terminals of all sizes."""

from __future__ import annotations

import io
import re

import pytest
from support.events import afternoon, as_event, example_event

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
    made = Summary()
    for event in afternoon(300):
        made.add(as_event(event))
    return made


@pytest.mark.parametrize("width", [30, 40, 60, 80, 120, 200])
def test_every_figure_is_there_at_every_width(summary: Summary, width: int) -> None:
    """Nothing is cut with an ellipsis, and no line is longer than the terminal is wide."""
    text = printed(summary, width)
    together = re.sub(r"\s", "", text)
    wanted = [
        percent(summary.hit_rate),
        percent(summary.request_hit_rate),
        number(summary.tokens["cached"]),
        number(summary.tokens["missed"]),
        number(summary.tokens["displaced"]),
        number(summary.tokens["new"]),
    ]
    wanted += [number(one.tokens) for one in summary.diagnosis]
    wanted += [
        seconds(summary.ttft[outcome].percentile(part))
        for outcome in ("hit", "partial", "miss")
        for part in (0.5, 0.9, 0.99)
    ]
    wanted += [miss.id for miss in summary.costliest]
    if width >= 40:
        assert [figure for figure in wanted if re.sub(r"\s", "", figure) not in together] == []
    assert "…" not in text
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


def test_a_pipe_gets_no_colours(summary: Summary) -> None:
    """Plain text, for grep."""
    assert "\x1b" not in printed(summary, 80)


def test_a_terminal_that_knows_ascii_only_gets_no_blocks(summary: Summary) -> None:
    """Bars are left out, the sparkline is made of other marks."""
    text = printed(summary, 100, "ascii")
    assert not set(text) & set("█▁▂▃▄▅▆▇\\")


def test_text_of_a_file_drives_nothing() -> None:
    """Escape sequences, rich's markup and emoji codes come out as the characters they are."""
    made = Summary()
    divergence = example_event()["divergence"] | {"role": HOSTILE}
    made.add(as_event(example_event(model=HOSTILE, divergence=divergence)))
    text = printed(made, 300)
    assert "\x1b" not in text
    assert "\\x1b[31m[bold red]evil[/]" in text
    assert ":smile:\\u202e" in text


def test_a_sparkline_goes_from_nothing_to_all() -> None:
    """The lowest mark is for the lowest eighth, the highest for the highest."""
    assert sparkline([0, 0.125, 0.5, 0.99, 1], is_ascii=False) == "▁▂▅██"
    assert sparkline([0, 1], is_ascii=True) == "_@"


def test_figures_are_honest() -> None:
    """Nearly all is not all, little is not nothing, unknown is not zero."""
    assert [percent(share) for share in (0, 0.0001, 0.5, 0.123, 0.9999, 1)] == [
        "0 %",
        "< 0.1 %",
        "50 %",
        "12.3 %",
        "> 99.9 %",
        "100 %",
    ]
    assert [seconds(value) for value in (None, 0, 0.0000123, 0.0123, 1.234, 119, 600, 9000)] == [
        "-",
        "0 s",
        "12 µs",
        "12.3 ms",
        "1.23 s",
        "119 s",
        "10 min",
        "2.5 h",
    ]
    assert [rate(value) for value in (None, 1.234, 2345.6)] == [
        "-",
        "1.2 tokens/s",
        "2,346 tokens/s",
    ]


def test_every_place_has_a_remedy() -> None:
    """Each part of a message has a remedy, a system prompt its own, an unknown place none."""
    divergence = example_event()["divergence"]
    for part in PARTS:
        assert place_remedy(
            place_of(as_event(example_event(divergence=divergence | {"part": part})))
        )
    assert place_remedy("system: text") != place_remedy("user: text") == place_remedy("a: b: text")
    assert place_remedy(NOWHERE) == place_remedy("somewhere") == ""
