"""What was said in a conversation, and the tokens that spell it. Bookkeeping only: no tokenizer, no model, no terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Mark:
    """A place in a spelling: so many characters, so many tokens."""

    characters: int
    tokens: int


@dataclass(frozen=True)
class Spelling:
    """A text and the tokens that spell it, but for those that a full context has dropped."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)

    @property
    def end(self) -> Mark:
        return Mark(len(self.text), len(self.tokens))

    def common(self, other: Spelling) -> Mark:
        """How far the two are the same."""
        return Mark(common(self.text, other.text), common(self.tokens, other.tokens))

    def up_to(self, mark: Mark) -> Spelling:
        return Spelling(self.text[: mark.characters], self.tokens[: mark.tokens])

    def and_then(self, text: str, tokens: Sequence[int]) -> Spelling:
        return Spelling(self.text + text, [*self.tokens, *tokens])


@dataclass(frozen=True)
class Turn:
    """What the user said and what was answered, thinking included.

    `begins` and `ends`: where the answer does in the history's spelling; None where that is not known any more. `closing`: what
    is spelled behind the answer, up to `ends`: the text of the token that ended it, if one did.
    """

    user: str
    answer: str
    begins: Mark | None = None
    ends: Mark | None = None
    closing: str = ""


@dataclass
class History:
    """`spelling` spells the turns from `first` on: earlier ones had to give room. `dropped`: its tokens that a full context has dropped."""

    turns: list[Turn] = field(default_factory=list)
    spelling: Spelling = field(default_factory=Spelling)
    first: int = 0
    dropped: int = 0

    def copy(self) -> History:
        return replace(self, turns=list(self.turns))

    def is_within(self, other: History) -> bool:
        """Return True if everything that was said here was said in `other`, too, which may go on behind it."""
        turns, others = self.turns, other.turns[: len(self.turns)]
        if not turns:
            return True
        same = [(turn.user, turn.answer) for turn in turns[:-1]] == [
            (turn.user, turn.answer) for turn in others[:-1]
        ]
        last = (
            turns[-1].user == others[-1].user and others[-1].answer.startswith(turns[-1].answer)
            if others
            else False
        )
        return len(others) == len(turns) and same and last

    def shared(self, other: History) -> int:
        """Return how many turns at the beginning are the same in both."""
        return common(
            [(turn.user, turn.answer) for turn in self.turns],
            [(turn.user, turn.answer) for turn in other.turns],
        )

    def cut(self, turns: int) -> None:
        """Keep the first so many turns, and their tokens where those are known."""
        self.turns = self.turns[:turns]
        self.first = min(self.first, turns)
        mark = self.turns[-1].ends if self.turns else None
        if mark is None:
            self.forget_tokens()
        else:
            self.spelling = self.spelling.up_to(mark)

    def add(self, turn: Turn, spelling: Spelling) -> None:
        """A turn more; `spelling` is that of everything, up to its end, and may be another one for the turns before, too."""
        self._keep_marks(self.spelling.common(spelling))
        self.turns.append(replace(turn, ends=spelling.end))
        self.spelling = spelling

    def _keep_marks(self, common: Mark) -> None:
        """Forget the places beyond which the spelling changes."""
        self.turns = [
            replace(turn, begins=_within(turn.begins, common), ends=_within(turn.ends, common))
            for turn in self.turns
        ]

    def respell(self, kept: Mark | None, spelling: Spelling, closing: str) -> None:
        """The same turns with other tokens from `kept` on, up to the `closing` text behind the last answer."""
        if kept is None:
            kept, self.dropped = Mark(0, 0), 0
        self._keep_marks(kept)
        self.turns[-1] = replace(self.turns[-1], ends=spelling.end, closing=closing)
        self.spelling = spelling

    def forget_tokens(self) -> None:
        """The turns stay as texts."""
        self.turns = [replace(turn, begins=None, ends=None) for turn in self.turns]
        self.spelling, self.dropped = Spelling(), 0

    def last_mark(self, characters: int) -> Mark | None:
        """The last known place within the first so many characters."""
        marks = (mark for turn in reversed(self.turns) for mark in (turn.ends, turn.begins))
        return next(
            (mark for mark in marks if mark is not None and mark.characters <= characters), None
        )

    def drop(self, keep: int, discard: int) -> None:
        """The tokens `keep .. keep + discard` are gone: the context was full."""
        if discard <= 0:
            return

        def moved(mark: Mark | None) -> Mark | None:
            if mark is None or mark.tokens <= keep:
                return mark
            return (
                Mark(mark.characters, mark.tokens - discard)
                if mark.tokens >= keep + discard
                else None
            )

        self.turns = [
            replace(turn, begins=moved(turn.begins), ends=moved(turn.ends)) for turn in self.turns
        ]
        tokens = self.spelling.tokens
        self.dropped += discard
        self.spelling = Spelling(self.spelling.text, tokens[:keep] + tokens[keep + discard :])


def _within(mark: Mark | None, kept: Mark) -> Mark | None:
    return (
        mark if mark and mark.tokens <= kept.tokens and mark.characters <= kept.characters else None
    )


def common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Length of the longest common beginning."""
    short = min(len(a), len(b))
    if a[:short] == b[:short]:
        return short
    return next(index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
