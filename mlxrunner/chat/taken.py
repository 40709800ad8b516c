"""The states of the conversation that commands have replaced, which /redo brings back.

A state is a branch, which never changes. This is bookkeeping only: no tokenizer, no terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mlxrunner.sessions.session import Branch

MOST = 50
"""Most states that a chat keeps in memory."""


@dataclass(frozen=True)
class State:
    """A branch as it was before a command."""

    name: str
    branch: Branch

    def is_lost_in(self, present: Branch | None) -> bool:
        """Return True if `present` lacks turns or the system prompt of this state."""
        if present is None:
            return bool(self.branch.history.turns)
        is_without = not self.branch.history.is_within(present.history)
        return is_without or present.system != self.branch.system


@dataclass
class Taken:
    """The states that commands have replaced, the newest last."""

    _states: list[State] = field(default_factory=list)
    _unsaved: list[State] = field(default_factory=list)

    def push(self, state: State) -> None:
        """Keep a state before a command runs, so that no interrupt can lose it."""
        self._states = [*self._states, state][-MOST:]
        self._unsaved = [*self._unsaved, state][-MOST:]

    def settle(self, state: State, branches: Mapping[str, Branch]) -> None:
        """Forget `state` after the command if nothing of it is lost in `branches`."""
        if not state.is_lost_in(branches.get(state.name)):
            self._forget(state)

    def pop(self, name: str, present: Branch) -> Branch | None:
        """Take the newest state of the branch `name` that differs from `present`, or None."""
        while own := [one for one in self._states if one.name == name]:
            self._forget(own[-1])
            if own[-1].is_lost_in(present):
                return own[-1].branch
        return None

    def _forget(self, state: State) -> None:
        self._states = [one for one in self._states if one is not state]
        self._unsaved = [one for one in self._unsaved if one is not state]

    def unsaved(self) -> list[State]:
        """Return the states that are not on the disk yet, the newest last."""
        return self._unsaved

    def saved(self, state: State) -> None:
        """Note that `state` is on the disk."""
        self._unsaved = [one for one in self._unsaved if one is not state]

    def restart(self, states: Iterable[State] = ()) -> None:
        """Begin anew with the saved states of another conversation, the newest last."""
        self._states, self._unsaved = list(states), []
