"""`mlxrunner batch`: answer a file of prompts."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

import click

from mlxrunner.batch.options import FileOptions
from mlxrunner.cli.generate import check_pictures
from mlxrunner.cli.options import (
    LOADING,
    RECORDING,
    STRICT,
    Configured,
    check_options,
    debug_option,
    draft_option,
    flag,
    form_options,
    is_given,
    model_options,
    option_of,
    options_that_hold,
    overflow_options,
    recording,
    sampling_options,
    system_option,
    take,
    template_options,
    together,
    typed_options,
    watching_options,
)
from mlxrunner.cli.program import F, HelpCommand, line_text, visible_text
from mlxrunner.cluster.options import ClusterOptions, Connection, check_installed
from mlxrunner.config.option import described
from mlxrunner.errors import CutOffError, OptionError
from mlxrunner.options import EngineSettings, GenerateOptions, RunnerSettings

if TYPE_CHECKING:
    from mlxrunner.batch.job import Job
    from mlxrunner.batch.work import Tally


CUT_OFF = 1
"""The exit code of a run with lines that are left."""


def _refuse_embeddings(ctx: click.Context, parameter: click.Parameter, given: bool) -> None:
    from mlxrunner.batch.inputs import NO_EMBEDDINGS

    if given:
        raise OptionError(f"--embeddings: {NO_EMBEDDINGS}")


_FIRST = click.option(
    "-o",
    "--output",
    metavar="FILE",
    help=(
        "Write the answers to FILE; - is standard output. FILE.csv, .tsv or .parquet is a table, "
        "written at the end."
    ),
)
_LAST = (
    flag("--plan", "only_plan", help="Only estimate the cost, without loading the weights."),
    flag("-q", "--quiet", help="Print only fatal errors on stderr."),
    click.option(
        "--embeddings",
        is_flag=True,
        hidden=True,
        expose_value=False,
        callback=_refuse_embeddings,
        help="Fail: embeddings are not supported.",
    ),
)
CONNECTION = ("tls_ca", "tls_cert", "tls_key", "insecure")
"""The options for a cluster on other hosts."""


@click.command(cls=HelpCommand)
@click.argument("address", metavar="ADDRESS")
@together(tuple(option_of(Connection, name) for name in CONNECTION))
@debug_option
def worker(address: str, **options: Any) -> None:
    """Answer lines of batches that `mlxrunner batch --dask ADDRESS` runs.

    ADDRESS is the cluster's scheduler, such as tls://HOST:8786; `dask scheduler` starts one. The
    model of a batch has to be on this machine: no files are copied. After Ctrl-C, unfinished lines
    run on other workers.
    """
    import asyncio

    from mlxrunner.terminal.control import orderly_end

    connection = Connection(**options)
    where = connection.check_address(address)
    check_installed()
    from mlxrunner.cluster.dask_workers import work

    with orderly_end():
        asyncio.run(work(where, connection, lambda text: click.echo(text, err=True)))


SOME_FAILED = 3
"""The exit code of a batch that is done, with failed lines."""


@click.command(cls=HelpCommand)
@click.argument("outputs", metavar="OUTPUT...", nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    required=True,
    help="Write all answers to FILE, which must not exist; .csv, .tsv or .parquet is a table.",
)
@flag("-q", "--quiet", help="Print only errors on stderr.")
def merge(outputs: tuple[str, ...], output: str, quiet: bool) -> None:
    """Put the outputs of all shards of a batch together, in the order of the input.

    Each OUTPUT comes from `mlxrunner batch --shard I/N`, with its OUTPUT.done beside it. Nothing is
    written if a shard is missing, repeated, unfinished, changed, or of another batch. With
    --no-usage, FILE has the bytes of a run on one machine, and `mlxrunner batch` without --shard
    accepts it for --resume and --retry-failed. Exit code 0 if every line was answered, 3 if some
    failed, 2 if nothing was written.
    """
    from mlxrunner.batch.job import merge_shards
    from mlxrunner.batch.output import TABLES, check_table, lines_path, write_table

    table = output if output.lower().endswith(TABLES) else None
    if table is not None:
        check_table(table, goes_on=False)
    whole = merge_shards(outputs, output if table is None else lines_path(table))
    if table is not None:
        write_table(table)
    if not quiet:
        failed = f", {whole.failed} of them failed" if whole.failed else ""
        click.echo(
            f"{line_text(output)}: {whole.lines:,} lines of {len(outputs)} shards{failed}", err=True
        )
    sys.exit(SOME_FAILED if whole.failed else 0)


_OWN = (
    *("prompt_template", "prompt_column", "messages_column", "id_column", "delimiter"),
    *("system", "raw", "pictures", "picture_folder", "strict"),
    *("order", "parallel", "workers", "shard", "retries", "timeout", "max_errors"),
    *("output_order", "usage", "resume", "retry_failed"),
    *("progress_file", "summary"),
)
"""The options of a batch, in the order in which --help shows them."""
_CLUSTER = ("dask", *CONNECTION)
"""The options for several processes."""
_SEVERAL = ("cache_memory", "max_step_ms")
"""The options for several lines at a time."""


def _option(name: str) -> Callable[[F], F]:
    if name == "prompt_template":
        return option_of(FileOptions, name, "--row-template", ["--prompt-template"])
    if name == "system":
        return system_option(described(FileOptions)[name].help)
    return option_of(FileOptions, name)


class _BatchCommand(Configured):
    """The command, with `merge` as a command of its own; a file of that name is ./merge."""

    commands: ClassVar = {"merge": merge}

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        if args and (other := self.commands.get(args[0])):
            return other.make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command(cls=_BatchCommand)
@click.argument("inputs", metavar="INPUT...", nargs=-1, required=True)
@together((_FIRST, *(_option(name) for name in _OWN), *_LAST))
@together(tuple(option_of(ClusterOptions, name) for name in _CLUSTER))
@model_options
@draft_option
@sampling_options
@form_options
@template_options
@option_of(EngineSettings, "cache_memory")
@option_of(EngineSettings, "max_step_ms", default=0.0, show_default="0")
@overflow_options("stop")
@watching_options
@option_of(GenerateOptions, "logprobs")
@flag("--json", "as_json", help="With --plan: print one JSON object instead of a table.")
@click.pass_context
def batch(
    ctx: click.Context,
    /,
    inputs: tuple[str, ...],
    output: str | None,
    model: str,
    only_plan: bool,
    quiet: bool,
    as_json: bool,
    greedy: bool,
    **options: Any,
) -> None:
    """Answer each line of INPUT, in the order that reuses most of the prefix cache.

    A line of INPUT is {"prompt": ...} or {"messages": [...]}, with an "id" and any sampling option,
    or a line of an OpenAI batch file. INPUT may also be a table (CSV, TSV, Parquet), a data set
    (a folder of datasets.save_to_disk or of Parquet files, or hf://datasets/OWNER/NAME), or a
    folder whose files are one prompt each. gzip and zstd are decompressed. - is standard input. The
    options below are defaults for all lines; with --seed S, line i (from 0) gets S + i. A line that
    can't be answered gets an "error" and stops nothing.

    On several machines, each runs a part: --shard 1/4, --shard 2/4 and so on. `mlxrunner batch
    merge OUTPUT... -o FILE` puts their outputs together. (An INPUT called merge is ./merge.)

    The same command with --resume continues a run that was stopped or killed. Exit code 0 if every
    line was answered, 3 if all are done but some failed, 1 if --resume would continue, 2 if nothing
    can run, 4 with --verify-strict. Ctrl-C and kill finish the running lines (1); a
    second one (130, 143) and closing the window (129) stop at once.
    """
    from mlxrunner.batch.inputs import STANDARD
    from mlxrunner.batch.job import Job
    from mlxrunner.batch.output import lines_path
    from mlxrunner.terminal.control import orderly_end

    _check_together(output, only_plan, as_json, options)
    recorded = take(options, RECORDING)
    if options["strict"] and recorded["verify_cache"]:  # its second meaning until 0.3
        recorded[STRICT] = True
    if recorded["verify_cache"]:
        options["parallel"] = 1
    cluster = ClusterOptions(workers=options["workers"], **take(options, _CLUSTER))
    if cluster.is_elsewhere:
        sees = options["pictures"]
        _check_elsewhere(cluster, only_plan, options["shard"], recorded, sees=sees)
    if options["pictures"]:
        check_pictures(raw=options["raw"], options=recorded, by="--pictures")
    table = _table(output, only_plan, options)
    if output and not quiet and output.lower().endswith((".xls", ".xlsx", ".ods")):
        name = line_text(output)
        click.echo(f"{name}: gets lines of JSON; a name with .csv gets a table", err=True)
    written = lines_path(table) if table else output or STANDARD
    own = take(options, _OWN) | {"inputs": inputs, "output": written, "model": model}
    own |= {"loading": _loading(options), "several": take(options, _SEVERAL)}
    check_options(options, quiet=quiet)
    job = Job(**own, defaults=options)
    typed = typed_options(ctx, options, greedy=greedy)
    job = replace(job, defaults=_reproducible(options_that_hold("batch", model, options, typed)))
    with orderly_end():
        _run(job, recorded, table, cluster, only_plan=only_plan, quiet=quiet, as_json=as_json)


def _loading(options: dict[str, Any]) -> dict[str, Any]:
    """Take the options of loading the model out of `options`, and return them."""
    loading = take(options, (*LOADING, "draft_model"))
    if not is_given("prefill_step") and loading["prefill_step"] == RunnerSettings().prefill_step:
        del loading["prefill_step"]  # several lines at a time have another default
    return loading


def _check_together(
    output: str | None, only_plan: bool, as_json: bool, options: dict[str, Any]
) -> None:
    """Raise OptionError for options that do not go together."""
    if not output and not only_plan:
        raise OptionError("missing output: give -o FILE, or -o - for standard output")
    if as_json and not only_plan:
        raise OptionError("--json is for --plan; the answers are JSON lines anyway")
    if only_plan and (options["progress_file"] or options["summary"]):
        raise OptionError("--progress-file and --summary are about a run, and --plan runs nothing")
    if options["verify_cache"] and options["parallel"] not in (None, 1):
        raise OptionError(
            "--verify-cache runs one request at a time, and --parallel several: use one of them"
        )


def _table(output: str | None, only_plan: bool, options: dict[str, Any]) -> str | None:
    """Return `output` if it is a table, else None.

    Raise OptionError if that can't be written.
    """
    from mlxrunner.batch.output import TABLES, check_table

    if not output or not output.lower().endswith(TABLES):
        return None
    if options["shard"]:
        raise OptionError(
            f"-o {line_text(output)}: shards are written as JSON lines, such as part.jsonl; "
            f"`mlxrunner batch merge ... -o {line_text(output)}` makes the table"
        )
    if not only_plan:
        check_table(output, goes_on=options["resume"] or options["retry_failed"])
    return output


def _check_elsewhere(
    cluster: ClusterOptions,
    only_plan: bool,
    shard: str | None,
    recorded: dict[str, Any],
    *,
    sees: bool,
) -> None:
    """Raise OptionError for options that need the model in this process."""
    if cluster.dask and only_plan:
        raise OptionError("--plan runs nothing: --plan --workers N says how a batch is cut")
    if cluster.dask and sees:
        raise OptionError(
            "--dask: models that see pictures run in one process: use --shard, or leave it out"
        )
    if cluster.dask and shard:
        raise OptionError("--dask runs all parts of a batch, and --shard one: use one of the two")
    for name in ("verify_cache", "log_tokens"):
        if recorded[name]:
            raise OptionError(
                f"--{name.replace('_', '-')} needs a single process, and --workers and "
                "--dask use several: use one of them"
            )


def _reproducible(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with a seed if they sample, so that the same batch has the same answers."""
    samples = options["temperature"] > 0 and options["seed"] is None
    return options | {"seed": 0} if samples else options


def _run(
    job: Job,
    recorded: dict[str, Any],
    table: str | None,
    cluster: ClusterOptions,
    *,
    only_plan: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Run or plan the job, and end with the exit code.

    `table` is the path of a table for the answers, once all are there. `cluster` says where
    the lines run.
    """
    from mlxrunner.batch.inputs import STANDARD
    from mlxrunner.batch.output import write_table
    from mlxrunner.batch.work import plan_job, run_job
    from mlxrunner.terminal.output import LINE_EVERY_S, Progress

    shares_terminal = job.output == STANDARD and _is_terminal(sys.stdout)
    has_bar = _is_terminal(sys.stderr) and not shares_terminal
    progress = Progress(has_bar=has_bar, line_every_s=LINE_EVERY_S, is_quiet=quiet)
    try:
        if only_plan:
            plan = plan_job(job, progress)
            progress.close()
            click.echo(json.dumps(plan.as_dict()) if as_json else plan.table())
            return
        with recording(recorded, "batch") as profile:
            elsewhere = None
            if cluster.is_elsewhere:
                check_installed()
                from mlxrunner.cluster.dask_workers import opened_dask
                from mlxrunner.cluster.driver import over_workers

                elsewhere = partial(over_workers, partial(opened_dask, cluster), profile)
            tally = run_job(job, progress, profile.watch, elsewhere)
            if table is not None and not tally.stopped:
                write_table(table)
            progress.close()
            if not quiet:
                _report(job, tally, table or job.output)
            if tally.stopped:
                _say_how_to_go_on(job)
    except (KeyboardInterrupt, SystemExit, CutOffError):
        progress.close()
        _say_how_to_go_on(job)
        raise
    finally:
        progress.close()
    sys.exit(CUT_OFF if tally.stopped else SOME_FAILED if tally.all_failed else 0)


def _is_terminal(stream: TextIO | None) -> bool:
    """Return True if the stream is a terminal. A closed stream is None."""
    return stream is not None and stream.isatty()


def _report(job: Job, tally: Tally, output: str) -> None:
    if tally.done or tally.stopped:
        click.echo(tally.summary(), err=True)
    elif tally.total:
        click.echo(
            f"{line_text(output)} is complete ({tally.total} lines): nothing to do", err=True
        )
    else:
        source = ", ".join(
            "standard input" if name == "-" else line_text(name) for name in job.inputs
        )
        has = "has" if len(job.inputs) == 1 else "have"
        if job.shard is not None:
            source, has = f"shard {job.shard}", "has"
        click.echo(f"{source} {has} no lines: nothing to do", err=True)
    if tally.all_failed:
        first = f", the first: {line_text(tally.first_error)}" if tally.first_error else ""
        click.echo(f"{tally.all_failed} of {tally.total} lines failed{first}", err=True)
    if tally.stopped:
        why = f" (--max-errors {job.max_errors})" if tally.stopped == "errors" else ""
        click.echo(f"stopped: {tally.all_done} of {tally.total} lines are done{why}", err=True)


def _say_how_to_go_on(job: Job) -> None:
    path = job.store_path
    if path is None or not path.exists():
        return
    goes_on = job.retry_failed or "--resume" in sys.argv
    arguments = [*sys.argv[1:], *([] if goes_on else ["--resume"])]
    click.echo(visible_text(f"to continue: {shlex.join(['mlxrunner', *arguments])}"), err=True)
