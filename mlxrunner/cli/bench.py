"""`mlxrunner bench`: measure the speed of a model, in shares of what the machine can do."""

from __future__ import annotations

import json
from typing import Any

import click

from mlxrunner.cli.options import debug_option, json_option, model_argument, trust_option
from mlxrunner.cli.program import visible_text


@click.command()
@model_argument
@click.option(
    "--context",
    "contexts",
    type=int,
    multiple=True,
    help="Tokens of a prompt; may be given several times. [default: 512 and 2048]",
)
@click.option(
    "--vs",
    type=click.Choice(["mlx-lm"]),
    help="Run the same through mlx-lm on the same weights, alternately, and compare.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    help="Number of times to measure each. [default: 3, with --quick 1]",
)
@click.option(
    "--quick", is_flag=True, help="Run one round of one short prompt, to see that it works."
)
@click.option(
    "--speculate",
    "guess",
    type=click.Choice(["auto", "lookup"]),
    help="Also measure an answer that is asked for again, of which the first one is a guess.",
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

    Each figure is also given as a share of what the machine can do at most, which is measured
    first: bytes and operations per second. MODEL is demo, a directory, a hub id, or random:100M
    for random weights of that size. Ctrl-C prints what was measured so far.
    """
    from mlxrunner.bench.bench import CONTEXTS, QUICK_CONTEXT, Bench
    from mlxrunner.terminal.progress import Steps

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
