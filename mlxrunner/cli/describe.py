"""`mlxrunner show`, `plan` and `doctor`: describe a model and the machine.

None of them generates anything.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from mlxrunner.cli.options import (
    MEMORY_OPTIONS,
    debug_option,
    json_option,
    model_argument,
    together,
)
from mlxrunner.cli.program import visible_text
from mlxrunner.errors import ModelError


@click.command()
@model_argument
@json_option
@debug_option
def show(model: str, as_json: bool) -> None:
    """Say what is known about MODEL without loading its weights: architecture, layers by kind,
    context, bytes per token, and the tokens and texts that end its answers.
    """
    from dataclasses import asdict

    from mlxrunner.models.description import describe, ends_of
    from mlxrunner.terminal.text import one_line, size

    facts = describe(model)
    try:
        ends, problem = ends_of(model), ""
    except ModelError as error:
        ends, problem = [], one_line(str(error))
    if as_json:
        listed = None if problem else list(map(asdict, ends))
        click.echo(json.dumps({**facts.as_dict(), "ends": listed}))
        return
    context = f"{facts.context} tokens" + (
        "" if facts.context_is_known else " (not stated: a guess)"
    )
    rows = {
        "architecture": facts.architecture,
        "layers": ", ".join(f"{count} {kind}" for kind, count in facts.layers.items()),
        "context": context,
        "vocabulary": f"{facts.vocab} tokens",
        "weights": size(facts.weight_bytes),
        "cache": f"{size(facts.cache.per_token)} per token"
        + (f" and {size(facts.cache.fixed)} whatever the length" if facts.cache.fixed else "")
        + f"; {size(facts.cache.per_token * facts.context + facts.cache.fixed)} "
        "for the whole context",
        "ends": "; ".join(map(_end_text, ends)) or (f"not known: {problem}" if problem else "none"),
    }
    for name, value in rows.items():
        click.echo(f"{name:13} {visible_text(value)}")


def _end_text(end: Any) -> str:
    """Return an end of answers, such as `<|im_end|> (2: config.json, chat template)`."""
    number = "" if end.token is None else f"{end.token}: "
    text = end.text if end.token is not None else repr(end.text)
    return f"{text} ({number}{', '.join(end.places)})"


@click.command()
@model_argument
@together(MEMORY_OPTIONS)
@click.option(
    "--measure",
    is_flag=True,
    help="Load the model and run the worst-case batch instead of estimating it.",
)
@json_option
@debug_option
def plan(model: str, measure: bool, as_json: bool, **options: Any) -> None:
    """Say what MODEL needs for a context, what this device offers, and the largest context that
    fits.

    Works from config.json and the headers of the weight files, without loading them. Exit code 2 if
    it does not fit.
    """
    from mlxrunner.loading import plan_model
    from mlxrunner.runner import Runner
    from mlxrunner.terminal.progress import loading

    made = plan_model(model, **options)
    if measure and made.fits:
        with loading(model) as show:
            loaded = Runner.load(model, progress=show, **{**options, "context": made.context})
        made = loaded.plan or made
    click.echo(json.dumps(made.as_dict()) if as_json else made.table())
    sys.exit(0 if made.fits else 2)


@click.command()
@json_option
@debug_option
def doctor(as_json: bool) -> None:
    """Say what this machine has (device, memory, libraries), and what to do about what it lacks."""
    from dataclasses import asdict

    from mlxrunner.system.doctor import findings

    found = findings()
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in found]))
        return
    for finding in found:
        click.echo(f"{'ok ' if finding.ok else '!! '} {finding.name:14} {finding.value}")
        if finding.advice:
            click.echo(f"    {'':14} {finding.advice}")
