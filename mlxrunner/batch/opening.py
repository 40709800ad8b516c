"""Load what the lines of a batch run on: the context, the tokenizer and the runner of a job."""

from __future__ import annotations

from collections.abc import Callable

from mlxrunner.batch.job import Job
from mlxrunner.batch.plan import Survey, lanes_for
from mlxrunner.errors import MemoryPlanError
from mlxrunner.loading import plan_model
from mlxrunner.models.eyes import runs_only_seeing
from mlxrunner.models.load import LoadProgress, load_model, tell_nobody, tokenizer_of
from mlxrunner.models.seeing import unread_seeing
from mlxrunner.options import RunnerSettings
from mlxrunner.parallel.stepper import Stepper
from mlxrunner.runner import Runner
from mlxrunner.tokenizer import Tokenizer

MAX_BATCH = 256
"""The tokens of a step for several lines, unless the user says otherwise.

Where rows are long, pieces of several prompts in one row cost more than they save.
"""


def context_of(job: Job) -> int:
    """Return the most tokens of a prompt and its answer.

    It is as asked, or else the model's own or what fits into memory.
    """
    settings = vars(RunnerSettings.among(job.loading))
    return plan_model(job.model, pictures=job.pictures, **settings).context


def tokenizer_for(job: Job) -> Tokenizer:
    """Return the tokenizer of the job's model, which knows pictures if lines may have some."""
    if _sees(job):
        return unread_seeing(job.model).tokenizer
    return tokenizer_of(job.model, trust_remote_code=job.trust_remote_code)


def _sees(job: Job) -> bool:
    return job.pictures or runs_only_seeing(job.model)


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
) -> Runner | Stepper:
    """Load the model and return a runner for the surveyed lines.

    The runner takes as many lines at a time as `lanes_for` says and as fit into memory. `say` is
    called with that number and the reason for it. Raise ModelError if the model can't be loaded,
    and MemoryPlanError if it does not fit.
    """
    lanes, why = lanes_of(job, found)
    if lanes > 1:
        runner = _several(job, lanes, found, context, say)
        if isinstance(runner, Stepper):
            return runner
        why = runner
    if why:
        say(f"one line at a time: {why}")
    loading = {**job.loading, "context": context, "pictures": job.pictures}
    return Runner.load(job.model, progress=progress, **loading)


def _several(
    job: Job, lanes: int, found: Survey, context: int, say: Callable[[str], None]
) -> Stepper | str:
    """Return a runner for several lines at a time, or the reason why it has to be one."""
    loaded = load_model(job.model, trust_remote_code=job.trust_remote_code)
    while lanes > 1:
        try:
            runner = Stepper.of(
                loaded,
                max_sequences=lanes,
                context=context,
                kv_cache_tokens=found.cells(lanes, context),
                prefill_step=max(job.loading.get("prefill_step") or MAX_BATCH, lanes),
                reserve=bool(job.loading.get("reserve", True)),
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
