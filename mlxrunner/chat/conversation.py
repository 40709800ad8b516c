"""A conversation whose history is the tokens that were evaluated, not a text that is tokenized again each turn.

A model may split a word otherwise than the tokenizer would; then the text of an answer, tokenized again, would leave the entry in the
middle of the last turn. So a turn appends only its own tokens wherever the template's rendering goes on from what was evaluated.
Knows nothing about terminals.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxrunner.cache.tokens import as_tokens
from mlxrunner.events import Chunk, Usage
from mlxrunner.overflow import Shift
from mlxrunner.pipeline import Progress
from mlxrunner.runner import Runner
from mlxrunner.tokenizer import Message
from mlxrunner.tokenizer.prompt import Prepared, system_tokens


@dataclass
class Conversation:
    """`options`: those of `Runner.generate`; `overflow` is "shift" unless they say otherwise. `usages`: one for each finished turn."""

    runner: Runner
    system: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    usages: list[Usage] = field(default_factory=list)
    # `_tokens` spell the rendered text `_spelled`, but for what a full context has dropped of them.
    _spelled: str = ""
    _tokens: list[int] = field(default_factory=list)
    _first: int = 0  # of the messages that are still rendered

    def clear(self) -> None:
        """Forget the turns; the system prompt stays, and so does what the entry can reuse of it."""
        self.messages.clear()
        self._spelled, self._tokens, self._first = "", [], 0

    def send(self, text: str, progress: Progress | None = None) -> Iterator[Chunk]:
        """The answer to `text`. Closing the iterator, or an interrupt, keeps the answer as far as it was given.

        A turn that got no answer at all (an error, an interrupted prefill) is taken back.
        """
        began = time.perf_counter()
        user: Message = {"role": "user", "content": text}
        rendered, prompt = self._render(user)
        overflow: dict[str, Any] = {}
        if self.options.get("overflow", "shift") == "shift":
            keep = self._keep_tokens(prompt)
            overflow = {"overflow": "shift", "keep": keep}
            if len(prompt) >= self.runner.context:
                shift = Shift(self.runner.context, keep)
                rendered, prompt = self._without_oldest(user, rendered, prompt, shift)
                if len(self.runner.tokenizer.encode_more(text)) >= shift.target_free:
                    overflow = {"overflow": "stop"}  # what a shift leaves would begin in the middle of this turn
        messages = [*self._system(), *self.messages[self._first :], user]
        prepared = Prepared(as_tokens(prompt), "messages", messages, rendered, seconds=time.perf_counter() - began)
        chunks = self.runner.generate(prepared, progress=progress, **(self.options | overflow))
        return self._answer(user, rendered, prompt, overflow.get("keep", 0), chunks)

    def _render(self, user: Message) -> tuple[str, list[int]]:
        """The conversation up to `user` as text and as tokens."""
        tokenizer = self.runner.tokenizer
        rendered = tokenizer.render([*self._system(), *self.messages[self._first :], user])
        if self._spelled and rendered.startswith(self._spelled):
            return rendered, self._tokens + tokenizer.encode_more(rendered[len(self._spelled) :])
        return rendered, tokenizer.encode(rendered)

    def _without_oldest(self, user: Message, rendered: str, prompt: list[int], shift: Shift) -> tuple[str, list[int]]:
        """Where the tokens can't simply go on, the oldest turns are not rendered any more, so that the next turns have room."""
        if self._spelled and rendered.startswith(self._spelled):
            return rendered, prompt
        while len(prompt) > self.runner.context - shift.target_free and self._first + 2 <= len(self.messages):
            self._first += 2
            rendered, prompt = self._render(user)
        return rendered, prompt

    def _keep_tokens(self, prompt: list[int]) -> int:
        """What a full context keeps: the system prompt with BOS, or what the options say."""
        keep: int | None = self.options.get("keep")
        return system_tokens(self.runner.tokenizer, self._system(), as_tokens(prompt)) if keep is None else keep

    def _system(self) -> list[Message]:
        return [{"role": "system", "content": self.system}] if self.system else []

    def _answer(self, user: Message, rendered: str, prompt: list[int], keep: int, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        shown: list[Chunk] = []
        try:
            for chunk in chunks:
                shown.append(chunk)
                if chunk.usage is not None:
                    self.usages.append(chunk.usage)
                yield chunk
        finally:
            chunks.close()  # type: ignore[attr-defined]  # a generator
            text = "".join(chunk.text for chunk in shown)
            if text or (shown and shown[-1].finish_reason is not None):
                self.messages += [user, {"role": "assistant", "content": text}]
                tokens = [chunk.token for chunk in shown if chunk.token is not None]
                self._go_on_from(rendered, text, prompt, tokens, keep)

    def _go_on_from(self, rendered: str, text: str, prompt: list[int], tokens: Sequence[int], keep: int) -> None:
        """Remember the tokens whose text was shown: not those of half a character, nor of a stop string or after it."""
        tokenizer = self.runner.tokenizer
        stream, spelled, count = tokenizer.stream(prompt[-8:]), "", 0
        for place, token in enumerate(tokens, 1):
            if token in tokenizer.stop_tokens and spelled == text and place == len(tokens):
                spelled, count = spelled + tokenizer.decode([token]), place
                break
            piece = stream.add(token)
            if not text.startswith(spelled + piece):
                break
            if piece:
                spelled, count = spelled + piece, place
        dropped = self.runner.shifted_tokens
        whole = [*prompt, *tokens[:count]]
        self._spelled, self._tokens = rendered + spelled, whole[:keep] + whole[keep + dropped :]
