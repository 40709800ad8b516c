"""Decide which conversation to give up: the one that is cheapest to evaluate again for its bytes.

The rule is GreedyDual-Size (Cao and Irani, 1997): the value of a conversation is its cost per byte,
plus the clock at its last use. Whatever is given up moves the clock to its value. So one that is
never used again goes at some time, however expensive it was. Bookkeeping only: no tensors.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

EVEN = 16_384
"""Tokens of a prompt at which attention costs as much as everything else.

In operations this is 12 times the hidden size: 9,216 for a model of 0.1 billion parameters, 49,152
for one of 8 billion.
"""


def cost(tokens: int, begin: int = 0, even: int = EVEN) -> float:
    """Return what evaluating `tokens` tokens costs, if the first `begin` of them are there.

    The unit is a token of a short prompt. `even` is as EVEN describes.
    """
    return float(tokens - begin) + (tokens * tokens - begin * begin) / even


def eviction_score(tokens: int, nbytes: int, begin: int = 0) -> float:
    """Return the cost per byte of `tokens` tokens that take `nbytes`.

    `begin`: the first tokens, which stay even if the rest is given up, and whose bytes don't count.
    """
    return cost(tokens, begin) / max(nbytes, 1)


class GreedyDual(Generic[Key]):
    """The clock, and the clock's time when each key was last used.

    What a key is worth may change, because others share its bytes: `least` is told at each choice.
    """

    def __init__(self) -> None:
        self.clock = 0.0
        self._used: dict[Key, float] = {}

    def use(self, key: Key) -> None:
        """Note that `key` is used now."""
        self._used[key] = self.clock

    def value(self, key: Key, eviction_score: float) -> float:
        """Return the value of `key`; one that was never used is as old as the clock."""
        return self._used.get(key, 0.0) + eviction_score

    def least(self, worths: Mapping[Key, float]) -> Key:
        """Return the key of `worths` with the least value. Raise ValueError if there is none.

        Of keys of equal value it is the first.
        """
        return min(worths, key=lambda key: self.value(key, worths[key]))

    def evict(self, key: Key, eviction_score: float) -> None:
        """Note that `key` is evicted, and move the clock to its value."""
        self.clock = max(self.clock, self.value(key, eviction_score))
        self.forget(key)

    def forget(self, key: Key) -> None:
        """Forget `key`, which is gone for another reason."""
        self._used.pop(key, None)
