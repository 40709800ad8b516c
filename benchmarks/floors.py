"""The floor of a trace: the tokens that no server avoids that reuses what it has evaluated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from traces import Ask

from mlxrunner.cache.entry import TokenArray, as_tokens, common_prefix
from mlxrunner.templates.messages import CheckedMessages
from mlxrunner.tokenizer import load_tokenizer


class Floor:
    """A server that keeps all it has ever evaluated, and reuses it up to the first difference."""

    def __init__(self, folder: Path) -> None:
        """Begin with nothing, for the model in `folder`."""
        self._tokenizer = load_tokenizer(folder)
        self._known: list[TokenArray] = []

    def ask(self, ask: Ask, answer: str) -> int:
        """Return the prompt tokens that a request evaluates, and keep its prompt and its answer.

        One at least is evaluated: the answer needs its logits.
        """
        plain: Any = ask.messages
        messages = CheckedMessages(plain)
        more: dict[str, Any] = {"tools": list(ask.tools)} if ask.tools else {}
        prompt = self._tokenizer.render(messages, enable_thinking=ask.thinks, **more)
        tokens = as_tokens(self._tokenizer.encode(prompt))
        shared = max((common_prefix(tokens, known) for known in self._known), default=0)
        self._known.append(as_tokens(self._tokenizer.encode(prompt + answer)))
        return len(tokens) - min(shared, len(tokens) - 1)
