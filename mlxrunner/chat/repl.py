"""Read a line, print the answer as it comes, again. Commands begin with a slash; everything else is sent."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from mlxrunner.chat.conversation import Conversation
from mlxrunner.errors import MlxrunnerError, PromptError
from mlxrunner.terminal import Output, PrefillBar, size

Read = Callable[[], str]
"""Returns the next line; EOFError at the end, KeyboardInterrupt where the line was given up."""


class Repl:
    """`read` gives the lines, answers go to stdout, everything else to stderr. `run` returns the exit code."""

    def __init__(self, conversation: Conversation, read: Read, *, interactive: bool) -> None:
        self._conversation, self._read, self._interactive = conversation, read, interactive
        self._output = Output()
        self._commands: dict[str, tuple[Callable[[str], None], str]] = {
            "/clear": (self._clear, "forget the conversation; the system prompt stays"),
            "/system": (self._system, "TEXT: set the system prompt and begin anew; without TEXT: show it"),
            "/stats": (self._stats, "what the last turn and the session reused and evaluated"),
            "/help": (self._help, "this list"),
            "/bye": (self._bye, "leave (so does Ctrl-D)"),
        }

    def run(self) -> int:
        failed = 0
        while True:
            try:
                line = self._read()
            except EOFError:
                return failed
            except KeyboardInterrupt:
                continue
            command, _, argument = line.strip().partition(" ")
            try:
                if command in self._commands:
                    self._commands[command][0](argument.strip())
                elif command.startswith("/") and "/" not in command[1:]:
                    _say(f"no such command: {command} (see /help)")
                elif line.strip():
                    self._turn(line)
            except EOFError:
                return failed
            except KeyboardInterrupt:  # a second one, while the first was being dealt with
                continue
            except MlxrunnerError as error:
                _say(f"error: {error}" + ("; /clear begins anew" if isinstance(error, PromptError) and self._interactive else ""))
                failed = error.exit_code

    def _turn(self, text: str) -> None:
        with _interruptible() as interrupted:
            bar = PrefillBar()

            def progress(done: int, total: int) -> None:
                bar(done, total)
                if interrupted():
                    raise KeyboardInterrupt

            answer = self._conversation.send(text, progress)
            try:
                for chunk in answer:
                    self._output.write(chunk.text)
                    if interrupted():
                        break
            except KeyboardInterrupt:
                pass
            finally:
                bar.close()
                answer.close()  # type: ignore[attr-defined]  # a generator
            self._output.write("\n")
            if interrupted():
                _say("(interrupted)")
                if not self._interactive:
                    raise EOFError

    def _clear(self, _: str) -> None:
        self._conversation.clear()
        _say("cleared")

    def _system(self, text: str) -> None:
        if text:
            self._conversation.clear()
            self._conversation.system = text
        _say(f"system prompt: {self._conversation.system or '(none)'}")

    def _stats(self, _: str) -> None:
        usages = self._conversation.usages
        if not usages:
            _say("no turn yet")
            return
        last = usages[-1]
        why = last.freed_by or last.rewind_limited_by
        reason = f" ({last.reason}{f': {why}' if why else ''})" if last.reason else ""
        _say(
            f"last turn: {last.outcome}{reason}; prompt {last.prompt_tokens} = cached {last.cached_tokens} + evaluated "
            f"{last.evaluated_tokens}, answer {last.completion_tokens} tokens; first token after {last.ttft_s * 1000:.0f} ms, "
            f"prefill {last.prefill_rate:.0f} tokens/s, decode {last.decode_rate:.0f} tokens/s"
        )
        prompt, cached = sum(u.prompt_tokens for u in usages), sum(u.cached_tokens for u in usages)
        entry, context = self._conversation.runner.entry, self._conversation.runner.context
        _say(
            f"session: {len(usages)} turns; {cached} of {prompt} prompt tokens reused ({cached / prompt:.0%}); "
            f"entry {len(entry.tokens)} of {context} tokens, {size(entry.used_bytes)} used, {size(entry.nbytes)} allocated"
        )

    def _help(self, _: str) -> None:
        for name, (_action, text) in self._commands.items():
            _say(f"{name:9}{text}")
        _say("Ctrl-C stops an answer and keeps what was shown; while typing it clears the line")

    def _bye(self, _: str) -> None:
        raise EOFError


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C sets a flag that is looked at between tokens and prefill chunks; a second one interrupts wherever it comes."""
    pressed: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        if len(pressed) > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def terminal_reader() -> Read:
    """Lines with editing and history in a terminal."""
    from prompt_toolkit import PromptSession

    session: PromptSession[str] = PromptSession()
    return lambda: session.prompt(">>> ")


def pipe_reader() -> Read:
    """Lines of standard input, as they are."""

    def read() -> str:
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    return read


def _say(text: str) -> None:
    sys.stdout.flush()
    Output(sys.stderr).write(text + "\n")
