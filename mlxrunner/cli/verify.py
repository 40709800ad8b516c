"""`mlxrunner verify`: prove on this device, with this model, that reuse changes nothing."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from mlxrunner.cli.options import debug_option, json_option, model_argument, trust_option
from mlxrunner.cli.program import visible_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlxrunner.verify.findings import Findings
    from mlxrunner.verify.verification import Verification

DIFFERENT, UNTESTED = 4, 5
"""Exit codes if an answer differs, and if nothing could be proved."""


@click.command()
@model_argument
@click.option(
    "--context",
    type=int,
    help=(
        "Tokens of the longest prompt and answer. [default: by the model's speed, for about "
        "two minutes]"
    ),
)
@click.option(
    "--tokens",
    type=int,
    default=8,
    show_default=True,
    help="Tokens of each answer that is compared.",
)
@click.option(
    "--kv-bits", type=int, metavar="B", help="Verify caches of 8 or 4 bits. [default: as computed]"
)
@trust_option
@json_option
@debug_option
def verify(model: str, as_json: bool, **options: Any) -> None:
    """Prove on this device that reuse changes nothing in what MODEL answers.

    Conversations are appended to, edited, regenerated, cancelled and run over the edge of the
    context; each warm answer is held against a cold one, tokens and logits, and the difference
    against what the device's own order of sums makes. MODEL is demo, a directory, a hub id, or
    random:100M for random weights. Exit code 4 if anything differs, 5 if nothing could be
    proved: where cold runs differ from each other as much as one wrong token makes.
    """
    from mlxrunner.terminal.progress import Steps
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
