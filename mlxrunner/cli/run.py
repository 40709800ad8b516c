"""`mlxrunner run`: chat with a model, or answer one prompt, as `ollama run` does."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from mlxrunner.cli.chat import chat
from mlxrunner.cli.generate import generate
from mlxrunner.cli.help import HelpCommand
from mlxrunner.cli.options import debug_option


class _Argument(str):
    """One of the arguments, which is told from an equal one by its identity."""


@click.command(
    cls=HelpCommand,
    context_settings={"ignore_unknown_options": True},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[MODEL] [PROMPT]...")
@debug_option
@click.pass_context
def run(ctx: click.Context, arguments: tuple[str, ...]) -> None:
    """Chat with MODEL, or answer PROMPT or standard input, as `ollama run` does.

    It takes the options of `mlxrunner chat`, or with a prompt those of `mlxrunner generate`.

    \b
    mlxrunner run llama3.2:1b
    mlxrunner run llama3.2:1b "Why is the sky blue?"
    mlxrunner run llama3.2:1b "Summarize this" < notes.txt
    """
    command, given = _meant([_Argument(one) for one in arguments])
    inner = command.make_context(str(command.name), given, parent=ctx.parent)
    with inner:
        command.invoke(inner)


def _meant(arguments: list[str]) -> tuple[click.Command, list[str]]:
    """Return the command that is meant, and its arguments."""
    parser = generate.make_parser(click.Context(generate))
    try:
        words: Sequence[str] = parser.parse_args(list(arguments))[0]["words"] or ()
    except click.UsageError:  # an option that only a chat has
        return chat, arguments
    is_piped = sys.stdin is not None and not sys.stdin.isatty()
    if len(words) < 2 and not is_piped:
        return chat, arguments
    options = [one for one in arguments if not any(one is word for word in words)]
    model = ["-m", words[0]] if words else []
    prompt = ["-p", " ".join(words[1:])] if words[1:] else []
    return generate, [*model, *prompt, *options]
