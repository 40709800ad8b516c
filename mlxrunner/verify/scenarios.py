"""The ways in which a conversation comes back to its entry.

Each scenario is a function that leaves a warm entry and returns the next prompt. A new scenario is
a function here and a line in SCENARIOS.
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

from mlxrunner.cache.disk.pieces import StoredEntry, pack
from mlxrunner.errors import OptionError
from mlxrunner.runner import Runner
from mlxrunner.sessions.store import SessionStore

WORDS = """
the a one many river stone copper lantern morning engine letter winter garden number harbour music
paper island window thread opens carries answers remembers forgets counts follows builds turns holds
brings takes under over between without because until when quiet early heavy seventh yellow careful
distant broken simple
""".split()
MESSAGES = 6
"""Number of messages of a prompt. The first one is half as long as the others."""
MORE = 16
"""Tokens of a next turn."""
THINKING = 3
"""Length of an answer with thinking, as a multiple of other answers."""
PLAIN: dict[str, Any] = {"stop_tokens": [], "speculate": "off"}
"""Options of the answers that lead to an entry. What is guessed depends on measured times."""
GUESSING: dict[str, Any] = PLAIN | {"speculate": "lookup"}
"""Options of answers whose tokens are guessed wherever that is possible."""
SMALLEST = 48
"""Fewest tokens of a prompt. Shorter ones have no early token to edit."""


@dataclass(frozen=True)
class Case:
    """The prompt that comes to the warm entry."""

    prompt: list[int]
    options: dict[str, Any] = field(default_factory=dict)
    """Options of `generate`."""
    before: list[int] | None = None
    """The prompt that a cold run evaluates first, in one request; None if there is none.

    The result of a shift depends on the tokens that it dropped.
    """


class Talk:
    """Made-up text of a conversation, as tokens.

    `base` is a prompt that fills the runner's context except for answers and next turns.
    """

    def __init__(self, runner: Runner, answer: int) -> None:
        self.runner, self.answer = runner, answer
        length = runner.context - THINKING * answer - 2 * MORE
        if length < SMALLEST:
            raise OptionError(
                f"context: {runner.context} tokens are too few to verify anything "
                f"with answers of {answer}: "
                f"at least {runner.context - length + SMALLEST} are needed"
            )
        self._random = random.Random(0)
        self._ends = sorted(runner.tokenizer.message_ends)
        text = [*runner.tokenizer.encode(""), *self._text(length)]
        for end in range(length // (2 * MESSAGES), length, length // MESSAGES):
            text[end - 1 : end] = self._ends[:1] or text[end - 1 : end]
        self.base = text[:length]

    def more(self, count: int = MORE) -> list[int]:
        """Return the tokens of a next turn."""
        return [*self._ends[:1], *self._text(count)][:count]

    def changed(self, place: int) -> list[int]:
        """Return `base` with another token at `place`."""
        old, vocab = self.base[place], max(self.runner.facts.vocab, 2)
        other = next((token for token in self._text(MORE) if token != old), (old + 1) % vocab)
        return [*self.base[:place], other, *self.base[place + 1 :]]

    def unlike(self, prompt: list[int]) -> list[int]:
        """Return a prompt of the same length that has another token in every place."""
        vocab = max(self.runner.facts.vocab, 2)
        text = self._text(len(prompt))
        return [
            (token + 1) % vocab if token == other else token
            for token, other in zip(text, prompt, strict=True)
        ]

    def say(self, prompt: list[int], count: int) -> list[int]:
        """Return `count` tokens of a greedy answer.

        The entry then holds the prompt and all of them but the last.
        """
        return [
            chunk.token or 0 for chunk in self.runner.generate(prompt, max_tokens=count, **PLAIN)
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
            ]  # the tokenizer has no tokens for these words
        return tokens[:count]


def append(talk: Talk) -> Case:
    """Append an answer and a next turn."""
    return Case([*talk.base, *talk.say(talk.base, talk.answer), *talk.more()])


def edit_early(talk: Talk) -> Case:
    """Change a token after an eighth of the prompt."""
    return _edit(talk, len(talk.base) // 8)


def edit_middle(talk: Talk) -> Case:
    """Change a token in the middle of the prompt."""
    return _edit(talk, len(talk.base) // 2)


def edit_last(talk: Talk) -> Case:
    """Change the last token of the prompt."""
    return _edit(talk, len(talk.base) - 1)


def _edit(talk: Talk, place: int) -> Case:
    talk.say(talk.base, talk.answer)
    return Case(talk.changed(place))


def regenerate(talk: Talk) -> Case:
    """Repeat the prompt after its answer."""
    talk.say(talk.base, talk.answer)
    return Case(talk.base)


def think_strip(talk: Talk) -> Case:
    """Leave the first half of an answer, its thinking, out of the next prompt."""
    said = talk.say(talk.base, THINKING * talk.answer)
    return Case([*talk.base, *said[len(said) // 2 :], *talk.more()])


def cancel_prefill(talk: Talk) -> Case:
    """Interrupt the prefill after half of the prompt, then repeat the prompt."""

    def stop(done: int, total: int) -> None:
        if 2 * done > total:
            raise _Stopped

    chunks = talk.runner.generate(talk.base, max_tokens=talk.answer, progress=stop, **PLAIN)
    with suppress(_Stopped):
        next(chunks)
    return Case(talk.base)


def cancel_decode(talk: Talk) -> Case:
    """Close the answer after some tokens, then append a next turn."""
    chunks: Any = talk.runner.generate(talk.base, max_tokens=THINKING * talk.answer, **PLAIN)
    said = [chunk.token for chunk in islice(chunks, talk.answer)]
    chunks.close()
    return Case([*talk.base, *said, *talk.more()])


def restore(talk: Talk) -> Case:
    """Save the entry as a session does, and read it back into freed caches."""
    said = talk.say(talk.base, talk.answer)
    with TemporaryDirectory() as folder:
        sessions = SessionStore(Path(folder))
        packed = pack(talk.runner.entry.export(), {})
        with sessions.lock("verify"):
            sessions.save_cache("verify", packed.arrays, packed.metadata)
        file = sessions.load_cache("verify")
        assert file is not None
        talk.runner.cache.adopt(StoredEntry(file))
        _ = talk.runner.entry  # read it now, before the file is removed
    return Case([*talk.base, *said, *talk.more()])


def overflow(talk: Talk) -> Case:
    """Continue a history of two turns with a prompt that is longer than the context."""
    talk.say(talk.base[: len(talk.base) // 2], 1)
    said = talk.say(talk.base, talk.answer)
    history = [*talk.base, *said[:-1]]
    prompt = [*history, *talk.more(talk.runner.context - len(history) + MORE // 2)]
    return Case(prompt, _shift(talk), before=history)


def overflow_decode(talk: Talk) -> Case:
    """Let an answer grow beyond the context."""
    talk.say(talk.base, 1)
    return Case(
        [*talk.base, *talk.more(talk.runner.context - len(talk.base) - max(talk.answer // 2, 1))],
        _shift(talk),
    )


def _shift(talk: Talk) -> dict[str, Any]:
    return {"overflow": "shift", "keep": len(talk.base) // (2 * MESSAGES)}


class _Stopped(KeyboardInterrupt):
    """An interrupt, as by Ctrl-C, that a scenario raises."""


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
