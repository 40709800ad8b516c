"""`mlxrunner report`, `explain`, `simulate`, `verify` and `bench`: look at what requests reused."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from mlxrunner.cli.options import (
    debug_option,
    flag,
    former_option,
    json_option,
    model_argument,
    trust_option,
)
from mlxrunner.cli.program import F, HelpCommand, visible_text
from mlxrunner.errors import OptionError

if TYPE_CHECKING:
    from mlxrunner.verify.findings import Findings
    from mlxrunner.verify.verification import Verification


BELOW_RATE = 3
FILE = click.Path(path_type=str)


@click.command(cls=HelpCommand)
@click.argument("events", nargs=-1, required=True, type=FILE, envvar="MLXRUNNER_EVENTS")
@click.option(
    "--html", type=FILE, metavar="FILE", help="Also write an HTML page with plots, in one file."
)
@click.option(
    "--csv", type=FILE, metavar="FILE", help="Also write one row per request, for spreadsheets."
)
@click.option(
    "--trace",
    type=FILE,
    metavar="FILE",
    help="Also write a trace for ui.perfetto.dev or chrome://tracing.",
)
@click.option(
    "--min-hit-rate",
    type=click.FloatRange(0, 1),
    metavar="RATE",
    help="Exit code 3 if a smaller share of the prompt tokens was reused, such as 0.8.",
)
@json_option
@debug_option
def report(
    events: tuple[str, ...],
    html: str | None,
    csv: str | None,
    trace: str | None,
    min_hit_rate: float | None,
    as_json: bool,
) -> None:
    """Report the requests in EVENTS: tokens reused and lost, causes, cost and remedies.

    EVENTS are files of --events, read with their rotated files (FILE.1 ...). Damaged lines are
    skipped and counted.
    """
    from mlxrunner.profiling.report.report import make_report, source_files
    from mlxrunner.profiling.report.screen import console, show_report
    from mlxrunner.terminal.control import orderly_end
    from mlxrunner.terminal.output import number, percent, reading

    with orderly_end(), reading("events") as progress:  # a report that is half written is removed
        made = make_report(source_files(events), html=html, csv=csv, trace=trace, progress=progress)
    click.echo(json.dumps(made.as_dict())) if as_json else show_report(
        made.summary, console(sys.stdout)
    )
    for note in made.notes:
        click.echo(f"mlxrunner: {note}", err=True)
    if html and sys.stderr.isatty():
        click.echo(f"{visible_text(html)}: open this page in a browser", err=True)
    if min_hit_rate is not None and made.summary.hit_rate < min_hit_rate:
        reused, prompt = (number(made.summary.tokens[name]) for name in ("saved", "prompt"))
        click.echo(
            f"mlxrunner: {reused} of {prompt} prompt tokens were reused, less than "
            f"{percent(min_hit_rate)}",
            err=True,
        )
        sys.exit(BELOW_RATE)


@click.command(cls=HelpCommand)
@click.argument("events", type=FILE, envvar="MLXRUNNER_EVENTS")
@click.argument("request", metavar="[ID]", required=False)
@flag("--last", help="The last request in the file, instead of an ID.")
@debug_option
def explain(events: str, request: str | None, last: bool) -> None:
    """Show why a request in EVENTS did not reuse more: the place where the prompt left the prefix
    cache, and the remedy.

    ID is the event's (or its beginning), or the request id of mlxrunner serve. With
    MLXRUNNER_EVENTS, EVENTS may be omitted.
    """
    from mlxrunner.profiling.report.report import source_files
    from mlxrunner.profiling.report.screen import console, find_event, show_event
    from mlxrunner.terminal.output import reading

    known = os.environ.get("MLXRUNNER_EVENTS")
    if known and request is None and not last and events != known:
        events, request = known, events
    if (request is None) == (not last):
        raise OptionError(
            f"give the ID of an event in {events}, or --last" + (", not both" if last else "")
        )
    with reading("events") as progress:
        event = find_event(source_files([events]), request, progress)
    show_event(event, console(sys.stdout))


def _several(
    flag: str, name: str, help: str, *, low: int, high: int | None = None, metavar: str = "N"
) -> Callable[[F], F]:
    """Return an option with a number to replay with, which may be given several times."""
    return click.option(
        flag, name, type=click.IntRange(low, high), multiple=True, metavar=metavar, help=help
    )


@click.command(cls=HelpCommand)
@click.argument("log", nargs=-1, required=True, type=FILE, envvar="MLXRUNNER_LOG_TOKENS")
@_several(
    "--entries",
    "entries",
    "Replay with K prefix caches (repeatable). [default: 2, 4, 8]",
    low=1,
    high=1024,
    metavar="K",
)
@_several(
    "--slots",
    "slots",
    "Replay parallel requests in K slots (repeatable). [default: 1, 2, 4, 8, 16]",
    low=1,
    high=1024,
    metavar="K",
)
@_several(
    "--checkpoint-interval",
    "intervals",
    "Replay with checkpoints every N tokens (repeatable). [default: a quarter and four times "
    "as many]",
    low=1,
)
@_several(
    "--rewind-slack",
    "slacks",
    "Replay with a rewind slack of N tokens (repeatable). [default: 0 and four times as many]",
    low=0,
)
@click.option(
    "--speculate",
    "guess",
    type=click.Choice(["lookup"]),
    help="Also report what speculative decoding would have saved.",
)
@json_option
@debug_option
def simulate(
    log: tuple[str, ...],
    entries: tuple[int, ...],
    slots: tuple[int, ...],
    intervals: tuple[int, ...],
    slacks: tuple[int, ...],
    guess: str | None,
    as_json: bool,
) -> None:
    """Replay LOG of --log-tokens without a model, with other settings.

    Each row changes one setting: entries, slots, prompts sorted by prefix, thinking kept or
    stripped, checkpoint intervals, rewind slack. The first row is the run itself, and has to agree
    with the log.
    """
    from mlxrunner.profiling.replay.trials import simulate as replay
    from mlxrunner.profiling.report.report import skipped_words, source_files
    from mlxrunner.profiling.report.screen import console, show_simulation
    from mlxrunner.terminal.output import reading

    with reading("requests") as progress:
        made = replay(
            *(source_files(log), entries, intervals, slacks, slots, progress),
            with_guesses=guess is not None,
        )
    click.echo(json.dumps(made.as_dict())) if as_json else show_simulation(
        made, console(sys.stdout)
    )
    for line in made.idle:
        click.echo(f"mlxrunner: {line}", err=True)
    if made.skipped.total():
        click.echo(f"mlxrunner: {skipped_words(made.skipped)}", err=True)


DIFFERENT, UNTESTED = 4, 5
"""Exit codes if an answer differs, and if nothing could be proved."""


@click.command(cls=HelpCommand)
@model_argument
@click.option(
    "--context",
    type=int,
    help=(
        "Context window: tokens of the longest prompt with its answer. [default: by the model's "
        "speed, for about two minutes]"
    ),
)
@click.option(
    "--max-tokens",
    "tokens",
    type=int,
    default=8,
    show_default=True,
    help="Tokens of each compared answer.",
)
@former_option("--tokens", "--max-tokens", "tokens")
@click.option(
    "--kv-bits",
    type=int,
    metavar="B",
    help="Verify a KV cache of 8 or 4 bits. [default: no quantization]",
)
@trust_option
@json_option
@debug_option
def verify(model: str, as_json: bool, **options: Any) -> None:
    """Prove on this device that reuse does not change the answers of MODEL.

    Compares warm answers with cold ones, tokens and logits, after appending, editing, regenerating,
    cancelling and overflowing. The tolerance comes from the differences of cold runs. MODEL is
    demo, a directory, a hub id, or random:100M for random weights. Exit code 4 if anything differs,
    5 if cold runs differ as much as one wrong token does.
    """
    from mlxrunner.terminal.output import Steps
    from mlxrunner.verify.verification import NUM_PARTS

    steps = Steps("verify", NUM_PARTS)
    made = None
    try:
        made = _prepare(model, steps, options)
        report = made.run()
    finally:
        steps.close()
        if made is not None and made.findings.checks:
            _print(made.findings, as_json)
    sys.exit(0 if report.passed else DIFFERENT if report.is_different else UNTESTED)


def _prepare(model: str, begin: Callable[[str], None], options: dict[str, Any]) -> Verification:
    """Load `model`, on all ranks if several share it, and prepare its verification."""
    from mlxrunner.verify.verification import prepared, verification

    ranks = click.get_current_context().meta.get("ranks")
    if ranks is None:
        return verification(model, begin=begin, **options)
    begin(f"loading {model}")
    first, own = ranks.load(model, {}), {name: options[name] for name in ("context", "tokens")}
    return prepared(partial(ranks.beside, first), begin=begin, **own)


def _print(report: Findings, as_json: bool) -> None:
    click.echo(json.dumps(report.as_dict()) if as_json else visible_text(report.table()))


@click.command(cls=HelpCommand)
@model_argument
@click.option(
    "--prompt-tokens",
    "contexts",
    type=int,
    multiple=True,
    help="Tokens of a prompt (repeatable). [default: 512 and 2048]",
)
@former_option("--context", "--prompt-tokens", "contexts", type=int, multiple=True)
@click.option(
    "--vs",
    type=click.Choice(["mlx-lm"]),
    help="Compare with mlx-lm on the same weights, in turns.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of times to measure each. [default: 3, with --quick 1]",
)
@flag("--quick", help="Run one round of one short prompt, as a test.")
@click.option(
    "--speculate",
    "guess",
    type=click.Choice(["auto", "lookup"]),
    help="Also measure speculative decoding of a repeated answer.",
)
@trust_option
@json_option
@debug_option
def bench(
    model: str,
    contexts: tuple[int, ...],
    vs: str | None,
    rounds: int | None,
    quick: bool,
    guess: str | None,
    as_json: bool,
    trust_remote_code: bool,
) -> None:
    """Measure MODEL on this machine: load, cold prefill, first token with 0 to 100 % of the prompt
    cached, decode, memory.

    Figures are also shares of the machine's limits (bytes and operations per second), which are
    measured first. MODEL is demo, a directory, a hub id, or random:100M
    for random weights of that size. Ctrl-C prints the figures so far.
    """
    from mlxrunner.bench.bench import CONTEXTS, QUICK_CONTEXT, Bench
    from mlxrunner.terminal.output import Steps

    rounds = rounds or (1 if quick else 3)
    if quick:
        contexts = contexts or (QUICK_CONTEXT,)
    how = guess or "off"
    steps = Steps("bench", Bench.num_parts(len(contexts or CONTEXTS), rounds, how))
    options: dict[str, Any] = {
        "contexts": contexts,
        "rounds": rounds,
        "quick": quick,
        "guess": how,
        "trust_remote_code": trust_remote_code,
    }
    ranks = click.get_current_context().meta.get("ranks")
    made = Bench(model, versus=vs is not None, begin=steps, ranks=ranks, **options)
    try:
        made.run()
    finally:
        steps.close()
        if made.measurements.about:
            click.echo(
                json.dumps(made.measurements.as_dict())
                if as_json
                else visible_text(made.measurements.table())
            )
