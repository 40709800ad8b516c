"""Find what the lines of a batch cost, in the order in which they run, to be cut. No tensors."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from mlxrunner.batch.records import StoredLine
from mlxrunner.batch.shards.cut import Costs
from mlxrunner.cache.tokens import common_prefix

ANSWER = 64
"""The tokens that an answer is expected to have, unless its limit is less.

Not measured: each machine has to expect the same, so that all of them cut alike.
"""


def costs_of(
    lines: Iterable[StoredLine], defaults: Mapping[str, Any], *, answer: float = ANSWER
) -> tuple[array[int], Costs]:
    """Return the indexes of the lines in their order, and what they cost.

    `lines` come in prefix order, and two are in memory at a time: the result takes 16 bytes for
    each, and as many while it is cut. `defaults` are the options of the batch, and `answer` the
    tokens that an answer is expected to have. A line that can't be run costs nothing.
    """
    indexes, evaluated, reused, answers = (array("i") for _ in range(4))
    before = np.empty(0, np.int32)
    for line in lines:
        limit = line.options.get("max_tokens", defaults.get("max_tokens"))
        has_tokens = line.error is None and len(line.tokens) > 0
        shared = min(common_prefix(before, line.tokens), len(line.tokens) - 1) if has_tokens else 0
        indexes.append(line.index)
        evaluated.append(len(line.tokens) - shared)
        reused.append(shared)
        answers.append(int(answer if limit is None else min(answer, limit)) if has_tokens else 0)
        before = line.tokens
    found = (np.frombuffer(numbers, np.intc) for numbers in (evaluated, reused, answers))
    return indexes, Costs(*found)
