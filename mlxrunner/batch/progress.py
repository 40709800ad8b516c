"""How far a batch is, on stderr: a bar in a terminal, a line every few seconds otherwise. Never anything on stdout. No tensors."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

from mlxrunner.batch.plan import duration
from mlxrunner.batch.speed import Speed
from mlxrunner.terminal import visible

if TYPE_CHECKING:
    from mlxrunner.batch.run import Outcome

EVERY = 5.0
"""Seconds between two lines."""
OFTEN = 0.1
"""Seconds between two looks of the bar."""


@dataclass
class Tally:
    """What came out so far. `total`: lines of the input; `earlier`, `earlier_failed`: those done before this run; the others are of this run.

    `seconds` of prompts and of answers are those of the lines, which overlap where several run at a time.
    """

    total: int = 0
    earlier: int = 0
    earlier_failed: int = 0
    done: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    prompt_seconds: float = 0.0
    answer_seconds: float = 0.0
    began: float = field(default_factory=time.monotonic)

    def add(self, outcome: Outcome) -> None:
        self.done += 1
        if outcome.result is None:
            self.failed += 1
            return
        usage = outcome.result.usage
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.answer_tokens += usage.completion_tokens
        self.prompt_seconds += usage.prefill_s
        self.answer_seconds += usage.decode_s

    @property
    def all_failed(self) -> int:
        return self.earlier_failed + self.failed

    @property
    def seconds(self) -> float:
        return max(time.monotonic() - self.began, 1e-9)

    @property
    def rate(self) -> float:
        """Answer tokens per second."""
        return self.answer_tokens / self.seconds

    @property
    def reused(self) -> float:
        """Share of the prompt tokens that were not evaluated."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def seconds_left(self) -> float | None:
        """At the pace so far; None before the first line is done."""
        return (
            self.seconds / self.done * (self.total - self.earlier - self.done)
            if self.done
            else None
        )

    def speed(self) -> Speed | None:
        """For the next estimate: the time of this run, divided as the lines' own times are. None if it was too short to tell."""
        evaluated, answered = self.prompt_tokens - self.cached_tokens, self.done - self.failed
        both = self.prompt_seconds + self.answer_seconds
        if not (evaluated and answered > 0 and self.prompt_seconds and self.answer_seconds):
            return None
        prompts, answers = (
            self.seconds * part / both for part in (self.prompt_seconds, self.answer_seconds)
        )
        return Speed(
            evaluated / prompts, self.answer_tokens / answers, self.answer_tokens / answered
        )

    def summary(self) -> str:
        """At the end."""
        return (
            f"{self.done} lines in {duration(self.seconds)}: {self.prompt_tokens:,} prompt tokens, {self.reused:.1%} of them reused; "
            f"{self.answer_tokens:,} answer tokens, {self.rate:.0f}/s"
        )

    def line(self) -> str:
        """For people."""
        left = self.seconds_left
        parts = [
            f"{self.earlier + self.done} of {self.total} lines",
            f"{self.all_failed} failed" if self.all_failed else "",
        ]
        parts += [f"{self.rate:.0f} tokens/s", f"{self.reused:.1%} of prompt tokens reused"]
        return ", ".join(
            filter(None, [*parts, f"{duration(left)} left" if left is not None else ""])
        )


class Progress:
    """Says nothing: --quiet. The others say more."""

    def say(self, line: str) -> None:
        """Something that is worth a line of its own."""

    def count(self, what: str, lines: int) -> None:
        """So many lines of the input are through a step that takes no time for a few of them, but for a million does."""

    def update(self, tally: Tally) -> None:
        """How far it is. Call it as often as you like."""

    def close(self) -> None:
        """No more of this."""


class Lines(Progress):
    """Plain lines."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stderr
        self._last = time.monotonic()

    def say(self, line: str) -> None:
        print(visible(line), file=self._stream, flush=True)

    def count(self, what: str, lines: int) -> None:
        if self._is_time(EVERY):
            self.say(f"{what}: {lines} lines")

    def update(self, tally: Tally) -> None:
        if self._is_time(EVERY):
            self.say(tally.line())

    def _is_time(self, every: float) -> bool:
        now = time.monotonic()
        if now - self._last < every:
            return False
        self._last = now
        return True


class Bar(Lines):
    """A bar that is gone when it is done."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        super().__init__(stream)
        self._bar: Any = None

    def say(self, line: str) -> None:
        if self._bar is None:
            super().say(line)
        else:
            self._bar.console.print(visible(line), markup=False, highlight=False, soft_wrap=True)

    def count(self, what: str, lines: int) -> None:
        if self._is_time(OFTEN):
            self._show(f"{what}: {lines} lines", None, 0)

    def update(self, tally: Tally) -> None:
        if self._is_time(OFTEN):
            self._show(tally.line(), tally.total, tally.earlier + tally.done)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show(self, text: str, total: int | None, done: int) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as RichProgress

            columns = (BarColumn(bar_width=20), TextColumn("{task.description}", markup=False))
            self._bar = RichProgress(*columns, console=Console(file=self._stream), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(text, total=total)
        self._bar.update(self._task, description=text, total=total, completed=done)


def progress_for(*, quiet: bool, shares_terminal: bool) -> Progress:
    """`shares_terminal`: the answers go to the terminal, too, where a bar would be in their way."""
    if quiet or sys.stderr is None:
        return Progress()
    return Bar() if sys.stderr.isatty() and not shares_terminal else Lines()
