"""In which order prompts cost least with ONE entry, and how much any order costs. Pure functions on token ids.

A prompt is compared with the one before it only: the entry holds that one's tokens. Sorted by token ids (depth-first through the tree
of their prefixes), each prompt comes directly behind the one that it has most in common with, and every node of the tree is evaluated
once: no cache of any size could do with less.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from mlxrunner.cache.tokens import TokenArray, common_prefix


def sort_key(tokens: TokenArray) -> bytes:
    """4 bytes per token, most significant first: compared as bytes they are in the order of the tokens, prefixes first."""
    return tokens.astype(">u4").tobytes()


def tokens_of(key: bytes) -> TokenArray:
    """The tokens of a `sort_key`."""
    return np.frombuffer(key, ">u4").astype(np.int32)


@dataclass(frozen=True)
class Cost:
    """Tokens of prompts that come one after the other, and how many of them are evaluated.

    `evaluated`: with one entry, in this order. `nodes`: of the tree of their prefixes, and `repeats`: prompts that are equal to the one
    before; both only mean that of all prompts if these come sorted, and then `evaluated == nodes + repeats`: of a prompt that is in the
    entry as a whole the last token is evaluated again, to get its logits.
    """

    prompts: int = 0
    tokens: int = 0
    evaluated: int = 0
    nodes: int = 0
    repeats: int = 0


def cost(prompts: Iterable[TokenArray]) -> Cost:
    """What the prompts cost in this order, beginning with an empty entry. Only two of them are in memory at a time."""
    entry = np.empty(0, np.int32)
    count = tokens = evaluated = nodes = repeats = 0
    for prompt in prompts:
        shared = common_prefix(entry, prompt)
        count += 1
        tokens += len(prompt)
        nodes += len(prompt) - shared
        evaluated += len(prompt) - min(shared, len(prompt) - 1)
        repeats += shared == len(prompt)
        entry = prompt
    return Cost(count, tokens, evaluated, nodes, repeats)
