"""Tokenizers that mlx-lm and transformers load."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlxrunner.errors import ModelError, OptionError, PromptError, reason
from mlxrunner.results import logger
from mlxrunner.system.foreign import failures_as_errors, foreign_code, is_failure
from mlxrunner.system.mlx_lm_internals import has_module, transformers_tokenizer
from mlxrunner.templates.chat_template import ChatTemplate
from mlxrunner.templates.messages import PlainMessage
from mlxrunner.templates.rendering import (
    FALLBACK_STOPS,
    PROCESSES,
    chosen_template,
    read_json,
    read_templates,
    render_jinja,
)
from mlxrunner.tokenizer.base import (
    FROM_CONFIG,
    DecodeStream,
    Ends,
    TemplateTokenizer,
    Vocabulary,
    check_ids,
    checked_text,
    letters_per_token,
    with_bos,
)

BYTE = re.compile("<0x([0-9A-F]{2})>")
PROBE = '{"a": [1, "b c"]}'
MODULES = {"chat_template_type": "chat_templates", "tool_parser_type": "tool_parsers"}
"""The settings of tokenizer_config.json that name a module of mlx-lm, and its package there."""
JSON_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


class HuggingFaceTokenizer(TemplateTokenizer):
    """A tokenizer of transformers, behind mlx-lm's TokenizerWrapper.

    The wrapper knows the chat templates and the end tokens.
    """

    def __init__(
        self,
        folder: Path,
        eos_tokens: Ends = MappingProxyType({}),
        stops: Sequence[str] = (),
        *,
        trust_remote_code: bool = False,
        of_processor: bool = False,
    ) -> None:
        """Load what is in `folder`; the other arguments are those of `load_tokenizer`."""
        config = read_json(folder / "tokenizer_config.json")
        templates = read_templates(folder, config, of_processor=of_processor)
        try:
            with foreign_code():
                self._load(folder, eos_tokens, templates, trust_remote_code)
        except Exception as error:
            for name in JSON_FILES:
                read_json(folder / name)  # raises the better error if this file is broken
            raise ModelError(
                f"{folder}: no tokenizer could be loaded: {_explain(folder, error)}"
            ) from error
        self.template_stops = (*stops, *(() if self._has_template else FALLBACK_STOPS))

    def _load(
        self,
        folder: Path,
        eos_tokens: Ends,
        templates: dict[str, str],
        trust_remote_code: bool,
    ) -> None:
        """Load the tokenizer, and try all functions once, so that a broken tokenizer fails here."""
        # Always pass `trust_remote_code`: without a value transformers asks on the terminal.
        settings: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        if templates:  # transformers' tokenizers don't know all places of templates
            is_one = templates.keys() == {"default"}
            settings["chat_template"] = templates["default"] if is_one else templates
        self._wrapper: Any = _wrapper_of(folder, settings, [*eos_tokens])
        _bound_template(self._wrapper)
        bos: int | None = self._wrapper.bos_token_id
        # Not read from the configuration, because the post-processor of tokenizer.json decides.
        wants_bos = bos is not None and self._wrapper.encode("a", add_special_tokens=True)[:1] == [
            bos
        ]
        self._bos = bos if wants_bos else None
        self._text_of = _decoder_of(self._wrapper)
        self._anchor = str(self._wrapper.eos_token or "")
        self._has_template = bool(self._wrapper.has_chat_template)
        self._template = ChatTemplate(self._apply if self._has_template else None)
        vocab = self._wrapper.get_vocab()
        check_ids(folder / "tokenizer.json", vocab.values())
        self._find_ends(
            eos_tokens,
            FROM_CONFIG,
            transformers_tokenizer(self._wrapper).eos_token_id,
            has_template=self._has_template,
            token_of=vocab.get,
        )
        check_ids(folder / "tokenizer.json", self.message_ends)
        self._encode(self._anchor + PROBE)
        self.decode(sorted(vocab.values()))  # a decoder may fail for a few tokens only

    @property
    def vocab_size(self) -> int:
        return len(self._wrapper)

    @cached_property
    def _marks(self) -> frozenset[int]:
        """The special and added tokens that are not white space alone."""
        added = self._wrapper.added_tokens_decoder
        special = {*self._wrapper.all_special_ids} - {*added}
        named = {token for token, one in added.items() if str(one).strip(" \t\r\n▁")}
        return frozenset(named | special)

    def _is_mark(self, token: int) -> bool:
        return token in self._marks

    def encode(self, text: str) -> list[int]:
        return with_bos(self._encode(checked_text(text)), self._bos)

    def encode_more(self, text: str) -> list[int]:
        # Encode it behind another token: a text's beginning would get a space in front.
        return self._encode(self._anchor + checked_text(text))[len(self._encode(self._anchor)) :]

    @cached_property
    def takers(self) -> frozenset[str]:
        """The tokens that take the white space after them, which then has no tokens of its own."""
        backend = getattr(transformers_tokenizer(self._wrapper), "backend_tokenizer", None)
        added = {} if backend is None else backend.get_added_tokens_decoder()
        return frozenset(one.content for one in added.values() if one.rstrip)

    def parts(self, text: str) -> list[str]:
        """Return `text` in parts that make the same tokens apart as together.

        The first is for `encode`, the others are for `encode_more`. Tokenizers without this method
        encode a text only as a whole.
        """
        ends = [] if self._cut is None else [found.end() for found in self._cut.finditer(text)]
        places = [0, *(end for end in ends if end < len(text)), len(text)]
        return [text[begin:end] for begin, end in pairwise(places)]

    @cached_property
    def _cut(self) -> re.Pattern[str] | None:
        """The ends of messages after which a text can be cut; None if there are none.

        A fast tokenizer of transformers finds special tokens before it does anything else, and
        encodes what is between them apart. Only tokens count that are always found where their text
        stands, whatever other tokens there are, and that take nothing from their neighbours.
        """
        backend = getattr(transformers_tokenizer(self._wrapper), "backend_tokenizer", None)
        if backend is None or backend.encode_special_tokens:
            return None
        added = backend.get_added_tokens_decoder()
        raw = {one.content for one in added.values() if not one.normalized}
        safe = {
            one.content: token
            for token, one in added.items()
            if not (one.normalized or one.lstrip or one.rstrip)
            and not any(_overlaps(other, one.content) for other in raw)
        }
        ends = [text for text, token in safe.items() if token in self.message_ends]
        if not ends or self._anchor not in safe or any(one.single_word for one in added.values()):
            return None
        return re.compile("|".join(map(re.escape, ends)))

    def decode(self, tokens: Sequence[int]) -> str:
        try:
            text = self._text_of(list(tokens))
        except BaseException as error:  # a panic is not an Exception
            if not is_failure(error):
                raise
            raise ModelError(
                f"the model's tokenizer can't decode its tokens: {reason(error)}"
            ) from error
        return str(text)

    def render_parts(self, messages: Sequence[Any]) -> str:
        """Return messages whose content is a list of parts. Raise what the template raises."""
        return self._apply(messages, True)

    def stream(self, context: Sequence[int]) -> DecodeStream:
        return DecodeStream(self.decode, context)

    @cached_property
    def letters_per_token(self) -> int | None:
        """The most letters of a token; None if a token may stand for any number of them.

        Code that comes with a model may change a text in its own way.
        """
        tokenizer = transformers_tokenizer(self._wrapper)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        is_known = type(tokenizer).__module__.startswith("transformers.")
        return letters_per_token(backend) if is_known and backend is not None else None

    @cached_property
    def vocabulary(self) -> Vocabulary:
        pieces = self._pieces()
        probe = self._encode(PROBE)
        if (
            b"".join(pieces[token] or b"" for token in probe).strip()
            != self.decode(probe).strip().encode()
        ):
            raise OptionError(
                "schema, choices: this model's tokenizer does not spell its tokens byte by byte, "
                "which they need"
            )
        return Vocabulary(pieces)

    def _pieces(self) -> list[bytes | None]:
        """Return the bytes of each token id; None for special and added tokens and for gaps."""
        vocab: dict[str, int] = self._wrapper.get_vocab()
        special = {*self._wrapper.all_special_ids, *self._wrapper.added_tokens_decoder}
        decoder = getattr(getattr(self._wrapper, "backend_tokenizer", None), "decoder", None)
        spell = _spell_byte_level() if "ByteLevel" in str(decoder) else _spell
        pieces: list[bytes | None] = [None] * (max(vocab.values()) + 1)
        for text, token in vocab.items():
            pieces[token] = None if token in special else spell(text)
        return pieces

    def _encode(self, text: str) -> list[int]:
        try:
            with failures_as_errors():
                return list(self._wrapper.encode(text, add_special_tokens=False, verbose=False))
        except Exception as error:
            raise PromptError(
                f"the model's tokenizer can't encode this text: {reason(error)}"
            ) from error

    def _apply(
        self, messages: Sequence[PlainMessage], add_generation_prompt: bool, /, **variables: Any
    ) -> str:
        text = self._wrapper.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, **variables
        )
        return str(text)


def _decoder_of(wrapper: Any) -> Callable[[list[int]], str]:
    """Return the function that decodes tokens as `decode` of transformers' tokenizer does.

    That of a fast tokenizer asks the Rust one after checks of its arguments, which take longer than
    the decoding and would be made twice for each token of an answer.
    """
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer := transformers_tokenizer(wrapper))
    is_plain = isinstance(tokenizer, PreTrainedTokenizerFast) and (
        (kind.decode, kind._decode)
        == (PreTrainedTokenizerFast.decode, PreTrainedTokenizerFast._decode)
    )
    if is_plain:
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=False)
    return partial(wrapper.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _wrapper_of(folder: Path, settings: dict[str, Any], eos_tokens: list[int]) -> Any:
    """Return mlx-lm's TokenizerWrapper. `settings` are those of transformers' tokenizer.

    transformers checks config.json, which it takes the model's type from, and refuses settings that
    mlx-lm runs. The tokenizer is then loaded with the type alone.
    """
    from mlx_lm.utils import load_tokenizer

    given = {**settings, **_without_missing_modules(folder)}
    ends = eos_tokens or None
    try:
        return load_tokenizer(folder, given, eos_token_ids=ends)
    except Exception:
        config = _config_in_place_of_a_refused_one(folder, settings["trust_remote_code"])
        if config is None:
            raise
    return load_tokenizer(folder, {**given, "config": config}, eos_token_ids=ends)


def _config_in_place_of_a_refused_one(folder: Path, trust_remote_code: bool) -> Any:
    """Return a configuration with the type of the model, or None if transformers takes its own."""
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

    try:
        AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception:  # of whatever library checks it
        settings = read_json(folder / "config.json")
    else:
        return None
    kind = settings.get("model_type")
    config = CONFIG_MAPPING[kind]() if kind in CONFIG_MAPPING else PretrainedConfig()
    if isinstance(named := settings.get("tokenizer_class"), str):
        config.tokenizer_class = named
    return config


def _without_missing_modules(folder: Path) -> dict[str, None]:
    """Return the settings to take back because they name modules that this mlx-lm lacks."""
    settings = read_json(folder / "tokenizer_config.json")
    missing = [
        name
        for name, package in MODULES.items()
        if settings.get(name) and not has_module(package, settings[name])
    ]
    for name in missing:
        logger.warning(
            "%s: %s is %.60r, which the installed mlx-lm lacks: it is ignored",
            *(folder / "tokenizer_config.json", name, settings[name]),
        )
    return dict.fromkeys(missing)


def _overlaps(other: str, text: str) -> bool:
    """Return True if the token `other` may be found where `text` stands, or runs into it."""
    if text != text.strip() or (text in other and text != other):
        return True
    return any(other.endswith(text[:count]) for count in range(1, len(text)))


def _bound_template(wrapper: Any) -> None:
    """Let transformers' tokenizer behind `wrapper` render in our sandbox.

    A tokenizer with its own renderer, which is not jinja, keeps it.
    """
    from transformers import PreTrainedTokenizerBase

    tokenizer = transformers_tokenizer(wrapper)
    if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
        return

    def apply_chat_template(
        messages: list[Any], *, add_generation_prompt: bool = False, tools: Any = None, **given: Any
    ) -> str:
        variables = {
            name: value for name, value in given.items() if name not in ("tokenize", "return_dict")
        }
        own = tokenizer.chat_template
        templates = own if isinstance(own, dict) else {"default": own or ""}
        template = chosen_template(templates, has_tools=bool(tools)) or ""
        return render_jinja(
            template,
            messages,
            add_generation_prompt,
            tools=tools,
            **{**tokenizer.special_tokens_map, **variables},
        )

    tokenizer.apply_chat_template = apply_chat_template
    PROCESSES.prepare()


def _spell(piece: str) -> bytes:
    """Return the bytes of a piece as SentencePiece writes it."""
    byte = BYTE.fullmatch(piece)
    return bytes.fromhex(byte[1]) if byte else piece.replace("▁", " ").encode()


def _spell_byte_level() -> Callable[[str], bytes | None]:
    """Return a function from a piece to its bytes, for pieces as GPT-2 writes them.

    GPT-2 writes each byte as one printable character.
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    return lambda piece: (
        bytes(byte_of[letter] for letter in piece) if byte_of.keys() >= set(piece) else None
    )


def _explain(folder: Path, error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if "trust_remote_code" in text:
        return "it wants to run Python code of its own; if you trust it, add --trust-remote-code"
    if not (folder / "tokenizer.json").exists():
        return f"neither tokenizer.json nor tokenizer.model is there ({text[:150]} ...)"
    return text[:300]
