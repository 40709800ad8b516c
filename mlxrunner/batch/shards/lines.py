"""Cut the lines of a store into shards: what they cost, and those of one shard. No tensors."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from mlxrunner.batch.plan import limit_of
from mlxrunner.batch.records import BriefLine, StoredLine, shared_tokens
from mlxrunner.batch.shards.cut import Costs, cut
from mlxrunner.batch.store import Store
from mlxrunner.errors import OptionError

Read = TypeVar("Read", StoredLine, BriefLine)
"""A line of a store, as it was read."""
ANSWER = 64
"""The tokens that an answer is expected to have, unless its limit is less.

Not measured: each machine has to expect the same, so that all of them cut alike.
"""
MOST_SHARDS = 100_000
"""The most parts of a batch."""


@dataclass(frozen=True, order=True)
class Shard:
    """One of the equal parts of a batch."""

    number: int
    """The number of the part, from 1."""
    count: int
    """The number of parts."""

    @classmethod
    def of(cls, text: str) -> Shard:
        """Read `I/N`. Raise OptionError if it is no part."""
        found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
        if found is not None:
            shard = cls(int(found[1]), int(found[2]))
            if 1 <= shard.number <= shard.count <= MOST_SHARDS:
                return shard
        raise OptionError(
            f"--shard {text}: has to be I/N, a part and the number of parts, such as 1/4, with I "
            f"from 1 to N and N up to {MOST_SHARDS:,}"
        )

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


def keep_shard(
    store: Store, lines: Iterable[Read], shard: Shard, defaults: Mapping[str, Any]
) -> str:
    """Keep only the lines of a shard in a store whose input was arranged.

    `lines` are those of the store in prefix order, and `defaults` the options of the batch. Return
    a digest of the whole cut, which all machines have in common.
    """
    indexes, costs = costs_of(lines, defaults)
    places = cut(costs, shard.count)
    store.keep(indexes[places[shard.number - 1] : places[shard.number]])
    digest = hashlib.sha256(np.asarray(indexes, "<i4").data)
    digest.update(np.asarray(places, "<i8").data)
    return digest.hexdigest()


def costs_of(
    lines: Iterable[Read], defaults: Mapping[str, Any], *, answer: float = ANSWER
) -> tuple[array[int], Costs]:
    """Return the indexes of the lines, which come in prefix order, and what the lines cost.

    Two lines are in memory at a time. `defaults` are the options of the batch, and `answer` is the
    number of tokens that an answer is expected to have. A line that can't be run costs nothing.
    """
    costing = Costing(defaults, answer=answer)
    for _ in costing.of(lines):
        pass
    return costing.indexes, costing.costs


class Costing:
    """Notes what lines cost while something else reads them: to read them takes longest.

    The notes take 16 bytes for each line, and a cut 8 more.
    """

    def __init__(self, defaults: Mapping[str, Any], *, answer: float = ANSWER) -> None:
        """Take the arguments of `costs_of`."""
        self._defaults, self._answer = defaults, answer
        self.indexes = array("i")
        """The indexes of the lines, in their order."""
        self._evaluated, self._reused, self._answers = (array("i") for _ in range(3))

    def of(self, lines: Iterable[Read]) -> Iterator[Read]:
        """Yield the lines, which come in prefix order, and note what they cost."""
        before = b""
        for line in lines:
            key = line.key
            self._note(line, key, before)
            before = key
            yield line

    def _note(self, line: StoredLine | BriefLine, key: bytes, before: bytes) -> None:
        """Note the cost of a line with this sort key behind the key `before`.

        A line that can't be run costs nothing.
        """
        tokens, shared, answer = len(key) // 4, 0, 0
        if line.error is None and tokens:
            shared = min(shared_tokens(before, key), tokens - 1)
            limit = limit_of(line, self._defaults)
            answer = int(self._answer if limit is None else min(self._answer, limit))
        self.indexes.append(line.index)
        self._evaluated.append(tokens - shared)
        self._reused.append(shared)
        self._answers.append(answer)

    @property
    def costs(self) -> Costs:
        """The costs of the lines so far, without a copy: no line may come any more."""
        notes = (self._evaluated, self._reused, self._answers)
        return Costs(*(np.frombuffer(numbers, np.intc) for numbers in notes))
