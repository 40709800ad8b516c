"""A conversation on disk: its tokens, its files and the offsets it can be resumed at. No tensors.

    rows-DIGEST-BEGIN-END.safetensors   what layers store for the tokens BEGIN .. END - 1, in rows
    state-DIGEST-OFFSET.safetensors     a checkpoint: the layers that can't be cut, at OFFSET
    talk-DIGEST-COUNT.safetensors       the tokens, those layers at the end, and the files' names

The digest is that of the model and of all tokens up to the last number. So two conversations that
share a prefix name the same files, and no file ever changes.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlxrunner.cache.checkpoints import ROLES, Role
from mlxrunner.cache.layers.extents import Extent
from mlxrunner.cache.tokens import TokenArray

SEGMENT = 512
"""Most tokens of a file with rows."""
SHORT = 64
"""Tokens that are stored again rather than read from a file of others.

A conversation whose last file has fewer writes them anew with its next turn, so that many short
turns don't make many files.
"""


@dataclass(frozen=True)
class Rows:
    """A file with the rows of the tokens `begin .. end - 1`.

    A conversation may use only the first of them: those before its next file, or before its end.
    """

    name: str
    begin: int
    end: int


@dataclass(frozen=True)
class State:
    """A file with a checkpoint."""

    name: str
    offset: int
    role: Role | None


@dataclass(frozen=True, eq=False)
class Parked:
    """A conversation on disk. It never changes: another turn makes another one."""

    name: str
    """The name of its own file."""
    tokens: TokenArray = field(repr=False)
    rows: Sequence[Rows] = field(repr=False)
    """Files that hold its rows, in order; together they cover all tokens, or there are none."""
    states: Sequence[State] = field(repr=False)
    """Its checkpoints, by offset."""
    lowest: int
    """The offset from which on its layers can go back to any other by themselves."""
    has_only_rows: bool
    """True if every layer has rows, so that any number of its first tokens can be read."""
    is_exact: bool = True
    """True if a cold run on its tokens would store the same: not after a shift."""

    @property
    def pieces(self) -> list[str]:
        """The names of the files that it may share with others."""
        return [piece.name for piece in self.rows] + [state.name for state in self.states]

    def resumable(self, to: int) -> int:
        """Return the largest offset <= `to`, at most the number of tokens, to go on from, or 0."""
        if to >= self.lowest:
            return to
        at = bisect_right(self.states, to, key=lambda state: state.offset)
        return self.states[at - 1].offset if at else 0

    def checkpoint(self, to: int) -> State | None:
        """Return the last checkpoint at or before `to`."""
        at = bisect_right(self.states, to, key=lambda state: state.offset)
        return self.states[at - 1] if at else None

    def used(self, to: int) -> list[tuple[Rows, int]]:
        """Return the files with rows of the first `to` tokens, and where the use of each ends."""
        nexts = [piece.begin for piece in self.rows[1:]]
        ends = [min(end, to) for end in (*nexts, len(self.tokens))]
        pairs = zip(self.rows, ends, strict=False)
        return [(piece, end) for piece, end in pairs if piece.begin < to]

    def describe(self, sizes: Mapping[str, int]) -> dict[str, Any]:
        """Return what its file says about it, for JSON. `sizes`: bytes of each file."""
        return {
            "rows": [[one.name, one.begin, one.end, sizes[one.name]] for one in self.rows],
            "states": [[one.name, one.offset, one.role, sizes[one.name]] for one in self.states],
            "lowest": self.lowest,
            "has_only_rows": self.has_only_rows,
            "is_exact": self.is_exact,
        }


def read_parked(
    name: str, tokens: TokenArray, found: Mapping[str, Any]
) -> tuple[Parked, dict[str, int]]:
    """Return the conversation that `describe` described, and the sizes of its files.

    Raise ValueError, TypeError or KeyError if it can't be one.
    """
    # Version 0.2 wrote checkpoints at 0, which are no use.
    kept = [one for one in found["states"] if int(one[1]) != 0]
    sizes = {str(one[0]): int(one[3]) for one in (*found["rows"], *kept)}
    rows = [Rows(str(name), int(begin), int(end)) for name, begin, end, _ in found["rows"]]
    states = [
        State(str(name), int(offset), next((one for one in ROLES if one == role), None))
        for name, offset, role, _ in kept
    ]
    begins, ends = [piece.begin for piece in rows], [piece.end for piece in rows]
    offsets = [state.offset for state in states]
    if (
        not len(tokens)
        or not 1 <= int(found["lowest"]) <= len(tokens)
        or any(
            following > end
            for following, end in zip([*begins[1:], len(tokens)], ends, strict=False)
        )
        or (begins and begins[0] != 0)
        or not _is_rising([*begins, len(tokens)])
        or not _is_rising([0, *offsets, len(tokens) + 1])
    ):
        raise ValueError(f"{len(tokens)} tokens have rows from {begins}, states at {offsets}"[:200])
    return Parked(
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
