"""Keep answers as they were generated, so that they come back as the tokens that were evaluated.

A client sends an answer back as text and JSON, and the template and the tokenizer may write it in
other tokens than the model did. Here its place in the rendered conversation is found, and filled
with the model's own tokens. That is done only where the text before it is the text that the model
continued, and where it says the same: the same text, thinking and calls. Of an answer that was cut
off, the client may have seen any beginning: so much of it is filled as says the same to the letter.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from mlxrunner.cache.tokens import TokenArray, as_tokens
from mlxrunner.results import Chunk
from mlxrunner.serve.prompts.encoding import Fill
from mlxrunner.serve.prompts.kept_file import KeptFile
from mlxrunner.serve.prompts.reader import Calls, Said
from mlxrunner.serve.prompts.turn import Turn
from mlxrunner.templates.remembered import ENTRY, footprint
from mlxrunner.tokenizer import Tokenizer

UNKNOWN = "\ue0f6\ue0f7"
"""Stands for an answer whose end is looked for: private characters, which no template changes."""
MOST_BYTES = 128_000_000
"""Most bytes of answers that are kept."""
MOST_FORMS = 4
"""Most texts that the template may write for an answer, whose places are known."""


Read = Callable[[str, str], Said]
"""A function from the text before an answer, and an answer, to its parts."""


class KeptTurns:
    """The answers of a model that may come back."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        """Begin without answers. At most `most` bytes are kept, of those used last."""
        self._most = most
        self._file: KeptFile | None = None
        self._turns: OrderedDict[tuple[bytes, int], Turn] = OrderedDict()
        self._places: dict[bytes, list[int]] = {}
        self._number = self._nbytes = 0
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def nbytes(self) -> int:
        """Bytes of all answers that are kept."""
        return self._nbytes

    def store_in(self, file: KeptFile) -> None:
        """Take the answers of `file`, and write new ones to it."""
        for link, turn in file.read():
            self._add(link, turn)
        self._file = file

    def keep(
        self, link: bytes, prompt: str, answer: Answer, said: Said, *, is_cut: bool = False
    ) -> None:
        """Keep an answer to the conversation `link`, which was the text `prompt`.

        `is_cut`: its client left before its end.
        """
        if not answer.text or "\ufffd" in answer.text:
            return
        turn = Turn(
            len(prompt),
            _hash(prompt).digest(),
            answer.text,
            answer.tokens,
            answer.ends,
            answer.closing,
            said,
            is_cut,
        )
        if self._add(link, turn) and self._file is not None:
            self._file.add(link, turn)

    def _add(self, link: bytes, turn: Turn) -> bool:
        """Add an answer, or the forms that are new of one that is known. Return False then."""
        with self._lock:
            for number in tuple(self._places.get(link, ())):
                known = self._turns[link, number]
                if (known.before, known.text) != (turn.before, turn.text):
                    continue
                self._places[link].remove(number)
                self._places[link].append(number)
                self._turns.move_to_end((link, number))
                if np.array_equal(known.tokens, turn.tokens):
                    _learn(known, turn.known)
                    return False
                self._nbytes -= known.nbytes  # the newest spelling is the one that is cached
                self._turns[link, number] = turn
                self._weigh(turn)
                return True
            self._number += 1
            self._turns[link, self._number] = turn
            self._places.setdefault(link, []).append(self._number)
            self._weigh(turn)
            return True

    def _weigh(self, turn: Turn) -> None:
        """Count the bytes of an answer, and drop others until all have room."""
        self._nbytes -= turn.nbytes
        turn.nbytes = 2 * ENTRY + footprint(turn)
        self._nbytes += turn.nbytes
        while self._nbytes > self._most and self._turns:
            self._drop(next(iter(self._turns)))

    def _drop(self, key: tuple[bytes, int]) -> None:
        self._nbytes -= self._turns.pop(key).nbytes
        numbers = self._places[key[0]]
        numbers.remove(key[1])
        if not numbers:
            del self._places[key[0]]

    def fills(
        self,
        text: str,
        links: Sequence[bytes],
        without: Callable[[int], str | None],
        read: Read,
    ) -> list[Fill]:
        """Return the places of kept answers in the rendered `text`, in order.

        `links`: a digest of the messages before each message. `without(i)`: the text with `UNKNOWN`
        in place of message `i`, or None if the template refuses that.
        """
        found, learned = list[Fill](), list[tuple[bytes, Turn]]()
        hashed, at = _hash(""), 0
        for number, key, turn in self._candidates(links):
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
                    if key in self._turns:
                        self._turns.move_to_end(key)
                        if turn.forms != forms:
                            self._weigh(turn)
                            learned.append((key[0], turn))
        if self._file is not None:
            for link, turn in learned:
                self._file.add(link, turn)
        return found

    def _candidates(self, links: Sequence[bytes]) -> list[tuple[int, tuple[bytes, int], Turn]]:
        """Return the kept answers to the beginnings of a conversation.

        The last of each come first, and those that were cut off behind the others.
        """
        with self._lock:
            found = [
                (number, (link, place), self._turns[link, place])
                for number, link in enumerate(links[:-1])
                for place in reversed(self._places.get(link, ()))
            ]
        return sorted(found, key=lambda one: (one[2].length, one[2].is_cut))


def _fill(
    text: str, number: int, turn: Turn, without: Callable[[int], str | None], read: Read
) -> Fill | None:
    """Return the place of `turn`, message `number`, in `text`; None if it says something else."""
    begin = turn.length
    if text.startswith(turn.text + turn.closing, begin):
        return Fill(begin, begin + len(turn.text), turn.text, turn.tokens)
    for written, fill in [*turn.known.items()]:  # another thread may add one
        if text.startswith(written, begin):
            return fill
    end = _end(text, begin, without(number))
    if end is None:
        return None
    if turn.is_cut:
        return turn.fill(begin, text[begin:end])
    # The end token of a call may end like that of a text, which stands in `unknown`.
    at = text.rfind(turn.closing, begin, end + len(turn.closing)) if turn.closing else -1
    if at >= 0 and not text[at + len(turn.closing) : end].strip():
        end = at
    filled = _checked(begin, end, turn, read(text[:begin], text[begin:end]))
    if filled is not None and turn.closing and text.startswith(turn.closing, end):
        _learn(turn, {text[begin:end] + turn.closing: filled})
    return filled


def _learn(turn: Turn, forms: Mapping[str, Fill]) -> None:
    """Remember fills by the text that the template writes for an answer."""
    turn.known |= forms
    turn.forms += len(forms)
    for written in [*turn.known][:-MOST_FORMS]:
        turn.known.pop(written, None)


def _checked(begin: int, end: int, turn: Turn, said: Said) -> Fill | None:
    """Return the fill of a place that says `said`, or None if the turn said something else."""
    own = turn.said
    if said.text != own.text or not _are_same(own.calls, said.calls):
        return None
    if said.thinking == own.thinking:
        return Fill(begin, end, turn.text, turn.tokens)
    rest = turn.after_thinking() if not said.begins else None
    if rest is None:
        return None
    at, first = rest
    return Fill(begin, end, turn.text[at:], turn.tokens[first:])


def _are_same(own: Calls, written: Calls) -> bool:
    """Return True if calls are those of the model. It may have left out ids that others add."""
    return len(own) == len(written) and all(
        mine[:2] == call[:2] and mine[2] in (None, call[2])
        for mine, call in zip(own, written, strict=True)
    )


class Answer(NamedTuple):
    """The tokens of an answer, and their text."""

    text: str
    tokens: TokenArray
    ends: Sequence[int]
    closing: str

    @classmethod
    def of(
        cls,
        chunks: Sequence[Chunk],
        tokenizer: Tokenizer,
        context: Sequence[int],
        *,
        is_cut: bool = False,
    ) -> Answer:
        """Return the answer that `chunks` make, up to a stop string, behind `context`.

        It is empty if it ends within a token. `is_cut`: its client left before its end.
        """
        text = "".join(chunk.text for chunk in chunks)
        tokens = [chunk.token for chunk in chunks if chunk.token is not None]
        if is_cut:
            texts = _texts(tokenizer, tokens, context)
            return cls("".join(texts), as_tokens(tokens), _ends(texts), "")
        closing = ""
        if tokens and tokens[-1] in tokenizer.stop_tokens:
            closing = tokenizer.decode([tokens.pop()])
        ends = _ends([chunk.text for chunk in chunks])[: len(tokens)]
        if "".join(chunk.text for chunk in chunks[: len(tokens)]) != text or not closing:
            ends = _ends(_texts(tokenizer, tokens, context))
            if len(text) not in ends:
                return cls("", as_tokens([]), [], "")
            count = ends.index(len(text)) + 1
            tokens, ends = tokens[:count], ends[:count]
        return cls(text, as_tokens(tokens), ends, closing)


def _texts(tokenizer: Tokenizer, tokens: Sequence[int], context: Sequence[int]) -> list[str]:
    """Return the text that each token completes."""
    stream = tokenizer.stream(context)
    return [stream.add(token) for token in tokens]


def _ends(texts: Sequence[str]) -> Sequence[int]:
    """Return the number of characters up to each text's end."""
    return array("q", accumulate(map(len, texts)))


def _hash(text: str) -> Any:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16)


def _end(text: str, begin: int, unknown: str | None) -> int | None:
    """Return the end of an answer in `text`, which is `unknown` but for that answer."""
    if unknown is None or unknown.count(UNKNOWN) != 1:
        return None
    tail = unknown.partition(UNKNOWN)[2]
    return len(text) - common_end(text[begin:], tail)


def common_end(a: str, b: str) -> int:
    """Return the length of the longest common end of two texts."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a.endswith(b[len(b) - middle :]):
            low = middle
        else:
            high = middle - 1
    return low
