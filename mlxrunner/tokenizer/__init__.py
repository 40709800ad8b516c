"""Text and tokens. `load_tokenizer` picks the library; the rest of the program sees only the `Tokenizer` protocol."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mlxrunner.reading import is_there
from mlxrunner.tokenizer.base import Message, TextStream, Tokenizer
from mlxrunner.tokenizer.tables import check_tables

__all__ = ["Message", "TextStream", "Tokenizer", "load_tokenizer"]


def load_tokenizer(
    folder: Path, eos_tokens: Iterable[int] = (), *, trust_remote_code: bool = False
) -> Tokenizer:
    """The tokenizer of a model directory; `eos_tokens`: what the model's configuration says ends an answer.

    A tokenizer.json wins where there is one: it also holds what the publisher added after training the tokenizer.model.
    ModelError where no tokenizer is there or it is damaged.
    """
    check_tables(folder)
    if is_there(folder / "tokenizer.model") and not is_there(folder / "tokenizer.json"):
        from mlxrunner.tokenizer.sentencepiece import SentencePieceTokenizer

        return SentencePieceTokenizer(folder, eos_tokens)
    from mlxrunner.tokenizer.huggingface import HuggingFaceTokenizer

    return HuggingFaceTokenizer(folder, eos_tokens, trust_remote_code=trust_remote_code)
