"""A batch over files: read the input into the store, run what has no answer yet, write what is answered. Can be killed at any byte.

The store (OUTPUT.run) is the truth: an answer is committed there before it is written to the output. When everything is in the output and on
the disk it is removed, and what the answers were made from stays (OUTPUT.done).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

from mlxrunner.batch.answers import error_of, write_line
from mlxrunner.batch.earlier import begun_of
from mlxrunner.batch.files import (
    check_made_from,
    finish,
    finished,
    open_output,
    opened_input,
    opened_store,
    store_to_plan,
)
from mlxrunner.batch.fingerprint import INPUT
from mlxrunner.batch.interrupt import Interrupt
from mlxrunner.batch.job import Job
from mlxrunner.batch.lanes import lanes_for, open_runner
from mlxrunner.batch.lines import LineReader
from mlxrunner.batch.output import OutputError
from mlxrunner.batch.plan import BatchPlan, Survey, make_plan, survey
from mlxrunner.batch.progress import Progress, Tally
from mlxrunner.batch.run import ORDERS, How, answer
from mlxrunner.batch.speed import Speed, known_speed, remember_speed
from mlxrunner.batch.spool import spool
from mlxrunner.batch.store import Counts, DamagedStoreError, Order, Store, StoreError
from mlxrunner.batch.writer import Writer
from mlxrunner.errors import MlxrunnerError, PromptError
from mlxrunner.models.load import tokenizer_of
from mlxrunner.parallel.runner import ParallelRunner
from mlxrunner.runner import Runner, plan_model
from mlxrunner.tokenizer import Tokenizer

T = TypeVar("T")
Watch = Callable[[Runner | ParallelRunner], None]
Stopped = Literal["interrupt", "errors"]


class CutOffError(MlxrunnerError):
    """A batch that could not write any more. What is in the store stays, and is gone on from."""


@dataclass(frozen=True)
class Summary:
    """How it ended. `lines`, `done`, `failed`: of the whole batch; `tally`: of this run. `stopped`: by Ctrl-C, or by too many failures.

    `first_error`: of the first line in the input that failed, if it is known.
    """

    lines: int
    done: int
    failed: int
    tally: Tally
    stopped: Stopped | None = None
    first_error: str | None = None


def run_job(job: Job, progress: Progress, watch: Watch = lambda runner: None) -> Summary:
    """Run it, or go on with it. Errors of lines are in the output; what is raised is about the whole batch, in one line.

    `watch` is given the runner before it runs anything.
    """
    how, parts = How(job.defaults, job.retries, job.timeout), job.parts()
    done = finished(job, parts)
    if done is not None:
        return Summary(done.lines, done.lines, done.failed, Tally(done.lines, done.lines))
    with opened_store(job) as store:
        tokenizer = tokenizer_of(job.model, trust_remote_code=job.trust_remote_code)
        context = _context(job)
        if store.is_complete:
            check_made_from(job, store.meta, parts)
        else:
            _read(job, store, tokenizer, context, parts, progress)
        counts = store.counts
        if job.strict and counts.broken:
            first = next(store.pending("prefix"), None)
            begin = f", the first: {first.error}" if first is not None and first.error else ""
            raise PromptError(f"{counts.broken} of {counts.lines} lines can't be run{begin}")
        with closing(open_output(job)) as output:
            writer = Writer(store, output, job.output_order)
            writer.mend()
            try:
                return _run(job, how, store, writer, tokenizer, context, progress, watch)
            except DamagedStoreError:
                raise
            except (StoreError, OutputError) as error:
                raise CutOffError(str(error)) from error


def plan_job(job: Job, progress: Progress) -> BatchPlan:
    """What it will cost, or what is left of it will: no weights are read, and nothing is kept."""
    parts, speed = job.parts() if job.resume else {}, known_speed(job.model)
    done, context = finished(job, parts), _context(job)
    with store_to_plan(job) as store:
        if store.is_complete:
            check_made_from(job, store.meta, parts)
        elif done is None:
            _read(
                job,
                store,
                tokenizer_of(job.model, trust_remote_code=job.trust_remote_code),
                context,
                {},
                progress,
            )
        counts = store.counts if done is None else Counts(done.lines, 0, done.lines, done.failed)
        found = {order: _survey(job, store, order, context, progress, speed) for order in ORDERS}
    lanes, _ = lanes_for(found[job.order], job.parallel, job.loading)
    return make_plan(counts, found, job.order, parallel=lanes, speed=speed)


def _context(job: Job) -> int:
    """Most tokens of a prompt and its answer: as asked, or the model's own, or what fits."""
    names = ("prefill_step", "kv_bits", "rewind_slack", "checkpoint_budget")
    return plan_model(
        job.model,
        job.loading.get("context"),
        **{name: job.loading[name] for name in names if name in job.loading},
    ).context


def _read(
    job: Job,
    store: Store,
    tokenizer: Tokenizer,
    context: int,
    parts: dict[str, str],
    progress: Progress,
) -> None:
    """The whole input into the store."""
    with opened_input(job) as stream:
        reader = LineReader(
            stream, defaults=job.defaults, system=job.system, raw=job.raw, template=job.template
        )
        spool(
            store,
            _counted(reader, "reading", progress),
            tokenizer,
            context=context,
            defaults=job.defaults,
        )
        store.finish({**parts, INPUT: reader.digest})
    progress.close()


def _survey(
    job: Job,
    store: Store,
    order: Order,
    context: int,
    progress: Progress,
    speed: Speed | None = None,
) -> Survey:
    found = survey(
        _counted(store.pending(order), "planning", progress), job.defaults, context, speed
    )
    progress.close()
    return found


def _counted(items: Iterable[T], what: str, progress: Progress) -> Iterator[T]:
    for number, item in enumerate(items, 1):
        progress.count(what, number)
        yield item


def _run(
    job: Job,
    how: How,
    store: Store,
    writer: Writer,
    tokenizer: Tokenizer,
    context: int,
    progress: Progress,
    watch: Watch,
) -> Summary:
    """All lines that have no answer, or those until it is stopped; when none is left the store goes."""
    before = store.counts
    with _runner(job, store, context, progress) as runner, Interrupt() as interrupt:
        if runner is not None:
            watch(runner)
        tally = Tally(before.lines, before.done, before.failed)

        def is_stopping() -> bool:
            return interrupt.asked or (
                job.max_errors is not None and tally.failed >= job.max_errors
            )

        how = How(how.defaults, how.retries, how.timeout, is_stopping, writer.tick)
        begun = begun_of(store, job.order, parallel=isinstance(runner, ParallelRunner))
        with writer, closing(answer(runner, store.pending(job.order), how, begun)) as outcomes:  # type: ignore[type-var]
            for outcome in outcomes:
                failed = outcome.result is None
                writer.write(
                    outcome.entry.index,
                    write_line(outcome, tokenizer, model=job.model, usage=job.usage),
                    failed=failed,
                )
                tally.add(outcome)
                progress.update(tally)
        after, first = store.counts, store.first_failure()
        if after.left and not is_stopping():
            raise store.damaged(f"{after.left} of {after.lines} lines are not found in it")
        if not after.left:
            writer.seal()
            finish(job, store, writer.output)
    progress.close()
    speed = tally.speed()
    if speed is not None:
        remember_speed(job.model, speed)
    stopped: Stopped | None = ("interrupt" if interrupt.asked else "errors") if after.left else None
    return Summary(
        after.lines,
        after.done,
        after.failed,
        tally,
        stopped,
        error_of(first.body) if first is not None else None,
    )


@contextmanager
def _runner(
    job: Job, store: Store, context: int, progress: Progress
) -> Iterator[Runner | ParallelRunner | None]:
    """None if there is no line that can be run."""
    found = _survey(job, store, job.order, context, progress)
    if not found.lines:
        yield None
        return
    runner = open_runner(job.model, job.loading, job.parallel, found, context, progress.say)
    try:
        yield runner
    finally:
        if isinstance(runner, ParallelRunner):
            runner.close()
