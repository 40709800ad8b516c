"""Cut the lines of a store into shards: what they cost, and those of one shard. No tensors."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxrunner.batch.plan import limit_of
from mlxrunner.batch.records import BriefLine, StoredLine
from mlxrunner.batch.shards.cut import Costs, cut
from mlxrunner.batch.store import Store
from mlxrunner.cache.tokens import common_prefix
from mlxrunner.errors import OptionError

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
    store: Store, lines: Iterable[StoredLine | BriefLine], shard: Shard, defaults: Mapping[str, Any]
) -> str:
    """Keep only the lines of a shard in a store whose input was arranged.

    `lines` are those of the store in prefix order, and `defaults` the options of the batch. Return
    a digest of the whole cut, which all machines have in common.
    """
    indexes, costs = costs_of(lines, defaults)
    places = cut(costs, shard.count)
    store.keep(indexes[places[shard.number - 1] : places[shard.number]])
    digest = hashlib.sha256(np.asarray(indexes, "<i4").tobytes())
    digest.update(np.asarray(places, "<i8").tobytes())
    return digest.hexdigest()


def costs_of(
    lines: Iterable[StoredLine | BriefLine], defaults: Mapping[str, Any], *, answer: float = ANSWER
) -> tuple[array[int], Costs]:
    """Return the indexes of the lines in their order, and what they cost.

    `lines` come in prefix order, and two are in memory at a time: the result takes 16 bytes for
    each, and as many while it is cut. `defaults` are the options of the batch, and `answer` the
    tokens that an answer is expected to have. A line that can't be run costs nothing.
    """
    indexes, evaluated, reused, answers = (array("i") for _ in range(4))
    before = np.empty(0, np.int32)
    for line in lines:
        limit = limit_of(line, defaults)
        has_tokens = line.error is None and len(line.tokens) > 0
        shared = min(common_prefix(before, line.tokens), len(line.tokens) - 1) if has_tokens else 0
        indexes.append(line.index)
        evaluated.append(len(line.tokens) - shared)
        reused.append(shared)
        answers.append(int(answer if limit is None else min(answer, limit)) if has_tokens else 0)
        before = line.tokens
    found = (np.frombuffer(numbers, np.intc) for numbers in (evaluated, reused, answers))
    return indexes, Costs(*found)
