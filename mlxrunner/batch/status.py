"""Tell other programs how a batch goes: a progress file while it runs, and a summary at its end.

Both are JSON and replaced as a whole, so that a reader never sees half of one. A file that can't be
written ends no batch: one warning says so.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from mlxrunner.batch.execution import Outcome
from mlxrunner.batch.speed import Speed
from mlxrunner.system.power import EnergyMeter, on_battery
from mlxrunner.system.writing import written
from mlxrunner.terminal.text import count_of, duration, one_line

if TYPE_CHECKING:
    from mlxrunner.batch.job import Job


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


State = Literal["starting", "running", "done", "interrupted", "failed"]
EVERY_S = 1.0
"""The least seconds between two writes of the progress file."""


class Status:
    """A context manager around a run, which writes the job's `progress_file` and `summary`.

    Set `tally` when the run has counts, and call `tick` often. Leaving the block writes the final
    state: "done", "interrupted" (by a signal or --max-errors) or "failed" (by an error).
    """

    def __init__(self, job: Job, warn: Callable[[str], None]) -> None:
        """Tell about `job`; `warn` gets a line for a file that can't be written."""
        self._job, self._warn = job, warn
        self.tally: Tally | None = None
        self._state: State = "starting"
        self._error: str | None = None
        self._due, self._broken = 0.0, False
        self._meter = EnergyMeter() if job.summary is not None else None

    def __enter__(self) -> Status:
        self._write_progress()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception):
            self._state, self._error = "failed", one_line(" ".join(str(error).split()))
        elif error is not None:
            self._state = "interrupted"
        elif self._state in ("starting", "running"):
            self._state = "done"
        self._write_progress()
        self._write_summary()

    def begin(self, tally: Tally) -> None:
        """Note that lines run now, counted by `tally`."""
        self.tally, self._state = tally, "running"
        self._write_progress()

    def stop(self) -> None:
        """Note that the run ends with lines left."""
        self._state = "interrupted"

    def tick(self) -> None:
        """Write the progress if the last write was long enough ago."""
        if time.monotonic() >= self._due:
            if self._meter is not None:
                self._meter.sample()
            self._write_progress()

    def _write_progress(self) -> None:
        self._due = time.monotonic() + EVERY_S
        path = self._job.progress_file
        if path is None or self._broken:
            return
        problem = _write(path, self._progress())
        if problem is not None:
            self._broken = True
            self._warn(f"--progress-file {problem}; the batch goes on without it")

    def _write_summary(self) -> None:
        path = self._job.summary
        if path is not None and (problem := _write(path, self._summary())) is not None:
            self._warn(f"--summary {problem}")

    def _progress(self) -> dict[str, Any]:
        tally = self.tally or Tally()
        return {
            "state": self._state,
            "error": self._error,
            "output": self._job.output,
            "lines": None if self.tally is None else tally.total,
            "done": tally.earlier + tally.done,
            "failed": tally.earlier_failed + tally.failed,
            "seconds": round(tally.seconds, 3),
            "seconds_left": _rounded(tally.seconds_left),
            "tokens_per_second": round(tally.rate, 3),
            "reused": round(tally.reused, 6),
            "pid": os.getpid(),
            "updated": round(time.time(), 3),
        }

    def _summary(self) -> dict[str, Any]:
        tally, meter = self.tally or Tally(), self._meter
        done, failed = tally.earlier + tally.done, tally.earlier_failed + tally.failed
        return {
            "state": self._state,
            "error": self._error,
            "model": self._job.model,
            "inputs": list(self._job.inputs),
            "output": self._job.output,
            "lines": None if self.tally is None else tally.total,
            "answered": done - failed,
            "failed": failed,
            "run": {
                **tally.figures(),
                "energy_joules": None if meter is None else _rounded(meter.sample()),
                "on_battery": on_battery(),
            },
        }


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 3)


def _write(path: str, content: dict[str, Any]) -> str | None:
    """Write `content` to `path` as a whole. Return the reason if that is impossible."""
    try:
        with written(Path(path), sync=False) as stream:
            json.dump(content, stream, indent=1)
            stream.write("\n")
    except OSError as error:
        return f"{path}: can't be written: {error.strerror or error}"
    return None
