"""Check the options whose values are lists of texts: stop strings and choices.

Each check raises OptionError, which shows the value. Knows nothing about what the texts mean.
"""

from __future__ import annotations

from typing import Any

from mlxrunner.config.arguments import listed
from mlxrunner.config.json_options import MAX_SCHEMA
from mlxrunner.errors import OptionError


def as_texts(name: str, given: Any) -> tuple[str, ...]:
    """Return one text, or several, as a tuple."""
    if isinstance(given, str):
        return (given,)
    return () if given is None else tuple(listed(name, given, '["a", "b"]'))


def as_choices(given: Any) -> tuple[str, ...]:
    """Return one choice, or several, as a tuple. Refuse an empty list."""
    choices = as_texts("choices", given)
    if given is not None and not choices:
        raise OptionError(
            "choices: the list is empty, it has to have at least one text "
            "(leave the option out for a free answer)"
        )
    return choices


def check_stop(stop: tuple[str, ...]) -> None:
    """Refuse anything but texts of at least one character."""
    for text in stop:
        _check_text("stop: each stop string", text)


def check_choices(choices: tuple[str, ...]) -> None:
    """Refuse anything but texts of at least one character that UTF-8 can hold.

    Together they may have as many characters as a schema: they are compiled as one is.
    """
    for text in choices:
        _check_text("choices: each one", text)
    size = sum(map(len, choices))
    if size > MAX_SCHEMA:
        raise OptionError(
            f"choices: {size} characters are too many, they may have at most {MAX_SCHEMA} together"
        )
    for text in choices:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise OptionError(
                f"choices: {text!r:.60} is not valid Unicode; replace character {error.start}"
            ) from error


def _check_text(what: str, text: Any) -> None:
    if not isinstance(text, str) or not text:
        raise OptionError(
            f"{what} has to be a text of at least one character, not {text!r:.60}; leave it out"
        )
