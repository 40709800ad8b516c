"""The page: complete in itself, safe, and readable in light and dark."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.events import afternoon, as_event, example_event
from support.waiting import PATIENCE_S

from mlxrunner.profiling.report.aggregate import BINS, Summary
from mlxrunner.profiling.report.html import page
from mlxrunner.profiling.report.svg import Plot, Scale

CHROMIUM = next(
    (
        found
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (found := shutil.which(name))
    ),
    None,
)
HOSTILE = """</title><script>alert(1)</script><img src=x onerror=alert(2)>"'&\x1b[31m\u202e"""


def summary_of(count: int = 60, **changes: object) -> Summary:
    summary = Summary()
    for event in afternoon(count):
        summary.add(as_event(event | changes))
    return summary


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
    text = page(summary_of(), ["events.jsonl"])
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
    summary = Summary()
    divergence = example_event()["divergence"] | {"role": HOSTILE[:40]}
    summary.add(as_event(example_event(model=HOSTILE, divergence=divergence, time=HOSTILE)))
    text = page(summary, [HOSTILE])
    elements = Elements(text)
    assert elements.open_tags == []
    assert {tag for tag, _ in elements.found}.isdisjoint({"script", "img"})
    assert not set("\x1b\u202e") & set(text)
    assert "&lt;script&gt;" in text


def test_each_plot_has_a_name_a_description_and_its_figures_as_a_table() -> None:
    """For those who don't see it."""
    text = page(summary_of(), ["events.jsonl"])
    figures = re.findall(r"<figure.*?</figure>", text, re.DOTALL)
    assert len(figures) == 4
    for figure in figures:
        assert 'role="img" aria-label="' in figure
        assert "<title>" in figure
        assert "<desc>" in figure
        assert "<table>" in figure
        assert '<th scope="col"' in figure


def test_the_timeline_draws_what_was_cached_lost_and_new() -> None:
    """A bar's parts are as high as their tokens, one upon the other."""
    summary = Summary()
    summary.add(
        as_event(
            example_event(
                prompt_tokens=100,
                matched_tokens=60,
                cached_tokens=50,
                saved_tokens=50,
                evaluated_tokens=50,
                lost_tokens=20,
            )
        )
    )
    figure = re.search(r"<figure.*?</figure>", page(summary, ["e"]), re.DOTALL)
    assert figure is not None
    heights = {
        kind: float(high)
        for kind, high in re.findall(
            r'<rect class="(\w+)" x=[^>]*height="([\d.]+)"><title>', figure[0]
        )
    }
    assert heights["cached"] == pytest.approx(2.5 * heights["lost"], rel=0.02)
    assert heights["new"] == pytest.approx(1.5 * heights["lost"], rel=0.02)


NOTHING = dict.fromkeys(
    (
        "prompt_tokens",
        "matched_tokens",
        "cached_tokens",
        "saved_tokens",
        "evaluated_tokens",
        "lost_tokens",
    ),
    0,
)


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
    """There may be few requests, of which little is known."""
    text = page(summary_of(count, **changes), ["events.jsonl"])
    assert Elements(text).open_tags == []
    assert not re.search(r"\bnan\b", text)


def test_a_page_of_many_requests_is_small() -> None:
    """The drawing does not grow with the file."""
    assert len(page(summary_of(3000), ["events.jsonl"])) < 600_000


def test_a_share_that_is_not_quite_nothing_is_written_in_one_size() -> None:
    """Only the unit is small."""
    summary = Summary()
    summary.add(
        as_event(
            example_event(
                prompt_tokens=10**6,
                cached_tokens=50,
                saved_tokens=50,
                evaluated_tokens=999_950,
                saved_s=None,
                max_sequences=4,
            )
        )
    )
    text = page(summary, ["e"])
    assert "<dd>&lt; 0.1 <span>%</span>" in text
    assert "<dd>-<small>by what was reused, an estimate for 0 of 1 requests" in text
    assert "over the tokens that were evaluated, for each of several at a time" in text


def test_scales_end_at_round_numbers() -> None:
    """With a handful of ticks, linear or logarithmic."""
    assert Scale.around([3, 7.2], 0, 100).ticks == [0, 2, 4, 6, 8]
    assert Scale.around([0.02, 30], 0, 100, is_log=True).ticks == pytest.approx(
        [0.01, 0.1, 1, 10, 100]
    )
    assert Scale.around([], 0, 100, is_log=True).ticks == [1, 10]
    assert len(Scale.around([1e-6, 1e9], 0, 100, is_log=True).ticks) <= 9
    assert Scale.around([5], 200, 0)(2.5) == 100


def test_marks_differ_without_colours() -> None:
    """A circle, a triangle, a square."""
    plot = Plot()
    for kind in ("hit", "partial", "miss"):
        plot.mark(kind, 10, 10)
    drawn = plot.render("t", "d")
    assert drawn.count("<circle") == 1
    assert len(set(re.findall(r' d="([^"]*)"', drawn))) == 2


@pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine (Debian: apt-get install chromium)"
)
@pytest.mark.parametrize(("width", "height"), [(1300, 2300), (420, 900)], ids=["desktop", "phone"])
def test_a_browser_shows_the_page_in_light_and_dark(
    tmp_path: Path, width: int, height: int
) -> None:
    """The page has no error on the console, and its two screenshots have their background."""
    file = tmp_path / "report.html"
    file.write_text(page(summary_of(), ["events.jsonl"]), encoding="utf-8")
    backgrounds = set()
    for scheme in (0, 1):
        picture = tmp_path / f"{scheme}.png"
        console = _browse(
            file,
            tmp_path,
            f"--window-size={width},{height}",
            f"--screenshot={picture}",
            f"--blink-settings=preferredColorScheme={scheme}",
        )
        assert "CONSOLE" not in console, console
        data = picture.read_bytes()
        assert struct.unpack(">II", data[16:24]) == (width, height)
        assert len(data) > 30_000
        backgrounds.add(_first_pixel(data))
    assert backgrounds == {(0xF7, 0xF6, 0xF3), (0x13, 0x15, 0x18)}


@pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine (Debian: apt-get install chromium)"
)
def test_a_browser_runs_nothing_of_a_hostile_file(tmp_path: Path) -> None:
    """The page as the browser understands it has no script, and its policy was never needed."""
    summary = Summary()
    summary.add(as_event(example_event(model=HOSTILE)))
    file = tmp_path / "report.html"
    file.write_text(page(summary, [HOSTILE]), encoding="utf-8")
    console = _browse(file, tmp_path, "--dump-dom")
    assert "CONSOLE" not in console
    assert "<script" not in console
    assert "&lt;script&gt;alert(1)" in console


def _browse(file: Path, folder: Path, *arguments: str) -> str:
    """Return a headless chromium's console (lines with CONSOLE), and what was asked for."""
    assert CHROMIUM is not None
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--enable-logging=stderr",
    ]
    command = [
        CHROMIUM,
        *options,
        f"--user-data-dir={folder / 'chromium'}",
        *arguments,
        file.as_uri(),
    ]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment
    )
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


def _first_pixel(png: bytes) -> tuple[int, ...]:
    """Red, green and blue of the pixel in the upper left corner: filters leave it as it is."""
    at, packed = 8, b""
    while at < len(png):
        (length,), kind = struct.unpack(">I", png[at : at + 4]), png[at + 4 : at + 8]
        packed += png[at + 8 : at + 8 + length] if kind == b"IDAT" else b""
        at += length + 12
    return tuple(zlib.decompress(packed)[1:4])
