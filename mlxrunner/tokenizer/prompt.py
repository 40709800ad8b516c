"""What can be given as a prompt, and its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from mlxrunner.cache.lookup import Earlier
from mlxrunner.cache.tokens import TokenArray, as_tokens, common_prefix
from mlxrunner.errors import PromptError
from mlxrunner.tokenizer.base import Message, Tokenizer


@dataclass(frozen=True, eq=False)
class Prepared:
    """A prompt with its tokens and what they were made of: `messages` and the `text` that the chat template made of them (with
    `variables`, where it was given some); of a raw prompt, only the text. `seconds`: what a caller has taken for that, which is part of
    the request's time. `earlier`: of a line of a batch, what lines before it have of it."""

    tokens: TokenArray
    kind: Literal["messages", "text", "tokens"] = "tokens"
    messages: Sequence[Message] = ()
    text: str = ""
    variables: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    earlier: Earlier | None = None


Prompt = str | Sequence[int] | Sequence[Message] | Prepared
"""Raw text, token ids, messages for the chat template, or one of these prepared by the caller."""


def tokenize(tokenizer: Tokenizer, prompt: Prompt) -> TokenArray:
    """A `str` is raw text, integers are taken as they are, messages go through the chat template."""
    return prepare(tokenizer, prompt).tokens


def prepare(tokenizer: Tokenizer, prompt: Prompt) -> Prepared:
    """The tokens of `prompt`, and what they were made of."""
    if isinstance(prompt, Prepared):
        return prompt
    if isinstance(prompt, str):
        return Prepared(as_tokens(tokenizer.encode(prompt)), "text", text=prompt)
    if not isinstance(prompt, Sequence | np.ndarray):
        raise PromptError(f"a prompt is a text, token ids or messages, not {type(prompt).__name__}")
    if len(prompt) and isinstance(prompt[0], dict):
        messages: Any = tuple(
            dict(message) if isinstance(message, dict) else message for message in prompt
        )
        text = tokenizer.render(messages)
        return Prepared(as_tokens(tokenizer.encode(text)), "messages", messages, text)
    return Prepared(as_tokens(prompt))  # type: ignore[arg-type]


def system_tokens(tokenizer: Tokenizer, prompt: Prompt, tokens: TokenArray) -> int:
    """How many of a prompt's first `tokens` are its system prompt with BOS, or BOS alone: what a full context keeps."""
    first = tokenizer.encode("")
    messages: Any = (prompt.messages or prompt.tokens) if isinstance(prompt, Prepared) else prompt
    if (
        not isinstance(messages, str)
        and len(messages)
        and isinstance(messages[0], dict)
        and messages[0].get("role") == "system"
    ):
        with suppress(PromptError):  # a template that refuses a system prompt alone
            first = tokenizer.encode(tokenizer.render(messages[:1], add_generation_prompt=False))
    return common_prefix(as_tokens(first), tokens)
