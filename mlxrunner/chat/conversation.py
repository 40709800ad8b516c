"""A conversation whose history is the tokens that were evaluated, not a text that is tokenized again each turn.

A model may split a word otherwise than the tokenizer would; then the text of an answer, tokenized again, would leave the entry in the
middle of the last turn. So a turn appends only its own tokens wherever the template's rendering goes on from what was evaluated.
Knows nothing about terminals.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from mlxrunner.cache.tokens import as_tokens, common_prefix
from mlxrunner.errors import PromptError
from mlxrunner.events import Chunk, Usage
from mlxrunner.pipeline import Progress
from mlxrunner.runner import Runner
from mlxrunner.tokenizer import Message


@dataclass
class Conversation:
    """`options`: those of `Runner.generate`. `usages`: one for each finished turn."""

    runner: Runner
    system: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    usages: list[Usage] = field(default_factory=list)
    _spelled: str = ""
    _tokens: list[int] = field(default_factory=list)

    def clear(self) -> None:
        """Forget the turns; the system prompt stays, and so does what the entry can reuse of it."""
        self.messages.clear()
        self._spelled, self._tokens = "", []

    def send(self, text: str, progress: Progress | None = None) -> Iterator[Chunk]:
        """The answer to `text`. Closing the iterator, or an interrupt, keeps the answer as far as it was given.

        A turn that got no answer at all (an error, an interrupted prefill) is taken back.
        """
        user: Message = {"role": "user", "content": text}
        rendered = self.runner.tokenizer.render([*self._system(), *self.messages, user])
        prompt = self._encode(rendered)
        chunks = self.runner.generate(prompt, progress=progress, **(self.options | self._overflow(prompt)))
        return self._answer(user, rendered, prompt, chunks)

    def _overflow(self, prompt: list[int]) -> dict[str, Any]:
        """A full context goes on without its oldest turns; the system prompt stays, and the new turn has to fit whole."""
        if self.options.get("overflow", "shift") != "shift":
            return {}
        kept = self.options.get("keep")
        if kept is None:
            kept = common_prefix(as_tokens(self._system_tokens()), as_tokens(prompt))
        turn = len(prompt) - common_prefix(as_tokens(self._tokens), as_tokens(prompt))
        if len(prompt) >= self.runner.context and turn > (self.runner.context - kept) // 2:
            return {"overflow": "stop"}  # what a shift leaves would begin in the middle of this turn
        return {"overflow": "shift", "keep": kept}

    def _system_tokens(self) -> list[int]:
        """The system prompt with BOS, or BOS alone."""
        tokenizer = self.runner.tokenizer
        if self.system:
            with suppress(PromptError):  # a template that refuses a system prompt alone
                return tokenizer.encode(tokenizer.render(self._system(), add_generation_prompt=False))
        return tokenizer.encode("")

    def _system(self) -> list[Message]:
        return [{"role": "system", "content": self.system}] if self.system else []

    def _encode(self, rendered: str) -> list[int]:
        tokenizer = self.runner.tokenizer
        if self._spelled and rendered.startswith(self._spelled):
            return self._tokens + tokenizer.encode_more(rendered[len(self._spelled) :])
        return tokenizer.encode(rendered)

    def _answer(self, user: Message, rendered: str, prompt: list[int], chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        shown: list[Chunk] = []
        try:
            for chunk in chunks:
                shown.append(chunk)
                if chunk.usage is not None:
                    self.usages.append(chunk.usage)
                yield chunk
        finally:
            chunks.close()  # type: ignore[attr-defined]  # a generator
            if shown:
                self._keep(user, rendered, prompt, shown)

    def _keep(self, user: Message, rendered: str, prompt: list[int], shown: Sequence[Chunk]) -> None:
        text = "".join(chunk.text for chunk in shown)
        tokens = [chunk.token for chunk in shown if chunk.token is not None]
        self.messages += [user, {"role": "assistant", "content": text}]
        last = shown[-1]
        if last.finish_reason == "stop" and not last.text and last.token in self.runner.tokenizer.stop_tokens:
            self._spelled = rendered + text + self.runner.tokenizer.decode([last.token])
        elif last.finish_reason != "stop":
            # Ended by the limit or by the reader: tokens whose text is still held back were not shown.
            while shown and not shown[-1].text:
                shown = shown[:-1]
            self._spelled, tokens = rendered + text, tokens[: len(shown)]
        else:  # a stop string: the tokens say more than the text
            self._spelled, self._tokens = "", []
            return
        self._tokens = self._without_what_was_shifted_out(prompt + tokens)

    def _without_what_was_shifted_out(self, tokens: list[int]) -> list[int]:
        """The conversation's tokens as the entry has them, where a full context has made it drop some."""
        entry = list(self.runner.entry.tokens)
        if common_prefix(as_tokens(entry), as_tokens(tokens)) >= min(len(entry), len(tokens)):
            return tokens
        # The entry may lack the last token, which nobody asked to go on from.
        return entry if entry[-1:] == tokens[-1:] else [*entry, *tokens[-1:]]
