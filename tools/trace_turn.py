"""Count the files that one chat turn passes: `python tools/trace_turn.py [MAX_TOKENS]`.

Runs two turns of the demo model through the chat's own loop. The second one, which finds a warm
entry, is traced from the moment its text is read until the loop asks for the next one. Prints the
distinct files of the package that were entered, how often two consecutive calls lie in different
files, and the calls; then the files, with their calls.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Any

import mlxrunner
from mlxrunner import Runner
from mlxrunner.chat.conversation import Conversation
from mlxrunner.chat.repl import open_chat

PACKAGE = str(Path(mlxrunner.__file__).parent) + os.sep
TEXTS = ("Hello, who are you?", "What is the capital of France?")
TRACED = 1
"""Index of the text whose turn is traced."""


class Trace:
    """The calls of one turn, as the files that they enter."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note a call; `sys.setprofile` also reports a generator that continues as one."""
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE):
            self.calls.append(file[len(PACKAGE) :])

    @property
    def changes(self) -> int:
        """Count how often a call lies in another file than the one before it."""
        return sum(one != other for one, other in zip(self.calls, self.calls[1:], strict=False))


class Reader:
    """Gives the texts one by one, and traces what follows one of them."""

    def __init__(self, trace: Trace) -> None:
        self._trace, self._given = trace, 0

    def read(self, idle: Callable[..., None], default: str = "") -> str:
        sys.setprofile(None)
        if self._given == len(TEXTS):
            raise EOFError
        if self._given == TRACED:
            sys.setprofile(self._trace)
        self._given += 1
        return TEXTS[self._given - 1]


def main(max_tokens: int) -> None:
    trace = Trace()
    runner = Runner.load("demo", 1024)
    chat, table = open_chat(Conversation(runner, options={"max_tokens": max_tokens}), model="demo")
    chat.reader = Reader(trace)
    with redirect_stdout(StringIO()):
        chat.run(table)
    files = Counter(trace.calls)
    print(f"{len(files)} files, {trace.changes} changes of file, {len(trace.calls)} calls")
    for file, calls in files.most_common():
        print(f"{calls:6} {file}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
