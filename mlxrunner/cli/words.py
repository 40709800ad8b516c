"""The words that a shell offers for an argument: models, sessions, branches. No word is an error.

A shell asks after each press of Tab, so nothing here imports mlx or opens a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

import click
from click.shell_completion import CompletionItem

Words = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def _words(found: Callable[[], Iterable[str]], otherwise: str | None = None) -> Words:
    """Return a function for `shell_complete=` that offers the words of `found`.

    The shell completes `otherwise` ("dir") by itself where none of them fits.
    """

    def offer(ctx: click.Context, parameter: click.Parameter, begin: str) -> list[CompletionItem]:
        with suppress(Exception):  # a shell cannot show an error
            given = ctx.params.get(parameter.name or "") if parameter.nargs == -1 else None
            words = [w for w in found() if w.startswith(begin) and w not in (given or ())]
            if words or otherwise is None:
                return [CompletionItem(word) for word in words]
        return [CompletionItem(begin, type=otherwise)] if otherwise else []

    return offer


def _repositories() -> list[str]:
    from mlxrunner.models.download import repositories

    return repositories()


def _models() -> list[str]:
    from mlxrunner.config.file import read_config_file
    from mlxrunner.options import EMBEDDED

    return [*EMBEDDED, *read_config_file().aliases, *_repositories()]


def _templates() -> Iterable[str]:
    from mlxrunner.config.file import read_config_file

    return read_config_file().templates


def _sessions() -> list[str]:
    from mlxrunner.sessions.store import SessionStore

    return SessionStore().names()


model_words = _words(_models, "dir")
"""For a parameter that takes every kind of model."""
repository_words = _words(_repositories)
"""For a parameter that takes a repository of the hub cache."""
template_words = _words(_templates)
"""For a parameter that takes a prompt template of the config file."""
session_words = _words(_sessions)
"""For a parameter that takes a saved session."""
