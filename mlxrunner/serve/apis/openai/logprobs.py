"""Log-probabilities as OpenAI's APIs write them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from mlxrunner.batch.answers import IMPOSSIBLE
from mlxrunner.serve.events import Token

_BYTES = re.compile(r"bytes:((?:\\x[0-9a-f]{2})+)")


def chat_logprobs(tokens: Iterable[Token]) -> list[dict[str, Any]]:
    """Return the log-probabilities of tokens as chats and responses have them."""
    return [
        {
            **_shown(token.text, token.logprob),
            "top_logprobs": [_shown(text, logprob) for text, _, logprob in token.top],
        }
        for token in tokens
    ]


def _shown(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": max(logprob, IMPOSSIBLE), "bytes": list(_bytes(text))}


def _bytes(text: str) -> bytes:
    """Return the bytes of a token's text, which names them if they are part of a character."""
    found = _BYTES.fullmatch(text)
    return bytes.fromhex(found[1].replace("\\x", "")) if found else text.encode()


def text_logprobs(tokens: Iterable[Token], begin: int = 0) -> dict[str, Any]:
    """Return the log-probabilities of tokens as completions have them.

    The text of the first token begins at offset `begin` of the completion.
    """
    tokens = list(tokens)
    offsets, tops = [], []
    for token in tokens:
        offsets.append(begin)
        begin += len(token.text)
        # Of tokens that are spelled alike, the last one written counts: the likeliest.
        tops.append({text: max(logprob, IMPOSSIBLE) for text, _, logprob in reversed(token.top)})
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [max(token.logprob, IMPOSSIBLE) for token in tokens],
        "top_logprobs": tops,
        "text_offset": offsets,
    }
