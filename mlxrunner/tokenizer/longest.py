"""Refuse a text that can't fit into a context, before it is tokenized: that takes seconds.

A token stands for a limited number of letters, if the tokenizer has no token for what it doesn't
know and drops no letters. White space, signs and accents don't count: some tokenizers drop them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mlxrunner.errors import ContextLengthError

SHRINKS = 4
"""Most letters that a tokenizer may join into one before it looks for tokens: NFC joins three."""
CHUNK = 2**16
"""Characters that are looked at together."""
PLAIN = frozenset(
    "NFC NFD NFKC NFKD Lowercase Strip Prepend ByteLevel Metaspace Digits Sequence".split()
)
"""Normalizers and pre-tokenizers of the tokenizers library that drop no letters."""
CUTTING = frozenset({"Split", "Punctuation"})
"""Pre-tokenizers that drop nothing unless they remove what they find."""


def check_text(tokenizer: Any, text: str, context: int | None) -> None:
    """Raise ContextLengthError if `text` certainly has `context` tokens or more. None: no limit.

    `tokenizer.letters_per_token` is the most letters of a token, or None if there is no such limit.
    Without this attribute nothing is refused.
    """
    if context is None or len(text) < context * SHRINKS:  # finding the longest token takes time
        return
    most: int | None = getattr(tokenizer, "letters_per_token", None)
    least = context * (most or 0) * SHRINKS
    if 0 < least <= len(text) and _has_letters(text, least):
        raise ContextLengthError(context, context, is_least=True)


def _has_letters(text: str, count: int) -> bool:
    """Return True if at least `count` characters of `text` are letters or digits."""
    found = 0
    for at in range(0, len(text), CHUNK):
        found += sum(map(str.isalnum, text[at : at + CHUNK]))
        if found >= count:
            return True
    return False


def letters_per_token(backend: Any) -> int | None:
    """Return the most letters that a token of a tokenizer of the tokenizers library stands for.

    Return None if there is no such limit: a token may stand for all that is unknown, or letters may
    be dropped.
    """
    parts = [*_parts(backend.normalizer), *_parts(backend.pre_tokenizer)]
    vocab = backend.get_vocab(with_added_tokens=True)
    if type(backend.model).__name__ != "BPE" or not all(map(_drops_nothing, parts)):
        return None
    is_byte_level = any(part["type"] == "ByteLevel" for part in parts)
    bytes_known = is_byte_level and _has_all(vocab, _byte_letters())
    if not bytes_known and not (
        backend.model.byte_fallback and _has_all(vocab, (f"<0x{byte:02X}>" for byte in range(256)))
    ):
        return None
    return max(map(len, vocab))


def _parts(component: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a normalizer or a pre-tokenizer as tokenizer.json describes them."""
    todo = [] if component is None else [json.loads(component.__getstate__())]
    while todo:
        part = todo.pop()
        todo += [*part.get("normalizers", ()), *part.get("pretokenizers", ())]
        yield part


def _drops_nothing(part: Mapping[str, Any]) -> bool:
    if part["type"] == "Replace":
        replaced = part["pattern"].get("String")
        return replaced is not None and not any(map(str.isalnum, replaced))
    if part["type"] in CUTTING:
        return bool(part["behavior"] != "Removed")
    return part["type"] in PLAIN


def _has_all(vocab: Mapping[str, int], texts: Iterable[str]) -> bool:
    return all(text in vocab for text in texts)


def _byte_letters() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel.alphabet()
