"""What can be given as a prompt, and its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from mlxrunner.cache.tokens import TokenArray, as_tokens, common_prefix
from mlxrunner.errors import PromptError
from mlxrunner.tokenizer.base import Message, Tokenizer

Prompt = str | Sequence[int] | Sequence[Message]
"""Raw text, token ids, or messages for the chat template."""


def tokenize(tokenizer: Tokenizer, prompt: Prompt) -> TokenArray:
    """A `str` is raw text, integers are taken as they are, messages go through the chat template."""
    if isinstance(prompt, str):
        return as_tokens(tokenizer.encode(prompt))
    if not isinstance(prompt, Sequence | np.ndarray):
        raise PromptError(f"a prompt is a text, token ids or messages, not {type(prompt).__name__}")
    if len(prompt) and isinstance(prompt[0], dict):
        return as_tokens(tokenizer.encode(tokenizer.render(prompt)))  # type: ignore[arg-type]
    return as_tokens(prompt)  # type: ignore[arg-type]


def system_tokens(tokenizer: Tokenizer, prompt: Prompt, tokens: TokenArray) -> int:
    """How many of a prompt's first `tokens` are its system prompt with BOS, or BOS alone: what a full context keeps."""
    first = tokenizer.encode("")
    messages: Any = prompt
    if not isinstance(prompt, str) and len(prompt) and isinstance(messages[0], dict) and messages[0].get("role") == "system":
        with suppress(PromptError):  # a template that refuses a system prompt alone
            first = tokenizer.encode(tokenizer.render(messages[:1], add_generation_prompt=False))
    return common_prefix(as_tokens(first), tokens)
