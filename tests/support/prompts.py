"""Prompts: a short one for the oracle, and many that share prefixes, made from a seed."""

from __future__ import annotations

import numpy as np

from mlxrunner.cache.entry import TokenArray

PROMPT = [*map(int, "7 3 9 1 4 200 33 150 8 2 61 5 90 13 77 6 41 250 19 88 23 10 54 3 3".split())]
"""25 tokens without a pattern: longer than the oracle's window, no marks of its tokenizer."""
SYSTEM, DOCUMENT = 203, 1678
"""Tokens of what all prompts share, and of what the questions about a document share."""
DOCUMENTS, QUESTIONS = 5, 40
QUESTION = (20, 2)
"""Tokens of a document's first question, and how many more each further one has."""


def shared_prefixes(seed: int = 0, *, lowest: int = 10, vocab: int = 500) -> list[TokenArray]:
    """Return 200 shuffled prompts of 388,000 tokens with shared prefixes.

    Each has a system prompt, one of 5 documents, and one of 40 questions about it. Their tree of
    prefixes has 20,393 nodes. Token ids are from `lowest` to `vocab - 1`; the longest prompt has
    1,979 tokens.
    """
    random = np.random.default_rng(seed)

    def text(first: int, length: int) -> TokenArray:
        """Random tokens after a `first` one that no other text at this place has."""
        tokens = random.integers(lowest, vocab, length, np.int32)
        tokens[0] = lowest + first
        return tokens

    system = text(0, SYSTEM)
    prompts = []
    for number in range(DOCUMENTS):
        document = text(number, DOCUMENT)
        questions = (text(which, QUESTION[0] + QUESTION[1] * which) for which in range(QUESTIONS))
        prompts += [np.concatenate([system, document, question]) for question in questions]
    return [prompts[place] for place in random.permutation(len(prompts))]
