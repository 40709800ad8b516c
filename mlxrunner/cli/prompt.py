"""The prompt of `generate`: what is typed, and what comes from standard input."""

from __future__ import annotations

import os
import shlex
import sys

import click

from mlxrunner.errors import OptionError

FROM_INPUT = "-"
"""The prompt that stands for standard input."""
JOINED_BY = "\n\n"
"""The text between a prompt and what comes from standard input."""


def prompt_of(words: tuple[str, ...], option: str | None) -> str:
    """Return the prompt: the text that is typed, and standard input behind it.

    `words` are the arguments, and `option` is that of --prompt. Nothing is dropped: raise
    OptionError if two texts are typed, or if it is unclear whether one is a model.
    """
    return _with_input(_typed(words, option))


def _typed(words: tuple[str, ...], option: str | None) -> str | None:
    if option is not None and words:
        raise OptionError(
            f"two prompts: {_shown(words[0])} and --prompt {_shown(option)}: use one of them"
        )
    if option is not None or not words:
        return option
    if len(words) > 1:
        raise OptionError(_too_many(words))
    if _is_model(words[0]):
        raise OptionError(
            f"{_shown(words[0])} may be a model or a prompt: -m {_shown(words[0])} names the "
            f"model, --prompt {_shown(words[0])} asks"
        )
    return words[0]


def _too_many(words: tuple[str, ...]) -> str:
    model, *rest = words
    if _is_model(model):
        return (
            f"is {_shown(model)} a model? mlxrunner generate -m {_shown(model)} "
            f"{_shown(' '.join(rest))}; is all of it the prompt? mlxrunner generate "
            f"{_shown(' '.join(words))}"
        )
    return (
        f"{len(words)} texts, and a prompt is one: mlxrunner generate {_shown(' '.join(words))}; "
        "-m MODEL names a model"
    )


def _is_model(text: str) -> bool:
    """Return True if `text` is the name of a model, or looks like one."""
    from mlxrunner.models.resolve import DEMO, HUB_ID

    return (
        text == DEMO
        or HUB_ID.fullmatch(text) is not None
        or ("\0" not in text and os.path.isfile(os.path.join(text, "config.json")))
    )


def _shown(text: str) -> str:
    """Return `text` as a shell needs it, cut to a few words."""
    return shlex.quote(text if len(text) <= 60 else f"{text[:60]} ...")


def _with_input(typed: str | None) -> str:
    """Return what is typed with standard input behind it, unless that is a terminal."""
    from mlxrunner.system.reading import say_if_waiting

    if typed is not None and typed != FROM_INPUT:
        if sys.stdin is None or sys.stdin.isatty():
            return typed
        say_if_waiting(sys.stdin.buffer, "standard input")
        piped = sys.stdin.read().rstrip("\n")
        return f"{typed}{JOINED_BY}{piped}" if piped.strip() else typed
    if sys.stdin is None:
        raise OptionError('standard input is closed: give a prompt: mlxrunner generate "TEXT"')
    if sys.stdin.isatty():
        if typed is None:
            raise OptionError(
                'no prompt: give one (mlxrunner generate "TEXT"), or send it to standard input'
            )
        click.echo("reading the prompt from the terminal, end it with Ctrl-D", err=True)
    return sys.stdin.read().rstrip("\n")
