"""Read a picture that came as text: base64, a data URL, or the URL of a file in a folder.

Nothing is fetched from the network, and no file is opened unless a folder is allowed.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mlxrunner.errors import PictureError
from mlxrunner.system.picture_files import MOST_BYTES
from mlxrunner.system.reading import read_bytes
from mlxrunner.terminal.text import one_line, size

_IS_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
LONGEST = 4096
"""Most characters of the URL of a file."""


def picture_bytes(text: str, name: str, folder: Path | None = None) -> bytes:
    """Return the file of a picture that is given as `text`, which errors call `name`.

    `folder`: files in it may be named by `file:` URLs, also as `file:photo.png`; None: no files.
    Raise PictureError, and ReadError for a file that can't be read.
    """
    if _IS_URL.match(text) is None:
        return _decoded(text, name)
    scheme = text.partition(":")[0].lower()
    if scheme == "data":
        head, comma, content = text.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise PictureError(
                f"{name}: a data URL has to begin as data:image/png;base64, and not as "
                f"{text[:40]!r}"
            )
        return _decoded(content, name)
    if scheme == "file":
        return _file(text, name, folder)
    raise PictureError(
        f"{name}: {one_line(text[:80])} is not fetched, as nothing is: send the picture itself, as "
        "data:image/png;base64,..."
    )


def _decoded(content: str, name: str) -> bytes:
    if len(content) > MOST_BYTES // 3 * 4 + 2**16:  # room for line breaks
        raise PictureError(f"{name}: it has more than {size(MOST_BYTES)}: make it smaller")
    try:
        return base64.b64decode(re.sub(r"\s+", "", content), validate=True)
    except (binascii.Error, ValueError) as error:
        raise PictureError(f"{name}: its base64 is wrong: {error}") from error


def _file(url: str, name: str, folder: Path | None) -> bytes:
    """Return the content of the file of a URL, which has to lie in `folder`."""
    if folder is None:
        raise PictureError(
            f"{name}: no files are opened: send the picture itself, as data:image/png;base64,..., "
            "or allow a folder with --picture-folder"
        )
    try:
        parts = urlsplit(url[:LONGEST])
        path = Path(os.path.realpath(folder / unquote(parts.path)))
        is_inside = parts.netloc in ("", "localhost") and path.is_relative_to(
            os.path.realpath(folder)
        )
    except ValueError:  # a NUL, or a wrong address
        is_inside = False
    if not is_inside:
        raise PictureError(
            f"{name}: {one_line(url[:200])} is not in the folder {one_line(str(folder))}, from "
            "which pictures may be read"
        )
    return read_bytes(path, MOST_BYTES)
