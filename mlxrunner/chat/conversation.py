"""A conversation whose history is the tokens that were evaluated: a turn appends only its own. Knows nothing about terminals."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlxrunner.cache.tokens import as_tokens, common_prefix
from mlxrunner.chat.history import History, Spelling, Turn
from mlxrunner.chat.spelling import Drift, Policy, Speller, messages
from mlxrunner.events import Chunk, Usage
from mlxrunner.overflow import Shift
from mlxrunner.pipeline import Progress
from mlxrunner.runner import Runner
from mlxrunner.tokenizer import Message
from mlxrunner.tokenizer.prompt import Prepared, system_tokens


@dataclass(frozen=True)
class Outlook:
    """What a prompt would reuse of the entry as it is: `cached` of its `tokens`."""

    tokens: int
    cached: int

    def __str__(self) -> str:
        return (
            f"{self.cached} of {self.tokens} tokens reused, {self.tokens - self.cached} to evaluate"
        )


@dataclass
class Conversation:
    """`options`: those of `Runner.generate`; `overflow` is "shift" unless they say otherwise. `usages`: one for each turn.

    `policy`, `keep_thinking`, `variables`: see `Speller`.
    """

    runner: Runner
    system: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    policy: Policy = "exact"
    keep_thinking: bool = False
    variables: dict[str, Any] = field(default_factory=dict)
    history: History = field(default_factory=History)
    usages: list[Usage] = field(default_factory=list)
    asked: Spelling = field(default_factory=Spelling)
    """What the last answer goes on from."""
    _drift: tuple[Spelling, Drift] | None = field(default=None, repr=False)

    @property
    def messages(self) -> list[Message]:
        """All turns, without the system prompt."""
        return messages(replace(self.history, first=0), None)

    @property
    def speller(self) -> Speller:
        return Speller(self.runner.tokenizer, self.policy, self.keep_thinking, self.variables)

    def clear(self) -> None:
        """Forget the turns; the system prompt stays, and so does what the entry can reuse of it."""
        self.history = History()

    def undo(self, turns: int = 1) -> list[Turn]:
        """Take back the last turns, which are returned; the entry is rewound when something else is evaluated."""
        count = max(len(self.history.turns) - turns, 0)
        taken = self.history.turns[count:]
        self.history.cut(count)
        return taken

    def answer_with(self, number: int, answer: str) -> None:
        """Put another answer into turn `number` (from 0), and drop the turns after it: the conversation goes on from there."""
        turn, asked, dropped = (
            self.history.turns[number],
            self.asked_for(number),
            self.history.dropped,
        )
        self.history.cut(number)
        if turn.begins is not None:  # the tokens stay as they are, and so does what they lack
            self.history.dropped = dropped
        spelling = asked.and_then(answer, self.runner.tokenizer.encode_more(answer))
        self.history.add(Turn(turn.user, answer, asked.end), spelling)
        self.speller.settle(self.history, self.system, is_edited=True)

    def asked_for(self, number: int) -> Spelling:
        """What the answer of turn `number` goes on from; where those tokens are not known any more, as it would be spelled now."""
        turn = self.history.turns[number]
        if turn.begins is not None:
            return self.history.spelling.up_to(turn.begins)
        before = self.history.copy()
        before.cut(number)
        return self.speller.spell(before, self.system, turn.user)

    def outlook(self, text: str | None = None) -> Outlook:
        """What sending `text` would reuse; without it, what of the conversation so far is in the entry."""
        speller = self.speller
        spelling = (
            speller.draft(self.history, self.system, "")
            if text is None
            else speller.spell(self.history, self.system, text)
        )
        entry, tokens = self.runner.entry, as_tokens(spelling.tokens)
        matched = common_prefix(entry.tokens.array, tokens)
        return Outlook(len(tokens), entry.reach(min(matched, len(tokens) - (text is not None)))[0])

    def drift(self) -> Drift | None:
        """What was evaluated against what the template says; None where nothing was yet, and where a full context has dropped some."""
        if not self.history.spelling.text or self.history.dropped or self.history.first:
            return None
        if self._drift is None or self._drift[0] is not self.history.spelling:
            self._drift = (self.history.spelling, self.speller.drift(self.history, self.system))
        return self._drift[1]

    def evaluate(self, draft: str, cancelled: Callable[[], bool]) -> None:
        """Evaluate what the next prompt begins with, as far as it is known: the conversation, and what has been typed of `draft`."""
        tokens = self.speller.draft(self.history, self.system, draft).tokens
        if draft:
            tokens = tokens[:-UNSTABLE]
        if len(tokens) < self.runner.context:
            self.runner.evaluate(tokens, cancelled=cancelled)

    def send(self, text: str, progress: Progress | None = None, **options: Any) -> Iterator[Chunk]:
        """The answer to `text`, with `options` over the conversation's own. Closing the iterator, or an interrupt, keeps the answer as
        far as it was given.

        A turn that got no answer at all (an error, an interrupted prefill) is taken back.
        """
        began = time.perf_counter()
        options = self.options | options
        history = (
            self.history.copy()
        )  # what is not rendered any more is so only when there is an answer
        spelling = self.speller.spell(history, self.system, text)
        overflow: dict[str, Any] = {}
        if options.get("overflow", "shift") == "shift":
            keep = self._keep_tokens(spelling, options)
            overflow = {"overflow": "shift", "keep": keep}
            if len(spelling.tokens) >= self.runner.context:
                shift = Shift(self.runner.context, keep)
                spelling = self._without_oldest(history, text, spelling, shift)
                if len(self.runner.tokenizer.encode_more(text)) >= shift.target_free:
                    overflow = {
                        "overflow": "stop"
                    }  # what a shift leaves would begin in the middle of this turn
        asked: list[Message] = [*messages(history, self.system), {"role": "user", "content": text}]
        prepared = Prepared(
            as_tokens(spelling.tokens),
            "messages",
            asked,
            spelling.text,
            self.speller.variables,
            time.perf_counter() - began,
        )
        chunks = self.runner.generate(prepared, progress=progress, **(options | overflow))
        self.asked = spelling
        return self._answer(text, spelling, history.first, overflow.get("keep", 0), chunks)

    def _without_oldest(
        self, history: History, text: str, spelling: Spelling, shift: Shift
    ) -> Spelling:
        """Where the tokens can't simply go on, the oldest turns are not rendered any more, so that the next turns have room."""
        if (
            history.spelling.text
            and spelling.text.startswith(history.spelling.text)
            and self.policy == "exact"
        ):
            return spelling
        while len(
            spelling.tokens
        ) > self.runner.context - shift.target_free and history.first < len(history.turns):
            history.first += 1
            spelling = self.speller.spell(history, self.system, text)
        return spelling

    def _keep_tokens(self, spelling: Spelling, options: dict[str, Any]) -> int:
        """What a full context keeps: the system prompt with BOS, or what the options say."""
        keep: int | None = options.get("keep")
        system = messages(History(), self.system)
        return (
            system_tokens(self.runner.tokenizer, system, as_tokens(spelling.tokens))
            if keep is None
            else keep
        )

    def _answer(
        self, user: str, asked: Spelling, first: int, keep: int, chunks: Iterator[Chunk]
    ) -> Iterator[Chunk]:
        shown: list[Chunk] = []
        try:
            for chunk in chunks:
                shown.append(chunk)
                yield chunk
        finally:
            chunks.close()  # type: ignore[attr-defined]  # a generator
            text = "".join(chunk.text for chunk in shown)
            if text or (shown and shown[-1].finish_reason is not None):
                tokens = [chunk.token for chunk in shown if chunk.token is not None]
                self.history.first = first
                if self.runner.usage is not None:
                    self.usages.append(self.runner.usage)
                self._remember(user, asked, text, tokens, keep)

    def _remember(
        self, user: str, asked: Spelling, text: str, tokens: Sequence[int], keep: int
    ) -> None:
        """Remember the tokens whose text was shown: not those of half a character, nor of a stop string or after it."""
        tokenizer = self.runner.tokenizer
        stream, spelled, count, closing = tokenizer.stream(asked.tokens[-8:]), "", 0, ""
        for place, token in enumerate(tokens, 1):
            if token in tokenizer.stop_tokens and spelled == text and place == len(tokens):
                closing, count = tokenizer.decode([token]), place
                break
            piece = stream.add(token)
            if not text.startswith(spelled + piece):
                break
            if piece:
                spelled, count = spelled + piece, place
        self.history.add(
            Turn(user, text, asked.end, closing=closing),
            asked.and_then(spelled + closing, tokens[:count]),
        )
        self.history.drop(keep, self.runner.shifted_tokens)
        self.speller.settle(self.history, self.system)


UNSTABLE = 4
"""The last tokens of what is being typed, which the next key may change."""
