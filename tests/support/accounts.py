"""A full memory of everything that was evaluated, and random histories of several clients."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlxrunner.cache.account import RUN
from mlxrunner.cache.entry import as_tokens, common_prefix
from mlxrunner.engine.request import Observation
from mlxrunner.results import Usage
from mlxrunner.tokenizer.prompt import Caller, TokenizedPrompt

ASK: dict[str, Any] = {"max_tokens": 5, "stop_tokens": [*range(0, 250, 9)]}
"""Options of an answer that ends in both ways."""
Name = tuple[str, str | None]
"""A client, and its session."""
CLOSE = 2 * RUN
"""Shares of two requests that differ by fewer tokens may both be the larger one."""


def tiled(old: Sequence[int], new: Sequence[int]) -> int:
    """Return how many tokens of `new` are in `old`, in runs of at least `RUN`, the longest first.

    Each token is used once. This is greedy string tiling (Wise, 1993), without hashes.
    """
    total = 0
    same = np.equal.outer(np.asarray(old), np.asarray(new)).astype(np.int32)
    runs = np.zeros((len(old) + 1, len(new) + 1), np.int32)  # that begin at a token of each
    while same.any():
        for i in range(len(old) - 1, -1, -1):
            np.multiply(runs[i + 1, 1:] + 1, same[i], out=runs[i, :-1])
        longest = runs.max(axis=1)
        length = int(longest.max())
        if length < RUN:
            break
        i = int(np.flatnonzero(longest == length)[-1])
        j = int(runs[i].argmax())
        same[i : i + length] = same[:, j : j + length] = 0
        total += length
    return total


def usage_of(**counts: Any) -> Usage:
    """Return the usage of a request with these counts."""
    zero = """
    completion_tokens trimmed_tokens shifted_tokens reevaluated_tokens cache_bytes peak_bytes
    tokenize_s lookup_s prefill_s ttft_s decode_s
    """
    none = {"trim_limited_by": None, "checkpoint": None, "evicted_by": None}
    cached = counts["cached_tokens"]
    evaluated = counts["prompt_tokens"] - cached
    return Usage.from_dict(
        dict.fromkeys(zero.split(), 0)
        | {"matched_tokens": cached, "evaluated_tokens": evaluated, **none, **counts}
    )


@dataclass
class FullMemory:
    """Everything that was evaluated, without bounds and without hashes."""

    evaluated: list[list[int]] = field(default_factory=list)
    perhaps: list[list[int]] = field(default_factory=list)
    """The same texts, with tokens of which it is not known whether they were evaluated."""
    asked: list[tuple[Name, list[int]]] = field(default_factory=list)
    """The prompts with their answers, each with the names of its conversation."""

    def known(self, prompt: list[int]) -> int:
        """Return how many first tokens of a prompt were evaluated before."""
        tokens = as_tokens(prompt)
        return max((common_prefix(as_tokens(one), tokens) for one in self.evaluated), default=0)

    def check(
        self, prompt: list[int], name: Name | None, usage: Usage, beside: Sequence[list[int]] = ()
    ) -> None:
        """Compare the account of a prompt with what this memory says.

        `name`: None for a line of a batch. `beside`: the texts of requests that ran at the same
        time: it is not known what of them was evaluated when this one began.
        """
        cached, missed = usage.cached_tokens, usage.missed_tokens
        displaced, new = usage.displaced_tokens, usage.new_tokens
        assert cached + missed + displaced + new == len(prompt) == usage.prompt_tokens
        assert usage.cache.lost_tokens == missed + displaced
        least, more = self.known(prompt), FullMemory([*self.perhaps, *beside]).known(prompt)
        least, most = (
            max(cached, min(known, len(prompt) - 1)) for known in (least, max(least, more))
        )
        assert least <= cached + missed <= most
        wanted = {0} if name is None else self._displaced(prompt, name, cached + missed)
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

    def add(self, prompt: list[int], result: Any, name: Name) -> None:
        """Remember a request that has ended.

        The last token of its answer may be evaluated before it is known to be the last one.
        """
        answer = [int(token) for token in result.tokens]
        self.evaluated.append([*prompt, *answer[:-1]])
        self.perhaps.append([*prompt, *answer[: ASK["max_tokens"] - 1]])
        self.asked.append((name, self.evaluated[-1]))


class Watch:
    """An observer that remembers what each request of a runner evaluated, and when."""

    def __init__(self) -> None:
        self.seen: list[tuple[Observation, list[int], Any, Any]] = []
        """Requests, each with all it has evaluated, and the moments of its beginning and end."""

    def __call__(self, runner: object, observed: Observation) -> None:
        order = len(self.seen)
        found, entry = observed.scheduling, observed.entry.array
        began, ended = (found.began, found.ended) if found else ((order, 0), (order, 1))
        shared = common_prefix(entry, observed.prompt)
        is_own = shared == min(len(entry), len(observed.prompt))
        text = entry if is_own else observed.prompt[:shared]
        self.seen.append((observed, text.tolist(), began, ended))

    def check(self) -> None:
        """Compare each account with a full memory of what had ended before it began."""
        for observed, _, began, ended in self.seen:
            names = observed.prepared.conversation
            memory, beside = FullMemory(), list[list[int]]()
            for other, text, other_began, other_ended in self.seen:
                if other_ended <= began:
                    memory.evaluated.append(text)
                    memory.asked.append(((other.prepared.conversation or ("", None))[:2], text))
                elif other is not observed and other_began <= ended:
                    beside.append(text)
            name = None if names is None else names[:2]
            memory.check(observed.prompt.tolist(), name, observed.usage, beside)


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
