"""The conversations in one folder: the files of each, the longest prefix, and which one to evict.

Bookkeeping only: no tensors.
"""

from __future__ import annotations

import hashlib
import weakref
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from mlxrunner.cache.entry import (
    GreedyDual,
    Role,
    TokenArray,
    common_prefix,
    eviction_score,
    goes_on,
    role_named,
)
from mlxrunner.cache.protocol import Extent
from mlxrunner.errors import SessionError

SEGMENT = 512
"""Most tokens of a file with rows."""
SHORT = 64
"""Tokens that are stored again rather than read from a file of others.

A conversation whose last file has fewer writes them again with its next turn, so that many short
turns don't make many files.
"""
FEW = 20
"""Tokens that are stored again to save a file are at most this part of the new ones: one in 20.

That holds where conversations are written after each turn.
"""


@dataclass(frozen=True)
class RowsPiece:
    """A file with the rows of the tokens `begin .. end - 1`.

    A conversation may use only the first of them: those before its next file, or before its end.
    """

    name: str
    begin: int
    end: int


@dataclass(frozen=True)
class StatePiece:
    """A file with a checkpoint."""

    name: str
    offset: int
    role: Role | None


@dataclass(frozen=True, eq=False)
class StoredConversation:
    """A conversation on disk. It never changes: another turn makes another one."""

    name: str
    """The name of its own file."""
    tokens: TokenArray = field(repr=False)
    rows: Sequence[RowsPiece] = field(repr=False)
    """Files that hold its rows, in order; together they cover all tokens, or there are none."""
    states: Sequence[StatePiece] = field(repr=False)
    """Its checkpoints, by offset."""
    lowest: int
    """The offset from which on its layers can go back to any other by themselves.

    It is beyond the tokens if only the checkpoints can be resumed.
    """
    has_only_rows: bool
    """True if every layer has rows, so that any number of its first tokens can be read."""
    is_exact: bool = True
    """True if a cold run on its tokens would store the same: not after a shift."""

    @property
    def pieces(self) -> list[str]:
        """The names of the files that it may share with others."""
        return [piece.name for piece in self.rows] + [state.name for state in self.states]

    def resumable(self, to: int) -> int:
        """Return the largest offset <= `to`, within the tokens, to continue from, or 0."""
        if to >= self.lowest:
            return to
        at = bisect_right(self.states, to, key=lambda state: state.offset)
        return self.states[at - 1].offset if at else 0

    def checkpoint(self, to: int) -> StatePiece | None:
        """Return the last checkpoint at or before `to`."""
        at = bisect_right(self.states, to, key=lambda state: state.offset)
        return self.states[at - 1] if at else None

    def used(self, to: int) -> list[tuple[RowsPiece, int]]:
        """Return the files with rows of the first `to` tokens, and where the use of each ends."""
        nexts = [piece.begin for piece in self.rows[1:]]
        ends = [min(end, to) for end in (*nexts, len(self.tokens))]
        pairs = zip(self.rows, ends, strict=False)
        return [(piece, end) for piece, end in pairs if piece.begin < to]

    def covers(self, other: StoredConversation) -> bool:
        """Return True if it can be resumed wherever `other`, with the same tokens, can be."""
        states = {state.offset for state in self.states}
        return self.lowest <= other.lowest and states.issuperset(
            state.offset for state in other.states
        )

    def describe(self, sizes: Mapping[str, int]) -> dict[str, Any]:
        """Return what its file says about it, for JSON. `sizes`: bytes of each file."""
        return {
            "rows": [[one.name, one.begin, one.end, sizes[one.name]] for one in self.rows],
            "states": [[one.name, one.offset, one.role, sizes[one.name]] for one in self.states],
            "lowest": self.lowest,
            "has_only_rows": self.has_only_rows,
            "is_exact": self.is_exact,
        }


def read_conversation(
    name: str, tokens: TokenArray, found: Mapping[str, Any]
) -> tuple[StoredConversation, dict[str, int]]:
    """Return the conversation that `describe` described, and the sizes of its files.

    Raise ValueError, TypeError or KeyError if it can't be one.
    """
    # Version 0.2 wrote checkpoints at 0, which are of no use.
    kept = [one for one in found["states"] if int(one[1]) != 0]
    sizes = {str(one[0]): int(one[3]) for one in (*found["rows"], *kept)}
    rows = [RowsPiece(str(name), int(begin), int(end)) for name, begin, end, _ in found["rows"]]
    states = [
        StatePiece(str(name), int(offset), role_named(role)) for name, offset, role, _ in kept
    ]
    begins, ends = [piece.begin for piece in rows], [piece.end for piece in rows]
    offsets = [state.offset for state in states]
    if (
        not len(tokens)
        or not 1 <= int(found["lowest"]) <= len(tokens) + bool(states)
        or any(
            following > end
            for following, end in zip([*begins[1:], len(tokens)], ends, strict=False)
        )
        or (begins and begins[0] != 0)
        or not _is_rising([*begins, len(tokens)])
        or not _is_rising([0, *offsets, len(tokens) + 1])
    ):
        raise ValueError(f"{len(tokens)} tokens have rows from {begins}, states at {offsets}"[:200])
    return StoredConversation(
        name,
        tokens,
        rows,
        states,
        int(found["lowest"]),
        found["has_only_rows"] is True,
        found["is_exact"] is True,
    ), sizes


def _is_rising(numbers: Sequence[int]) -> bool:
    return all(a < b for a, b in pairwise(numbers))


def file_name(kind: str, digest: str, *numbers: int) -> str:
    """Return the name of a file of tokens with `digest`."""
    return "-".join([kind, digest, *map(str, numbers)]) + ".safetensors"


def digests(seed: bytes, spelled: NDArray[np.int32], offsets: Iterable[int]) -> dict[int, str]:
    """Return a digest of the first tokens up to each offset. `spelled`: a row for each token."""
    found, state, done = {}, hashlib.blake2b(seed, digest_size=16), 0
    for offset in sorted(set(offsets)):
        state.update(spelled[done:offset].tobytes())
        found[offset], done = state.copy().hexdigest(), offset
    return found


def pieces(begin: int, end: int) -> list[tuple[int, int]]:
    """Return the beginnings and ends of the files for the rows of the tokens `begin .. end - 1`."""
    return [(at, min(at + SEGMENT, end)) for at in range(begin, end, SEGMENT)]


def lowest_offset(extents: Sequence[Extent], tokens: int) -> int:
    """Return the offset from which on restored layers can go back to any other by themselves.

    `extents`: those of all layers at `tokens` tokens.
    """
    restored = {extent.saved() for extent in extents}
    low, high = 1, tokens
    while low < high:
        middle = (low + high) // 2
        if all(extent.reachable(middle) == middle for extent in restored):
            high = middle
        else:
            low = middle + 1
    return low


Key = TypeVar("Key", bound=Hashable)


class PrefixTree(Generic[Key]):
    """Keys, each with a sequence of at least one token. A lookup compares each token once."""

    def __init__(self) -> None:
        self._root = _TreeNode[Key](np.empty(0, np.int32))

    def add(self, key: Key, tokens: TokenArray) -> None:
        """Add `key`, whose sequence is `tokens`. The array must not change from then on."""
        node, at = self._root, 0
        node.keys[key] = None
        while at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None:
                child = node.children[int(tokens[at])] = _TreeNode(tokens[at:])
            elif (shared := common_prefix(child.tokens, tokens[at:])) < len(child.tokens):
                child = node.split(child, shared)
            child.keys[key] = None
            node, at = child, at + len(child.tokens)

    def remove(self, key: Key, tokens: TokenArray) -> None:
        """Remove `key`, which was added with `tokens`."""
        path, at = [self._root], 0
        while at < len(tokens):
            path.append(path[-1].children[int(tokens[at])])
            at += len(path[-1].tokens)
        for node in path:
            del node.keys[key]
        for parent, node in pairwise(path):
            if not node.keys:
                del parent.children[int(node.tokens[0])]
                break
        for node in path[1:]:
            node.join()

    def sharing(self, prompt: TokenArray) -> Iterator[tuple[int, list[Key]]]:
        """Yield the keys that share tokens with `prompt`, those that share most first.

        With them comes the number of tokens that all of them share with it at least. Later groups
        repeat the keys of earlier ones.
        """
        path: list[tuple[int, _TreeNode[Key]]] = []
        node, at = self._root, 0
        while at < len(prompt) and (child := node.children.get(int(prompt[at]))) is not None:
            shared = common_prefix(child.tokens, prompt[at:])
            node, at = child, at + shared
            path.append((at, node))
            if shared < len(node.tokens):
                break
        for shared, node in reversed(path):
            yield shared, list(node.keys)


class _TreeNode(Generic[Key]):
    """A piece of text that all `keys` have, and the pieces that follow it, by their first token."""

    __slots__ = ("children", "keys", "tokens")

    def __init__(self, tokens: TokenArray) -> None:
        self.tokens = tokens
        self.children: dict[int, _TreeNode[Key]] = {}
        self.keys: dict[Key, None] = {}  # in the order in which they were added

    def split(self, child: _TreeNode[Key], at: int) -> _TreeNode[Key]:
        """Put a node with the first `at` tokens of `child` before it, and return that."""
        before = _TreeNode[Key](child.tokens[:at])
        before.keys = dict(child.keys)
        child.tokens = child.tokens[at:]
        before.children[int(child.tokens[0])] = child
        self.children[int(before.tokens[0])] = before
        return before

    def join(self) -> None:
        """Take over the only child, as long as no key ends here."""
        while len(self.children) == 1:
            (child,) = self.children.values()
            if len(child.keys) < len(self.keys):
                break
            self.tokens = np.concatenate([self.tokens, child.tokens])
            self.children = child.children


OnEvicted = Callable[[StoredConversation, str], None]
"""A function that is told which conversation was evicted, and by what."""


@dataclass(frozen=True)
class EntryForm:
    """The form in which an entry is stored."""

    tokens: TokenArray
    extents: Sequence[Extent]
    checkpoints: Sequence[tuple[int, Role | None]]
    """The offset and the role of each; none if the layers can't be cut."""
    has_rows: bool
    """True if some layers have a row per token."""
    has_only_rows: bool
    can_be_cut: bool
    """False if a layer has neither rows nor checkpoints."""
    is_exact: bool
    spelled: NDArray[np.int32]
    """The tokens as files are named by, a row each; see `mlxrunner.pictures.table`."""


def plan(
    seed: bytes,
    form: EntryForm,
    closest: StoredConversation | None = None,
    shared: int = 0,
    *,
    is_frugal: bool = False,
) -> StoredConversation:
    """Name the files of a conversation: those that are there, and those to be written.

    It uses the files of `closest` that have rows of the first `shared` tokens of both, but for a
    last one with fewer than SHORT tokens; if `is_frugal`, with few beside the new ones.
    """
    tokens, length = form.tokens, len(form.tokens)
    rows, begin = list[RowsPiece](), 0
    if closest is not None and closest.rows and shared:
        rows, begin = [piece for piece, _ in closest.used(shared)], shared
        short = min(SHORT, (length - shared) // FEW) if is_frugal else SHORT
        if shared < length and shared - rows[-1].begin < short:
            begin = rows.pop().begin
    new = pieces(begin, length) if form.has_rows else []
    offsets = [length, *(end for _, end in new), *(offset for offset, _ in form.checkpoints)]
    named = digests(seed, form.spelled, offsets)
    rows += [RowsPiece(file_name("rows", named[end], at, end), at, end) for at, end in new]
    return StoredConversation(
        file_name("talk", named[length], length),
        tokens,
        rows if form.has_rows else [],
        [
            StatePiece(file_name("state", named[offset], offset), offset, role)
            for offset, role in form.checkpoints
        ],
        lowest_offset(form.extents, length) if form.can_be_cut else length,
        form.has_only_rows,
        form.is_exact,
    )


class DiskCacheIndex:
    """Conversations and their files, of at most `limit` bytes."""

    def __init__(self, delete: Callable[[str], object], limit: int) -> None:
        """Begin without conversations. `delete`: removes the file of a name."""
        self.limit = limit
        self.on_evicted: OnEvicted = lambda conversation, by: None
        self._remove_file = delete
        self.sizes: dict[str, int] = {}
        """Bytes of each file."""
        self.bytes = 0
        """Bytes of all files."""
        self._conversations: dict[str, StoredConversation] = {}
        self._users: dict[str, set[StoredConversation]] = {}
        self._exact, self._shifted = (
            PrefixTree[StoredConversation](),
            PrefixTree[StoredConversation](),
        )
        self._is_whole = True
        """False while trees and users change, and after an interrupt meanwhile."""
        self._dual = GreedyDual[StoredConversation]()
        self._restored: weakref.WeakSet[StoredConversation] = weakref.WeakSet()
        self._read: weakref.WeakKeyDictionary[object, StoredConversation] = (
            weakref.WeakKeyDictionary()
        )

    def __len__(self) -> int:
        return len(self._conversations)

    def __iter__(self) -> Iterator[StoredConversation]:
        return iter(self._conversations.values())

    def __contains__(self, conversation: object) -> bool:
        return (
            isinstance(conversation, StoredConversation)
            and self._conversations.get(conversation.name) is conversation
        )

    def named(self, name: str) -> StoredConversation | None:
        return self._conversations.get(name)

    def plan(self, seed: bytes, form: EntryForm, *, is_frugal: bool = False) -> StoredConversation:
        """Name the files of a conversation: see the function `plan`."""
        closest, shared = self.closest(form.tokens) if form.is_exact else (None, 0)
        return plan(seed, form, closest, shared, is_frugal=is_frugal)

    def claim(self, conversation: StoredConversation) -> None:
        """Keep the files that `conversation` is going to share."""
        for name in conversation.pieces:
            self._users.setdefault(name, set()).add(conversation)

    def wrote(self, name: str, nbytes: int) -> None:
        """Note that the file `name` of `nbytes` is there, or is being written."""
        self.bytes += nbytes - self.sizes.get(name, 0)
        self.sizes[name] = nbytes

    def forget(self, name: str) -> None:
        """Note that the file `name` is not there."""
        self.bytes -= self.sizes.pop(name, 0)

    def add(self, conversation: StoredConversation) -> None:
        """Add a conversation whose files are all there, in place of another one of its name."""
        self._mend()
        self.claim(conversation)
        before = self._conversations.get(conversation.name)
        self._is_whole = False
        self._conversations[conversation.name] = conversation
        if before is not None:
            self._tree(before).remove(before, before.tokens)
            self._dual.forget(before)
        self._tree(conversation).add(conversation, conversation.tokens)
        self._dual.use(conversation)
        self._is_whole = True
        if before is not None:
            self.release(before)

    def use(self, conversation: StoredConversation, reader: object | None = None) -> None:
        """Note that a conversation is used. It is not given up while `reader` exists."""
        self._dual.use(conversation)
        if reader is not None:
            self._read[reader] = conversation
            self._restored.add(conversation)

    def remove(self, conversation: StoredConversation) -> None:
        """Remove a conversation, and the files that no other one uses; its own file first."""
        self._mend()
        if conversation in self:
            self._is_whole = False
            del self._conversations[conversation.name]
            self._tree(conversation).remove(conversation, conversation.tokens)
            self._dual.forget(conversation)
            self._is_whole = True
        if (
            conversation.name not in self._conversations
        ):  # another one may have been written meanwhile
            self._delete(conversation.name)
        self.release(conversation)

    def release(self, conversation: StoredConversation) -> None:
        """Undo `claim`: remove the files that nobody uses any more."""
        for name in conversation.pieces:
            users = self._users.get(name, set())
            users.discard(conversation)
            if not users:
                self._users.pop(name, None)
                self._delete(name)

    def drop_users(self, name: str) -> None:
        """Remove all conversations that use the damaged file `name`."""
        users = self._users.get(name, set()) | {
            conversation for conversation in (self._conversations.get(name),) if conversation
        }
        for conversation in users:
            self.remove(conversation)

    def drop_earlier(
        self, conversation: StoredConversation, replaces: StoredConversation | None
    ) -> None:
        """Remove what is an earlier state of `conversation`: see `DiskCache.offload`."""
        self._mend()
        is_enough = conversation.is_exact and conversation.lowest == 1
        pinned = set(self._read.values())
        for shared, found in list(self._tree(conversation).sharing(conversation.tokens)):
            for one in found:
                if (
                    one is not conversation
                    and one not in pinned
                    and goes_on(shared, len(one.tokens))
                    and (one is replaces or one in self._restored or is_enough)
                ):
                    self.remove(one)

    def closest(self, tokens: TokenArray) -> tuple[StoredConversation | None, int]:
        """Return the exact conversation that shares most tokens with `tokens`, and how many."""
        self._mend()
        for shared, found in self._exact.sharing(tokens):
            return found[-1], shared
        return None, 0

    def find(self, prompt: TokenArray) -> tuple[StoredConversation, int] | None:
        """Return the conversation from which `prompt` can reuse most tokens, and how many.

        At least one token of the prompt is left to evaluate.
        """
        self._mend()
        best: tuple[StoredConversation, int] | None = None
        for tree in (self._exact, self._shifted):
            for shared, found in tree.sharing(prompt):
                to, least = min(shared, len(prompt) - 1), best[1] if best else 0
                if to <= least:
                    break
                offset, conversation = _most(found, to)
                if offset > least:
                    best = conversation, offset
        return best

    def make_room(self, need: int, by: StoredConversation | None = None) -> None:
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
            self._dual.evict(least, worths[least])
            self.remove(least)
            self.on_evicted(least, "disk_cache_bytes")

    def _worth(self, conversation: StoredConversation) -> float:
        """Return what it costs to evaluate again what only `conversation` has, per byte."""
        shared, nbytes = 0, self.sizes.get(conversation.name, 0)
        for piece, end in conversation.used(len(conversation.tokens)):
            if len(self._users[piece.name]) > 1:
                shared = end
            else:
                nbytes += self.sizes.get(piece.name, 0)
        for state in conversation.states:
            if len(self._users[state.name]) == 1:
                nbytes += self.sizes.get(state.name, 0)
            elif not conversation.rows:
                shared = state.offset
        return eviction_score(len(conversation.tokens), nbytes, shared)

    def _mend(self) -> None:
        """Build trees and users again from the conversations, if an interrupt cut a change off."""
        if self._is_whole:
            return
        self._exact, self._shifted = (
            PrefixTree[StoredConversation](),
            PrefixTree[StoredConversation](),
        )
        users: dict[str, set[StoredConversation]] = {}
        for conversation in self:
            self._tree(conversation).add(conversation, conversation.tokens)
            for name in conversation.pieces:
                users.setdefault(name, set()).add(conversation)
        self._users, self._is_whole = users, True

    def _tree(self, conversation: StoredConversation) -> PrefixTree[StoredConversation]:
        return self._exact if conversation.is_exact else self._shifted

    def _delete(self, name: str) -> None:
        self.forget(name)
        with suppress(OSError):  # what stays is removed at the next start
            self._remove_file(name)


def _most(found: list[StoredConversation], to: int) -> tuple[int, StoredConversation]:
    """Return the largest offset <= `to` that one of them can be resumed at, and that one."""
    most, best = 0, found[0]
    for conversation in found:
        offset = to if to >= conversation.lowest else conversation.resumable(to)
        if offset > most:
            most, best = offset, conversation
            if most == to:
                break
    return most, best
