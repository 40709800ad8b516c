"""Tell other programs how a batch goes: a progress file while it runs, and a summary at its end.

Both are JSON and replaced as a whole, so that a reader never sees half of one. A file that can't be
written ends no batch: one warning says so.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from mlxrunner.batch.tally import Tally
from mlxrunner.system.power import EnergyMeter, on_battery
from mlxrunner.system.writing import written
from mlxrunner.terminal.text import one_line

if TYPE_CHECKING:
    from mlxrunner.batch.job import Job

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
