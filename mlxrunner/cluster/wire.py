"""Turn a batch, its lines and their outcomes into plain data for the wire, and back.

Both sides have the same version of this program: the driver compares versions before it sends
anything but `describe`, whose answer therefore never changes its form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mlxrunner.batch.execution import Outcome
from mlxrunner.batch.job import Job
from mlxrunner.batch.plan import Survey
from mlxrunner.batch.prompts import PromptCost
from mlxrunner.batch.records import (
    LineCounts,
    StoredLine,
    plain_result,
    result_of,
    sort_key,
    tokens_of,
)

Plain = dict[str, Any]
"""Plain data: texts, numbers, bytes, None, and lists and dictionaries of them."""
_OF_JOB = ("model", "loading", "several", "parallel", "defaults", "retries", "timeout", "order")
"""The fields of a job that its answers are made with."""


@dataclass(frozen=True)
class SentBatch:
    """A batch as a worker gets it."""

    key: str
    """The name of this run of the batch, which no other has."""
    job: Plain
    """The fields of the job that answers are made with."""
    found: Plain
    """The survey of the lines, which decides how many run at a time."""
    counts: Plain
    """The numbers of lines of the whole batch."""
    context: int
    """The most tokens of a prompt and its answer."""
    has_events: bool
    """True if an event of each request goes back."""
    log_text: bool
    """True if these events show text where a prompt leaves the entry."""

    @classmethod
    def of(
        cls,
        key: str,
        job: Job,
        found: Survey,
        counts: LineCounts,
        context: int,
        *,
        has_events: bool,
        log_text: bool,
    ) -> SentBatch:
        """Describe a batch whose lines were surveyed."""
        fields = {name: getattr(job, name) for name in _OF_JOB}
        fields = {
            name: dict(one) if isinstance(one, Mapping) else one for name, one in fields.items()
        }
        return cls(key, fields, asdict(found), asdict(counts), context, has_events, log_text)

    def its_job(self) -> Job:
        """Return a job with the fields that answers are made with."""
        return Job(inputs=["-"], **self.job)

    def its_survey(self) -> Survey:
        """Return the survey of the lines."""
        return Survey(**{**self.found, "cost": PromptCost(**self.found["cost"])})

    def its_counts(self) -> LineCounts:
        """Return the numbers of lines of the whole batch."""
        return LineCounts(**self.counts)


def plain_line(line: StoredLine, *, with_prompt: bool) -> Plain:
    """Return a line as plain data. Only observers of a runner need its prompt."""
    fields = vars(line) | {"tokens": sort_key(line.tokens), "options": dict(line.options)}
    return fields if with_prompt else fields | {"prompt": None}


def line_of(plain: Plain) -> StoredLine:
    """Return the line that `plain_line` gave."""
    return StoredLine(**{**plain, "tokens": tokens_of(plain["tokens"])})


def plain_outcome(outcome: Outcome) -> Plain:
    """Return an outcome as plain data, without its line."""
    result = outcome.result
    fields = {name: value for name, value in vars(outcome).items() if name != "line"}
    return fields | {"result": None if result is None else plain_result(result)}


def outcome_of(line: StoredLine, plain: Plain) -> Outcome:
    """Return the outcome that `plain_outcome` gave, of this line."""
    result = plain["result"]
    return Outcome(line, **{**plain, "result": None if result is None else result_of(result)})
