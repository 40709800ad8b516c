"""Retake docs/images/chat.svg: `python tools/chat_picture.py`.

Types a chat with the demo model into the real program, at a terminal of 90 columns, and draws the
screen. Needs pexpect and pyte, which come with the extra `dev`.
"""

from __future__ import annotations

import io
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import pexpect
import pyte
from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "chat.svg"
COLUMNS, LINES = 90, 33
TYPED = (
    "My name is Zorblin.",
    "I have a parrot.",
    "What is my name?",
    "/stats",
    "/system You are a kind friend.",
    "What is my name?",
    "/explain",
)


def main() -> None:
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    with tempfile.TemporaryDirectory() as folder:
        own = {"TERM": "xterm-256color", "MLXRUNNER_DATA": folder, "MLXRUNNER_CONFIG": ""}
        child = pexpect.spawn(
            sys.executable,
            ["-m", "mlxrunner", "chat"],
            env={**os.environ, **own, "PROMPT_TOOLKIT_NO_CPR": "1"},
            dimensions=(LINES, COLUMNS),
        )
        for text in (*TYPED, ""):
            read_until_prompt(child, screen, stream)
            if text:
                child.send(f"{text}\r")
        child.close(force=True)
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    rows = [line.rstrip() for line in screen.display]
    console.print(Text("\n".join(rows).strip("\n")))
    drawn = console.export_svg(title="mlxrunner chat")
    # No font is fetched from the network.
    PICTURE.write_text(re.sub(r"@font-face \{.*?\}\n?\s*", "", drawn, flags=re.DOTALL))
    print(f"{PICTURE}: {len(rows)} rows")


def read_until_prompt(child: pexpect.spawn, screen: pyte.Screen, stream: pyte.ByteStream) -> None:
    """Read until the program waits at its prompt, and nothing more comes for a second."""
    begin, last = time.monotonic(), time.monotonic()
    while time.monotonic() - last < 1.5 or time.monotonic() - begin < 2:
        try:
            stream.feed(child.read_nonblocking(65536, timeout=0.2))
            last = time.monotonic()
        except pexpect.TIMEOUT:
            row = screen.display[screen.cursor.y].rstrip()
            if row != ">>>" and time.monotonic() - begin < 60:
                last = time.monotonic()


if __name__ == "__main__":
    main()
