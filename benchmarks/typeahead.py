"""Measure the gain of evaluating while somebody types, and the lag that it adds to typing.

python benchmarks/typeahead.py [--tokens N] [--rounds N]

A chat on a random Llama of 98 M parameters runs in a pseudo-terminal. A message is pasted, read
over for as long as its evaluation takes, and sent; the time is from the Enter key to the end of an
answer of one token. The sides take turns: with typing ahead and without. While a pasted message is
being evaluated, keys are typed and the time until each is echoed is taken; then it is given up with
Ctrl-C, and the time until the model is free is taken.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pexpect
from arguments import print_json, print_table

from mlxrunner.bench.harness import less_is_better

KEYS = "the quick brown fox"


def serve(type_ahead: bool, progress: Path) -> None:
    """The chat itself, in the pseudo-terminal.

    `progress` gets a line for each evaluation in advance that was finished.
    """
    from arguments import random_runner

    from mlxrunner.chat import editor
    from mlxrunner.chat.conversation import Conversation
    from mlxrunner.chat.input import TypedText
    from mlxrunner.chat.repl import open_chat

    class TimedDraft(TypedText):
        ended = 0.0

        def finish(self) -> None:
            TimedDraft.ended = time.perf_counter()
            super().finish()

    editor.TypedText = TimedDraft  # type: ignore[attr-defined]
    conversation = Conversation(random_runner(), options={"max_tokens": 1})
    chat, table = open_chat(conversation, plain=True, history=False, type_ahead=type_ahead)
    evaluate = conversation.evaluate

    def noted(draft: str, cancelled: Callable[[], bool], after: Any = None) -> None:
        began = time.perf_counter()
        evaluate(draft, cancelled, after)
        if not cancelled():
            with progress.open("a") as stream:
                stream.write(f"{len(draft)}\n")
        elif TimedDraft.ended > began:
            with progress.with_suffix(".stopped").open("a") as stream:
                stream.write(f"{time.perf_counter() - TimedDraft.ended}\n")

    conversation.evaluate = noted  # type: ignore[method-assign]
    chat.after_turn.append(
        lambda chat: print(
            f"<answered, ttft {chat.conversation.usages[-1].timing.ttft_s:.4f}>", flush=True
        )
    )
    sys.exit(chat.run(table))


class Chat:
    """The one in the pseudo-terminal, from the side of the keyboard."""

    def __init__(self, type_ahead: bool, folder: Path) -> None:
        self.progress = folder / f"evaluated-{type_ahead}"
        self.progress.touch()
        self.stopped = self.progress.with_suffix(".stopped")
        self.stopped.touch()
        command = [__file__, "--serve", str(self.progress), *([] if type_ahead else ["--without"])]
        environment = {**os.environ, "PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm"}
        self.child = pexpect.spawn(
            sys.executable, command, env=environment, dimensions=(40, 120), timeout=120
        )
        self.child.delaybeforesend = None
        self.child.expect(">>>")
        self.wait_until_evaluated(0)

    def wait_until_evaluated(self, length: int) -> None:
        """Wait until `length` characters of a message have been evaluated since the last call."""
        while str(length) not in self.progress.read_text().split():
            time.sleep(0.05)
        self.progress.write_text("")

    def paste(self, text: str) -> None:
        self.child.send(f"\x1b[200~{text}\x1b[201~")
        self.child.expect_exact(text[-8:])

    def enter(self) -> float:
        """Seconds from the key to the end of an answer of one token."""
        began = time.perf_counter()
        self.child.send("\r")
        self.child.expect("<answered")
        seconds = time.perf_counter() - began
        self.child.expect(">>>")
        return seconds

    def echoes(self) -> list[float]:
        """Return the seconds until each key was on the screen while the paste is evaluated."""
        seconds = []
        for key in KEYS.replace(" ", ""):
            time.sleep(0.3)  # longer than the pause after which evaluating continues
            while True:  # what is still coming of the last key
                try:
                    self.child.read_nonblocking(4096, timeout=0)
                except pexpect.TIMEOUT:
                    break
            self.child.buffer = b""
            began = time.perf_counter()
            self.child.send(key)
            self.child.expect_exact(key)
            seconds.append(time.perf_counter() - began)
        return seconds

    def clear(self) -> None:
        """Begin again, with nothing left of the last message in the entry but its first tokens."""
        self.progress.write_text("")
        self.child.send("/clear\r")
        self.child.expect("cleared")
        self.child.expect(">>>")
        self.wait_until_evaluated(0)


def message(tokens: int, number: int) -> str:
    """Return a message of `tokens` tokens, a byte each, that begins with `number`."""
    return (
        f"{number}: "
        + "some text that was copied from elsewhere, with a question about it at its end ... "
        * tokens
    )[:tokens]


def in_ms(seconds: list[float]) -> list[float]:
    return [one * 1e3 for one in seconds]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2000, help="length of the paste")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--without", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(not options.without, options.serve)
    ahead: list[float] = []
    plain: list[float] = []
    echo: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        sides = {type_ahead: Chat(type_ahead, Path(folder)) for type_ahead in (True, False)}
        for number in range(options.rounds):
            text = message(options.tokens, number)
            for type_ahead, chat in sides.items():
                chat.paste(text)
                if type_ahead:
                    chat.wait_until_evaluated(len(text))
                (ahead if type_ahead else plain).append(chat.enter())
                chat.clear()
                chat.paste(message(options.tokens, number + 100))
                echo[type_ahead] += chat.echoes()
                chat.child.send("\x03")
                chat.child.expect(">>>")
        stopped = [float(line) for line in sides[True].stopped.read_text().split()]
        for chat in sides.values():
            chat.child.close(force=True)
    first = less_is_better(
        f"first token after Enter, paste of {options.tokens}", "ms", in_ms(ahead), in_ms(plain)
    )
    echoes = less_is_better(
        "echo of a key while a paste is evaluated", "ms", in_ms(echo[True]), in_ms(echo[False])
    )
    rows = [replace(first, target=10), echoes]
    print_table(rows)
    print(
        f"slowest echo of {len(echo[True])}: {max(echo[True]) * 1e3:.1f} ms; without: "
        f"{max(echo[False]) * 1e3:.1f} ms"
    )
    print(
        f"the model was free {max(stopped) * 1e3:.1f} ms after the key that needed it, at most, of "
        f"{len(stopped)} times"
    )
    print_json(rows, versus="without typing ahead", rounds=options.rounds)


if __name__ == "__main__":
    main()
