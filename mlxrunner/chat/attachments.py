"""Files that go into a message, attached before it or named in it with `@`: texts and pictures."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mlxrunner.errors import PictureError, ReadError
from mlxrunner.runner import Runner
from mlxrunner.system.picture_files import (
    Pixels,
    decode_picture,
    encoded,
    open_picture,
    small_png,
)
from mlxrunner.system.reading import open_file
from mlxrunner.templates.messages import PlainMessage
from mlxrunner.terminal.text import one_line, size
from mlxrunner.tokenizer import Tokenizer

NAMED = re.compile(r'(?<!\S)@(?:"([^"\n]+)"|(\S+))')
"""Matches a file that is named with `@`."""
FENCED = re.compile(r"^(`{3,}).*?(?:^\1`*\s*$|\Z)", re.MULTILINE | re.DOTALL)
"""Matches a fence of Markdown and the text in it."""
LONGEST_TOKEN = 32
"""Most bytes per token of the context; a file with more is not read at all."""


@dataclass
class Attachments:
    """The files that go before the next message. They are evaluated while the user types it."""

    texts: dict[str, str] = field(default_factory=dict)
    """The text of each file, by name."""
    pictures: list[str] = field(default_factory=list)
    """The names of pictures: see `mlxrunner.chat.attachments`."""

    def __bool__(self) -> bool:
        return bool(self.texts or self.pictures)

    def clear(self) -> None:
        """Drop all files."""
        self.texts.clear()
        self.pictures.clear()

    def before(self, text: str) -> str:
        """Return `text` with the attached files before it."""
        files = (f"{fenced(*file)}\n" for file in self.texts.items())
        return "".join([*(f"{name}\n" for name in self.pictures), *files, text])

    def with_named(
        self,
        text: str,
        runner: Runner,
        say: Callable[[str], None],
        show: Callable[[str], str],
    ) -> str:
        """Return `text` with the attached files before it and the files that it names after it.

        An edited message may hold files already: these are not added again, and names inside their
        fences are ignored. `say` is called with a note for each name that looks like that of a
        missing file, and `show` with the path of each picture: it returns the picture's name. Raise
        ReadError if a file cannot be used.
        """
        named: dict[str, str] = {}
        pictures = list[str]()
        for in_quotes, word in NAMED.findall(FENCED.sub("", text)) if "@" in text else ():
            # A mark that ends a sentence belongs to a name only if a file has that name.
            candidates = (in_quotes, word, word.rstrip(".,;:!?)'\""))
            name = next((name for name in candidates if _exists(name)), None)
            if name is not None and is_picture(name):
                shown = show(name)
                pictures += [f"{shown}\n"] if shown not in self.before(text) else []
            elif name is not None:
                found = read_text(name, runner)
                content = fenced(name, found).rstrip("\n")
                if content not in text and name not in named:
                    say(f"{name} ({size(len(found.encode()))}) is attached")
                    named[name] = content
            elif in_quotes or "/" in word or "." in word.strip("."):
                say(f"no such file: {in_quotes or word}; sent as text")
        return "\n\n".join(
            ["".join([*dict.fromkeys(pictures), self.before(text)]), *named.values()]
        )


def fenced(name: str, text: str) -> str:
    """Return a file as part of a message, in a fence that its own text does not end."""
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 3)
    return f"{name}:\n{fence}\n{text.rstrip()}\n{fence}\n"


def read_text(name: str, runner: Runner) -> str:
    """Return the text of a file that fits into the context. Raise ReadError for any other file."""
    path = Path(os.path.expanduser(name))
    limit = LONGEST_TOKEN * runner.context
    try:
        descriptor, nbytes = open_file(path)
        with os.fdopen(descriptor, "rb") as stream:
            content = stream.read(limit + 1) if nbytes <= limit else b""
        if max(nbytes, len(content)) > limit:
            raise ReadError(
                f"{name}: {size(max(nbytes, len(content)))} are more than the context of "
                f"{runner.context} tokens holds"
            )
        text = content.decode()
    except OSError as error:
        raise ReadError(f"{name}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ReadError(f"{name}: not a text (byte {error.start} is not UTF-8)") from error
    if "\0" in text:
        raise ReadError(f"{name}: not a text (byte {text.index(chr(0))} is 0)")
    tokens = len(runner.tokenizer.encode_more(text))
    if tokens >= runner.context:
        raise ReadError(
            f"{name}: its {tokens} tokens are more than the context of "
            f"{runner.context} tokens holds"
        )
    return text


def _exists(name: str) -> bool:
    try:
        return bool(name) and Path(os.path.expanduser(name)).exists()
    except (OSError, ValueError):  # too long, or not a name at all
        return False


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
