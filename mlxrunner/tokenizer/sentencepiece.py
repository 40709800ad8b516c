"""Tokenizers that sentencepiece reads from a `tokenizer.model`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlxrunner.errors import ModelError
from mlxrunner.templates.chat_template import ChatTemplate
from mlxrunner.templates.rendering import (
    FALLBACK_STOPS,
    jinja_renderer,
    read_json,
    read_templates,
)
from mlxrunner.tokenizer.base import (
    FROM_CONFIG,
    ByteStream,
    Ends,
    TemplateTokenizer,
    Vocabulary,
    checked_text,
    with_bos,
)

SPACE = "▁"
RULES = frozenset({"identity", "nfkc", "nmt_nfkc", "nfkc_cf", "nmt_nfkc_cf"})
"""Rules of SentencePiece that drop no letters, and join three at most."""


class SentencePieceTokenizer(TemplateTokenizer):
    """A tokenizer of SentencePiece, with special tokens and the model's chat template.

    The special tokens come from tokenizer_config.json and added_tokens.json.
    """

    def __init__(
        self,
        folder: Path,
        eos_tokens: Ends = MappingProxyType({}),
        stops: Sequence[str] = (),
        *,
        of_processor: bool = False,
    ) -> None:
        """Load what is in `folder`; the other arguments are those of `load_tokenizer`."""
        import sentencepiece

        file = folder / "tokenizer.model"
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(file))
        except (RuntimeError, OSError) as error:
            raise ModelError(f"{file}: not a SentencePiece model, or damaged") from error
        config = read_json(folder / "tokenizer_config.json")
        self._pieces: int = self._model.get_piece_size()
        decoder = config.get("added_tokens_decoder")
        entries = [
            (token, one["content"], one)
            for token, one in (decoder.items() if isinstance(decoder, dict) else ())
            if isinstance(one, dict) and isinstance(one.get("content"), str)
        ]
        control = filter(self._model.is_control, range(self._pieces))
        self._special: dict[str, int] = {self._model.id_to_piece(one): one for one in control}
        added = read_json(folder / "added_tokens.json")
        self._special |= {text: token for text, token in added.items() if isinstance(token, int)}
        self._special |= {text: int(token) for token, text, _ in entries if token.isdecimal()}
        self._special.pop("", None)
        # Tokens that take the white space after them, or before them.
        self.takers = frozenset(text for _, text, one in entries if one.get("rstrip") is True)
        before = {text for _, text, one in entries if one.get("lstrip") is True}
        space = r"\s*"
        # Longest first: a token may begin like another one.
        alternatives = "|".join(
            space * (text in before) + re.escape(text) + space * (text in self.takers)
            for text in sorted(self._special, key=len, reverse=True)
        )
        self._split = re.compile(f"({alternatives})") if alternatives else None
        self._texts = {token: text for text, token in self._special.items()}
        bos, eos = (
            self._named(config, "bos_token", self._model.bos_id()),
            self._named(config, "eos_token", self._model.eos_id()),
        )
        self._bos = bos if config.get("add_bos_token", True) else None
        templates = read_templates(folder, config, of_processor=of_processor)
        names = {"bos_token": self._text(bos), "eos_token": self._text(eos)}
        self._template = ChatTemplate(jinja_renderer(templates, names) if templates else None)
        self.template_stops = (*stops, *(() if templates else FALLBACK_STOPS))
        self._find_ends(
            eos_tokens,
            FROM_CONFIG if config.get("eos_token") else file.name,
            eos,
            has_template=bool(templates),
            token_of=lambda text: self._special.get(text, self._piece(text)),
        )

    @property
    def vocab_size(self) -> int:
        return max(self._pieces, *(token + 1 for token in self._texts), 0)

    def encode(self, text: str) -> list[int]:
        return with_bos(self.encode_more(text), self._bos)

    def encode_more(self, text: str) -> list[int]:
        tokens: list[int] = []
        text = checked_text(text)
        for part in self._split.split(text) if self._split else [text]:
            special = self._special.get(part, self._special.get(part.strip()))
            if special is not None:
                tokens.append(special)
            elif part:
                tokens.extend(self._model.encode(part))
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        text = b"".join(map(self.piece_bytes, tokens)).decode("utf-8", "replace")
        return text[1:] if self._adds_prefix and text.startswith(" ") else text

    def stream(self, context: Sequence[int]) -> ByteStream:
        return ByteStream(self.piece_bytes, context)

    def piece_bytes(self, token: int) -> bytes:
        """Return the bytes of a token; none for a token beyond the vocabulary."""
        if token in self._texts:
            return self._texts[token].encode()
        if not 0 <= token < self._pieces:
            return b""
        piece: str = self._model.id_to_piece(token)
        if self._model.is_byte(token):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(SPACE, " ").encode()

    @property
    def _has_own_rules(self) -> bool:
        """True if texts are normalized by rules that are not those of SentencePiece."""
        from sentencepiece.sentencepiece_model_pb2 import ModelProto  # protobuf comes with mlx-lm

        rules = ModelProto.FromString(self._model.serialized_model_proto()).normalizer_spec
        return bool(rules.precompiled_charsmap) and rules.name not in RULES

    @cached_property
    def letters_per_token(self) -> int | None:
        """The most letters of a token; None if a token may stand for any number of them.

        It does for all that is unknown, or where a model's own rules drop or join letters.
        """
        pieces = range(self._pieces)
        if not any(map(self._model.is_byte, pieces)) or self._has_own_rules:
            return None
        return max(len(text) for text in (*map(self._model.id_to_piece, pieces), *self._special))

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(
            [
                None if self._is_mark(token) else self.piece_bytes(token)
                for token in range(self.vocab_size)
            ]
        )

    def _is_mark(self, token: int) -> bool:
        """Return True for a token that is not text.

        Such a token is special, unknown, unused, or a symbol that looks like one of these.
        """
        if token in self._texts or token >= self._pieces:
            return True
        if self._model.is_byte(token):
            return False
        piece: str = self._model.id_to_piece(token)
        looks_like_one = len(piece) > 2 and piece.startswith("<") and piece.endswith(">")
        return looks_like_one or bool(self._model.is_unknown(token) or self._model.is_unused(token))

    @cached_property
    def _adds_prefix(self) -> bool:
        """True if the model puts a space in front of a text, which decoding has to remove."""
        return bool(self._model.encode("a", out_type=str)[0].startswith(SPACE))

    def _named(self, config: dict[str, Any], name: str, default: int) -> int | None:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str) and text:
            return self._special.get(text, self._piece(text))
        return default if default >= 0 else None

    def _piece(self, text: str) -> int | None:
        token: int = self._model.piece_to_id(text)
        return None if token == self._model.unk_id() else token

    def _text(self, token: int | None) -> str:
        return (
            "" if token is None else self._texts.get(token) or str(self._model.id_to_piece(token))
        )
