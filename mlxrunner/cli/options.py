"""Options that several commands have."""

from __future__ import annotations

import csv
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from mlxrunner.cli.program import F, set_debug
from mlxrunner.config import MAX_SCHEMA
from mlxrunner.errors import OptionError
from mlxrunner.reading import ReadError, read_text

if TYPE_CHECKING:
    from mlxrunner.runner import Runner

DEMO_BANNER = (
    "This is the embedded demo model: a toy of 2.8 million parameters that remembers small facts you tell it, and nothing else.\n"
    "For a real one: -m mlx-community/Llama-3.2-1B-Instruct-4bit (or any MLX model on the hub, or a directory)."
)


def _verbose(ctx: click.Context, parameter: click.Parameter, value: int) -> None:
    if value:
        import logging

        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger = logging.getLogger("mlxrunner")
        logger.handlers = [handler]
        logger.setLevel(logging.INFO if value == 1 else logging.DEBUG)


debug_option = click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    callback=set_debug,
    help="Show the traceback of an error.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")


def together(options: tuple[Callable[[F], F], ...]) -> Callable[[F], F]:
    """Several options as one decorator, in the order in which --help shows them."""

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


MEMORY_OPTIONS = (
    click.option("--context", type=int, help="Most tokens of prompt and answer together. [default: the model's own, or what fits]"),
    click.option("--kv-bits", type=int, metavar="B", help="Store full attention's keys and values in 8 or 4 bits. [default: as computed]"),
    click.option("--prefill-step", type=int, default=2048, show_default=True, help="Prompt tokens evaluated at once."),
    click.option("--rewind-slack", type=int, default=512, show_default=True, help="Tokens a sliding window keeps beyond itself, to be rewound."),
    click.option("--checkpoint-budget", type=int, metavar="BYTES", help="For checkpoints of windows and states. [default: room for 8]"),
)  # fmt: skip
LOADING = (
    "context",
    "kv_bits",
    "prefill_step",
    "rewind_slack",
    "checkpoint_budget",
    "checkpoint_interval",
    "reserve",
    "trust_remote_code",
)


def overflow_options(default: str) -> Callable[[F], F]:
    """What happens when the context is full."""
    return together((
        click.option("--overflow", type=click.Choice(["stop", "shift", "error"]), default=default, show_default=True,
                     help="When the context is full: end the answer, drop the oldest half after the first --keep tokens, or fail."),
        click.option("--keep", type=int, help="Tokens that a shift keeps. [default: the system prompt]"),
    ))  # fmt: skip


def model_options(command: F) -> F:
    """What generate and chat load, and how much they say about it."""
    return together((
        click.option("-m", "--model", default="demo", show_default=True, envvar="MLXRUNNER_MODEL", show_envvar=True,
                     help="demo, a model directory, or a hub id such as mlx-community/Llama-3.2-1B-Instruct-4bit."),
        *MEMORY_OPTIONS,
        click.option("--checkpoint-interval", type=int, default=1024, show_default=True, help="Tokens between checkpoints."),
        click.option("--reserve/--no-reserve", default=True, help="Take all memory at start, or as the conversation grows.  [default: reserve]"),
        click.option("--trust-remote-code", is_flag=True, help="Run Python code that the model brings. Only if you trust it."),
        click.option("-v", "--verbose", count=True, expose_value=False, callback=_verbose,
                     help="Log to stderr what each request reused and what it cost; -vv: also what is left, before it is evaluated."),
        debug_option,
    ))(command)  # fmt: skip


def sampling_options(command: F) -> F:
    """How the next token is chosen, and when an answer ends."""
    return together((
        click.option("--max-tokens", type=int, help="Longest answer. [default: until the model stops or the context is full]"),
        click.option("--temperature", type=float, default=0.0, show_default=True, help="0 = always the most likely token."),
        click.option("--top-k", type=int, default=0, help="Only the K most likely tokens. [default: all]"),
        click.option("--top-p", type=float, default=1.0, help="Only the most likely tokens up to this probability. [default: all]"),
        click.option("--min-p", type=float, default=0.0, help="Only tokens at least this likely, as a share of the likeliest."),
        click.option("--repetition-penalty", type=float, help="Divide the logits of recent tokens; 1 = off."),
        click.option("--presence-penalty", type=float, help="Subtract from the logits of recent tokens."),
        click.option("--frequency-penalty", type=float, help="Subtract from them once per occurrence."),
        click.option("--penalty-context", type=int, default=20, show_default=True, help="How many recent tokens the penalties see."),
        click.option("--seed", type=int, help="Makes sampling repeatable."),
        click.option("--stop", multiple=True, metavar="TEXT",
                     help="End the answer before TEXT; may be given several times. No effect with --schema or --choices."),
    ))(command)  # fmt: skip


def _read_schema(ctx: click.Context, parameter: click.Parameter, file: str | None) -> str | None:
    if file is None:
        return None
    try:
        return read_text(file, 4 * MAX_SCHEMA, given=True)
    except ReadError as error:
        raise OptionError(f"--schema {error}") from error


def _split_choices(
    ctx: click.Context, parameter: click.Parameter, line: str | None
) -> tuple[str, ...] | None:
    if line is None:
        return None
    try:
        choices = tuple(
            text for row in csv.reader([line], skipinitialspace=True, strict=True) for text in row
        )
    except csv.Error as error:
        raise OptionError(
            f"--choices {line}: the texts are separated by commas, one that has a comma is put in double quotes"
        ) from error
    if not choices:
        raise OptionError("--choices: there is none, give them as yes,no")
    return choices


def form_options(command: F) -> F:
    """What an answer has to be."""
    return together((
        click.option("--schema", metavar="FILE", callback=_read_schema, help="The answer is JSON that fits the JSON schema in FILE."),
        click.option("--choices", metavar="A,B,...", callback=_split_choices,
                     help='The answer is one of these; one with a comma is put in double quotes: \'yes,"no, never"\'.'),
    ))(command)  # fmt: skip


def check_options(options: dict[str, Any], *, quiet: bool = False) -> None:
    """Complain before a model is loaded. `quiet`: say nothing of what only has no effect."""
    from mlxrunner.config import GenerateOptions
    from mlxrunner.constrain import check_form

    checked = GenerateOptions.of(**options)
    check_form(checked)
    if checked.has_form and checked.stop and not quiet:
        click.echo(
            "--stop has no effect with --schema or --choices: such an answer ends where its form is complete",
            err=True,
        )


def take(options: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Move these options out of `options`."""
    return {name: options.pop(name) for name in names}


def load(model: str, loading: dict[str, Any], *, banner: bool) -> Runner:
    from mlxrunner.runner import Runner

    if banner and model == "demo":
        click.echo(DEMO_BANNER, err=True)
    return Runner.load(model, **loading)
