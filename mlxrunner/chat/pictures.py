"""Pictures in a chat: a text names each, such as `[picture: receipt.png, 640x480, 3fa9c18e]`.

The name is what is shown, edited and saved. Where a message of the user has it, the model sees the
picture. The last part of a name comes from the pixels, so no other picture has the same name.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from mlxrunner.errors import PictureError
from mlxrunner.system.picture_files import (
    Pixels,
    decode_picture,
    encoded,
    open_picture,
    small_png,
)
from mlxrunner.templates.messages import PlainMessage
from mlxrunner.terminal.text import one_line
from mlxrunner.tokenizer import Tokenizer

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
NAME = re.compile(r"\[picture: [^\[\]\n]{1,80}, \d+x\d+, [0-9a-f]{8}\]")
SMALL = 320
"""Most rows and columns of a picture in the terminal."""
BEGIN, END = "\ue0f2", "\ue0f3"
"""Stand around the name of a picture that is shown: private characters, which no template changes.

They are taken out of all messages, so nobody else can write them.
"""
SHOWN = re.compile(f"{BEGIN}([^{BEGIN}{END}]*){END}")


class Album:
    """The pictures of a chat, by their names."""

    def __init__(self) -> None:
        self._pixels: dict[str, Pixels] = {}
        self.held: Any = None
        """The pictures that were tokenized last, as the encoder needs them."""

    def add(self, path: str) -> tuple[str, bool]:
        """Read a picture file, and return the name that shows it, and True if it is new here.

        Raise PictureError if it can't be used, and OptionError if nothing that reads it is
        installed.
        """
        pixels = open_picture(os.path.expanduser(path))
        height, width, _ = pixels.shape
        file = re.sub(r"[\[\]\n]", "_", one_line(Path(path).name))[-80:] or "?"
        name = f"[picture: {file}, {width}x{height}, {_short_digest(pixels)}]"
        is_new = name not in self._pixels
        self._pixels.setdefault(name, pixels)
        return name, is_new

    def png(self, name: str) -> bytes:
        """Return the PNG of the picture with this name."""
        return encoded(self._pixels[name])

    def bring_back(self, name: str, content: bytes) -> bool:
        """Add a picture that was kept under this name. Return False if it is another one.

        Raise OptionError if nothing that reads it is installed.
        """
        try:
            pixels = decode_picture(content, name)
        except PictureError:
            return False
        if name.rpartition(", ")[2] != f"{_short_digest(pixels)}]":
            return False
        self._pixels.setdefault(name, pixels)
        return True

    def prepare(self, names: Sequence[str], seeing: Any) -> list[Any]:
        """Return the pictures with these names as a model that sees prepares them.

        They are held until others are tokenized. Raise PictureError if one can't be seen.
        """
        self.held = [seeing.prepare(self._pixels[name]) for name in names]
        return list(self.held)

    def small(self, name: str) -> tuple[bytes, int]:
        """Return a small PNG of the picture with this name, and its width."""
        return small_png(self._pixels[name], SMALL)

    def named(self, text: str) -> list[str]:
        """Return the names of pictures in `text`, in order."""
        return [name for name in NAME.findall(text) if name in self._pixels]

    def shown(self, text: str) -> list[Pixels]:
        """Return the pictures that a rendered text shows, in order."""
        return [self._pixels[name] for name in SHOWN.findall(text) if name in self._pixels]

    def marked(self, message: PlainMessage) -> PlainMessage:
        """Return a message of which the model sees the pictures.

        A line break behind a name belongs to it.
        """
        content = message["content"].replace(BEGIN, "").replace(END, "")
        if message["role"] == "user":
            for name in dict.fromkeys(self.named(content)):
                parts = re.split(f"{re.escape(name)}\n?", content)
                content = f"{BEGIN}{name}{END}".join(parts)
        return {**message, "content": content}

    def tokenizer(self, seeing: Any) -> Tokenizer:
        """Return the tokenizer of a model that sees, which shows it the pictures that are named."""
        tokenizer: Any = _Showing(seeing, self) if self._pixels else seeing
        return tokenizer  # type: ignore[no-any-return]


def _short_digest(pixels: Pixels) -> str:
    """Return the beginning of the SHA-256 of a picture, as it is in names."""
    return hashlib.sha256(np.ascontiguousarray(pixels).data).hexdigest()[:8]


class _Showing:
    def __init__(self, seeing: Any, album: Album) -> None:
        self._seeing, self._album = seeing, album

    def __getattr__(self, name: str) -> Any:
        return getattr(self._seeing, name)

    def render(self, messages: Sequence[PlainMessage], **variables: Any) -> str:
        plain = [self._album.marked(message) for message in messages]
        return str(self._seeing.render(plain, **variables))

    def encode(self, text: str) -> list[int]:
        return self._encoded(text, self._seeing.encode)

    def encode_more(self, text: str) -> list[int]:
        return self._encoded(text, self._seeing.encode_more)

    def _encoded(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        pictures = self._album.shown(text)
        if not pictures:
            return encode(text)
        written = SHOWN.sub(lambda _: self._seeing.written, text)
        tokens, self._album.held = self._seeing.tokens_of(written, pictures, encode)
        found: list[int] = tokens.tolist()
        return found


def picture_paths(text: str) -> list[str]:
    """Return the paths if `text` is nothing but paths of picture files, as terminals drop them."""
    line = text.strip()
    if not line.lower().rstrip("'\"").endswith(SUFFIXES) or "\n" in line:
        return []
    candidates = [[line]]
    with suppress(ValueError):  # an open quote
        candidates.append(shlex.split(line))
    return next((paths for paths in candidates if all(map(is_picture, paths))), [])


def is_picture(path: str) -> bool:
    """Return True if `path` is a file whose name ends as that of a picture."""
    try:
        return path.lower().endswith(SUFFIXES) and os.path.isfile(os.path.expanduser(path))
    except ValueError:  # a NUL
        return False
