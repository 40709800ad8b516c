"""Run a batch over files: read the input into the store, run the lines, write the answers.

The run can be killed at any byte. The store is authoritative: an answer is committed there before
it is written to the output.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

from mlxrunner.batch.answers import error_of, write_line
from mlxrunner.batch.execution import Execution, Outcomes
from mlxrunner.batch.job import (
    ANSWERS,
    INPUT,
    Completion,
    Job,
    check_made_from,
    check_same,
    completed,
    open_output,
    opened_store,
    store_to_plan,
)
from mlxrunner.batch.opening import context_of, lanes_of, open_runner, tokenizer_for
from mlxrunner.batch.options import Order
from mlxrunner.batch.output import Writer
from mlxrunner.batch.plan import (
    BatchPlan,
    Survey,
    make_plan,
    survey,
)
from mlxrunner.batch.prompts import Begun, tokenize_lines
from mlxrunner.batch.records import CUT, BriefLine, Counts
from mlxrunner.batch.retry import (
    complete,
    copy_answers,
    finished,
    made_from,
    opened_retry,
)
from mlxrunner.batch.shards.lines import Costing, Shard, keep_shard
from mlxrunner.batch.shards.plan import CutPlan
from mlxrunner.batch.speed import Speed, known_speed, remember_speed
from mlxrunner.batch.status import Status, Tally
from mlxrunner.batch.store import Store
from mlxrunner.errors import (
    CutOffError,
    DamagedStoreError,
    OutputError,
    PromptError,
    StoreError,
)
from mlxrunner.parallel.stepper import Stepper
from mlxrunner.runner import Runner
from mlxrunner.terminal.progress import Progress, loading
from mlxrunner.terminal.signals import Interrupts, say_now
from mlxrunner.tokenizer import Tokenizer

T = TypeVar("T")
Watch = Callable[[Runner | Stepper], object]
Answering = Callable[[Callable[[], bool], Callable[[], None]], Outcomes]
"""A function that runs the lines without an answer and yields their outcomes.

It is called with a function that is true when no further line may begin, and with one to call
often.
"""
Elsewhere = Callable[[Job, Store, int, Progress], AbstractContextManager[Answering]]
"""A function that opens other processes for a job and its store, with this context."""
Stopped = Literal["interrupt", "errors"]
ENDING = (
    "finishing the lines that are running; Ctrl-C or kill again stops at once, and nothing that "
    "is finished is lost"
)


@dataclass(frozen=True)
class JobSummary:
    """The end of a job. The counts are those of the whole batch."""

    lines: int
    """The number of lines of the input."""
    done: int
    """The number of lines that have an answer."""
    failed: int
    """The number of lines whose answer is an error."""
    tally: Tally
    """The counts and times of this run."""
    stopped: Stopped | None = None
    """The cause of an early end: Ctrl-C, or too many failures; None if all lines are done."""
    first_error: str | None = None
    """The error of the first failed line of the input; None if no line failed or it is unknown."""


def run_job(
    job: Job,
    progress: Progress,
    watch: Watch = lambda runner: None,
    elsewhere: Elsewhere | None = None,
) -> JobSummary:
    """Run the job, or resume it, and return its end.

    `watch` is called with the runner before it runs anything. With `elsewhere`, other processes run
    the lines, and no model is loaded here. The output holds the errors of lines. An error that is
    raised concerns the whole batch, and has a message of one line.
    """
    opened = elsewhere or partial(_here, watch)
    with Status(job, progress.say) as status:
        found = _run_job(job, progress, opened, status)
    speed = found.tally.speed()
    if speed is not None and elsewhere is None:
        remember_speed(job.model, speed)
    return found


def _run_job(job: Job, progress: Progress, opened: Elsewhere, status: Status) -> JobSummary:
    """Run the job, or resume it; `status` tells others about it."""
    parts = job.parts()
    found, retried = _found(job, parts)
    if found is not None:
        status.tally = Tally(found.lines, found.lines, found.failed)
        return JobSummary(found.lines, found.lines, found.failed, status.tally)
    with opened_store(job) if retried is None else opened_retry(job, retried) as store:
        tokenizer = tokenizer_for(job)
        context = context_of(job)
        if store.is_complete:
            check_made_from(job, made_from(store), parts)
        else:
            _read(job, store, tokenizer, context, parts, progress, retried)
        counts = store.counts
        if job.strict and counts.broken:
            first = next(store.pending("prefix"), None)
            begin = f", the first: {first.error}" if first is not None and first.error else ""
            raise PromptError(f"{counts.broken} of {counts.lines} lines can't be run{begin}")
        with closing(open_output(job)) as output:
            writer = Writer(store, output, job.output_order)
            writer.mend()
            try:
                writer.flush()
                with opened(job, store, context, progress) as answering:
                    return _run(job, store, writer, tokenizer, answering, progress, status)
            except DamagedStoreError:
                raise
            except (StoreError, OutputError) as error:
                raise CutOffError(str(error)) from error


def _found(job: Job, parts: dict[str, str]) -> tuple[Completion | None, Completion | None]:
    """Return the record of a run that has nothing left to do, and that of the run to retry.

    At most one of them is not None.
    """
    if not job.retry_failed:
        return completed(job, parts), None
    found = finished(job, parts)
    return (None, found) if found.failed else (found, None)


def plan_job(job: Job, progress: Progress) -> BatchPlan:
    """Return the plan of the job, or of the lines that are left.

    No weights are read, and nothing is kept.
    """
    goes_on = job.resume or job.retry_failed
    parts, speed = job.parts() if goes_on else {}, known_speed(job.model)
    (done, retried), context = _found(job, parts), context_of(job)
    with store_to_plan(job, None if retried is None else retried.digest) as store:
        if store.is_complete:
            check_made_from(job, made_from(store), parts)
        elif done is None:
            tokenizer = tokenizer_for(job)
            _read(job, store, tokenizer, context, parts, progress, retried)
        counts = store.counts if done is None else Counts(done.lines, 0, done.lines, done.failed)
        costing = None if job.workers is None else Costing(job.defaults)
        found: dict[Order, Survey] = {
            "input": _survey(job, store, "input", context, progress, speed),
            "prefix": _survey(job, store, "prefix", context, progress, speed, costing),
        }
        parted = None
        if job.workers is not None and costing is not None:
            expected = found["prefix"].answer_tokens
            parted = CutPlan.of(costing.costs, job.workers, expected, speed)
    lanes, _ = lanes_of(job, found[job.order])
    return make_plan(counts, found, job.order, parallel=lanes, speed=speed, cut=parted)


def _read(
    job: Job,
    store: Store,
    tokenizer: Tokenizer,
    context: int,
    parts: dict[str, str],
    progress: Progress,
    retried: Completion | None,
) -> None:
    """Read the whole input into the store, and the good answers of the output that is retried."""
    inputs = job.lines()
    lines = _counted(inputs, "reading", progress)
    is_shifted = tokenize_lines(
        store,
        lines,
        tokenizer,
        context=context,
        defaults=job.defaults,
        picture_folder=job.picture_folder,
    )
    parts = {**parts, INPUT: inputs.digest}
    if job.shard is not None:
        store.arrange(by_tokens=is_shifted)
        arranged = _counted(store.left(), "cutting", progress)
        parts[CUT] = keep_shard(store, arranged, Shard.of(job.shard), job.defaults)
    if retried is not None:
        check_same(retried.made_from, parts, job.output)
        copy_answers(job, store, retried)
        parts[ANSWERS] = retried.digest
    store.finish(parts, by_tokens=is_shifted)
    progress.close()


def _survey(
    job: Job,
    store: Store,
    order: Order,
    context: int,
    progress: Progress,
    speed: Speed | None = None,
    costing: Costing | None = None,
) -> Survey:
    """Survey the lines that have no answer yet, and show the progress.

    `costing` notes what they cost on the way.
    """
    lines: Iterable[BriefLine] = _counted(store.left(order), "planning", progress)
    if costing is not None:
        lines = costing.of(lines)
    found = survey(lines, job.defaults, context, speed)
    progress.close()
    return found


def _counted(items: Iterable[T], what: str, progress: Progress) -> Iterator[T]:
    """Yield the items, and show how many there were."""
    for number, item in enumerate(items, 1):
        progress.update(partial("{}: {} lines".format, what, number))
        yield item


def _run(
    job: Job,
    store: Store,
    writer: Writer,
    tokenizer: Tokenizer,
    answering: Answering,
    progress: Progress,
    status: Status,
) -> JobSummary:
    """Run the lines that have no answer, until none is left or the run is stopped.

    The store is removed when no line is left.
    """
    before = store.counts
    tally = Tally(before.lines, before.done, before.failed)
    status.begin(tally)

    def tick() -> None:
        writer.tick()
        status.tick()

    with (
        Interrupts(signal.SIGTERM) as interrupts,
        interrupts.asking(partial(say_now, ENDING), is_settled_when_seen=False) as interrupted,
    ):

        def is_stopping() -> bool:
            failed_too_often = job.max_errors is not None and tally.failed >= job.max_errors
            return interrupted() or failed_too_often

        with writer, closing(answering(is_stopping, tick)) as outcomes:
            for outcome in outcomes:
                line = write_line(outcome, tokenizer, model=job.model, usage=job.usage)
                writer.write(outcome.line.index, line, failed=outcome.result is None)
                tally.add(outcome)
                status.tick()
                progress.update(tally.line, tally.earlier + tally.done, tally.total)
        after, first = store.counts, store.first_failure()
        if after.left and not is_stopping():
            raise store.damaged(f"{after.left} of {after.lines} lines are not found in it")
        if not after.left:
            complete(job, store, writer.output)
    progress.close()
    if after.left:
        status.stop()
    stopped: Stopped | None = ("interrupt" if interrupted() else "errors") if after.left else None
    first_error = error_of(first.body) if first is not None else None
    return JobSummary(after.lines, after.done, after.failed, tally, stopped, first_error)


@contextmanager
def _here(
    watch: Watch, job: Job, store: Store, context: int, progress: Progress
) -> Iterator[Answering]:
    """Load the model, and yield what answers the lines in this process."""
    with _runner(job, store, context, progress) as runner:
        if runner is not None:
            watch(runner)

        def answering(is_stopping: Callable[[], bool], tick: Callable[[], None]) -> Outcomes:
            begun = Begun.of(store, job.order, parallel=isinstance(runner, Stepper))
            execution = Execution(runner, job, begun, is_stopping, tick)
            return execution.run(store.pending(job.order))

        yield answering


@contextmanager
def _runner(
    job: Job, store: Store, context: int, progress: Progress
) -> Iterator[Runner | Stepper | None]:
    """Yield the runner for the lines without an answer; None if none of them can be run."""
    found = _survey(job, store, job.order, context, progress)
    if not found.lines:
        yield None
        return
    with loading(job.model, is_quiet=not progress.has_bar) as show:
        runner = open_runner(job, found, context, progress.say, show)
    try:
        yield runner
    finally:
        if isinstance(runner, Stepper):
            runner.close()
