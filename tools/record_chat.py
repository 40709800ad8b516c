"""The README's parts about the chat, from the real program: python tools/record_chat.py [--write]

A session with the demo model, typed into a pseudo-terminal and read from its screen, and the table of commands. Without --write they are
printed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mlxrunner.chat.start import commands
from mlxrunner.sessions.commands import Saving
from screen import Screen

README = Path(__file__).parent.parent / "README.md"
BACKSPACE = "\x7f"


def session(folder: str) -> list[str]:
    """What is on the screen in the end, less the banner."""
    screen = Screen(
        ["-m", "mlxrunner", "chat"], {"MLXRUNNER_DATA": folder, "COLUMNS": "100"}, (100, 60)
    )
    screen.prompt()
    for text in ("My name is Zorblin.", "I have a parrot.", "What is my name?", "/stats"):
        screen.say(text)
    screen.child.send("/edit 1\r")
    screen.until(lambda: screen.lines[-1] == ">>> My name is Zorblin.")
    screen.child.send(BACKSPACE * len("Zorblin.") + "Quib.\r")
    screen.until("to evaluate").prompt()
    for text in ("What is my name?", "/explain"):
        screen.say(text)
    screen.child.send("/bye\r")
    lines = screen.everything[:-1]
    screen.child.close(force=True)
    return lines[next(index for index, line in enumerate(lines) if line.startswith(">>>")) :]


def parts() -> Iterator[tuple[str, list[str]]]:
    """What the README has between `<!-- NAME -->` and `<!-- end -->`."""
    with tempfile.TemporaryDirectory() as folder:
        yield "chat session", ["```console", "$ mlxrunner chat", *session(folder), "```"]
    rows = [
        f"| `{_escaped(command.usage)}` | {_escaped(command.help)} |"
        for command in commands(*Saving().commands)
    ]
    yield "chat commands", ["| command | what it does |", "|---|---|", *rows]


def _escaped(text: str) -> str:
    return text.replace("|", chr(92) + "|")


def put(readme: str, name: str, lines: list[str]) -> str:
    """The README with this part replaced."""
    before, _, rest = readme.partition(f"<!-- {name} -->\n")
    _, _, after = rest.partition("<!-- end -->")
    body = "\n".join(lines)
    return f"{before}<!-- {name} -->\n{body}\n<!-- end -->{after}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="put them into README.md")
    write = parser.parse_args().write
    readme = README.read_text()
    for name, lines in parts():
        readme = put(readme, name, lines)
        if not write:
            print("\n".join(lines), end="\n\n")
    if write:
        README.write_text(readme)


if __name__ == "__main__":
    main()
