"""`mlxrunner run`: chat with a model, or answer one prompt, as `ollama run` does."""

from __future__ import annotations

import sys

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
    words = _words(generate, "words", arguments)
    if words is None and _words(chat, "named", arguments) is not None:
        return chat, arguments  # an option that only a chat has
    is_piped = sys.stdin is not None and not sys.stdin.isatty()
    if words is not None and len(words) < 2 and not is_piped:
        return chat, arguments
    words = words or ()
    options = [one for one in arguments if not any(one is word for word in words)]
    model = ["-m", words[0]] if words else []
    prompt = ["-p", " ".join(words[1:])] if words[1:] else []
    return generate, [*model, *prompt, *options]


def _words(command: click.Command, name: str, arguments: list[str]) -> tuple[str, ...] | None:
    """Return the words that `command` takes as argument `name`; None if it refuses an option."""
    try:
        found = command.make_parser(click.Context(command)).parse_args(list(arguments))[0]
    except click.UsageError:
        return None
    return found[name] if isinstance(found.get(name), tuple) else ()
