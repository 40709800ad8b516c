"""The conversations in one folder: which files each of them uses, and which one goes first.

Bookkeeping only: no tensors. How many conversations use a file is counted anew in each process, and
stored nowhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlxrunner.cache.checkpoints import Role
from mlxrunner.cache.layers.extents import Extent
from mlxrunner.cache.tokens import TokenArray, goes_on
from mlxrunner.cache.worth import GreedyDual, worth
from mlxrunner.errors import SessionError
from mlxrunner.stored.parked import (
    SHORT,
    Parked,
    Rows,
    State,
    digests,
    file_name,
    lowest_offset,
    pieces,
)
from mlxrunner.stored.prefixes import Prefixes

GivenUp = Callable[[Parked], None]
"""A function that is told which conversation was given up to make room."""


@dataclass(frozen=True)
class Form:
    """The form in which an entry is stored."""

    tokens: TokenArray
    extents: Sequence[Extent]
    """Those of its layers."""
    checkpoints: Sequence[tuple[int, Role | None]]
    """The offset and the role of each; none if the layers can't be cut."""
    has_rows: bool
    """True if some layers have a row per token."""
    has_only_rows: bool
    """True if all layers do."""
    can_be_cut: bool
    """False if a layer has neither rows nor checkpoints."""
    is_exact: bool
    spelled: NDArray[np.int32]
    """The tokens as files are named by, a row each; see `mlxrunner.pictures.stored`."""


class Shelf:
    """Parked conversations and their files, of at most `limit` bytes."""

    def __init__(
        self,
        delete: Callable[[str], object],
        limit: int,
        on_given_up: GivenUp = lambda parked: None,
    ) -> None:
        """Begin without conversations. `delete`: removes the file of a name."""
        self.limit, self.on_given_up = limit, on_given_up
        self._remove_file = delete
        self.sizes: dict[str, int] = {}
        """Bytes of each file."""
        self.bytes = 0
        """Bytes of all files."""
        self._parked: dict[str, Parked] = {}
        self._users: dict[str, set[Parked]] = {}
        self._exact, self._shifted = Prefixes[Parked](), Prefixes[Parked]()
        self._is_whole = True
        """False while trees and users change, and after an interrupt meanwhile."""
        self._dual = GreedyDual[Parked]()
        self._restored: weakref.WeakSet[Parked] = weakref.WeakSet()
        self._read: weakref.WeakKeyDictionary[object, Parked] = weakref.WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._parked)

    def __iter__(self) -> Iterator[Parked]:
        return iter(self._parked.values())

    def __contains__(self, parked: object) -> bool:
        return isinstance(parked, Parked) and self._parked.get(parked.name) is parked

    def named(self, name: str) -> Parked | None:
        return self._parked.get(name)

    def plan(self, seed: bytes, form: Form) -> Parked:
        """Name the files of a conversation: those that are there, and those to be written."""
        tokens, length = form.tokens, len(form.tokens)
        rows, begin = self._shared_rows(tokens) if form.is_exact else ([], 0)
        new = pieces(begin, length) if form.has_rows else []
        offsets = [length, *(end for _, end in new), *(offset for offset, _ in form.checkpoints)]
        named = digests(seed, form.spelled, offsets)
        rows += [Rows(file_name("rows", named[end], at, end), at, end) for at, end in new]
        return Parked(
            file_name("talk", named[length], length),
            tokens,
            rows if form.has_rows else [],
            [
                State(file_name("state", named[offset], offset), offset, role)
                for offset, role in form.checkpoints
            ],
            lowest_offset(form.extents, length) if form.can_be_cut else length,
            form.has_only_rows,
            form.is_exact,
        )

    def _shared_rows(self, tokens: TokenArray) -> tuple[list[Rows], int]:
        """Return the files of others that have rows of `tokens`, and up to which one."""
        closest, shared = self.closest(tokens)
        if closest is None or not closest.rows:
            return [], 0
        rows = [piece for piece, _ in closest.used(shared)]
        if shared < len(tokens) and shared - rows[-1].begin < SHORT:
            shared = rows.pop().begin
        return rows, shared

    def claim(self, parked: Parked) -> None:
        """Keep the files that `parked` is going to share."""
        for name in parked.pieces:
            self._users.setdefault(name, set()).add(parked)

    def wrote(self, name: str, nbytes: int) -> None:
        """Note that the file `name` of `nbytes` was written."""
        self.bytes += nbytes - self.sizes.get(name, 0)
        self.sizes[name] = nbytes

    def add(self, parked: Parked) -> None:
        """Add a conversation whose files are all there."""
        self._mend()
        self.claim(parked)
        self._is_whole = False
        self._parked[parked.name] = parked
        self._tree(parked).add(parked, parked.tokens)
        self._dual.use(parked)
        self._is_whole = True

    def use(self, parked: Parked, reader: object | None = None) -> None:
        """Note that a conversation is used. It is not given up while `reader` exists."""
        self._dual.use(parked)
        if reader is not None:
            self._read[reader] = parked
            self._restored.add(parked)

    def remove(self, parked: Parked) -> None:
        """Remove a conversation, and the files that no other one uses; its own file first."""
        self._mend()
        if parked in self:
            self._is_whole = False
            del self._parked[parked.name]
            self._tree(parked).remove(parked, parked.tokens)
            self._dual.forget(parked)
            self._is_whole = True
        if parked.name not in self._parked:  # another one may have been written meanwhile
            self._delete(parked.name)
        self.release(parked)

    def release(self, parked: Parked) -> None:
        """Undo `claim`: remove the files that nobody uses any more."""
        for name in parked.pieces:
            users = self._users.get(name, set())
            users.discard(parked)
            if not users:
                self._users.pop(name, None)
                self._delete(name)

    def drop_users(self, name: str) -> None:
        """Remove all conversations that use the damaged file `name`."""
        users = self._users.get(name, set()) | {
            parked for parked in (self._parked.get(name),) if parked
        }
        for parked in users:
            self.remove(parked)

    def drop_earlier(self, parked: Parked, replaces: Parked | None) -> None:
        """Remove what is an earlier state of `parked`: see `Parking.park`."""
        self._mend()
        is_enough = parked.is_exact and parked.lowest == 1
        pinned = set(self._read.values())
        for shared, found in list(self._tree(parked).sharing(parked.tokens)):
            for one in found:
                if (
                    one is not parked
                    and one not in pinned
                    and goes_on(shared, len(one.tokens))
                    and (one is replaces or one in self._restored or is_enough)
                ):
                    self.remove(one)

    def closest(self, tokens: TokenArray) -> tuple[Parked | None, int]:
        """Return the exact conversation that shares most tokens with `tokens`, and how many."""
        self._mend()
        for shared, found in self._exact.sharing(tokens):
            return found[-1], shared
        return None, 0

    def find(self, prompt: TokenArray) -> tuple[Parked, int] | None:
        """Return the conversation from which `prompt` can reuse most tokens, and how many.

        At least one token of the prompt is left to evaluate.
        """
        self._mend()
        best: tuple[Parked, int] | None = None
        for tree in (self._exact, self._shifted):
            for shared, found in tree.sharing(prompt):
                to, least = min(shared, len(prompt) - 1), best[1] if best else 0
                if to <= least:
                    break
                offset, parked = _most(found, to)
                if offset > least:
                    best = parked, offset
        return best

    def make_room(self, need: int, by: Parked | None = None) -> None:
        """Give conversations up until `need` more bytes fit.

        Raise SessionError, with nothing given up, if they can't, beside the files that `by` shares.
        """
        self._mend()
        kept = sum(self.sizes.get(name, 0) for name in by.pieces) if by is not None else 0
        if need + kept > self.limit:
            raise SessionError(f"it takes {need + kept:,} of at most {self.limit:,} bytes")
        while self.bytes + need > self.limit:
            pinned = set(self._read.values())
            worths = {one: self._worth(one) for one in self if one not in pinned}
            if not worths:
                raise SessionError(f"{need:,} bytes more don't fit: the rest is being read")
            least = self._dual.least(worths)
            self._dual.give_up(least, worths[least])
            self.remove(least)
            self.on_given_up(least)

    def _worth(self, parked: Parked) -> float:
        """Return what it costs to evaluate again what only `parked` has, per byte."""
        shared, nbytes = 0, self.sizes.get(parked.name, 0)
        for piece, end in parked.used(len(parked.tokens)):
            if len(self._users[piece.name]) > 1:
                shared = end
            else:
                nbytes += self.sizes.get(piece.name, 0)
        for state in parked.states:
            if len(self._users[state.name]) == 1:
                nbytes += self.sizes.get(state.name, 0)
            elif not parked.rows:
                shared = state.offset
        return worth(len(parked.tokens), nbytes, shared)

    def _mend(self) -> None:
        """Build trees and users again from the conversations, if an interrupt cut a change off."""
        if self._is_whole:
            return
        self._exact, self._shifted = Prefixes[Parked](), Prefixes[Parked]()
        users: dict[str, set[Parked]] = {}
        for parked in self:
            self._tree(parked).add(parked, parked.tokens)
            for name in parked.pieces:
                users.setdefault(name, set()).add(parked)
        self._users, self._is_whole = users, True

    def _tree(self, parked: Parked) -> Prefixes[Parked]:
        return self._exact if parked.is_exact else self._shifted

    def _delete(self, name: str) -> None:
        self.bytes -= self.sizes.pop(name, 0)
        with suppress(OSError):  # what stays is removed at the next start
            self._remove_file(name)


def _most(found: list[Parked], to: int) -> tuple[int, Parked]:
    """Return the largest offset <= `to` that one of them can be resumed at, and that one."""
    most, best = 0, found[0]
    for parked in found:
        offset = to if to >= parked.lowest else parked.resumable(to)
        if offset > most:
            most, best = offset, parked
            if most == to:
                break
    return most, best
