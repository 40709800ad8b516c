"""How a conversation is spelled in tokens: by the template, going on from the tokens that were evaluated.

A model may split a word otherwise than the tokenizer would, and a template may write an earlier answer otherwise than the model did.
`history="exact"` keeps what was evaluated and appends only what the template puts behind it; `history="template"` spells the whole
conversation as the template does, each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mlxrunner.chat.history import History, Spelling, Turn, common
from mlxrunner.chat.thinking import for_template, has_thinking, opens_thinking
from mlxrunner.tokenizer import Message, Tokenizer

Policy = Literal["exact", "template"]
POLICIES: tuple[Policy, ...] = ("exact", "template")
HERE = "\ue0f0\ue0f1"
"""Stands for a text that is not known yet: characters for private use, which no template touches."""


@dataclass(frozen=True)
class Drift:
    """Where what was evaluated differs from what the template would have said: `at` tokens of both are the same."""

    kind: Literal["none", "retokenized", "whitespace", "thinking", "text"]
    at: int
    evaluated: int
    template: int

    def __str__(self) -> str:
        if self.kind == "none":
            return "none"
        what = {
            "retokenized": "the same text in other tokens",
            "whitespace": "other white space",
            "thinking": "thinking that the template leaves out",
            "text": "other text",
        }[self.kind]
        return f"{what}, after {self.at} tokens: {self.evaluated - self.at} were evaluated, the template has {self.template - self.at}"


@dataclass
class Speller:
    """`variables`: what else the template may look at, such as `enable_thinking`."""

    tokenizer: Tokenizer
    policy: Policy = "exact"
    keep_thinking: bool = False
    variables: dict[str, Any] = field(default_factory=dict)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        return self.tokenizer.render(
            messages, add_generation_prompt=add_generation_prompt, **self.variables
        )

    def spell(self, history: History, system: str | None, user: str) -> Spelling:
        """Everything up to where the answer to `user` begins."""
        rendered = self.render([*messages(history, system), {"role": "user", "content": user}])
        return self._go_on(history, system, user, rendered, "")

    def draft(self, history: History, system: str | None, text: str) -> Spelling:
        """The same, but only as far as it stays when more is typed behind `text`."""
        user = text + HERE
        rendered = self.render([*messages(history, system), {"role": "user", "content": user}])
        return self._go_on(history, system, user, rendered, HERE)

    def _go_on(
        self, history: History, system: str | None, user: str, rendered: str, cut: str
    ) -> Spelling:
        whole, so_far = _before(rendered, cut), history.spelling
        if self.policy == "exact" and so_far.text:
            if whole.startswith(so_far.text):
                return self._extend(so_far, whole[len(so_far.text) :])
            tail = self._behind_last_answer(history, system, user)
            if tail is not None:
                return self._extend(so_far, _before(tail, cut))
        return Spelling(whole, self.tokenizer.encode(whole))

    def _extend(self, spelling: Spelling, text: str) -> Spelling:
        return spelling.and_then(text, self.tokenizer.encode_more(text))

    def _behind_last_answer(self, history: History, system: str | None, user: str) -> str | None:
        """What the template writes after the last answer, whatever it makes of that; None where it can't be told.

        Less the text of the token that ended the answer, which was evaluated.
        """
        tail = self._tail(history, system, user)
        return None if tail is None else tail.removeprefix(history.turns[-1].closing)

    def _tail(self, history: History, system: str | None, user: str) -> str | None:
        """The same, but with all that the template writes."""
        last = history.turns[-1]
        before = messages(
            History([*history.turns[:-1], Turn(last.user, HERE)], first=history.first), system
        )
        _, found, tail = self.render([*before, {"role": "user", "content": user}]).partition(HERE)
        return tail if found else None

    def settle(self, history: History, system: str | None, *, is_edited: bool = False) -> None:
        """Spell the last answer as the next turn will see it, where the template leaves out its thinking, or nothing of it is evaluated."""
        if self.policy != "exact" or self.keep_thinking or not history.turns:
            return
        turn = history.turns[-1]
        before = history.spelling.up_to(turn.begins).text if turn.begins else ""
        if not (is_edited or has_thinking(turn.answer) or opens_thinking(before)):
            return
        seen = _before(
            self.render([*messages(history, system), {"role": "user", "content": HERE}]), HERE
        )
        text = history.spelling.text
        if not seen.startswith(text):
            mark = history.last_mark(common(seen, text))
            kept = history.spelling.up_to(mark) if mark else Spelling()
            respelled = (
                self._extend(kept, seen[mark.characters :])
                if mark
                else Spelling(seen, self.tokenizer.encode(seen))
            )
            history.respell(mark, respelled, _before(self._tail(history, system, HERE) or "", HERE))

    def drift(self, history: History, system: str | None) -> Drift:
        """What was evaluated against what the template would have written. A full context must not have dropped anything."""
        evaluated, text = history.spelling.tokens, history.spelling.text
        rendered = self.render([*messages(history, system), {"role": "user", "content": HERE}])
        whole = _before(rendered, HERE)
        if whole.startswith(text):
            whole = text  # what follows the last answer is not evaluated yet
        else:
            tail = self._behind_last_answer(history, system, HERE) or ""
            whole = whole.removesuffix(_before(tail, HERE))
        template = self.tokenizer.encode(whole)
        at = common(evaluated, template)
        if at == len(evaluated) == len(template):
            return Drift("none", at, at, at)
        kinds = (
            ("retokenized", whole == text),
            ("whitespace", "".join(whole.split()) == "".join(text.split())),
            ("thinking", any(has_thinking(turn.answer) for turn in history.turns[history.first :])),
        )
        kind: Any = next((name for name, holds in kinds if holds), "text")
        return Drift(kind, at, len(evaluated), len(template))


def messages(history: History, system: str | None) -> list[Message]:
    """What the template is given: the system prompt, and the turns that are still rendered."""
    spoken: list[Message] = [{"role": "system", "content": system}] if system else []
    for turn in history.turns[history.first :]:
        spoken += [
            {"role": "user", "content": turn.user},
            {"role": "assistant", "content": for_template(turn.answer)},
        ]
    return spoken


def _before(text: str, cut: str) -> str:
    return text.partition(cut)[0] if cut else text
