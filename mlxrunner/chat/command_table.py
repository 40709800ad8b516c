"""The commands of a chat: their description, and the parsing of typed text.

/help, completion and the table in docs/chat.md are made from a `CommandTable`. This knows nothing
about what the commands do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

from mlxrunner.errors import OptionError

if TYPE_CHECKING:
    from mlxrunner.chat.repl import Chat


PATH = "PATH"
"""The word in `Command.takes` that makes completion offer paths."""
QUOTES = '"""'
_QUOTED = re.compile(rf"\s*(?:/[\w-]+\s+)?{QUOTES}")
OTHER_NAMES = {"/exit": "/bye", "/quit": "/bye", "/q": "/bye", "/?": "/help"}
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
_COMMAND = re.compile(r"\s*(/(?:[\w-]+|\?))(?:\s+(.*))?", re.DOTALL)
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
        """Return True if the first word is a slash and letters, digits, `-` or `_`, or `/?`.

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
