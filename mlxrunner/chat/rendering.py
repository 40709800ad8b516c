"""Render a conversation to tokens with the chat template, beginning with the evaluated tokens.

A model may split a word otherwise than the tokenizer, and a template may write an earlier answer
otherwise than the model. The policy "exact" keeps the evaluated tokens and adds only what the
template writes after them. The policy "template" renders the whole conversation anew each time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mlxrunner.sessions.session import History, Rendering, SessionTurn, common
from mlxrunner.templates.messages import PlainMessage
from mlxrunner.templates.thinking import has_thinking, opens_thinking
from mlxrunner.tokenizer import Tokenizer, encode_after

Policy = Literal["exact", "template"]
POLICIES: tuple[Policy, ...] = ("exact", "template")
UNKNOWN = "\ue0f0\ue0f1"
"""Stands for a text that is not known yet: private characters, which no template changes."""
DRIFTS = {
    "none": "none",
    "retokenized": "the same text in other tokens",
    "whitespace": "other white space",
    "thinking": "thinking that the template leaves out",
    "text": "other text",
}


@dataclass(frozen=True)
class TemplateDrift:
    """The difference between the evaluated tokens and those that the template would make."""

    kind: Literal["none", "retokenized", "whitespace", "thinking", "text"]
    """The kind of the difference: a key of `DRIFTS`."""
    at: int
    """Number of tokens at the beginning that are equal in both."""
    evaluated: int
    """Number of tokens evaluated."""
    template: int
    """Number of tokens that the template makes."""

    def __str__(self) -> str:
        if self.kind == "none":
            return DRIFTS[self.kind]
        return (
            f"{DRIFTS[self.kind]}, after {self.at} tokens: {self.evaluated - self.at} were "
            f"evaluated, the template has {self.template - self.at}"
        )


@dataclass(frozen=True)
class Renderer:
    """Renders the histories of one conversation."""

    tokenizer: Tokenizer
    system: str | None = None
    """The system prompt, or None."""
    policy: Policy = "exact"
    """"exact" keeps the evaluated tokens; "template" renders the whole conversation anew."""
    keep_thinking: bool = False
    """Keep thinking in the history even if the template leaves it out."""
    variables: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as `enable_thinking`."""

    def render(self, history: History, user: str) -> Rendering:
        """Return the rendering up to the beginning of the answer to `user`."""
        return self._continued(history, user, self._text(history, user), cut="")

    def render_draft(self, history: History, text: str) -> Rendering:
        """Return the part of the rendering that stays the same when more is typed after `text`."""
        user = text + UNKNOWN
        return self._continued(history, user, self._text(history, user), cut=UNKNOWN)

    def settled(self, history: History, *, is_edited: bool = False) -> History:
        """Return the history with its last answer rendered as the next turn needs it.

        That differs from the evaluated tokens if the template leaves out the thinking, or if the
        user has edited the answer.
        """
        if self.policy != "exact" or self.keep_thinking or not history.turns:
            return history
        turn = history.turns[-1]
        before = history.rendering.text[: turn.begins.characters] if turn.begins else ""
        if not (is_edited or has_thinking(turn.answer) or opens_thinking(before)):
            return history
        seen, text = _before(self._text(history, UNKNOWN), UNKNOWN), history.rendering.text
        if seen.startswith(text):
            return history
        position = history.last_position(common(seen, text))
        if position is None:
            rendering = Rendering(seen, tuple(self.tokenizer.encode(seen)))
        else:
            kept = history.rendering.up_to(position)
            rendering = self._extended(kept, seen[position.characters :])
        closing = _before(self._after_last_answer(history, UNKNOWN) or "", UNKNOWN)
        return history.rerendered(position, rendering, closing)

    def asked(self, history: History, number: int) -> Rendering:
        """Return the rendering that the answer of turn `number` (from 0) continues.

        If its tokens are no longer known, it is rendered as it would be now.
        """
        turn = history.turns[number]
        if turn.begins is not None:
            return history.rendering.up_to(turn.begins)
        return self.render(history.cut(number), turn.user)

    def with_answer(self, history: History, number: int, answer: str) -> History:
        """Return the history with another answer to turn `number` (from 0).

        The turns after it are dropped.
        """
        turn, asked, before = (
            history.turns[number],
            self.asked(history, number),
            history.cut(number),
        )
        if turn.begins is not None:  # the tokens are kept, and so is this count
            before = replace(before, dropped=history.dropped)
        rendering = self._extended(asked, answer)
        edited = before.with_turn(SessionTurn(turn.user, answer, asked.end), rendering)
        return self.settled(edited, is_edited=True)

    def drift(self, history: History) -> TemplateDrift:
        """Compare the evaluated tokens with those that the template would make.

        Use it only if a full context has dropped nothing.
        """
        evaluated, text = history.rendering.tokens, history.rendering.text
        whole = _before(self._text(history, UNKNOWN), UNKNOWN)
        if whole.startswith(text):
            whole = text  # the text after the last answer is not evaluated yet
        else:
            tail = self._not_evaluated_after_last_answer(history, UNKNOWN) or ""
            whole = whole.removesuffix(_before(tail, UNKNOWN))
        template = tuple(self.tokenizer.encode(whole))
        at = common(evaluated, template)
        kind: Literal["none", "retokenized", "whitespace", "thinking", "text"] = "text"
        if at == len(evaluated) == len(template):
            kind = "none"
        elif whole == text:
            kind = "retokenized"
        elif "".join(whole.split()) == "".join(text.split()):
            kind = "whitespace"
        elif any(has_thinking(turn.answer) for turn in history.turns[history.first :]):
            kind = "thinking"
        return TemplateDrift(kind, at, len(evaluated), len(template))

    def _text(self, history: History, user: str) -> str:
        """Return the template's text of the whole conversation."""
        messages: list[PlainMessage] = [
            *history.messages(self.system),
            {"role": "user", "content": user},
        ]
        return self.tokenizer.render(messages, **self.variables)

    def _continued(self, history: History, user: str, text: str, cut: str) -> Rendering:
        """Return the rendering of `text` up to `cut`, from the history's tokens if possible."""
        whole, evaluated = _before(text, cut), history.rendering
        if self.policy == "exact" and evaluated.text:
            if whole.startswith(evaluated.text):
                return self._extended(evaluated, whole[len(evaluated.text) :])
            tail = self._not_evaluated_after_last_answer(history, user)
            if tail is not None:
                return self._extended(evaluated, _before(tail, cut))
        return Rendering(whole, tuple(self.tokenizer.encode(whole)))

    def _extended(self, rendering: Rendering, text: str) -> Rendering:
        return rendering.and_then(text, encode_after(self.tokenizer, rendering.text, text))

    def _not_evaluated_after_last_answer(self, history: History, user: str) -> str | None:
        """Return `_after_last_answer` without the text of the token that ended the answer."""
        tail = self._after_last_answer(history, user)
        return None if tail is None else tail.removeprefix(history.turns[-1].closing)

    def _after_last_answer(self, history: History, user: str) -> str | None:
        """Return the template's text after the last answer, however it changes that answer.

        Return None if the template leaves the answer out.
        """
        *earlier, last = history.turns
        unknown = replace(history, turns=(*earlier, SessionTurn(last.user, UNKNOWN)))
        _, found, tail = self._text(unknown, user).partition(UNKNOWN)
        return tail if found else None


def _before(text: str, cut: str) -> str:
    return text.partition(cut)[0] if cut else text
