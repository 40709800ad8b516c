"""Add up the lines of batches: how they ended, and what they reused of what could be reused."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from mlxrunner.profiling.schema import Event

MOST_RUNS = 50
"""The most runs that are counted apart; later ones are left out."""
MOST_FAILED = 100_000
"""The most failed lines of a run that are remembered, to tell a line from another try of it."""


@dataclass
class BatchRun:
    """The requests of one process that ran the lines of a batch."""

    process: str
    time: str
    """The time at which its first line began."""
    at_a_time: int
    """The number of lines that could run at a time."""
    order: str | None
    """The order of the lines; None in events that do not say it."""
    lines: int | None
    """The number of lines of the input; None in events that do not say it."""
    refused: int
    """The lines that could not be run, and made no request."""
    answered: int = 0
    """The lines that were answered."""
    cut: int = 0
    """The answers that ended at the most tokens that they may have."""
    tries: int = 0
    """The requests: more than the lines that ran, if some were tried again."""
    prompt: int = 0
    """The tokens of the prompts of all requests."""
    reused: int = 0
    """The prompt tokens that were reused."""
    lost: int = 0
    """The prompt tokens that were evaluated beyond the tree of all prefixes."""
    avoidable: int = 0
    """The lost tokens against whose loss something can be done."""
    _failed: dict[int, str] = field(default_factory=dict)

    @property
    def failed(self) -> Counter[str]:
        """The lines that ran and have no answer, by the name of what ended them."""
        return Counter(self._failed.values())

    @property
    def left(self) -> int | None:
        """The lines that this run did not come to, or that an earlier one had answered."""
        if self.lines is None:
            return None
        return max(0, self.lines - self.refused - self.answered - len(self._failed))

    @property
    def reuse(self) -> float:
        """The share of the prompt tokens that were reused, from 0 to 1."""
        return self.reused / self.prompt if self.prompt else 0.0

    @property
    def best(self) -> float:
        """The share that a cache of any size could have reused: all but the tree of prefixes."""
        return (self.reused + self.lost) / self.prompt if self.prompt else 0.0

    def add(self, event: Event, avoidable: int) -> None:
        """Add a request, which lost `avoidable` tokens that it need not have lost."""
        self.tries += 1
        self.prompt += event.prompt_tokens
        self.reused += event.saved_tokens
        self.lost += event.lost_tokens
        self.avoidable += avoidable
        number = event.line.number if event.line else event.number
        if event.finish in ("stop", "length"):
            self.answered += 1
            self.cut += event.finish == "length"
            self._failed.pop(number, None)
        elif number in self._failed or len(self._failed) < MOST_FAILED:
            self._failed[number] = event.error or event.finish

    def as_dict(self) -> dict[str, Any]:
        """Return the figures that `--json` prints."""
        names = "process time order lines refused answered cut tries prompt reused lost".split()
        return {
            **{name: getattr(self, name) for name in names},
            "at_a_time": self.at_a_time,
            "failed": dict(self.failed),
            "left": self.left,
        }


class Batches:
    """The runs of all batches, in the order in which they began."""

    def __init__(self) -> None:
        self._runs: dict[str, BatchRun] = {}

    @property
    def runs(self) -> list[BatchRun]:
        """The runs."""
        return list(self._runs.values())

    def add(self, event: Event, avoidable: int) -> None:
        """Add an event if it is of a batch; see `BatchRun.add`."""
        line = event.line
        if line is None and event.command != "batch":
            return
        run = self._runs.get(event.process)
        if run is None:
            if len(self._runs) == MOST_RUNS:
                return
            order, lines, refused = (line.order, line.lines, line.refused) if line else (None,) * 3
            run = BatchRun(
                event.process, event.time, event.max_sequences, order, lines, refused or 0
            )
            self._runs[event.process] = run
        run.add(event, avoidable)


def words(run: BatchRun) -> str:
    """Say in a few sentences how the lines of a run ended."""
    failed = run.failed
    parts = [
        (run.refused, "could not be run (see the output)"),
        *((count, ENDINGS.get(name, f"failed: {name}")) for name, count in failed.most_common(8)),
        (run.left or 0, "not in this run"),
    ]
    total = run.answered + failed.total() if run.lines is None else run.lines
    answered = f"{_lines(total)}, {run.answered:,} answered"
    cut = f", {run.cut:,} of them cut at their most tokens" if run.cut else ""
    said = "".join(f". {_lines(count).capitalize()} {what}" for count, what in parts if count)
    again = run.tries - run.answered - failed.total()
    tried = f". {again:,} further tries of lines that had failed" if again > 0 else ""
    return f"{answered}{cut}{said}{tried}."


ENDINGS = {
    "interrupted": "ended early, by a time limit or Ctrl-C",
    "TimeLimitError": "ended by a time limit before an answer began",
}
"""The ends of lines that have words of their own."""


def _lines(count: int) -> str:
    return "1 line" if count == 1 else f"{count:,} lines"


def name_of(run: BatchRun) -> str:
    """Name a run by its order: "prefix order, 8 at a time"."""
    order = f"{run.order} order" if run.order else "a batch"
    return f"{order}, {run.at_a_time} at a time" if run.at_a_time > 1 else f"{order}, one at a time"
