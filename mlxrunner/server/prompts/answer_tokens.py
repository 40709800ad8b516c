"""Keep answers as they were generated, so that they come back as the tokens that were evaluated.

A client sends an answer back as text and JSON, and the template and the tokenizer may write it in
other tokens than the model did. Here its place in the rendered conversation is found, and filled
with the model's own tokens. That is done only where the text before it is the text that the model
continued, and where it says the same: the same text, thinking and calls. Of an answer that was cut
off, the client may have seen any beginning: so much of it is filled as says the same to the letter.
"""

from __future__ import annotations

import json
import os
from array import array
from base64 import b64decode, b64encode
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from threading import Lock, Timer
from typing import Any, NamedTuple

import numpy as np

from mlxrunner.cache.entry import TokenArray, as_tokens
from mlxrunner.errors import MlxrunnerError, ReadError
from mlxrunner.results import logger
from mlxrunner.server.prompts.rules import ENTRY, LRUCache, footprint
from mlxrunner.server.tools.reader import Calls, ParsedAnswer
from mlxrunner.system.reading import read_bytes
from mlxrunner.system.writing import open_own, whole_sync, write_all, written
from mlxrunner.templates.messages import common, common_end
from mlxrunner.tokenizer import Tokenizer
from mlxrunner.tokenizer.base import AnswerTokens, check_text, left_over

UNKNOWN = "\ue0f6\ue0f7"
"""Stands for an answer whose end is looked for: private characters, which no template changes."""
MOST_CACHE_BYTES, MOST_FORMS = 128_000_000, 4
"""Most bytes of answers that are kept, and most texts of one that the template may write."""


Read = Callable[[str, str], ParsedAnswer]
"""A function from the text before an answer, and an answer, to its parts."""


class AnswerTokenCache:
    """The answers of a model that may come back."""

    def __init__(self, most: int = MOST_CACHE_BYTES) -> None:
        """Begin without answers. At most `most` bytes are kept, of those used last."""
        self._most = most
        self._file: AnswerTokenFile | None = None
        self._turns: OrderedDict[bytes, list[CachedAnswer]] = OrderedDict()
        """The answers to each conversation, the newest last."""
        self._nbytes = 0
        self._lock = Lock()

    def __len__(self) -> int:
        return sum(map(len, self._turns.values()))

    @property
    def nbytes(self) -> int:
        """Bytes of all answers that are kept."""
        return self._nbytes

    def store_in(self, file: AnswerTokenFile) -> None:
        """Take the answers of `file`, and write new ones to it."""
        for link, turn in file.read():
            self._add(link, turn)
        self._file = file

    def keep(
        self,
        link: bytes,
        prompt: str,
        answer: AnswerTokens,
        said: ParsedAnswer,
        *,
        is_cut: bool = False,
    ) -> None:
        """Keep an answer to the conversation `link`, which was the text `prompt`.

        `is_cut`: its client left before its end.
        """
        if not answer.text or "\ufffd" in answer.text:
            return
        turn = CachedAnswer(len(prompt), _hash(prompt).digest(), answer, said, is_cut)
        if self._add(link, turn) and self._file is not None:
            self._file.add(link, turn)

    def _add(self, link: bytes, turn: CachedAnswer) -> bool:
        """Add an answer, or the forms that are new of one that is known. Return False then."""
        with self._lock:
            turns = self._turns.setdefault(link, [])
            self._turns.move_to_end(link)
            for known in turns:
                if (known.before, known.answer.text) == (turn.before, turn.answer.text):
                    turns.remove(known)
                    if np.array_equal(known.answer.tokens, turn.answer.tokens):
                        turns.append(known)
                        _learn(known, turn.known)
                        return False
                    self._nbytes -= known.nbytes  # the newest spelling is the one that is cached
                    break
            turns.append(turn)
            self._weigh(turn)
            return True

    def _weigh(self, turn: CachedAnswer) -> None:
        """Count the bytes of an answer, and drop others until all have room."""
        self._nbytes -= turn.nbytes
        turn.nbytes = 2 * ENTRY + footprint(turn)
        self._nbytes += turn.nbytes
        while self._nbytes > self._most and self._turns:
            link, turns = next(iter(self._turns.items()))
            self._nbytes -= turns.pop(0).nbytes
            if not turns:
                del self._turns[link]

    def fills(
        self,
        text: str,
        links: Sequence[bytes],
        without: Callable[[int], str | None],
        read: Read,
    ) -> list[TokenSpan]:
        """Return the places of kept answers in the rendered `text`, in order.

        `links`: a digest of the messages before each message. `without(i)`: the text with `UNKNOWN`
        in place of message `i`, or None if the template refuses that.
        """
        found, learned = list[TokenSpan](), list[tuple[bytes, CachedAnswer]]()
        hashed, at = _hash(""), 0
        for number, link, turn in self._candidates(links):
            if turn.length < at or (found and turn.length < found[-1].end):
                continue
            hashed.update(text[at : turn.length].encode(errors="surrogatepass"))
            at = turn.length
            if len(text) < at or hashed.digest() != turn.before:
                continue
            forms = turn.forms
            fill = _fill(text, number, turn, without, read)
            if fill is not None:
                found.append(fill)
                with self._lock:
                    if turn in self._turns.get(link, ()):
                        self._turns.move_to_end(link)
                        if turn.forms != forms:
                            self._weigh(turn)
                            learned.append((link, turn))
        if self._file is not None:
            for link, turn in learned:
                self._file.add(link, turn)
        return found

    def _candidates(self, links: Sequence[bytes]) -> list[tuple[int, bytes, CachedAnswer]]:
        """Return the kept answers to the beginnings of a conversation.

        The last of each come first, and those that were cut off after the others.
        """
        with self._lock:
            found = [
                (number, link, turn)
                for number, link in enumerate(links[:-1])
                for turn in reversed(self._turns.get(link, ()))
            ]
        return sorted(found, key=lambda one: (one[2].length, one[2].is_cut))


def _fill(
    text: str, number: int, turn: CachedAnswer, without: Callable[[int], str | None], read: Read
) -> TokenSpan | None:
    """Return the place of `turn`, message `number`, in `text`; None if it says something else."""
    begin, (said, tokens, _, closing, _) = turn.length, turn.answer
    if text.startswith(said + closing, begin):
        return TokenSpan(begin, begin + len(said), said, tokens)
    for form, fill in [*turn.known.items()]:  # another thread may add one
        if text.startswith(form, begin):
            return fill
    end = _end(text, begin, without(number))
    if end is None:
        return None
    if turn.is_cut:
        return turn.fill(begin, text[begin:end])
    # The end token of a call may end like that of a text, which stands in `unknown`.
    at = text.rfind(closing, begin, end + len(closing)) if closing else -1
    if at >= 0 and not text[at + len(closing) : end].strip():
        end = at
    filled = _checked(begin, end, turn, read(text[:begin], text[begin:end]))
    if filled is not None and closing and text.startswith(closing, end):
        _learn(turn, {text[begin:end] + closing: filled})
    return filled


def _learn(turn: CachedAnswer, forms: Mapping[str, TokenSpan]) -> None:
    """Remember fills by the text that the template writes for an answer."""
    turn.known |= forms
    turn.forms += len(forms)
    for form in [*turn.known][:-MOST_FORMS]:
        turn.known.pop(form, None)


def _checked(begin: int, end: int, turn: CachedAnswer, said: ParsedAnswer) -> TokenSpan | None:
    """Return the fill of a place that says `said`, or None if the turn said something else."""
    own = turn.said
    if said.text != own.text or not _are_same(own.calls, said.calls):
        return None
    if said.thinking == own.thinking:
        return TokenSpan(begin, end, turn.answer.text, turn.answer.tokens)
    rest = turn.after_thinking() if not said.begins else None
    if rest is None:
        return None
    at, first = rest
    return TokenSpan(begin, end, turn.answer.text[at:], turn.answer.tokens[first:])


def _are_same(own: Calls, written: Calls) -> bool:
    """Return True if calls are those of the model. It may have left out ids that others add."""
    return len(own) == len(written) and all(
        mine[:2] == call[:2] and mine[2] in (None, call[2])
        for mine, call in zip(own, written, strict=True)
    )


def _hash(text: str) -> blake2b:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16)


def _end(text: str, begin: int, unknown: str | None) -> int | None:
    """Return the end of an answer in `text`, which is `unknown` but for that answer."""
    if unknown is None or unknown.count(UNKNOWN) != 1:
        return None
    tail = unknown.partition(UNKNOWN)[2]
    return len(text) - common_end(text[begin:], tail)


@dataclass(eq=False)
class CachedAnswer:
    """An answer as it was generated."""

    length: int
    """Characters of the text that it continues."""
    before: bytes
    """Digest of that text."""
    answer: AnswerTokens
    said: ParsedAnswer
    is_cut: bool = False
    """True if the client left before its end."""
    known: dict[str, TokenSpan] = field(default_factory=dict)
    """Fills by the text that the template writes for this answer, with `closing` after it."""
    forms: int = 0
    """The number of texts that have been put into `known`."""
    nbytes: int = 0
    """Bytes in memory, at the last look."""

    def after_thinking(self) -> tuple[int, int] | None:
        """Return the number of characters and tokens up to the end of the thinking.

        None if there is none, or if no token ends there.
        """
        text, _, ends, *_ = self.answer
        at = len(text) - len(text[self.said.begins :].lstrip())
        index = bisect_left(ends, at)
        if self.said.begins == 0 or index >= len(ends) or ends[index] != at:
            return None
        return at, index + 1

    def fill(self, begin: int, said: str) -> TokenSpan | None:
        """Return the tokens that `said`, at the place `begin`, begins with; None if with none.

        The thinking may be missing there.
        """
        found = []
        for at, first in filter(None, ((0, 0), self.after_thinking())):
            text, tokens, *_ = self.answer
            end, count = self.answer.within(at + common(text[at:], said))
            if end > at:
                whole = text[at:end], tokens[first:count]
                found.append(TokenSpan(begin, begin + end - at, *whole))
        return max(found, key=lambda fill: fill.end, default=None)


NAME = "answers.jsonl"
MOST_FILE_BYTES = 2**24
"""Most bytes of a file. The older half of its answers is dropped then."""
DIGEST = 32
"""Characters of a digest."""
SYNC_S = 1.0
"""Seconds after which an answer is on the disk, also after a power cut."""


class AnswerTokenFile:
    """The answers of one model that may come back, in the folder of its parked conversations.

    One process at a time may use it: the one that has locked the folder.
    """

    def __init__(self, folder: Path, most: int = MOST_FILE_BYTES) -> None:
        self._path, self._most, self._lock, self._said = folder / NAME, most, Lock(), ""
        self._timer: Timer | None = None
        """The timer that forces the last answers to the disk."""

    def read(self) -> Iterator[tuple[bytes, CachedAnswer]]:
        """Yield the answers and the conversations that they answer, the oldest first.

        An answer comes again when the template has written it in another form.
        """
        try:
            lines = read_bytes(self._path, 2 * self._most).splitlines()
        except ReadError:  # missing, or not ours to read: there are none
            return
        for line in lines:
            found = _read(line)
            if found is not None:
                yield found

    def add(self, link: bytes, turn: CachedAnswer) -> None:
        """Write an answer to the conversation `link`. A failure costs only this answer on disk."""
        line = _line(link, turn)
        try:
            if 2 * len(line) > self._most:
                raise OSError(f"it takes {len(line):,} of at most {self._most // 2:,} bytes")
            with self._lock:
                descriptor = open_own(self._path, append=True)
                try:
                    size = os.fstat(descriptor).st_size
                    # A process that was killed may have left the beginning of a line.
                    is_cut = size and os.pread(descriptor, 1, size - 1) != b"\n"
                    write_all(descriptor, b"\n" + line if is_cut else line)
                finally:
                    os.close(descriptor)
                if size + len(line) > self._most:
                    self._drop_older()
                self._sync_soon()
        except (OSError, MlxrunnerError) as error:
            said = " ".join(str(error).split())
            if said != self._said:
                logger.warning("an answer will not be known after a restart: %s", said)
            self._said = said

    def _sync_soon(self) -> None:
        """Force what was written to the disk in a moment, in a thread."""
        if self._timer is None:
            self._timer = Timer(SYNC_S, self._sync)
            self._timer.daemon = True
            self._timer.start()

    def _sync(self) -> None:
        self._timer = None
        with suppress(OSError):
            descriptor = open_own(self._path, append=True, make=False)
            try:
                whole_sync(descriptor)
            finally:
                os.close(descriptor)

    def _drop_older(self) -> None:
        content = read_bytes(self._path, 4 * self._most)
        begin = content.find(b"\n", len(content) - self._most // 2) + 1
        with written(self._path, sync=False) as stream:
            stream.write(content[begin:].decode("ascii", "replace"))


def _line(link: bytes, turn: CachedAnswer) -> bytes:
    """Return an answer as a line. Its text may have half surrogates, which JSON escapes."""
    value = {
        "link": link.hex(),
        "length": turn.length,
        "before": turn.before.hex(),
        "text": turn.answer.text,
        "tokens": _packed(turn.answer.tokens),
        "ends": _packed(turn.answer.ends),
        "closing": turn.answer.closing,
        "said": asdict(turn.said),
        "is_cut": turn.is_cut,
        "known": [
            [form, fill.begin, fill.end, fill.text, _packed(fill.tokens)]
            for form, fill in [*turn.known.items()]
        ],
    }
    content = json.dumps(value, separators=(",", ":")).encode()
    return b"%s %s\n" % (_digest(content), content)


def _read(line: bytes) -> tuple[bytes, CachedAnswer] | None:
    digest, _, content = line.partition(b" ")
    if digest != _digest(content):
        return None
    value: dict[str, Any] = json.loads(content)
    said = value.pop("said")
    said["calls"] = tuple((name, arguments, id_) for name, arguments, id_ in said["calls"])
    link = bytes.fromhex(value.pop("link"))
    known = {
        written: TokenSpan(begin, end, text, as_tokens(_numbers(tokens)))
        for written, begin, end, text, tokens in value.pop("known")
    }
    answer = AnswerTokens(
        value["text"],
        as_tokens(_numbers(value["tokens"])),
        array("q", _numbers(value["ends"]).tolist()),
        value["closing"],
    )
    before, parsed = bytes.fromhex(value["before"]), ParsedAnswer(**said)
    found = (value["length"], before, answer, parsed, value["is_cut"], known)
    return link, CachedAnswer(*found, forms=len(known))


def _packed(numbers: Sequence[int] | TokenArray) -> str:
    """Return numbers as text: base64 of 32 bits each."""
    return b64encode(np.asarray(numbers, "<i4").tobytes()).decode()


def _numbers(packed: str) -> TokenArray:
    return np.frombuffer(b64decode(packed), "<i4").astype(np.int32)


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=DIGEST // 2).hexdigest().encode()


MOST_ENCODED_BYTES = 64_000_000
"""Most bytes of texts whose tokens are remembered, and of the tokens."""


class TokenSpan(NamedTuple):
    """A place in a rendered text, and what the model wrote there."""

    begin: int
    end: int
    text: str
    tokens: TokenArray


class PromptEncoder:
    """Encodes texts in pieces, and remembers the tokens of each. Any thread may use it."""

    def __init__(self, tokenizer: Tokenizer, most: int = MOST_ENCODED_BYTES) -> None:
        """Encode with `tokenizer`, and remember texts and tokens of at most `most` bytes."""
        self._tokenizer = tokenizer
        self._known = LRUCache[TokenArray](most)

    def encode(
        self, text: str, fills: Sequence[TokenSpan], context: int | None = None
    ) -> tuple[TokenArray, str]:
        """Return the tokens of `text` with `fills` in their places, and their text.

        Raise ContextLengthError if they are certainly `context` tokens or more. None: no limit.
        """
        begins = [0, *(fill.end for fill in fills)]
        ends = [*(fill.begin for fill in fills), len(text)]
        others = [text[begin:end] for begin, end in zip(begins, ends, strict=True)]
        check_text(self._tokenizer, "".join(others), context)
        arrays, texts = [self._piece(others[0], True)], others[:1]
        for fill, other in zip(fills, others[1:], strict=True):
            own = left_over(self._tokenizer, fill.text, other)
            arrays += [fill.tokens, self._piece(own, False)]
            texts += [fill.text, other]
        return np.concatenate(arrays), "".join(texts)

    def _piece(self, text: str, is_first: bool) -> TokenArray:
        known = self._known.get((is_first, text))
        if known is not None:
            return known
        parts_of = getattr(self._tokenizer, "parts", None)
        parts: list[str] = [text] if parts_of is None else parts_of(text)
        if len(parts) == 1:
            encode = self._tokenizer.encode if is_first else self._tokenizer.encode_more
            tokens = as_tokens(encode(text))
        else:
            pieces = [self._piece(part, is_first and n == 0) for n, part in enumerate(parts)]
            tokens = np.concatenate(pieces)
        self._known.put((is_first, text), tokens)
        return tokens


def digest(value: Any) -> bytes:
    """Return the digest of a JSON value. The order of its keys does not count."""
    return _hash(json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)).digest()


def message_digest(message: Mapping[str, Any]) -> bytes:
    """Return the digest of what a message says and shows.

    Thinking, ids and white space around it do not count.
    """
    content = str(message.get("content") or "").strip()
    calls = [
        [call["function"]["name"], call["function"]["arguments"]]
        for call in message.get("tool_calls") or ()
    ]
    pictures = [message["pictures"]] if message.get("pictures") else []
    if not (calls or pictures):
        return _hash(f"{message['role']}\0{content}").digest()
    return digest([message["role"], content, calls, *pictures])


def chain(digests: Sequence[bytes]) -> list[bytes]:
    """Return a digest of the messages before each message, and of all."""
    links = [b""]
    for one in digests:
        links.append(blake2b(links[-1] + one, digest_size=16).digest())
    return links
