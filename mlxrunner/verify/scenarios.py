"""The ways in which a conversation comes back to its entry, each as a function that leaves a warm entry and says which prompt is next.

A further one is a function here and a line in SCENARIOS.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlxrunner.errors import OptionError
from mlxrunner.runner import Runner
from mlxrunner.sessions.entry import StoredEntry, pack
from mlxrunner.sessions.store import Sessions

WORDS = """
the a one many river stone copper lantern morning engine letter winter garden number harbour music paper island window thread
opens carries answers remembers forgets counts follows builds turns holds brings takes under over between without because until when
quiet early heavy seventh yellow careful distant broken simple
""".split()
MESSAGES = 6
"""In a prompt, the first one of half the length of the others."""
MORE = 16
"""Tokens of a next turn."""
THINKING = 3
"""A thoughtful answer is so many times as long as the others."""
SMALLEST = 48
"""Tokens of a prompt; with fewer there is nothing to edit early."""


@dataclass(frozen=True)
class Case:
    """The prompt that comes to the warm entry. `before`: what a cold run has to have evaluated first, in one request (for a shift, whose
    result depends on what it dropped)."""

    prompt: list[int]
    options: dict[str, Any] = field(default_factory=dict)
    before: list[int] | None = None


class Talk:
    """Made-up text of a conversation, as tokens: `base` is a prompt that fills `runner`'s context but for answers and next turns."""

    def __init__(self, runner: Runner, answer: int) -> None:
        self.runner, self.answer = runner, answer
        length = runner.context - THINKING * answer - 2 * MORE
        if length < SMALLEST:
            raise OptionError(
                f"context: {runner.context} tokens are too few to verify anything with answers of {answer}: "
                f"at least {runner.context - length + SMALLEST} are needed"
            )
        self._random = random.Random(0)
        self._ends = sorted(runner.tokenizer.message_ends)
        text = [*runner.tokenizer.encode(""), *self._text(length)]
        for end in range(length // (2 * MESSAGES), length, length // MESSAGES):
            text[end - 1 : end] = self._ends[:1] or text[end - 1 : end]
        self.base = text[:length]

    def more(self, count: int = MORE) -> list[int]:
        """The tokens of a next turn."""
        return [*self._ends[:1], *self._text(count)][:count]

    def changed(self, place: int) -> list[int]:
        """`base` with another token at `place`."""
        old, vocab = self.base[place], max(self.runner.facts.vocab, 2)
        other = next((token for token in self._text(MORE) if token != old), (old + 1) % vocab)
        return [*self.base[:place], other, *self.base[place + 1 :]]

    def unlike(self, prompt: list[int]) -> list[int]:
        """Another prompt of that length, no token of which is that of `prompt` in its place."""
        vocab = max(self.runner.facts.vocab, 2)
        text = self._text(len(prompt))
        return [
            (token + 1) % vocab if token == other else token
            for token, other in zip(text, prompt, strict=True)
        ]

    def say(self, prompt: list[int], count: int) -> list[int]:
        """The tokens of a greedy answer, which the entry holds afterwards but for the last."""
        return [
            chunk.token or 0
            for chunk in self.runner.generate(prompt, max_tokens=count, stop_tokens=[])
        ]

    def _text(self, count: int) -> list[int]:
        tokens: list[int] = []
        vocab = self.runner.facts.vocab
        while len(tokens) < count:
            words = [self._random.choice(WORDS) for _ in range(9)] + [
                str(self._random.randrange(10_000))
            ]
            spelled = self.runner.tokenizer.encode_more(f"{' '.join(words).capitalize()}. ")
            usable = [token for token in spelled if not vocab or token < vocab]
            tokens += usable or [
                self._random.randrange(max(vocab, 2))
            ]  # a tokenizer that has no words for it
        return tokens[:count]


def append(talk: Talk) -> Case:
    return Case([*talk.base, *talk.say(talk.base, talk.answer), *talk.more()])


def edit_early(talk: Talk) -> Case:
    return _edit(talk, len(talk.base) // 8)


def edit_middle(talk: Talk) -> Case:
    return _edit(talk, len(talk.base) // 2)


def edit_last(talk: Talk) -> Case:
    return _edit(talk, len(talk.base) - 1)


def _edit(talk: Talk, place: int) -> Case:
    talk.say(talk.base, talk.answer)
    return Case(talk.changed(place))


def regenerate(talk: Talk) -> Case:
    talk.say(talk.base, talk.answer)
    return Case(talk.base)


def think_strip(talk: Talk) -> Case:
    """The first half of an answer, its thinking, is left out of the next prompt."""
    said = talk.say(talk.base, THINKING * talk.answer)
    return Case([*talk.base, *said[len(said) // 2 :], *talk.more()])


def cancel_prefill(talk: Talk) -> Case:
    def stop(done: int, total: int) -> None:
        if 2 * done > total:
            raise _Stopped

    chunks = talk.runner.generate(talk.base, max_tokens=talk.answer, stop_tokens=[], progress=stop)
    with suppress(_Stopped):
        next(chunks)
    return Case(talk.base)


def cancel_decode(talk: Talk) -> Case:
    chunks: Any = talk.runner.generate(talk.base, max_tokens=THINKING * talk.answer, stop_tokens=[])
    said = [chunk.token for chunk in islice(chunks, talk.answer)]
    chunks.close()
    return Case([*talk.base, *said, *talk.more()])


def restore(talk: Talk) -> Case:
    """The entry goes into a file, as that of a saved session does, and comes back into caches that were freed."""
    said = talk.say(talk.base, talk.answer)
    with TemporaryDirectory() as folder:
        sessions = Sessions(Path(folder))
        packed = pack(talk.runner.entry.export(), {})
        with sessions.lock("verify"):
            sessions.save_cache("verify", packed.arrays, packed.metadata)
        file = sessions.load_cache("verify")
        assert file is not None
        talk.runner.adopt(StoredEntry(file))
        _ = talk.runner.entry  # read now: the file goes
    return Case([*talk.base, *said, *talk.more()])


def overflow(talk: Talk) -> Case:
    """A history of two turns, and then a prompt that is longer than the context."""
    talk.say(talk.base[: len(talk.base) // 2], 1)
    said = talk.say(talk.base, talk.answer)
    history = [*talk.base, *said[:-1]]
    prompt = [*history, *talk.more(talk.runner.context - len(history) + MORE // 2)]
    return Case(prompt, _shift(talk), before=history)


def overflow_decode(talk: Talk) -> Case:
    """An answer that goes over the edge of the context."""
    talk.say(talk.base, 1)
    return Case(
        [*talk.base, *talk.more(talk.runner.context - len(talk.base) - max(talk.answer // 2, 1))],
        _shift(talk),
    )


def _shift(talk: Talk) -> dict[str, Any]:
    return {"overflow": "shift", "keep": len(talk.base) // (2 * MESSAGES)}


class _Stopped(KeyboardInterrupt):
    """What Ctrl-C does, but from here."""


SCENARIOS: dict[str, Callable[[Talk], Case]] = {
    "append": append,
    "edit an early token": edit_early,
    "edit a middle token": edit_middle,
    "edit the last token": edit_last,
    "regenerate": regenerate,
    "thinking left out": think_strip,
    "cancelled in the prefill": cancel_prefill,
    "cancelled in the answer": cancel_decode,
    "restored from a file": restore,
    "overflow": overflow,
    "overflow in the answer": overflow_decode,
}
