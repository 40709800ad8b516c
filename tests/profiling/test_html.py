"""The page: complete in itself, safe, and readable in light and dark."""

from __future__ import annotations

import re
import struct
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.browser import WIDTHS, browse, measure, needs_chromium
from support.events import afternoon, example_event, summary_of

from mlxrunner.profiling.report.page import SHAPES, Plot, Scale, page
from mlxrunner.profiling.report.summary import BINS, Summary

HOSTILE = """</title><script>alert(1)</script><img src=x onerror=alert(2)>"'&\x1b[31m\u202e"""


def some(count: int = 60, **changes: object) -> Summary:
    return summary_of(*(event | changes for event in afternoon(count)))


class Elements(HTMLParser):
    """Collects elements with their attributes; `open_tags` is empty if all are closed in order."""

    VOID = frozenset(["meta", "line", "rect", "circle", "path", "polyline", "br"])

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open_tags: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))
        if tag != "meta":
            self.open_tags.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag


def test_the_page_fetches_nothing_and_runs_nothing() -> None:
    """No script, no address, and a policy that forbids both; every element is closed."""
    text = page(some(), ["events.jsonl"])
    elements = Elements(text)
    assert elements.open_tags == []
    assert {tag for tag, _ in elements.found}.isdisjoint(
        {"script", "link", "img", "iframe", "object", "use"}
    )
    assert not re.search(r"https?:|url\(|@import|javascript:", text)
    assert all(not name.startswith("on") for _, attributes in elements.found for name in attributes)
    assert "default-src 'none'" in text


def test_names_from_files_are_text() -> None:
    """Model, role and file names cannot end a tag, run, reorder or hide anything."""
    divergence = example_event()["divergence"] | {"role": HOSTILE[:40]}
    event = example_event(model=HOSTILE, divergence=divergence, time=HOSTILE)
    text = page(summary_of(event), [HOSTILE])
    elements = Elements(text)
    assert elements.open_tags == []
    assert {tag for tag, _ in elements.found}.isdisjoint({"script", "img"})
    assert not set("\x1b\u202e") & set(text)
    assert "&lt;script&gt;" in text


def test_each_plot_has_a_name_a_description_and_its_figures_as_a_table() -> None:
    panels = re.findall(r"<section.*?</section>", page(some(), ["events.jsonl"]), re.DOTALL)
    plots = [panel for panel in panels if 'class="plot"' in panel]
    assert len(plots) == 3
    wanted = 'role="img" aria-label="', "<title>", "<desc>", "<table>", '<th scope="col"'
    assert [one for plot in plots for one in wanted if one not in plot] == []


def test_the_timeline_draws_what_was_cached_lost_and_new() -> None:
    """A bar's parts are as high as their tokens, one upon the other."""
    heights = bars_of(one_request("diverged"))
    assert set(heights) == {"cached", "displaced", "new"}
    assert heights["cached"] == pytest.approx(2.5 * heights["displaced"], rel=0.02)
    assert heights["new"] == pytest.approx(1.5 * heights["displaced"], rel=0.02)


def test_red_is_only_what_could_have_been_avoided() -> None:
    """Lines that run side by side evaluate a few tokens twice, and nothing can be done against it.

    The memory's peak and a first request, which misses, are no losses either.
    """
    assert set(bars_of(one_request("side_by_side"))) == {"cached", "unavoidable", "new"}
    text = page(one_request("side_by_side"), ["e"])
    assert 'class="displaced"' not in text
    assert 'class="mark displaced"' not in text
    style = text[text.index("<style>") : text.index("</style>")]
    red = [rule for rule in style.split("}") if "var(--displaced)" in rule]
    assert [rule.split("{")[0].strip() for rule in red] == [".displaced"]
    assert 'class="displaced"' in page(one_request("diverged"), ["e"])


def one_request(reason: str) -> Summary:
    """Return a summary of a request that lost 20 of its 100 tokens to `reason`."""
    counts = {"prompt": 100, "matched": 60, "cached": 50, "saved": 50, "evaluated": 50, "lost": 20}
    tokens = {f"{name}_tokens": count for name, count in counts.items()}
    ids = ("00000000002a", "00000000002b")
    return summary_of(*(example_event(id=id, reason=reason, **tokens) for id in ids))


def bars_of(summary: Summary) -> dict[str, float]:
    """Return the heights of the parts of the timeline's bars, which are all alike, by kind."""
    _, panel = re.findall(r"<section.*?</section>", page(summary, ["e"]), re.DOTALL)[:2]
    return {
        kind: float(high)
        for kind, high in re.findall(r'<rect class="(\w+)" x=[^>]*height="([\d.]+)"><title>', panel)
    }


def test_ticks_of_a_timeline_say_a_time_once() -> None:
    """Requests of one second have their numbers below them, and the second at the first."""
    summary = some(60, time="2026-11-20T13:00:00.000000Z")
    timeline = page(summary, ["e"]).split("</svg></div>")[0]
    assert timeline.count(">13:00:00</text>") == 1
    ticks = re.findall(r">([\d,]+)</text>", timeline)
    assert ticks[-7:] == ["1", "10", "20", "30", "40", "50", "60"]
    days = page(some(9000), ["e"])
    assert ">11-20 13:00</text>" in days
    assert ">11-21 " in days


COUNTS = "prompt matched cached saved evaluated lost".split()
NOTHING = {f"{name}_tokens": 0 for name in COUNTS}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ttft_s": None, "prefill_s": None, "decode_s": None},
        {"used_bytes": 0, "cache_bytes": 0, "peak_bytes": 0},
        NOTHING,
        {"reason": None, "lost_tokens": 0},
    ],
    ids=["whole", "no first token", "no bytes", "no tokens", "no losses"],
)
@pytest.mark.parametrize("count", [1, 2, BINS + 5])
def test_every_page_is_whole(count: int, changes: dict[str, object]) -> None:
    text = page(some(count, **changes), ["events.jsonl"])
    assert Elements(text).open_tags == []
    assert not re.search(r"\bnan\b", text)


def test_a_page_of_many_requests_is_small() -> None:
    assert len(page(some(3000), ["events.jsonl"])) < 600_000


def test_a_share_that_is_not_quite_nothing_is_written_in_one_size() -> None:
    """Only the unit is small."""
    counts = {"prompt_tokens": 10**6, "evaluated_tokens": 999_950, "cached_tokens": 50}
    event = example_event(saved_s=None, max_sequences=4, saved_tokens=50, **counts)
    text = page(summary_of(event), ["e"])
    assert "<dd>&lt; 0.1 <span>%</span>" in text
    assert "<small>of prompt processing (prefill), an estimate" in text
    assert "prefill of evaluated tokens, for each of several at a time" in text


def test_scales_end_at_round_numbers_close_to_the_values() -> None:
    """With a handful of ticks; logarithmic for values that are far apart."""
    assert Scale.around([3, 7.2]).ticks == [0, 2, 4, 6, 8]
    assert Scale.around([5, 10])(5) == 0.5
    wide = Scale.around([24, 1700])
    assert (wide.low, wide.high, wide.is_log) == (20, 2000, True)
    assert wide.ticks == [20, 50, 100, 200, 500, 1000, 2000]
    assert Scale.around([0.02, 30]).ticks == pytest.approx([0.03, 0.1, 0.3, 1, 3, 10, 30])
    assert not Scale.around([24, 1700], from_zero=True).is_log
    assert Scale.around([]).ticks == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert len(Scale.around([1e-6, 1e9]).ticks) <= 8


def test_marks_differ_without_colours() -> None:
    plot = Plot()
    for shape in SHAPES.values():
        plot.mark("cached", shape, 0.1, 10)
    drawn = plot.render("t", "d")
    assert drawn.count("<circle") == 1
    assert len(set(re.findall(r' d="([^"]*)"', drawn))) == 2


@pytest.mark.exhaustive(0)
@needs_chromium
@pytest.mark.parametrize(("width", "height"), [(1600, 2300), (500, 900)], ids=["desktop", "phone"])
def test_a_browser_shows_the_page_in_light_and_dark(
    tmp_path: Path, width: int, height: int
) -> None:
    """The page has no error on the console, and its two screenshots have their background."""
    file = tmp_path / "report.html"
    file.write_text(page(some(), ["events.jsonl"]), encoding="utf-8")
    backgrounds = set()
    for scheme in (0, 1):
        picture = tmp_path / f"{scheme}.png"
        options = f"--window-size={width},{height} --screenshot={picture}"
        color = f"--blink-settings=preferredColorScheme={scheme}"
        console = browse(file, tmp_path, *options.split(), color)
        assert "CONSOLE" not in console, console
        data = picture.read_bytes()
        assert struct.unpack(">II", data[16:24]) == (width, height)
        assert len(data) > 30_000
        backgrounds.add(_first_pixel(data))
    assert backgrounds == {(0xF7, 0xF6, 0xF3), (0x13, 0x15, 0x18)}


@needs_chromium
def test_nothing_is_clipped_and_one_type_scale_is_used_at_any_width(tmp_path: Path) -> None:
    """At 500, 1,000 and 1,600 pixels, with all tables unfolded.

    Nothing leaves its panel, no text lies on another, and no table has to be scrolled.
    """
    events = list(afternoon(9))
    for event in events:
        event["model"] = HOSTILE + 300 * "M"
        if event["divergence"]:
            event["divergence"]["role"] = HOSTILE + 60 * "W"
    pages = {
        "chat": page(some(), ["events.jsonl"]),
        "days": page(some(9_000), ["events.jsonl"]),
        "one": page(some(1), ["events.jsonl"]),
        "hostile": page(summary_of(*events), [HOSTILE + 300 * "M"]),
    }
    found = measure(pages, tmp_path)
    assert set(found) == {(name, width) for name in pages for width in WIDTHS}
    assert {key: one["faults"] for key, one in found.items() if one["faults"]} == {}
    sizes = {size for one in found.values() for size in one["sizes"]}
    assert sizes == {"13px", "16px", "20px", "25px"}


@needs_chromium
def test_a_browser_runs_nothing_of_a_hostile_file(tmp_path: Path) -> None:
    """The page as the browser understands it has no script, and its policy was never needed."""
    file = tmp_path / "report.html"
    text = page(summary_of(example_event(model=HOSTILE)), [HOSTILE])
    file.write_text(text, encoding="utf-8")
    console = browse(file, tmp_path, "--dump-dom")
    assert "CONSOLE" not in console
    assert "<script" not in console
    assert "&lt;script&gt;alert(1)" in console


def _first_pixel(png: bytes) -> tuple[int, ...]:
    """Red, green and blue of the pixel in the upper left corner: filters leave it as it is."""
    at, packed = 8, b""
    while at < len(png):
        (length,), kind = struct.unpack(">I", png[at : at + 4]), png[at + 4 : at + 8]
        packed += png[at + 8 : at + 8 + length] if kind == b"IDAT" else b""
        at += length + 12
    return tuple(zlib.decompress(packed)[1:4])
