"""The branches of one conversation, by name.

A branch keeps tokens only. There is one prefix-cache entry, and it follows the present branch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count

from mlxrunner.errors import OptionError
from mlxrunner.sessions.session import MAIN, Branch


@dataclass
class Branches:
    """The names of all branches, and every branch but the present one, which the chat holds."""

    current: str = MAIN
    """The name of the present branch."""
    others: dict[str, Branch] = field(default_factory=dict)
    """The other branches, by name."""
    given_up: list[Branch] = field(default_factory=list)
    """The branches that the user has dropped."""

    def __iter__(self) -> Iterator[str]:
        yield from sorted([self.current, *self.others])

    def fork(self, name: str, present: Branch) -> None:
        """Continue under another name, and leave the branch `present` as it is.

        Raise OptionError if the name is taken or not one word.
        """
        if not name or name.split() != [name]:
            raise OptionError(f"{name!r} is not a name for a branch: it has to be one word")
        if name in self:
            raise OptionError(f"there is a branch {name} already: /switch {name} goes to it")
        self.others[self.current] = present
        self.current = name

    def switch(self, name: str, present: Branch) -> Branch:
        """Leave the branch `present`, and return the branch to continue.

        Raise OptionError if no branch has this name.
        """
        if name == self.current:
            return present
        self._check(name)
        self.others[self.current] = present
        self.current = name
        return self.others.pop(name)

    def keep(self, name: str, branch: Branch) -> str:
        """Keep an earlier state of branch `name`. Return its new name, such as `main~1`."""
        base = re.sub(r"~\d+$", "", name)
        free = next(f"{base}~{number}" for number in count(1) if f"{base}~{number}" not in self)
        self.others[free] = branch
        return free

    def drop_kept_within(self, branch: Branch) -> None:
        """Drop the branches whose names `keep` has made and whose turns `branch` has again."""
        for name, one in [*self.others.items()]:
            if not re.search(r"~\d+$", name):
                continue
            if one.system == branch.system and one.history.is_within(branch.history):
                del self.others[name]

    def drop(self, name: str) -> Branch:
        """Drop a branch and return it. Raise OptionError if it is the present one or unknown."""
        if name == self.current:
            raise OptionError(f"branch {name} is the present one: /switch to another one first")
        self._check(name)
        self.given_up.append(self.others.pop(name))
        return self.given_up[-1]

    def forget_tokens(self) -> None:
        """Keep the other branches as texts only, for another model."""
        self.others = {
            name: replace(branch, history=branch.history.without_tokens())
            for name, branch in self.others.items()
        }

    def _check(self, name: str) -> None:
        if name not in self.others:
            raise OptionError(f"there is no branch {name!r}: there are {', '.join(self)}")
