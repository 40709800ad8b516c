"""The prompt of `generate`: what is typed, and what comes from standard input."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from mlxrunner.config.file import read_config_file
from mlxrunner.config.names import did_you_mean, known_models
from mlxrunner.errors import OptionError

if TYPE_CHECKING:
    from mlxrunner.batch.tables import Template


INPUT = "input"
"""The name of the place in a template where the prompt goes."""
FROM_INPUT = "-"
"""The prompt that stands for standard input."""
JOINED_BY = "\n\n"
"""The text between a prompt and what comes from standard input."""


def prompt_of(words: tuple[str, ...], option: str | None, *, is_optional: bool = False) -> str:
    """Return the prompt: the text that is typed, and standard input behind it.

    `words` are the arguments, and `option` is that of --prompt. Nothing is dropped: raise
    OptionError if two texts are typed, or if it is unclear whether one is a model. Without a text
    and a pipe it is empty if `is_optional`, and an OptionError otherwise.
    """
    typed = _typed(words, option)
    if typed is None and is_optional and (sys.stdin is None or sys.stdin.isatty()):
        return ""
    return _with_input(typed)


def filled(name: str | None, text: str, given: tuple[str, ...]) -> tuple[str, str | None]:
    """Return the prompt that a template of the config file makes of `text`, and its system prompt.

    Without the `name` of a template, that is `text` and None. `given` are the variables, each as
    NAME=VALUE. A template without {input} is followed by the text. Raise OptionError for a variable
    that is missing or not used, and for a template that can't be read.
    """
    variables = _variables(given)
    if name is None:
        if variables:
            raise OptionError("--prompt-var fills a template: name it with -t NAME")
        return text, None
    config = read_config_file()
    template = config.template(name)
    system = None if template.system is None else config.system(template.system)
    places = _places(name, template.prompt)
    columns = places.columns if places is not None else []
    _check_variables(name, [column for column in columns if column != INPUT], variables)
    if INPUT in columns and not text:
        raise OptionError(f"template {name} needs an input: give a prompt, or pipe a text in")
    made = template.prompt if places is None else places.fill({**variables, INPUT: text})
    return made if INPUT in columns or not text else f"{made}{JOINED_BY}{text}", system


def _places(name: str, prompt: str) -> Template | None:
    """Return the parsed text of a template, or None if it has no places to fill."""
    from mlxrunner.batch.tables import Template

    if "{" not in prompt and "}" not in prompt:
        return None
    try:
        return Template(prompt)
    except OptionError as error:
        raise OptionError(f"template {name}: {error}") from error


def _variables(given: tuple[str, ...]) -> dict[str, str]:
    variables = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not equals or not name or name == INPUT:
            raise OptionError(f"--prompt-var {one:.80}: it has to be NAME=VALUE, and not {INPUT}=")
        variables[name] = value
    return variables


def _check_variables(name: str, wanted: list[str], given: dict[str, str]) -> None:
    missing = [f"--prompt-var {one}=..." for one in wanted if one not in given]
    unused = [one for one in given if one not in wanted]
    if missing:
        raise OptionError(f"template {name} needs {', '.join(missing)}")
    if unused:
        has = f"it has {', '.join(wanted)}" if wanted else "it has none"
        raise OptionError(
            f"template {name} has no variable {unused[0]!r:.60}: {did_you_mean(unused[0], wanted)}"
            f"{has}"
        )


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
    from mlxrunner.models.resolve import HUB_ID
    from mlxrunner.options import EMBEDDED

    return (
        text in EMBEDDED
        or text in read_config_file().aliases
        or text in known_models()
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


ONLY_TEXT = {
    "verify_cache": "--verify-cache runs requests again without pictures",
    "log_tokens": "--log-tokens writes tokens only",
}
"""Options that know no pictures, and why."""


def check_pictures(*, raw: bool, options: dict[str, Any], by: str = "--image") -> None:
    """Raise OptionError for options that do not go together with the option `by`."""
    if raw:
        raise OptionError(f"--raw is plain text only: leave it out, or leave {by} out")
    for name, why in ONLY_TEXT.items():
        if options[name]:
            raise OptionError(f"{why}: leave it out, or leave {by} out")


def content_of(text: str, images: Sequence[str]) -> Any:
    """Return the content of a message with the pictures in these files before its text.

    Raise PictureError if one can't be read, and OptionError if nothing that reads them is
    installed.
    """
    if not images:
        return text
    from mlxrunner.system.picture_files import open_picture

    parts: list[dict[str, Any]] = [
        {"type": "image", "image": open_picture(name)} for name in images
    ]
    return [*parts, {"type": "text", "text": text}]
