"""Guesses of answers that are known beforehand: right as far as a test wants them to be."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from typing import Any

from support.checked import CheckedHistory
from support.engine import Stepper, request_of

from mlxrunner.speculation.drafting import Counts

DEEPEST = 9
"""Most tokens of such a guess."""


class Guesses:
    """In place of `mlxrunner.speculation.drafting.Drafting`: it knows the answer."""

    always = True

    def __init__(self, answer: list[int], rng: random.Random, seen: Counter[str]) -> None:
        self.answer, self.rng, self.seen, self.place = answer, rng, seen, 0
        self.by_source: defaultdict[str, Counts] = defaultdict(Counts)
        self.passes = 0
        self.source, self.model_s = "lookup", None

    def close(self) -> None:
        """Keep nothing for a request."""

    def add(self, token: int) -> None:
        self.place += 1

    @property
    def is_worth_waiting(self) -> bool:
        return self.rng.random() < 0.5

    def draft(self, most: int) -> list[int]:
        guess = self.answer[self.place : self.place + self.rng.randint(0, DEEPEST)][: max(0, most)]
        if guess and self.rng.random() < 0.5:
            guess[self.rng.randrange(len(guess))] = self.rng.randrange(290)
        return guess

    def judge(self, drafted: int, accepted: int, seconds: float) -> None:
        self.passes += 1
        self.seen["drafts"] += 1
        self.seen["wrong"] += accepted < drafted
        self.seen["right"] += accepted


class GuessedHistory(CheckedHistory):
    """A history whose answers are guessed. What happens to an entry is counted."""

    def submit(self, runner: Stepper) -> None:
        live = len(self.live)
        super().submit(runner)
        if len(self.live) > live:
            handle, prompt, options = self.live[-1]
            answer = self.cold(prompt, options).tokens
            drafting: Any = Guesses(answer, self.rng, self.seen)
            request_of(handle).drafting = drafting
