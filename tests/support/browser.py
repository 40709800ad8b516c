"""Look at a page in a headless Chromium, and measure it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest
from support.waiting import PATIENCE_S

CHROMIUM = next(
    (
        found
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (found := shutil.which(name))
    ),
    None,
)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine (Debian: apt-get install chromium)"
)
WIDTHS = (500, 1000, 1600)
MEASURE = """
function measure(view) {
  const all = [...view.document.querySelectorAll('body *')], width = view.innerWidth, faults = [];
  for (const one of all) if (one.tagName == 'DETAILS') one.open = true;
  const seen = all.filter(one => one.getBoundingClientRect().width);
  const box = one => one.getBoundingClientRect(), words = one => one.textContent.slice(0, 40);
  for (const one of seen) {
    const scrolled = one.closest('.scroll');
    if (!scrolled && (box(one).right > width + 1 || box(one).left < -1))
      faults.push('outside: ' + one.tagName + ' ' + words(one));
    if (!scrolled && !one.ownerSVGElement && one.tagName != 'svg' &&
        one.scrollWidth > one.clientWidth + 1 && view.getComputedStyle(one).display != 'inline')
      faults.push('clipped: ' + one.tagName + ' ' + words(one));
    if (one.className == 'scroll' && one.scrollWidth > one.clientWidth + 1)
      faults.push('scrolls: ' + words(one));
  }
  const texts = seen.filter(one => one.tagName == 'text');
  for (const one of texts) {
    const panel = box(one.closest('.panel')), a = box(one);
    if (a.left < panel.left || a.right > panel.right)
      faults.push('leaves its panel: ' + words(one));
    for (const other of texts) {
      const b = box(other);
      if (one != other && a.left < b.right && b.left < a.right &&
          a.top + 3 < b.bottom && b.top + 3 < a.bottom)
        faults.push('overlaps: ' + words(one) + ', ' + words(other));
    }
  }
  const written = seen.filter(one =>
    [...one.childNodes].some(node => node.nodeType == 3 && node.data.trim()));
  const sizes = new Set(written.map(one => view.getComputedStyle(one).fontSize));
  return {width: width, faults: faults.slice(0, 10), sizes: [...sizes].sort()};
}
addEventListener('load', () => {
  const found = {};
  for (const frame of document.querySelectorAll('iframe'))
    found[frame.title] = measure(frame.contentWindow);
  const shown = document.createElement('pre');
  shown.textContent = JSON.stringify(found);
  document.body.replaceChildren(shown);
});
"""


def browse(file: Path, folder: Path, *arguments: str) -> str:
    """Return what a headless Chromium prints: its console, with CONSOLE, and what was asked for."""
    assert CHROMIUM is not None
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--hide-scrollbars",
        "--enable-logging=stderr",
        f"--user-data-dir={folder / 'chromium'}",
    ]
    result = subprocess.run(
        [CHROMIUM, *options, *arguments, file.as_uri()],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


def measure(pages: Mapping[str, str], folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Lay out each page, as it is, at each of WIDTHS; return what was found by name and width.

    Found are `faults` (clipped, outside the window, overlapping) and the `sizes` of fonts.
    """
    frames = "".join(
        f'<iframe title="{name} {width}" style="width:{width}px;height:900px;border:0" '
        f'srcdoc="{escape(text)}"></iframe>'
        for name, text in pages.items()
        for width in WIDTHS
    )
    file = folder / "frames.html"
    file.write_text(
        f"<!doctype html><meta charset=utf-8><body>{frames}<script>{MEASURE}</script>", "utf-8"
    )
    printed = re.search(r"<pre>(.*?)</pre>", browse(file, folder, "--dump-dom"), re.DOTALL)
    assert printed is not None
    found = json.loads(unescape(printed[1]))
    return {(name.rpartition(" ")[0], one["width"]): one for name, one in found.items()}
