"""Run a batch over files: read the input into the store, run the lines, write the answers.

The run can be killed at any byte. The store is authoritative: an answer is committed there before
it is written to the output.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

from mlxrunner.batch.execution import Execution, Outcome, Outcomes
from mlxrunner.batch.job import (
    ANSWERS,
    INPUT,
    Completion,
    Job,
    check_made_from,
    check_same,
    complete,
    copy_answers,
    finished_run,
    made_from,
    open_output,
    opened_store,
    store_to_plan,
)
from mlxrunner.batch.options import Order
from mlxrunner.batch.output import AnswerWriter, error_of, write_line
from mlxrunner.batch.plan import (
    BatchPlan,
    CostRecorder,
    CutPlan,
    Shard,
    Speed,
    Survey,
    keep_shard,
    known_speed,
    lanes_for,
    make_plan,
    remember_speed,
    survey,
)
from mlxrunner.batch.prompts import EarlierLines, tokenize_lines
from mlxrunner.batch.store import CUT, BriefLine, LineCounts, Store
from mlxrunner.engine.engine import Engine
from mlxrunner.errors import (
    CutOffError,
    DamagedStoreError,
    MemoryPlanError,
    OutputError,
    PromptError,
    StoreError,
)
from mlxrunner.loading import plan_model
from mlxrunner.models.facts import is_run_by_mlx_vlm
from mlxrunner.models.load import (
    LoadProgress,
    load_model,
    tell_nobody,
    tokenizer_of,
    unread_vision_model,
)
from mlxrunner.options import RunnerSettings
from mlxrunner.runner import Runner
from mlxrunner.system.device import EnergyMeter, on_battery
from mlxrunner.system.writing import why_not, written
from mlxrunner.terminal.control import Interrupts, say_now
from mlxrunner.terminal.output import Progress, count_of, duration, loading, one_line
from mlxrunner.tokenizer import Tokenizer

T = TypeVar("T")
Watch = Callable[[Runner | Engine], object]
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
MAX_BATCH = 256
"""The tokens of a step for several lines, unless the user says otherwise.

Where rows are long, pieces of several prompts in one row cost more than they save.
"""
State = Literal["starting", "running", "done", "interrupted", "failed"]
EVERY_S = 1.0
"""The least seconds between two writes of the progress file."""


def run_job(
    job: Job,
    progress: Progress,
    watch: Watch = lambda runner: None,
    elsewhere: Elsewhere | None = None,
) -> Tally:
    """Run the job, or resume it, and return its end.

    `watch` is called with the runner before it runs anything. With `elsewhere`, other processes run
    the lines, and no model is loaded here. The output holds the errors of lines. An error that is
    raised concerns the whole batch, and has a message of one line.
    """
    opened = elsewhere or partial(_here, watch)
    with Status(job, progress.say) as status:
        found = _run_job(job, progress, opened, status)
    speed = found.speed()
    if speed is not None and elsewhere is None:
        remember_speed(job.model, speed)
    return found


def _run_job(job: Job, progress: Progress, opened: Elsewhere, status: Status) -> Tally:
    parts = job.parts()
    found, retried = finished_run(job, parts)
    if found is not None:
        status.tally = Tally(found.lines, found.lines, found.failed)
        return status.tally
    with opened_store(job, retried) as store:
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
            writer = AnswerWriter(store, output, job.output_order)
            writer.mend()
            try:
                writer.flush()
                with opened(job, store, context, progress) as answering:
                    return _run(job, store, writer, tokenizer, answering, progress, status)
            except DamagedStoreError:
                raise
            except (StoreError, OutputError) as error:
                raise CutOffError(str(error)) from error


def plan_job(job: Job, progress: Progress) -> BatchPlan:
    """Return the plan of the job, or of the lines that are left.

    No weights are read, and nothing is kept.
    """
    goes_on = job.resume or job.retry_failed
    parts, speed = job.parts() if goes_on else {}, known_speed(job.model)
    (done, retried), context = finished_run(job, parts), context_of(job)
    with store_to_plan(job, retried) as store:
        if store.is_complete:
            check_made_from(job, made_from(store), parts)
        elif done is None:
            tokenizer = tokenizer_for(job)
            _read(job, store, tokenizer, context, parts, progress, retried)
        counts = (
            store.counts if done is None else LineCounts(done.lines, 0, done.lines, done.failed)
        )
        costing = None if job.workers is None else CostRecorder(job.defaults)
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
    costing: CostRecorder | None = None,
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
    for number, item in enumerate(items, 1):
        progress.update(partial("{}: {} lines".format, what, number))
        yield item


def _run(
    job: Job,
    store: Store,
    writer: AnswerWriter,
    tokenizer: Tokenizer,
    answering: Answering,
    progress: Progress,
    status: Status,
) -> Tally:
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
                progress.update(tally.line, tally.all_done, tally.total)
        after, first = store.counts, store.first_failure()
        if after.left and not is_stopping():
            raise store.damaged(f"{after.left} of {after.lines} lines are not found in it")
        if not after.left:
            complete(job, store, writer.output)
    progress.close()
    if after.left:
        tally.stopped = "interrupt" if interrupted() else "errors"
    tally.first_error = error_of(first.body) if first is not None else None
    return tally


@contextmanager
def _here(
    watch: Watch, job: Job, store: Store, context: int, progress: Progress
) -> Iterator[Answering]:
    """Load the model if a line can be run, and yield what answers the lines in this process."""
    found, runner = _survey(job, store, job.order, context, progress), None
    if found.lines:
        with loading(job.model, is_quiet=not progress.has_bar) as show:
            runner = open_runner(job, found, context, progress.say, show)
    try:
        if runner is not None:
            watch(runner)

        def answering(is_stopping: Callable[[], bool], tick: Callable[[], None]) -> Outcomes:
            begun = EarlierLines.of(store, job.order, parallel=isinstance(runner, Engine))
            execution = Execution(runner, job, begun, is_stopping, tick)
            return execution.run(store.pending(job.order))

        yield answering
    finally:
        if isinstance(runner, Engine):
            runner.close()


def context_of(job: Job) -> int:
    """Return the most tokens of a prompt and its answer.

    It is as asked, or else the model's own or what fits into memory.
    """
    settings = vars(RunnerSettings.among(job.loading))
    return plan_model(job.model, pictures=job.pictures, **settings).context


def tokenizer_for(job: Job) -> Tokenizer:
    """Return the tokenizer of the job's model, which knows pictures if lines may have some."""
    if _sees(job):
        return unread_vision_model(job.model).tokenizer
    return tokenizer_of(job.model, trust_remote_code=job.trust_remote_code)


def _sees(job: Job) -> bool:
    return job.pictures or is_run_by_mlx_vlm(job.model)


def lanes_of(job: Job, found: Survey) -> tuple[int, str]:
    """Return how many of the surveyed lines to run at a time, and why no more."""
    if _sees(job):
        return 1, "a model that sees pictures takes no more"
    return lanes_for(found, job.parallel, job.loading)


def open_runner(
    job: Job,
    found: Survey,
    context: int,
    say: Callable[[str], None],
    progress: LoadProgress = tell_nobody,
) -> Runner | Engine:
    """Load the model and return a runner for the surveyed lines.

    The runner takes as many lines at a time as `lanes_for` says and as fit into memory. `say` is
    called with that number and the reason for it. Raise ModelError if the model can't be loaded,
    and MemoryPlanError if it does not fit.
    """
    lanes, why = lanes_of(job, found)
    if lanes > 1:
        runner = _several(job, lanes, found, context, say, progress)
        if isinstance(runner, Engine):
            return runner
        why = runner
    if why:
        say(f"one line at a time: {why}")
    loading = {**job.loading, "context": context, "pictures": job.pictures}
    return Runner.load(job.model, progress=progress, **loading)


def _several(
    job: Job,
    lanes: int,
    found: Survey,
    context: int,
    say: Callable[[str], None],
    progress: LoadProgress,
) -> Engine | str:
    """Return a runner for several lines at a time, or the reason why it has to be one."""
    loaded = load_model(job.model, trust_remote_code=job.trust_remote_code, progress=progress)
    while lanes > 1:
        try:
            runner = Engine.of(
                loaded,
                max_sequences=lanes,
                progress=progress,
                context=context,
                kv_cache_tokens=found.cells(lanes, context),
                prefill_step=max(job.loading.get("prefill_step") or MAX_BATCH, lanes),
                reserve=bool(job.loading.get("reserve", True)),
                wire=job.loading.get("wire", "weights"),
                draft_model=job.loading.get("draft_model"),
                **job.several,
            )
        except MemoryPlanError:
            if job.parallel is not None:
                raise
            lanes //= 2
        else:
            if runner.why_alone is not None:
                runner.close()
                return runner.why_alone
            say(
                f"{lanes} lines at a time, prefixes that they share stored once "
                f"({found.new_tokens:.0f} new tokens a line)"
            )
            return runner
    return "more do not fit into memory; --max-tokens would bound what each line needs"


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
    stopped: Stopped | None = None
    """The cause of an early end: Ctrl-C, or too many failures; None if all lines are done."""
    first_error: str | None = None
    """The error of the first failed line of the input; None if no line failed or it is unknown."""

    @property
    def all_done(self) -> int:
        """The lines of the whole batch that have an answer."""
        return self.earlier + self.done

    @property
    def all_failed(self) -> int:
        """The lines of the whole batch whose answer is an error."""
        return self.earlier_failed + self.failed

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
        return self.seconds / self.done * (self.total - self.all_done)

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
        parts = [f"{self.all_done} of {self.total} lines"]
        if self.all_failed:
            parts.append(f"{self.all_failed} failed")
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
        elif error is not None or (self.tally is not None and self.tally.stopped):
            self._state = "interrupted"
        else:
            self._state = "done"
        self._write_progress()
        path = self._job.summary
        if path is not None and (problem := _write(path, self._summary())):
            self._warn(f"--summary {problem}")

    def begin(self, tally: Tally) -> None:
        """Note that lines run now, counted by `tally`."""
        self.tally, self._state = tally, "running"
        self._write_progress()

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
            self._warn(f"--progress-file {problem}; the batch continues without it")

    def _progress(self) -> dict[str, Any]:
        tally = self.tally or Tally()
        return {
            "state": self._state,
            "error": self._error,
            "output": self._job.output,
            "lines": None if self.tally is None else tally.total,
            "done": tally.all_done,
            "failed": tally.all_failed,
            "seconds": round(tally.seconds, 3),
            "seconds_left": _rounded(tally.seconds_left),
            "tokens_per_second": round(tally.rate, 3),
            "reused": round(tally.reused, 6),
            "pid": os.getpid(),
            "updated": round(time.time(), 3),
        }

    def _summary(self) -> dict[str, Any]:
        tally, meter = self.tally or Tally(), self._meter
        return {
            "state": self._state,
            "error": self._error,
            "model": self._job.model,
            "inputs": list(self._job.inputs),
            "output": self._job.output,
            "lines": None if self.tally is None else tally.total,
            "answered": tally.all_done - tally.all_failed,
            "failed": tally.all_failed,
            "run": {
                **tally.figures(),
                "energy_joules": None if meter is None else _rounded(meter.sample()),
                "on_battery": on_battery(),
            },
        }


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 3)


def _write(path: str, content: dict[str, Any]) -> str | None:
    try:
        with written(Path(path), sync=False) as stream:
            json.dump(content, stream, indent=1)
            stream.write("\n")
    except OSError as error:
        return f"{path}: can't be written: {why_not(error, path)}"
    return None
