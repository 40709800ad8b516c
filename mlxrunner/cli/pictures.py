"""The pictures of `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxrunner.errors import OptionError

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
