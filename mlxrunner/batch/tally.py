"""Count the tokens and seconds of a run of a batch, and say them in words. No files."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from mlxrunner.batch.execution import Outcome
from mlxrunner.batch.speed import Speed
from mlxrunner.terminal.text import count_of, duration


@dataclass
class Tally:
    """The counts and times of a run so far."""

    total: int = 0
    """The number of lines of the input."""
    earlier: int = 0
    """The number of lines that were done before this run."""
    earlier_failed: int = 0
    """The number of those lines that failed."""
    done: int = 0
    """The number of lines that have ended in this run, as in all fields below."""
    failed: int = 0
    """The number of those lines that failed."""
    failures: Counter[str] = field(default_factory=Counter)
    """The number of those lines by `Outcome.kind`."""
    cut: int = 0
    """The number of answers that ended at their limit, or at that of the context."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    prompt_seconds: float = 0.0
    """The seconds of prefill, added up over lines that overlap if several run at a time."""
    answer_seconds: float = 0.0
    """The seconds of decoding, added up in the same way."""
    began: float = field(default_factory=time.monotonic)
    """The time at which the run began, on time.monotonic."""

    def add(self, outcome: Outcome) -> None:
        """Count a line that has ended."""
        self.done += 1
        if outcome.result is None:
            self.failed += 1
            self.failures[outcome.kind] += 1
            return
        self.cut += outcome.result.finish_reason == "length"
        usage = outcome.result.usage
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.answer_tokens += usage.completion_tokens
        self.prompt_seconds += usage.timing.prefill_s
        self.answer_seconds += usage.timing.decode_s

    @property
    def seconds(self) -> float:
        """The seconds since the run began."""
        return max(time.monotonic() - self.began, 1e-9)

    @property
    def rate(self) -> float:
        """The answer tokens per second."""
        return self.answer_tokens / self.seconds

    @property
    def reused(self) -> float:
        """The share of the prompt tokens that were not evaluated, from 0 to 1."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def seconds_left(self) -> float | None:
        """The seconds until all lines are done, at the pace so far; None before the first."""
        if not self.done:
            return None
        return self.seconds / self.done * (self.total - self.earlier - self.done)

    def figures(self) -> dict[str, Any]:
        """Return the counts of this run by name, for other programs."""
        return {
            "lines": self.done,
            "failed": self.failed,
            "failures": dict(self.failures),
            "cut_at_limit": self.cut,
            "seconds": round(self.seconds, 3),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "evaluated_tokens": self.prompt_tokens - self.cached_tokens,
            "reused": round(self.reused, 6),
            "answer_tokens": self.answer_tokens,
            "tokens_per_second": round(self.rate, 3),
        }

    def speed(self) -> Speed | None:
        """Return the speed for the next estimate; None if the run was too short to tell.

        The seconds of this run are divided between prompts and answers like the lines' own seconds.
        """
        evaluated, answered = self.prompt_tokens - self.cached_tokens, self.done - self.failed
        if not (evaluated and answered > 0 and self.prompt_seconds and self.answer_seconds):
            return None
        share = self.prompt_seconds / (self.prompt_seconds + self.answer_seconds)
        prompts, answers = self.seconds * share, self.seconds * (1 - share)
        mean = self.answer_tokens / answered
        return Speed(evaluated / prompts, self.answer_tokens / answers, mean)

    def line(self) -> str:
        """Return the progress so far, for people. The time left assumes the same pace."""
        failed = self.earlier_failed + self.failed
        parts = [f"{self.earlier + self.done} of {self.total} lines"]
        if failed:
            parts.append(f"{failed} failed")
        parts += [f"{self.rate:.0f} tokens/s", f"{self.reused:.1%} of prompt tokens reused"]
        if (left := self.seconds_left) is not None:
            parts.append(f"{duration(left)} left")
        return ", ".join(parts)

    def summary(self) -> str:
        """Return a sentence for people about the whole run."""
        return (
            f"{count_of(self.done, 'line')} in {duration(self.seconds)}: "
            f"{self.prompt_tokens:,} prompt tokens, "
            f"{self.reused:.1%} of them reused; {self.answer_tokens:,} answer tokens, "
            f"{self.rate:.0f}/s"
        )
