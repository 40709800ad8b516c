"""The turns of a conversation, and the text and tokens that they were rendered to.

A history never changes: each method that changes something returns a new one. This is bookkeeping
only: no tokenizer, no model, no terminal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlxrunner.templates.messages import PlainMessage
from mlxrunner.templates.thinking import content_for_template


@dataclass(frozen=True)
class Position:
    """A position in a rendering."""

    characters: int
    tokens: int


@dataclass(frozen=True)
class Rendering:
    """A text and its tokens."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    """The tokens of `text`, without those that were dropped when the context was full."""

    @property
    def end(self) -> Position:
        """The position after the last character and token."""
        return Position(len(self.text), len(self.tokens))

    def shared(self, other: Rendering) -> Position:
        """Return the position up to which both are the same."""
        return Position(common(self.text, other.text), common(self.tokens, other.tokens))

    def up_to(self, position: Position) -> Rendering:
        """Return the rendering up to `position`."""
        return Rendering(self.text[: position.characters], self.tokens[: position.tokens])

    def and_then(self, text: str, tokens: Sequence[int]) -> Rendering:
        """Return the rendering with `text` and `tokens` added."""
        return Rendering(self.text + text, (*self.tokens, *tokens))


@dataclass(frozen=True)
class Turn:
    """A message of the user and its answer."""

    user: str
    answer: str
    """The answer, with its thinking."""
    begins: Position | None = None
    """The beginning of the answer in the history's rendering, or None if it is not known."""
    ends: Position | None = None
    """The end of the answer and of `closing`, or None if it is not known."""
    closing: str = ""
    """The text of the token that ended the answer, if one did."""


@dataclass(frozen=True)
class History:
    """The turns of a conversation and their rendering."""

    turns: tuple[Turn, ...] = ()
    rendering: Rendering = field(default_factory=Rendering)
    """The rendering of the turns from `first` on; empty if their tokens are not known."""
    first: int = 0
    """Index of the first turn that is rendered; earlier turns were left out to make room."""
    dropped: int = 0
    """Number of tokens dropped from the rendering because the context was full."""

    def messages(self, system: str | None) -> list[PlainMessage]:
        """Return the messages for the template: the system prompt and the turns from `first` on."""
        messages: list[PlainMessage] = [{"role": "system", "content": system}] if system else []
        for turn in self.turns[self.first :]:
            messages += [
                {"role": "user", "content": turn.user},
                {"role": "assistant", "content": content_for_template(turn.answer)},
            ]
        return messages

    @property
    def all_messages(self) -> list[PlainMessage]:
        """The messages of all turns, without a system prompt."""
        return replace(self, first=0).messages(None)

    @property
    def _said(self) -> list[tuple[str, str]]:
        return [(turn.user, turn.answer) for turn in self.turns]

    def is_within(self, other: History) -> bool:
        """Return True if `other` begins with all these turns.

        The last answer of this history may be only the beginning of the answer in `other`.
        """
        if not self.turns:
            return True
        if len(other.turns) < len(self.turns):
            return False
        *earlier, (user, answer) = self._said
        *others, (other_user, other_answer) = other._said[: len(self.turns)]
        return earlier == others and user == other_user and other_answer.startswith(answer)

    def shared_turns(self, other: History) -> int:
        """Return the number of turns at the beginning that are equal in both."""
        return common(self._said, other._said)

    def cut(self, turns: int) -> History:
        """Return the first `turns` turns, with their tokens if those are known."""
        kept = replace(self, turns=self.turns[:turns], first=min(self.first, turns))
        end = kept.turns[-1].ends if kept.turns else None
        if end is None:
            return kept.without_tokens()
        return replace(kept, rendering=self.rendering.up_to(end))

    def with_turn(self, turn: Turn, rendering: Rendering) -> History:
        """Return the history with one turn more.

        `rendering` is the rendering of the new history as a whole. If it differs from the present
        one within earlier turns, their positions after the difference are forgotten.
        """
        earlier = self._with_positions_up_to(self.rendering.shared(rendering))
        turns = (*earlier, replace(turn, ends=rendering.end))
        return replace(self, turns=turns, rendering=rendering)

    def rerendered(self, kept: Position | None, rendering: Rendering, closing: str) -> History:
        """Return the history with another rendering of all that follows `kept`.

        `kept` is None to replace the whole rendering. `closing` is the text after the last answer.
        """
        *earlier, last = self._with_positions_up_to(kept or Position(0, 0))
        turns = (*earlier, replace(last, ends=rendering.end, closing=closing))
        dropped = 0 if kept is None else self.dropped
        return replace(self, turns=turns, rendering=rendering, dropped=dropped)

    @property
    def shows_pictures(self) -> bool:
        """True if pictures are among the tokens, whose ids hold for one loaded model only."""
        from mlxrunner.cache.tokens import FIRST_OF_PICTURES  # with numpy, which completion has not

        return max(self.rendering.tokens, default=0) >= FIRST_OF_PICTURES

    def without_tokens(self) -> History:
        """Return the turns as texts only."""
        turns = tuple(replace(turn, begins=None, ends=None) for turn in self.turns)
        return History(turns, first=self.first)

    def without_range(self, keep: int, discard: int) -> History:
        """Return the history without the tokens `keep` to `keep + discard`.

        A full context drops such a range.
        """
        if discard <= 0:
            return self

        def moved(position: Position | None) -> Position | None:
            if position is None or position.tokens <= keep:
                return position
            if position.tokens < keep + discard:
                return None
            return replace(position, tokens=position.tokens - discard)

        turns = tuple(
            replace(turn, begins=moved(turn.begins), ends=moved(turn.ends)) for turn in self.turns
        )
        text, tokens = self.rendering.text, self.rendering.tokens
        rendering = Rendering(text, tokens[:keep] + tokens[keep + discard :])
        return replace(self, turns=turns, rendering=rendering, dropped=self.dropped + discard)

    def last_position(self, characters: int) -> Position | None:
        """Return the last known position within the first `characters` characters."""
        positions = (one for turn in reversed(self.turns) for one in (turn.ends, turn.begins))
        return next((one for one in positions if one and one.characters <= characters), None)

    def _with_positions_up_to(self, kept: Position) -> list[Turn]:
        """Return the turns without the positions after `kept`."""

        def within(one: Position | None) -> Position | None:
            is_kept = one and one.tokens <= kept.tokens and one.characters <= kept.characters
            return one if is_kept else None

        return [
            replace(turn, begins=within(turn.begins), ends=within(turn.ends)) for turn in self.turns
        ]


def common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the length of the longest common prefix."""
    short = min(len(a), len(b))
    if a[:short] == b[:short]:
        return short
    return next(index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
