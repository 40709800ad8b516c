"""The protocol of tokenizers, the parts that all share, and text that grows token by token."""

from __future__ import annotations

import codecs
import json
import sys
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, islice
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from mlxrunner.errors import ContextLengthError, ModelError, OptionError, PromptError, ReadError
from mlxrunner.system.imports import how_to_install
from mlxrunner.system.reading import is_there, read_bytes
from mlxrunner.templates.chat_template import ChatTemplate
from mlxrunner.templates.messages import PlainMessage, check_messages, common, overlap
from mlxrunner.templates.probe import turn_ends
from mlxrunner.templates.rendering import END_OF_MESSAGE, MOST_JSON, read_json

if TYPE_CHECKING:
    from mlxrunner.cache.entry import TokenArray
    from mlxrunner.results import Chunk


MOST_SPACE = 4096
"""Most characters at the end of a text in which a token that takes white space is looked for."""


class TextStream(Protocol):
    """A converter of tokens into text, one at a time.

    It yields whole characters, and keeps leading spaces.
    """

    def add(self, token: int) -> str:
        """Return the text that this token completes."""
        ...

    def finish(self) -> str:
        """Return the rest, with U+FFFD for an incomplete character."""
        ...


FROM_CONFIG, FROM_TEMPLATE = "tokenizer_config.json", "chat template"
"""Places that say which tokens end an answer."""
Ends = Mapping[int, tuple[str, ...]]
"""The places that say so, for each token that ends an answer."""


IN_UTF8 = {bytes([byte]) for byte in range(256)} - {
    bytes([byte]) for byte in (0xC0, 0xC1, *range(0xF5, 0x100))
}


class Vocabulary:
    """The bytes of each token id, and llguidance's form of them, which is computed once."""

    def __init__(self, pieces: Sequence[bytes | None]) -> None:
        """Wrap `pieces`, the bytes of each token.

        The bytes are None for a token that is not text (BOS, the end of a turn).
        """
        self.pieces = pieces

    @cached_property
    def guide(self) -> Any:
        """The vocabulary in llguidance's form. Computing it takes a second per 100,000 tokens.

        Its end token is one after the last, which no model has. The stop tokens of a request
        decide where an answer may end.
        """
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(_Library(self.pieces)))

    @cached_property
    def _tokens(self) -> dict[bytes, int]:
        """A token for each piece."""
        return {piece: token for token, piece in enumerate(self.pieces) if piece}

    def can_spell(self, text: str) -> bool:
        """Return True if some sequence of tokens is exactly `text`."""
        known, data = self._tokens, text.encode()
        if known.keys() >= IN_UTF8:
            return True
        longest = max(map(len, known), default=0)
        ends = [True]  # at n: the first n bytes can be spelled
        for end in range(1, len(data) + 1):
            begins = range(max(0, end - longest), end)
            ends.append(any(ends[begin] and data[begin:end] in known for begin in begins))
        return ends[-1]

    def spelled(self, text: str) -> list[int]:
        """Return tokens of one character or byte each that are `text`; none if it has others."""
        known = self._tokens
        letters = (letter.encode() for letter in text)
        pieces = [
            piece
            for data in letters
            for piece in ([data] if data in known else (bytes([byte]) for byte in data))
        ]
        return [known[piece] for piece in pieces] if all(map(known.__contains__, pieces)) else []


class _Library:
    """The attributes of a tokenizer that llguidance reads."""

    bos_token_id = None
    special_token_ids: Sequence[int] = ()

    def __init__(self, pieces: Sequence[bytes | None]) -> None:
        self.tokens = [*(piece or b"" for piece in pieces), b"\xff<end>"]
        self.eos_token_id = len(pieces)

    def __call__(self, text: str) -> list[int]:
        """Fail: llguidance only tokenizes forced text, and there is none (`constrain.HEAD`)."""
        raise AssertionError("the model decides how a text is spelled")


def library() -> Any:
    """Return the module llguidance. Raise OptionError if it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise OptionError(
            "schema, choices: answers in a given form need llguidance, which is not installed: "
            f"{how_to_install('structured')}"
        ) from error
    return llguidance


class Tokenizer(Protocol):
    """A converter between text and token ids that also renders the chat template."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Tokens that end an answer."""
        ...

    @property
    def ends(self) -> Ends:
        """The places that name each of `stop_tokens`, such as "config.json"."""
        ...

    @property
    def message_ends(self) -> frozenset[int]:
        """Tokens that end a message of any role. The next prompt may differ from there on."""
        ...

    @property
    def template_stops(self) -> tuple[str, ...]:
        """Texts before which an answer ends: the model's own, and those of the fallback template.

        The model's are `stop_strings` of generation_config.json.
        """
        ...

    def encode(self, text: str) -> list[int]:
        """Encode text with its special tokens, and put one BOS in front if the model uses it.

        Raise PromptError if `text` is not valid Unicode.
        """
        ...

    def encode_more(self, text: str) -> list[int]:
        """Encode text that follows other tokens, without BOS."""
        ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def render(
        self,
        messages: Sequence[PlainMessage],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Return the conversation as the model's chat template writes it.

        `variables`: the other variables of the template, such as `enable_thinking` or `tools`.
        Raise PromptError if the template refuses the conversation.
        """
        ...

    def stream(self, context: Sequence[int]) -> TextStream:
        """Return a stream for the tokens that follow `context`."""
        ...

    @property
    def vocabulary(self) -> Vocabulary:
        """The bytes of each token, computed on first use.

        Raise OptionError if the tokens are not made of bytes.
        """
        ...


def encode_after(tokenizer: Tokenizer, before: str, text: str) -> list[int]:
    """Encode `text`, which follows the text `before`, as if both were encoded together."""
    return tokenizer.encode_more(left_over(tokenizer, before, text))


def left_over(tokenizer: Tokenizer, before: str, text: str) -> str:
    """Return `text` without the white space that a token at the end of `before` takes.

    Some tokenizers have `takers`, the texts of such tokens.
    """
    takers: frozenset[str] = getattr(tokenizer, "takers", frozenset())
    takes = takers and text[:1].isspace() and before[-MOST_SPACE:].rstrip().endswith(tuple(takers))
    return text.lstrip() if takes else text


def checked_text(text: str) -> str:
    """Return `text` if it is valid Unicode, and raise PromptError otherwise.

    Half characters (lone surrogates) come from text that is not in the encoding of the locale.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        encoding = sys.getfilesystemencoding()
        raise PromptError(
            f"the text is not valid Unicode: {error.reason} at character {error.start}; "
            + ("is it UTF-8?" if encoding == "utf-8" else f"read as {encoding}: set PYTHONUTF8=1")
        ) from error
    return text


def with_bos(tokens: list[int], bos: int | None) -> list[int]:
    """Return `tokens` with BOS in front, unless it is there already."""
    return tokens if bos is None or tokens[:1] == [bos] else [bos, *tokens]


class TemplateTokenizer(ABC):
    """The part of a tokenizer that renders a model's chat template, and knows what ends answers."""

    _template: ChatTemplate
    encode_more: Callable[[str], list[int]]

    def _find_ends(
        self,
        given: Ends,
        place: str,
        own: int | None,
        *,
        has_template: bool,
        token_of: Callable[[str], int | None],
    ) -> None:
        """Find the tokens that end answers and messages.

        `given`: those that the model's configuration names. `own`: the one that the tokenizer's
        files name, at `place`. `token_of` returns the token with a text, or None.
        """
        written: frozenset[int] = frozenset()
        if has_template:
            written = turn_ends(self._template.unchecked, self.encode_more, self._is_mark)
        ends = dict(given)
        for at, tokens in ((place, {own} - {None}), (FROM_TEMPLATE, written)):
            for token in sorted(cast(set[int], tokens)):
                ends[token] = (*ends.get(token, ()), at)
        self.ends: Ends = ends
        self.stop_tokens = frozenset(self.ends)
        named = {token_of(text) for text in END_OF_MESSAGE} - {None}
        self.message_ends: frozenset[int] = self.stop_tokens | cast(set[int], named)

    @abstractmethod
    def _is_mark(self, token: int) -> bool:
        """Return True for a token that is not text."""

    def render(
        self,
        messages: Sequence[PlainMessage],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        return self._template.text(
            messages, add_generation_prompt=add_generation_prompt, **variables
        )


VOCAB = 300
"""Number of token ids; those from 256 to 297 stand for nothing."""
EOS = 299
"""The token that ends a message and an answer. In a text it is the byte 0x1E (record separator)."""
BOS = 298
"""The token that begins each encoded text."""


class ByteTokenizer:
    """A tokenizer with one token per UTF-8 byte.

    Its chat template has one line per message: `role: text`, then EOS. It has the members of
    `mlxrunner.tokenizer.Tokenizer`.
    """

    vocab_size = VOCAB
    stop_tokens = frozenset({EOS})
    message_ends = frozenset({EOS})
    ends: Mapping[int, tuple[str, ...]] = MappingProxyType({EOS: ("tokenizer",)})
    template_stops: tuple[str, ...] = ()
    letters_per_token = 1

    def encode(self, text: str) -> list[int]:
        """Return BOS and the tokens of `text`. Raise PromptError if `text` is not valid Unicode."""
        return [BOS, *self.encode_more(text)]

    def encode_more(self, text: str) -> list[int]:
        """Return the tokens of `text` alone: its bytes, and EOS for each byte 0x1E."""
        tokens: list[int] = []
        for index, part in enumerate(checked_text(text).split("\x1e")):
            tokens += [EOS] * (index > 0) + list(part.encode())
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`; U+FFFD stands for bytes that are not valid UTF-8."""
        return b"".join(map(self._bytes, tokens)).decode("utf-8", "replace")

    def render(
        self,
        messages: Sequence[PlainMessage],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Return the conversation as one text. `variables` of the template are ignored."""
        text = "".join(
            f"{message['role']}: {message['content']}\x1e" for message in check_messages(messages)
        )
        return text + ("assistant: " if add_generation_prompt else "")

    def stream(self, context: Sequence[int]) -> ByteStream:
        """Return a decoder for tokens that come one at a time; it needs no `context`."""
        return ByteStream(self._bytes)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The bytes of each token, for answers in a form."""
        return Vocabulary([*(bytes([byte]) for byte in range(256)), *[None] * (VOCAB - 256)])

    @staticmethod
    def _bytes(token: int) -> bytes:
        return bytes([token]) if token < 256 else b"\x1e" if token == EOS else b""


INCOMPLETE = "\ufffd"
LONGEST_CHARACTER = 4
"""Bytes of the longest character, which is also the most tokens of a character."""
MOST_PENDING = 2 * LONGEST_CHARACTER
CONTEXT = 6


class ByteStream:
    """The stream of a tokenizer whose tokens are byte strings.

    It is exact even if `context` ends within a character.
    """

    def __init__(self, piece_bytes: Callable[[int], bytes], context: Sequence[int] = ()) -> None:
        self._piece_bytes = piece_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(b"".join(map(piece_bytes, context[-CONTEXT:])))

    def add(self, token: int) -> str:
        return self._decoder.decode(self._piece_bytes(token))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class DecodeStream:
    """The stream of any tokenizer with a `decode` function.

    It compares the text of a few tokens with and without the new one. The last tokens before the
    answer are decoded, too, because a decoder may strip the space of the first word.
    """

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int]) -> None:
        self._decode = decode
        self._shown = [int(token) for token in context[-CONTEXT:]]
        while self._shown and decode(self._shown).startswith(INCOMPLETE):  # cut within a character
            del self._shown[0]
        self._shown_text = decode(self._shown)
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        self._pending.append(token)
        text = self._text(len(self._pending))
        if not text.endswith(INCOMPLETE):
            return self._show(len(self._pending), text)
        if len(self._pending) < MOST_PENDING:
            return ""
        # All characters so far are broken. Show all but the last tokens, which may begin a whole
        # character.
        for count in range(len(self._pending) - LONGEST_CHARACTER + 1, 0, -1):
            if text.startswith(whole := self._text(count)):
                return self._show(count, whole)
        return ""

    def finish(self) -> str:
        return self._show(len(self._pending), self._text(len(self._pending)))

    def _text(self, count: int) -> str:
        """Return the text that the first `count` pending tokens add."""
        pending = self._pending[:count]
        text = self._decode(self._shown + pending)
        if text.startswith(self._shown_text):
            return text[len(self._shown_text) :]
        return self._decode(pending)  # this decoder also drops the bytes before a broken one

    def _show(self, count: int, text: str) -> str:
        shown, self._pending = self._pending[:count], self._pending[count:]
        shown_text = self._decode(shown)
        if shown_text:  # else keep the earlier tokens, which decide about a leading space
            self._shown, self._shown_text = shown, shown_text
        return text


class StopScanner:
    """A scanner that cuts a text before a stop string, and holds back a possible start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def add(self, text: str) -> str:
        """Return the text that may be shown now.

        After a match `stopped` is True, and no more text may be added.
        """
        if not self._stops:
            return text
        held = self._held + text
        # Take the match that ends first: it does not depend on how the text was cut.
        found = [
            (place + len(stop), place) for stop in self._stops if (place := held.find(stop)) >= 0
        ]
        if found:
            self.stopped, self._held = True, ""
            return held[: min(found)[1]]
        keep = max(overlap(held, stop) for stop in self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def finish(self) -> str:
        """Return the text that was held back and is not a stop string."""
        held, self._held = self._held, ""
        return held


class AnswerTokens(NamedTuple):
    """The tokens of an answer as they were generated, as far as their text was shown."""

    text: str
    """The text of the tokens."""
    tokens: TokenArray
    ends: Sequence[int]
    """The number of characters up to each token's end."""
    closing: str = ""
    """The text of the token that ended the answer, or nothing."""
    closing_token: int | None = None

    @classmethod
    def of(
        cls, chunks: Sequence[Chunk], tokenizer: Tokenizer, context: Sequence[int]
    ) -> AnswerTokens:
        """Return the tokens of an answer after the tokens `context`.

        Those of half a character, of a stop string, and after that are left out.
        """
        from mlxrunner.cache.entry import as_tokens  # with numpy, which completion has not

        shown = "".join(chunk.text for chunk in chunks)
        tokens = [chunk.token for chunk in chunks if chunk.token is not None]
        last = tokens.pop() if tokens and tokens[-1] in tokenizer.stop_tokens else None
        texts = [chunk.text for chunk in chunks[: len(tokens)]]
        if last is None or "".join(texts) != shown:
            stream = tokenizer.stream(context)
            texts = [stream.add(token) for token in tokens]
        whole = cls("".join(texts), as_tokens(tokens), array("q", accumulate(map(len, texts))))
        if last is not None and whole.text == shown:
            return whole._replace(closing=tokenizer.decode([last]), closing_token=last)
        end, count = whole.within(common(whole.text, shown))
        return cls(shown[:end], whole.tokens[:count], whole.ends[:count])

    def within(self, most: int) -> tuple[int, int]:
        """Return the most characters, up to `most`, that tokens end with, and those tokens."""
        count = bisect_right(self.ends, most)
        end = self.ends[count - 1] if count else 0
        # Later tokens with the same end begin a character.
        return end, bisect_left(self.ends, end) + 1 if end else 0


SHRINKS = 4
"""Most letters that a tokenizer may join into one before it looks for tokens: NFC joins three."""
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
    letters = filter(str.isalnum, text)
    if 0 < least <= len(text) and next(islice(letters, least - 1, None), None) is not None:
        raise ContextLengthError(context, context, is_least=True)


def letters_per_token(backend: Any) -> int | None:
    """Return the most letters that a token of a tokenizer of the tokenizers library stands for.

    Return None if there is no such limit: a token may stand for all that is unknown, or letters may
    be dropped.
    """
    parts = [*_parts(backend.normalizer), *_parts(backend.pre_tokenizer)]
    vocab = backend.get_vocab(with_added_tokens=True)
    if type(backend.model).__name__ != "BPE" or not all(map(_drops_nothing, parts)):
        return None
    letters = set[str]()
    if any(part["type"] == "ByteLevel" for part in parts):
        from tokenizers.pre_tokenizers import ByteLevel

        letters = set(ByteLevel.alphabet())
    names = {f"<0x{byte:02X}>" for byte in range(256)} if backend.model.byte_fallback else set()
    if not any(spelling and vocab.keys() >= spelling for spelling in (letters, names)):
        return None  # a byte may be unknown
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


MOST_SPECIAL = 2**15
"""Most special tokens of a model. Some speech models have 28,000."""
MOST_NAMED = 2**12
"""Most tokens listed as `additional_special_tokens`, which take longest to load."""
LAST_TOKEN = 2**22 - 1
"""The highest token id. The largest vocabularies in use have a million tokens."""


def check_tables(folder: Path) -> None:
    """Raise ModelError if a file of `folder` has too many special tokens, or too high ids."""
    settings_file, added_file = folder / "tokenizer_config.json", folder / "added_tokens.json"
    settings, added = read_json(settings_file), read_json(added_file)
    decoder = settings.get("added_tokens_decoder")
    decoder = decoder if isinstance(decoder, dict) else {}
    _check_count(settings_file, "added_tokens_decoder", len(decoder), MOST_SPECIAL)
    short = (token for token in decoder if token.isdecimal() and len(token) < 100)
    check_ids(settings_file, map(int, short))
    _check_count(added_file, "the file", len(added), MOST_SPECIAL)
    check_ids(added_file, (token for token in added.values() if type(token) is int))
    map_file = folder / "special_tokens_map.json"
    for file, table in ((settings_file, settings), (map_file, read_json(map_file))):
        for setting in ("additional_special_tokens", "extra_special_tokens"):
            named = table.get(setting)
            if isinstance(named, list | dict):
                _check_count(file, setting, len(named), MOST_NAMED)
    file = folder / "tokenizer.json"
    if is_there(file):
        try:
            count = read_bytes(file, MOST_JSON).count(b'"special"')
        except ReadError as error:
            raise ModelError(str(error)) from error
        _check_count(file, "the file", count, MOST_SPECIAL)


def check_ids(file: Path, tokens: Iterable[int]) -> None:
    """Raise ModelError for an id that no vocabulary has. The message names `file`."""
    wrong = next((token for token in tokens if not 0 <= token <= LAST_TOKEN), None)
    if wrong is not None:
        shown = wrong if abs(wrong) < 10**20 else "a number of more than 20 digits"
        raise ModelError(
            f"{file}: a token has the id {shown}, and {LAST_TOKEN:,} is the last that one can have"
        )


def _check_count(file: Path, name: str, count: int, most: int) -> None:
    if count > most:
        raise ModelError(
            f"{file}: {name} has {count:,} special tokens, and {most:,} are the most: "
            "loading them would take minutes"
        )
