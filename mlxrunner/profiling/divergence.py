"""Where a prompt and the entry part, said in the words of the conversation. No tensors, and no work unless something was lost.

Which token it is the lookup knows. Which message and part that token belongs to is found afterwards, from the text: as few tokens as
possible are decoded to get from an index among the tokens to a character of the rendered conversation, and that is looked up among the
segments of the template. What the template can't tell is left open, never guessed.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxrunner.cache.lookup import WINDOW, Lookup
from mlxrunner.cache.tokens import TokenArray
from mlxrunner.profiling.segments import Place, Rendered, common, is_thinking
from mlxrunner.tokenizer import Tokenizer
from mlxrunner.tokenizer.prompt import Prepared
from mlxrunner.tokenizer.thinking import THINKING

COMMON = 8
"""Tokens that are shown of what both sides share."""
_LONGEST_MARK = max(len(begin) for begin, _ in THINKING)


@dataclass
class Divergences:
    """Places the divergences of one runner's requests; remembers what the entry's prompt was made of until the next request.

    `log_text`: also show the tokens' text, not only their hashes. These are keyed with a random key that is never stored, as the tokens
    of a vocabulary could be found by trying all of them.
    """

    tokenizer: Tokenizer
    log_text: bool = False

    def __post_init__(self) -> None:
        self._key = secrets.token_bytes(16)
        self.forget()

    def follow(self, prepared: Prepared) -> None:
        """What the entry holds now was made of this."""
        self._before = prepared

    def forget(self) -> None:
        """What the entry holds now was made of something else."""
        self._before = Prepared(np.empty(0, np.int32))

    def describe(
        self, prepared: Prepared, prompt: TokenArray, lookup: Lookup
    ) -> dict[str, Any] | None:
        """The `divergence` of an event; None where the prompt goes on as the entry does, or one of them ends."""
        index = lookup.matched
        if lookup.entry_tokens == 0 or index >= min(len(prompt), lookup.entry_tokens):
            return None
        if lookup.is_restored:
            self.forget()
        dropped, coming = list(lookup.dropped), prompt[index : index + WINDOW].tolist()
        here, before = self._places(prepared, prompt, index, dropped)
        place = here if here.part is not None else before
        shared = prompt[max(0, index - COMMON) : index].tolist()
        return {
            "index": index,
            **place._asdict(),
            "common": {"tokens": self._hashes(shared), "text": self._text(shared)},
            "previous": {
                **before._asdict(),
                "tokens": self._hashes(dropped),
                "text": self._text(dropped),
            },
            "current": {
                **here._asdict(),
                "tokens": self._hashes(coming),
                "text": self._text(coming),
            },
        }

    def _places(
        self, prepared: Prepared, prompt: TokenArray, index: int, dropped: Sequence[int]
    ) -> tuple[Place, Place]:
        """Where the first characters that differ lie, in the prompt and in the entry."""
        at = self._character(prepared, prompt, index)
        if at is None:
            return self._place(prepared, None), Place()
        before, text = self._before, prepared.text
        known = before.text[:at] == text[: len(before.text)][:at]
        old = self._goes_on(before.text[at:] if known else "", dropped)
        same = common(old, text[at:])
        if (
            same == len(old)
        ):  # the same text in other tokens, farther than is remembered: where the first two tokens part
            same = common(
                *(
                    self.tokenizer.decode(tokens[:1])
                    for tokens in (dropped, prompt[index:].tolist())
                )
            )
        at, old = min(at + same, len(text) - 1), old[same:]
        here = self._place(prepared, at)
        if not known:
            return here, Place()
        if at < len(before.text):
            return here, self._place(before, at)
        if not before.messages:
            return here, Place(part="text" if before.kind == "text" else None)
        return here, Place(
            len(before.messages),
            "assistant",
            self._part_of_answer(text[len(before.text) : at], old),
        )

    def _goes_on(self, rest: str, dropped: Sequence[int]) -> str:
        """Return the text of the entry from a place on: the `rest` of its prompt and its answer, as far as the `dropped` tokens go."""
        spelled = self.tokenizer.decode(dropped)
        return spelled if spelled.startswith(rest) else rest or spelled

    def _part_of_answer(self, begun: str, rest: str) -> str:
        """Return the part that `rest` begins with, after the `begun` part of an answer, which may have opened a thinking block."""
        shared = self._before.text[-_LONGEST_MARK:] + begun
        if is_thinking(shared + rest, len(shared)):
            return "thinking"
        ends = (self.tokenizer.decode([token]) for token in self.tokenizer.message_ends)
        whole = shared + rest
        is_end = any(
            whole.startswith(end, begin)
            for end in ends
            if end
            for begin in range(max(0, len(shared) - len(end) + 1), len(shared) + 1)
        )
        return "message_end" if is_end else "text"

    def _place(self, prepared: Prepared, at: int | None) -> Place:
        if at is None or prepared.kind == "tokens":
            return Place()
        if prepared.kind == "text":
            return Place(part="text" if at < len(prepared.text) else None)
        return Rendered(
            self.tokenizer.render, prepared.messages, prepared.text, prepared.variables
        ).place(at)

    def _character(self, prepared: Prepared, prompt: TokenArray, index: int) -> int | None:
        """The index in the text at which token `index` begins; None where the tokens don't spell the text."""
        text, decode = prepared.text, self.tokenizer.decode
        if not text:
            return None
        if len(prompt) - index <= index:
            return _from_end(text, decode(prompt[index:].tolist()))
        begins = decode(prompt[:index].tolist())
        at = _from_begin(text, begins)
        if at is None and index:  # a BOS that the tokenizer put in front
            at = _from_begin(text, begins.removeprefix(decode(prompt[:1].tolist())))
        return at

    def _hashes(self, tokens: Sequence[int]) -> list[str]:
        return [
            hashlib.blake2b(token.to_bytes(4, "little"), digest_size=4, key=self._key).hexdigest()
            for token in tokens
        ]

    def _text(self, tokens: Sequence[int]) -> str | None:
        return self.tokenizer.decode(tokens) if self.log_text else None


def _from_begin(text: str, decoded: str) -> int | None:
    """How many characters of `text` the `decoded` tokens spell; a decoder may drop or add spaces, and halve a character at the end."""
    whole = decoded.rstrip("\ufffd")
    if text.startswith(whole):
        return len(whole)
    letters = "".join(whole.split())
    at = _after(text, len(letters))
    if "".join(text[:at].split()) != letters:
        return None
    spaces = len(whole) - len(whole.rstrip())
    while spaces and text[at : at + 1].isspace():
        at, spaces = at + 1, spaces - 1
    return at


def _from_end(text: str, decoded: str) -> int | None:
    """The index in `text` from which on the `decoded` tokens spell it."""
    whole = decoded.lstrip("\ufffd")
    spelled = len(whole) if text.endswith(whole) else _from_begin(text[::-1], whole[::-1])
    return None if spelled is None else max(0, len(text) - spelled - (whole != decoded))


def _after(text: str, letters: int) -> int:
    """The index behind so many characters that are no spaces."""
    for at, character in enumerate(text):
        if letters == 0:
            return at
        letters -= not character.isspace()
    return len(text)
