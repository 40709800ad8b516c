"""What can be given as a prompt, and its tokens."""

from __future__ import annotations

from collections.abc import Sequence

from mlxrunner.cache.tokens import TokenArray, as_tokens
from mlxrunner.tokenizer.base import Message, Tokenizer

Prompt = str | Sequence[int] | Sequence[Message]
"""Raw text, token ids, or messages for the chat template."""


def tokenize(tokenizer: Tokenizer, prompt: Prompt) -> TokenArray:
    """A `str` is raw text, integers are taken as they are, messages go through the chat template."""
    if isinstance(prompt, str):
        return as_tokens(tokenizer.encode(prompt))
    if len(prompt) and isinstance(prompt[0], dict):
        return as_tokens(tokenizer.encode(tokenizer.render(prompt)))  # type: ignore[arg-type]
    return as_tokens(prompt)  # type: ignore[arg-type]
