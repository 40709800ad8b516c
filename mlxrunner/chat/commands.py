"""What begins with a slash: a table of commands, from which /help, completion and the README's list are made.

A command is a name, what it takes, one line of help and a function. Knows nothing about what the commands do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlxrunner.chat.repl import Chat

PATH = "PATH"
"""What `Command.takes` says where paths complete the argument."""


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

    def parse(self, line: str) -> tuple[Command, str] | str | None:
        """A command and its argument; a line that says there is no such command; or None for what is no command at all.

        `/usr/bin` and `/* a comment` are texts that begin with a slash, not commands.
        """
        name, _, argument = line.strip().partition(" ")
        if command := self._commands.get(name):
            return command, argument.strip()
        if not re.fullmatch("/[a-zA-Z]+", name):
            return None
        similar = get_close_matches(name, self._commands, n=1)
        return f"no such command: {name} ({f'did you mean {similar[0]}? ' if similar else ''}/help lists them)"

    def help(self) -> list[str]:
        """One line for each command."""
        width = max(len(command.usage) for command in self) + 2
        return [f"{command.usage:{width}}{command.help}" for command in self]
