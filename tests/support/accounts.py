"""A full memory of everything that was evaluated, and random histories of several clients."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlxrunner.cache.account import RUN
from mlxrunner.cache.tokens import as_tokens, common_prefix
from mlxrunner.results import Usage
from mlxrunner.tokenizer.prompt import Caller, TokenizedPrompt

Name = tuple[str, str | None]
"""A client, and its session."""
CLOSE = 2 * RUN
"""Shares of two requests that differ by fewer tokens may both be the larger one."""


def tiled(old: Sequence[int], new: Sequence[int]) -> int:
    """Return how many tokens of `new` are in `old`, in runs of at least `RUN`, the longest first.

    Each token is used once. This is greedy string tiling (Wise, 1993), without hashes.
    """
    a, b = np.asarray(old), np.asarray(new)
    free_a, free_b = np.ones(len(a), bool), np.ones(len(b), bool)
    total = 0
    while len(a) and len(b):
        reach, best = np.zeros(len(b) + 1, int), (0, 0, 0)
        for i in range(len(a) - 1, -1, -1):
            same = (b == a[i]) & free_b & free_a[i]
            reach = np.append(np.where(same, reach[1:] + 1, 0), 0)
            longest = int(reach.argmax())
            best = max(best, (int(reach[longest]), i, longest))
        length, i, j = best
        if length < RUN:
            return total
        free_a[i : i + length] = free_b[j : j + length] = False
        total += length
    return total


@dataclass
class FullMemory:
    """Everything that was evaluated, without bounds and without hashes."""

    evaluated: list[list[int]] = field(default_factory=list)
    asked: list[tuple[Name, list[int]]] = field(default_factory=list)
    """The prompts with their answers, each with the names of its conversation."""

    def known(self, prompt: list[int]) -> int:
        """Return how many first tokens of a prompt were evaluated before."""
        tokens = as_tokens(prompt)
        return max((common_prefix(as_tokens(one), tokens) for one in self.evaluated), default=0)

    def check(self, prompt: list[int], name: Name, usage: Usage) -> None:
        """Compare the account of a prompt with what this memory says."""
        cached, missed = usage.cached_tokens, usage.missed_tokens
        displaced, new = usage.displaced_tokens, usage.new_tokens
        assert cached + missed + displaced + new == len(prompt) == usage.prompt_tokens
        assert usage.cache.lost_tokens == missed + displaced
        known = max(cached, min(self.known(prompt), len(prompt) - 1))
        assert missed == known - cached
        wanted = self._displaced(prompt, name, known)
        assert any(abs(displaced - one) <= RUN for one in wanted), (displaced, wanted)

    def _displaced(self, prompt: list[int], name: Name, known: int) -> set[int]:
        """Return the displaced tokens by each request that may be the one that is closest."""
        client, session = name
        asked = [text for other, text in self.asked if other == name]
        if session is None or not asked:
            asked = [text for other, text in self.asked if other[0] == client]
        shares = []
        for text in asked:
            shared = common_prefix(as_tokens(text), as_tokens(prompt))
            moved = tiled(text[shared:], prompt[max(shared, known) :])
            shares.append((shared + moved, moved))
        most = max(shares, default=(0, 0))[0]
        return {moved for share, moved in shares if share > most - CLOSE} or {0}

    def add(self, prompt: list[int], answer: list[int], name: Name) -> None:
        """Remember a request that has ended. The last token of its answer was not evaluated."""
        self.evaluated.append([*prompt, *answer[:-1]])
        self.asked.append((name, self.evaluated[-1]))


class Writer:
    """A client that grows a conversation, and edits it in all ways."""

    def __init__(self, rng: random.Random, name: Name, beginning: Sequence[int]) -> None:
        self.name, self._rng = name, rng
        self.messages = [list(beginning), self._text()]

    def _text(self, most: int = 60) -> list[int]:
        return [self._rng.randrange(1, 250) for _ in range(self._rng.randint(3, most))]

    @property
    def prompt(self) -> list[int]:
        """The tokens of all messages."""
        return [token for message in self.messages for token in message]

    def tokenized(self) -> TokenizedPrompt:
        """Return the prompt with the names of the client and its session."""
        caller = Caller("1", self.name[0], self.name[1])
        return TokenizedPrompt(as_tokens(self.prompt), caller=caller)

    def go_on(self, answer: list[int]) -> None:
        """Take the answer over, add a message, and change something now and then."""
        self.messages += [answer, self._text()]
        change = self._rng.choice([None, None, None, *CHANGES])
        if change is not None and len(self.messages) > 3:
            getattr(self, f"_{change}")(self._rng.randrange(len(self.messages) - 1))

    def _edit(self, at: int) -> None:
        message = self.messages[at]
        message[self._rng.randrange(len(message))] = self._rng.randrange(1, 250)

    def _insert(self, at: int) -> None:
        self.messages.insert(at, self._text(20))

    def _remove(self, at: int) -> None:
        del self.messages[at]

    def _move(self, at: int) -> None:
        self.messages.insert(self._rng.randrange(len(self.messages)), self.messages.pop(at))

    def _rewrite(self, at: int) -> None:
        self.messages[at] = self._text()

    def _drop_all(self, at: int) -> None:
        self.messages = [self.messages[0], self._text()]

    def _go_back(self, at: int) -> None:
        self.messages = [*self.messages[: max(at, 1)], self._text()]


CHANGES = ["edit", "insert", "remove", "move", "rewrite", "drop_all", "go_back"]


def writers(rng: random.Random) -> list[Writer]:
    """Return clients with and without sessions; some begin alike."""
    common = [rng.randrange(1, 250) for _ in range(rng.randint(5, 50))]
    names: list[Name] = [("one", "a"), ("one", "b"), ("two", None), ("", None)]
    return [
        Writer(rng, name, common if rng.random() < 0.6 else [rng.randrange(1, 250)])
        for name in names
    ]


def answers_of(result: Any) -> list[int]:
    """Return the tokens of an answer."""
    return [int(token) for token in result.tokens]
