"""Prompts that share prefixes, made from a seed: for tests and measurements of the order in which prompts run."""

from __future__ import annotations

import numpy as np

from mlxrunner.cache.tokens import TokenArray

SYSTEM, DOCUMENT = 203, 1678
"""Tokens of what all prompts share, and of what the questions about a document share."""
DOCUMENTS, QUESTIONS = 5, 40
QUESTION = (20, 2)
"""Tokens of a document's first question, and how many more each further one has."""


def shared_prefixes(seed: int = 0, *, lowest: int = 10, vocab: int = 500) -> list[TokenArray]:
    """200 prompts of 388,000 tokens in all, shuffled: a system prompt, one of 5 documents, one of 40 questions about it.

    Their tree of prefixes has 20,393 nodes. Token ids are from `lowest` to `vocab - 1`; the longest prompt has 1,979 tokens.
    """
    random = np.random.default_rng(seed)

    def text(first: int, length: int) -> TokenArray:
        """Random tokens behind a `first` one that no other text at this place has."""
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
