"""How what was typed is read: as a command, or as a text, which may be quoted.

A command is a name, what it takes, one line of help and a function; /help, completion and the README's list are made from a table of them.
Knows nothing about what the commands do.
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
"""What `Command.takes` says where paths complete the argument."""
QUOTES = '"""'
_QUOTED = re.compile(rf"\s*(?:/[\w-]+\s+)?{QUOTES}")
ELSEWHERE = {"/exit": "/bye", "/quit": "/bye", "/q": "/bye"}
"""Names that other chats have for commands, and what they are called here."""
_COMMAND = re.compile(r"\s*(/[\w-]+)(?:\s+(.*))?", re.DOTALL)


def _nothing(chat: Chat) -> Iterable[str]:
    return ()


@dataclass(frozen=True)
class Command:
    """`run(chat, argument)` does it; an MlxrunnerError becomes one line. `words(chat)`: what the argument may be, for completion."""

    name: str
    takes: str
    help: str
    run: Callable[[Chat, str], None]
    words: Callable[[Chat], Iterable[str]] = _nothing

    @property
    def takes_path(self) -> bool:
        return PATH in self.takes

    @property
    def usage(self) -> str:
        return f"{self.name} {self.takes}".rstrip()


class Table:
    """Commands in the order in which /help shows them."""

    def __init__(self, commands: Iterable[Command]) -> None:
        self._commands = {command.name: command for command in commands}

    def __iter__(self) -> Iterator[Command]:
        return iter(self._commands.values())

    def parse(self, text: str) -> tuple[Command, str] | None:
        """Split a text into a command and its argument, which may be quoted; None if it is not a command.

        OptionError for one that is not there, or takes nothing.
        """
        if not self.parses(text) or (found := _COMMAND.fullmatch(text)) is None:
            return None
        name, argument = found[1], (found[2] or "").strip()
        argument = argument if is_open(argument) else unquoted(argument).strip()
        command = self._commands.get(name)
        if command is None:
            similar = (
                [ELSEWHERE[name]]
                if name in ELSEWHERE
                else get_close_matches(name, self._commands, n=1)
            )
            raise OptionError(
                f"no such command: {name} ({f'did you mean {similar[0]}? ' if similar else ''}/help lists them)"
            )
        if argument and not command.takes:
            raise OptionError(
                f"{name} takes nothing behind it; {QUOTES} around a text sends it as it is"
            )
        return command, argument

    def parses(self, text: str) -> bool:
        """Return True if the first word is a slash and letters, digits, `-` or `_`: `/usr/bin` and `/* a comment` are texts.

        So are several lines that begin with a word that is no command: `/etc` and a listing below it.
        """
        found = _COMMAND.fullmatch(text)
        return found is not None and (found[1] in self._commands or "\n" not in text.strip())

    def help(self) -> list[str]:
        """One line for each command."""
        width = max(len(command.usage) for command in self) + 2
        return [f"{command.usage:{width}}{command.help}" for command in self]


def flagged(argument: str, flag: str) -> tuple[bool, str]:
    """Whether `flag` is the first word of an argument, and what else it is."""
    first, _, rest = argument.partition(" ")
    return (True, rest.strip()) if first == flag else (False, argument)


def is_open(text: str) -> bool:
    '''Return True if a text or an argument began with """ and has not been ended by them yet.'''
    found = _QUOTED.match(text)
    rest = text[found.end() :].strip() if found else QUOTES
    return found is not None and not rest.endswith(QUOTES)


def unquoted(text: str) -> str:
    '''A text without the """ around it, or before it while it is open.'''
    if not text.strip().startswith(QUOTES):
        return text
    inner = text.strip()[len(QUOTES) :]
    return inner.lstrip("\n") if is_open(text) else inner[: -len(QUOTES)].strip("\n")


def quoted(text: str) -> str:
    """What has to be typed for `text`, so that it is not taken for something else."""
    return f"{QUOTES}\n{text}\n{QUOTES}" if _QUOTED.match(text) else text
