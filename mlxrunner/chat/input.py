"""Read what the user types: lines and typed-ahead text, commands, and the files that a text names.

/help, completion and the table in docs/chat.md are made from a `CommandTable`, which parses the
text of commands and knows nothing about what they do. Readers give one text after the other, each
as a whole. `Attachments` has the pictures that a text shows.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from threading import Condition
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mlxrunner.errors import OptionError, PictureError, ReadError
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
from mlxrunner.terminal.control import wait_readable
from mlxrunner.terminal.output import one_line, size
from mlxrunner.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mlxrunner.chat.repl import Chat


PATH = "PATH"
"""The word in `Command.takes` that makes completion offer paths."""
QUOTES = '"""'
_QUOTED = re.compile(rf"\s*(?:/[\w-]+\s+)?{QUOTES}")
OTHER_NAMES = {"/exit": "/bye", "/quit": "/bye", "/q": "/bye", "/?": "/help", "/": "/help"}
"""Names that other chats give to commands, and the commands here that they run."""
MEANT = {
    "/show": "info status history list messages transcript",
    "/stats": "usage tokens context timings speed perf memory",
    "/explain": "why cache misses reuse",
    "/clear": "reset new forget restart clean",
    "/undo": "delete rewind back remove pop",
    "/retry": "regenerate regen again repeat reroll",
    "/branch": "fork branches copychat",
    "/switch": "checkout goto",
    "/model": "models use",
    "/set": "settings options params parameters config",
    "/set temperature VALUE": "temperature temp",
    "/set context VALUE": "num_ctx ctx",
    "/system": "prompt persona role instructions",
    "/think": "thinking reasoning reason",
    "/file": "read open attach add include upload document doc",
    "/image": "picture img photo vision",
    "/editor": "multiline multi paste vi vim compose",
    "/copy": "clip clipboard yank",
    "/export": "write download transcript",
    "/load": "resume sessions session chats restore continue",
    "/help": "commands h",
    "/bye": "end stop close leave x logout",
}
"""Words after a slash that other chats have, or that one may try, by the command here."""
_MEANING = {f"/{word}": name for name, words in MEANT.items() for word in words.split()}
GOODBYES = ("exit", "quit")
"""Words that leave a chat in a terminal, if they are the whole text."""
_COMMAND = re.compile(r"\s*(/(?:[\w-]+|\?|(?=\s*\Z)))(?:\s+(.*))?", re.DOTALL)
_CONTINUED = re.compile(r"(?<!\\)(?:\\\\)*\\\Z")


def _nothing(chat: Chat, before: str) -> Iterable[str]:
    return ()


@dataclass(frozen=True)
class Command:
    """A command of the chat."""

    name: str
    """The command with its slash, such as /undo."""
    takes: str
    """The argument as /help shows it, or "" if the command takes none."""
    help: str
    """One line for /help."""
    run: Callable[[Chat, str], None]
    """Runs the command: `run(chat, argument)`. The chat prints an MlxrunnerError in one line."""
    words: Callable[[Chat, str], Iterable[str]] = _nothing
    """Returns the words that complete the argument: `words(chat, before)`.

    `before` is the part of the argument before the word that is being typed.
    """
    is_daily: bool = False
    """True if /help shows the command; /help all shows every command."""

    @property
    def takes_path(self) -> bool:
        """True if completion offers paths for the argument."""
        return PATH in self.takes

    @property
    def usage(self) -> str:
        """The command with its argument, as /help shows them."""
        return f"{self.name} {self.takes}".rstrip()


class CommandTable:
    """Commands in the order in which /help shows them."""

    def __init__(self, commands: Iterable[Command] = ()) -> None:
        self._commands = {command.name: command for command in commands}

    def __iter__(self) -> Iterator[Command]:
        return iter(self._commands.values())

    def parse(self, text: str) -> tuple[Command, str] | None:
        """Split a text into a command and its argument, which may be quoted.

        Return None if the text is not a command. Raise OptionError if the command is unknown, or if
        it takes no argument and gets one.
        """
        if not self.is_command(text) or (found := _COMMAND.fullmatch(text)) is None:
            return None
        name, argument = OTHER_NAMES.get(found[1], found[1]), (found[2] or "").strip()
        argument = argument if is_open(argument) else unquoted(argument).strip()
        command = self._commands.get(name)
        if command is None:
            raise OptionError(f"no such command: {name} ({self._similar(name)}/help lists them)")
        if argument and not command.takes:
            raise OptionError(
                f"{found[1]} takes no argument; {QUOTES} around a text sends it unchanged"
            )
        return command, argument

    def is_command(self, text: str) -> bool:
        """Return True for a slash, and if letters, digits, `-` or `_` follow it, or `/?`.

        `/usr/bin` and `/* a comment` are not commands. Several lines are a command only if their
        first word names one: `/etc` and a listing below it are a text.
        """
        found = _COMMAND.fullmatch(text)
        return found is not None and (
            OTHER_NAMES.get(found[1], found[1]) in self._commands or "\n" not in text.strip()
        )

    def help(self, *, is_whole: bool = True) -> list[str]:
        """Return one line for each command, or only for each daily one."""
        shown = [command for command in self if is_whole or command.is_daily]
        width = max(len(command.usage) for command in shown) + 2
        return [f"{command.usage:{width}}{command.help}" for command in shown]

    def _similar(self, name: str) -> str:
        known = [*self._commands, *OTHER_NAMES, *_MEANING]
        similar = get_close_matches(name, known, n=1, cutoff=0.7)
        meant = _MEANING.get(similar[0], similar[0]) if similar else ""
        is_here = meant.partition(" ")[0] in {*self._commands, *OTHER_NAMES}
        return f"did you mean {meant}? " if is_here else ""


def flagged(argument: str, flag: str) -> tuple[bool, str]:
    """Return True and the rest if `flag` is the first word, or else False and `argument`."""
    first, _, rest = argument.partition(" ")
    return (True, rest.strip()) if first == flag else (False, argument)


def whole_number(argument: str, *, default: int) -> int:
    """Return a number from 1 on. Raise OptionError for anything else."""
    if not argument:
        return default
    if not re.fullmatch("0*[1-9][0-9]{0,8}", argument):
        raise OptionError(f"{argument[:20]!r} is not a whole number between 1 and 999999999")
    return int(argument)


def is_open(text: str) -> bool:
    '''Return True if a text or an argument begins with """ and does not end with them yet.'''
    found = _QUOTED.match(text)
    rest = text[found.end() :].strip() if found else QUOTES
    return found is not None and not rest.endswith(QUOTES)


def is_continued(text: str) -> bool:
    """Return True if a text ends with a backslash, and the next line belongs to it.

    Two backslashes stand for themselves. So does each one in a text that begins with `QUOTES`.
    """
    return _CONTINUED.search(text) is not None and not _QUOTED.match(text)


def unquoted(text: str) -> str:
    '''Return a text without the """ around it, or before it while it is open.'''
    if not text.strip().startswith(QUOTES):
        return text
    inner = text.strip()[len(QUOTES) :]
    return inner.lstrip("\n") if is_open(text) else inner[: -len(QUOTES)].strip("\n")


def quoted(text: str) -> str:
    """Return `text` as a user has to type it, in quotes if it could be taken for something else."""
    return f"{QUOTES}\n{text}\n{QUOTES}" if _QUOTED.match(text) else text


PIECE = 2**16
"""Most bytes read from standard input at once."""


class DraftInterrupt(KeyboardInterrupt):
    """Ctrl-C that gives up a text which the user was typing."""


class Reader(Protocol):
    """A source of texts."""

    def read(self, idle: Callable[[TypedText], None], default: str = "") -> str:
        """Return the next text. `default` is there to be edited.

        `idle(draft)` works until the text is complete. Raise EOFError at the end of the input,
        DraftInterrupt if the user gives up what was typed, and KeyboardInterrupt at a press of
        Ctrl-C before anything was typed.
        """
        ...


class StdinReader:
    '''Reads a text from each line of standard input; lines between """ are one text.

    So are a line that ends with a backslash and the next one. Nobody edits these lines: `default`
    and `idle` are ignored.
    '''

    def __init__(self) -> None:
        self._unread = b""

    def read(self, idle: Callable[[TypedText], None], default: str = "") -> str:
        text = self._line()
        if not text:
            raise EOFError
        while is_open(text) and (line := self._line()):
            text += line
        while is_continued(text.rstrip("\n")):
            text = text.rstrip("\n")[:-1] + "\n"
            if not (line := self._line()):
                break
            text += line
        return text.rstrip("\n")

    def _line(self) -> str:
        """Return the next line with its end, or "" after the last one.

        Ctrl-C ends the wait for it at any time.
        """
        try:
            descriptor = sys.stdin.fileno()
        except (OSError, ValueError):  # a program may have replaced sys.stdin
            return sys.stdin.readline()
        while b"\n" not in self._unread:
            wait_readable(descriptor)
            piece = os.read(descriptor, PIECE)
            if not piece:
                break
            self._unread += piece
        line, end, self._unread = self._unread.partition(b"\n")
        text = (line + end).decode(sys.stdin.encoding or "utf-8", sys.stdin.errors or "strict")
        return text.replace("\r\n", "\n")


logger = logging.getLogger("mlxrunner")

PAUSE_S = 0.15
"""Seconds without a key before the typed text is evaluated."""
SIGNAL_S = 1.0
"""Most seconds until a signal is handled that comes as a wait begins, which it does not end."""


class TypedText:
    """A text that one thread edits and another one evaluates."""

    def __init__(self, text: str = "") -> None:
        self._condition = Condition()
        self._text, self._over = text, False

    @property
    def text(self) -> str:
        """The text typed so far."""
        return self._text

    @property
    def is_over(self) -> bool:
        """True once the editing has ended."""
        return self._over

    def update(self, text: str) -> None:
        """Replace the text."""
        with self._condition:
            self._text = text
            self._condition.notify_all()

    def finish(self) -> None:
        """End the editing."""
        with self._condition:
            self._over = True
            self._condition.notify_all()

    def changes(self, text: str, seconds: float) -> bool:
        """Wait until the draft differs from `text`, or is over.

        Return False if neither happens within `seconds`.
        """
        with self._condition:
            return self._condition.wait_for(lambda: self._over or self._text != text, seconds)

    def wait_until_over(self, idle: Callable[[], object] = lambda: None) -> None:
        """Wait until the editing has ended, and call `idle` about once a second."""
        while not self._over:
            with self._condition:
                if self._condition.wait_for(lambda: self._over, SIGNAL_S):
                    return
            idle()


class TypeAhead:
    """Evaluates a draft while the user edits it."""

    def __init__(
        self,
        evaluate: Callable[[str, Callable[[], bool]], None],
        *,
        reads_draft: Callable[[], bool],
        idle: Callable[[], bool] = lambda: False,
    ) -> None:
        """Call `evaluate(text, cancelled)` to evaluate a prompt that begins with `text`.

        It calls `cancelled` between chunks, and ends once that returns True. If `reads_draft`
        returns False, only the conversation before the draft is evaluated. `idle` is called about
        once a second while nothing is to be evaluated. It returns True if it has dropped the draft.
        """
        self._evaluate, self._reads_draft, self._idle = evaluate, reads_draft, idle

    def __call__(self, draft: TypedText) -> None:
        """Work until the draft is over.

        Evaluate first what comes before the draft, and then, in each pause, the typed text.
        """
        reads_draft = self._reads_draft()
        evaluated: str | None = self._work("", draft)
        if not reads_draft:
            draft.wait_until_over(self._idle)
        while not draft.is_over:
            text = draft.text
            if draft.changes(text, SIGNAL_S if text == evaluated else PAUSE_S):
                continue
            if text != evaluated:
                evaluated = self._work(text, draft)
            elif self._idle():
                evaluated = None

    def _work(self, text: str, draft: TypedText) -> str:
        """Evaluate `text` as long as the draft begins with it.

        Return `text` if it was evaluated, or "".
        """

        def outdated() -> bool:
            return draft.is_over or not draft.text.startswith(text)

        try:
            self._evaluate(text, outdated)
        except Exception as error:  # sending the message raises it again
            logger.debug("nothing was evaluated in advance: %s", error)
        return "" if outdated() else text


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
    """The names of pictures: see `mlxrunner.chat.input`."""

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
        self.held = [seeing.sight.prepare(self._pixels[name]) for name in names]
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

        A line break after a name belongs to it.
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
