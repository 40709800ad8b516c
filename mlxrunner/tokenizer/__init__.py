"""Text and tokens.

`load_tokenizer` picks the library; the rest of the program sees only the `Tokenizer` protocol.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mlxrunner.system.reading import is_there
from mlxrunner.tokenizer.base import Ends, TextStream, Tokenizer, check_tables, encode_after

__all__ = ["TextStream", "Tokenizer", "encode_after", "load_tokenizer"]


def load_tokenizer(
    folder: Path,
    eos_tokens: Ends | Iterable[int] = (),
    *,
    stops: Sequence[str] = (),
    trust_remote_code: bool = False,
    of_processor: bool = False,
) -> Tokenizer:
    """Load the tokenizer of a model directory.

    `eos_tokens`: tokens that end an answer according to the model's configuration, with the files
    that say so. `stops`: texts before which an answer ends. `of_processor`: prefer the chat
    template of the model's processor, as for pictures. A tokenizer.json is preferred to a
    tokenizer.model, because it also holds additions after the training. Raise ModelError if the
    tokenizer is missing or damaged.
    """
    check_tables(folder)
    if not isinstance(eos_tokens, Mapping):
        eos_tokens = dict.fromkeys(eos_tokens, ("given",))
    if is_there(folder / "tokenizer.model") and not is_there(folder / "tokenizer.json"):
        from mlxrunner.tokenizer.sentencepiece import SentencePieceTokenizer

        return SentencePieceTokenizer(folder, eos_tokens, stops, of_processor=of_processor)
    from mlxrunner.tokenizer.huggingface import HuggingFaceTokenizer

    return HuggingFaceTokenizer(
        folder,
        eos_tokens,
        stops,
        trust_remote_code=trust_remote_code,
        of_processor=of_processor,
    )
