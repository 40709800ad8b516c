"""Edit a text in the user's own editor, `$VISUAL` or `$EDITOR`. Knows nothing about chats."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from mlxrunner.errors import FileError, MlxrunnerError
from mlxrunner.system.reading import read_text
from mlxrunner.system.writing import written
from mlxrunner.terminal.keyboard import Keyboard

LONGEST_TEXT = 2**26
"""Most bytes of a text that comes back from an editor."""
USUAL = "vi"
"""The editor of a user who has set none."""


def edit_outside(text: str, keyboard: Keyboard) -> str:
    """Return `text` as the user leaves it in an editor of their own.

    The editor has the terminal meanwhile; Ctrl-C is a key of the editor. The text is in a folder
    that only the user can read, and that is removed afterwards. Use it in the main thread. Raise
    MlxrunnerError if the editor cannot be started or fails, and FileError if what it leaves is not
    a text.
    """
    command = os.environ.get("VISUAL") or os.environ.get("EDITOR") or USUAL
    with TemporaryDirectory(prefix="mlxrunner-") as folder:
        path = Path(folder) / "text.md"
        try:
            with written(path, sync=False) as stream:
                stream.write(f"{text}\n" if text else "")
            with keyboard.lent():
                code = _run([*shlex.split(command), str(path)])
        except (OSError, ValueError) as error:
            raise MlxrunnerError(
                f"the editor {command!r} can't be used ({error}): set EDITOR to another one"
            ) from error
        if code:
            raise MlxrunnerError(
                f"the editor {command!r} ended with code {code}, so the text stays as it was"
            )
        edited = read_text(path, LONGEST_TEXT)
    if "\0" in edited:
        raise FileError("what the editor left is not a text: it has a byte 0")
    return edited.removesuffix("\n")


def _run(command: list[str]) -> int:
    """Run `command` in the terminal, and return its exit code. Ctrl-C is for the command only."""
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        return subprocess.call(command)
    finally:
        signal.signal(signal.SIGINT, before)
