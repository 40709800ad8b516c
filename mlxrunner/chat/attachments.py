"""Files that go into a message, attached before it or named in it with `@`: texts and pictures."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mlxrunner.chat.pictures import is_picture
from mlxrunner.errors import FileError, ReadError
from mlxrunner.runner import Runner
from mlxrunner.system.reading import open_file
from mlxrunner.terminal.text import size

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
    """The names of pictures: see `mlxrunner.chat.pictures`."""

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
        FileError if a file cannot be used.
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
                content = fenced(name, read_text(name, runner)).rstrip("\n")
                named |= {name: content} if content not in text else {}
            elif in_quotes or "/" in word or "." in word.strip("."):
                say(f"no such file: {in_quotes or word}; sent as it is")
        return "\n\n".join(
            ["".join([*dict.fromkeys(pictures), self.before(text)]), *named.values()]
        )


def fenced(name: str, text: str) -> str:
    """Return a file as part of a message, in a fence that its own text does not end."""
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 3)
    return f"{name}:\n{fence}\n{text.rstrip()}\n{fence}\n"


def read_text(name: str, runner: Runner) -> str:
    """Return the text of a file that fits into the context. Raise FileError for any other file."""
    path = Path(os.path.expanduser(name))
    limit = LONGEST_TOKEN * runner.context
    try:
        descriptor, nbytes = open_file(path)
        with os.fdopen(descriptor, "rb") as stream:
            content = stream.read(limit + 1) if nbytes <= limit else b""
        if max(nbytes, len(content)) > limit:
            raise FileError(
                f"{name}: {size(max(nbytes, len(content)))} are more than the context of "
                f"{runner.context} tokens holds"
            )
        text = content.decode()
    except ReadError as error:
        raise FileError(str(error)) from error
    except OSError as error:
        raise FileError(f"{name}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise FileError(f"{name}: not a text (byte {error.start} is not UTF-8)") from error
    if "\0" in text:
        raise FileError(f"{name}: not a text (byte {text.index(chr(0))} is 0)")
    tokens = len(runner.tokenizer.encode_more(text))
    if tokens >= runner.context:
        raise FileError(
            f"{name}: its {tokens} tokens are more than the context of "
            f"{runner.context} tokens holds"
        )
    return text


def _exists(name: str) -> bool:
    try:
        return bool(name) and Path(os.path.expanduser(name)).exists()
    except (OSError, ValueError):  # too long, or not a name at all
        return False
