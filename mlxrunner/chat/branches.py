"""Several lines of one conversation, by name. They keep tokens only: there is one entry, and it follows the line that is talked on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from mlxrunner.chat.history import History
from mlxrunner.errors import OptionError

MAIN = "main"


@dataclass
class Branches:
    """`current`: the one that is talked on; the others lie in `others`, as they were left, with their system prompts.

    `given_up`: those that the user has dropped.
    """

    current: str = MAIN
    others: dict[str, tuple[str | None, History]] = field(default_factory=dict)
    given_up: list[tuple[str | None, History]] = field(default_factory=list)

    def __iter__(self) -> Iterator[str]:
        yield from sorted([self.current, *self.others])

    def fork(self, name: str, system: str | None, history: History) -> None:
        """Leave the current branch as it is and go on under another name. OptionError for a name that is taken."""
        if not name or name.split() != [name]:
            raise OptionError(f"{name!r} is no name for a branch: one word")
        if name in self:
            raise OptionError(f"there is a branch {name} already: /switch {name} goes to it")
        self.others[self.current] = (system, history.copy())
        self.current = name

    def switch(self, name: str, system: str | None, history: History) -> tuple[str | None, History]:
        """Leave the current branch, and what is to be gone on with. OptionError for a name that is not known."""
        if name == self.current:
            return system, history
        if name not in self.others:
            raise OptionError(f"there is no branch {name!r}: there are {', '.join(self)}")
        self.others[self.current] = (system, history)
        self.current = name
        return self.others.pop(name)

    def keep(self, name: str, system: str | None, history: History) -> str:
        """Put an earlier state of branch `name` beside the others; returns the name it gets: `main~1` for one of `main`."""
        base = re.sub(r"~\d+$", "", name)
        free = next(f"{base}~{number}" for number in count(1) if f"{base}~{number}" not in self)
        self.others[free] = (system, history)
        return free

    def drop(self, name: str) -> History:
        """Forget a branch, and return it. OptionError for the one that is talked on, or that is not known."""
        if name == self.current:
            raise OptionError(
                f"branch {name} is the one that is talked on: /switch to another one first"
            )
        if name not in self.others:
            raise OptionError(f"there is no branch {name!r}: there are {', '.join(self)}")
        self.given_up.append(self.others.pop(name))
        return self.given_up[-1][1]
