"""Refuse a text that can't fit into a context, before it is tokenized: that takes seconds.

A token stands for a limited number of letters, if the tokenizer has no token for what it doesn't
know and drops no letters. White space, signs and accents don't count: some tokenizers drop them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mlxrunner.errors import ContextLengthError, ModelError, ReadError
from mlxrunner.system.reading import is_there, read_bytes
from mlxrunner.templates.rendering import MOST_JSON, read_json

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


MOST_SPECIAL = 2**15
"""Most special tokens of a model. Some speech models have 28,000."""
MOST_NAMED = 2**12
"""Most tokens listed as `additional_special_tokens`, which take longest to load."""
LAST_TOKEN = 2**22 - 1
"""The highest token id. The largest vocabularies in use have a million tokens."""


def check_tables(folder: Path) -> None:
    """Raise ModelError if a file of `folder` has too many special tokens, or too high ids."""
    settings, added = (
        read_json(folder / "tokenizer_config.json"),
        read_json(folder / "added_tokens.json"),
    )
    decoder = _of(settings, "added_tokens_decoder", dict)
    _check_count(
        folder / "tokenizer_config.json", "added_tokens_decoder", len(decoder), MOST_SPECIAL
    )
    check_ids(
        folder / "tokenizer_config.json",
        (int(token) for token in decoder if token.isdecimal() and len(token) < 100),
    )
    _check_count(folder / "added_tokens.json", "the file", len(added), MOST_SPECIAL)
    check_ids(
        folder / "added_tokens.json", (token for token in added.values() if type(token) is int)
    )
    for name, table in (
        ("tokenizer_config.json", settings),
        ("special_tokens_map.json", read_json(folder / "special_tokens_map.json")),
    ):
        for setting in ("additional_special_tokens", "extra_special_tokens"):
            _check_count(folder / name, setting, len(_of(table, setting, (list, dict))), MOST_NAMED)
    file = folder / "tokenizer.json"
    if is_there(file):
        try:
            _check_count(
                file, "the file", read_bytes(file, MOST_JSON).count(b'"special"'), MOST_SPECIAL
            )
        except ReadError as error:
            raise ModelError(str(error)) from error


def check_ids(file: Path, tokens: Iterable[int]) -> None:
    """Raise ModelError for an id that no vocabulary has. The message names `file`."""
    wrong = next((token for token in tokens if not 0 <= token <= LAST_TOKEN), None)
    if wrong is not None:
        shown = wrong if abs(wrong) < 10**20 else "a number of more than 20 digits"
        raise ModelError(
            f"{file}: a token has the id {shown}, and {LAST_TOKEN:,} is the last that one can have"
        )


def _of(table: dict[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    found = table.get(name)
    return found if isinstance(found, kind) else ()


def _check_count(file: Path, name: str, count: int, most: int) -> None:
    if count > most:
        raise ModelError(
            f"{file}: {name} has {count:,} special tokens, and {most:,} are the most: "
            "loading them would take minutes"
        )
