"""Find where a prompt leaves the entry, in the words of the conversation.

The lookup knows the token. Its message and part are found afterwards, from the text, and only if
something was lost. The fewest possible tokens are decoded to get from the index of the token to a
character of the rendered conversation. The segments of the template then give the place of that
character. A place that the template can't tell stays unknown and is never guessed. No tensors.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlxrunner.cache.lookup import WINDOW, Lookup
from mlxrunner.cache.tokens import FIRST_OF_PICTURES, TokenArray
from mlxrunner.profiling.schema import Common, Divergence, Side
from mlxrunner.templates.messages import PICTURE
from mlxrunner.templates.segments import Place, Rendered, common, is_thinking
from mlxrunner.templates.thinking import THINKING_TAGS
from mlxrunner.tokenizer import Tokenizer
from mlxrunner.tokenizer.prompt import TokenizedPrompt

COMMON = 8
"""The number of shared tokens that are shown before the place."""
_LONGEST_MARK = max(len(tags.begin) for tags in THINKING_TAGS)


@dataclass
class Divergences:
    """The divergences of one runner's requests, each found by comparing with the last prompt.

    Tokens are shown as hashes with a random key that is never stored. Without a key, trying the
    whole vocabulary would reveal the tokens.
    """

    tokenizer: Tokenizer
    log_text: bool = False
    """True to show the text of the tokens too."""

    def __post_init__(self) -> None:
        self._key = secrets.token_bytes(16)
        self.forget()

    def follow(self, prepared: TokenizedPrompt) -> None:
        """Remember that the entry now holds this prompt."""
        self._before = prepared

    def forget(self) -> None:
        """Forget the last prompt, because the entry now holds something else."""
        self._before = TokenizedPrompt(np.empty(0, np.int32))

    def describe(
        self, prepared: TokenizedPrompt, prompt: TokenArray, lookup: Lookup
    ) -> Divergence | None:
        """Return where the prompt leaves the entry; None if one of them begins with the other."""
        index = lookup.matched
        if lookup.entry_tokens == 0 or index >= min(len(prompt), lookup.entry_tokens):
            return None
        if lookup.is_restored:
            self.forget()
        dropped, coming = list(lookup.dropped), prompt[index : index + WINDOW].tolist()
        here, before = self._places(prepared, prompt, index, dropped)
        place = here if here.part is not None else before
        shared = prompt[max(0, index - COMMON) : index].tolist()
        return Divergence(
            index,
            *place[:3],
            Common(self._hashes(shared), self._text(shared)),
            Side(*before[:3], self._hashes(dropped), self._text(dropped), before.picture),
            Side(*here[:3], self._hashes(coming), self._text(coming), here.picture),
            place.picture,
        )

    def _places(
        self, prepared: TokenizedPrompt, prompt: TokenArray, index: int, dropped: Sequence[int]
    ) -> tuple[Place, Place]:
        """Return the places of the first characters that differ, in the prompt and the entry."""
        at = self._character(prepared, prompt, index)
        if at is None:
            return self._place(prepared, None), Place()
        before, text = self._before, prepared.text
        known = before.text[:at] == text[: len(before.text)][:at]
        old = self._goes_on(before.text[at:] if known else "", dropped)
        first = [*dropped[:1], *prompt[index : index + 1].tolist()]
        shows = any(token >= FIRST_OF_PICTURES for token in first)
        same = 0 if shows else common(old, text[at:])
        if same == len(old) and not shows:
            # All that is remembered is the same text in other tokens: compare the first two tokens.
            ours, theirs = (
                self.tokenizer.decode(tokens[:1]) for tokens in (dropped, prompt[index:].tolist())
            )
            same = common(ours, theirs)
        at, old = min(at + same, len(text) - 1), old[same:]
        here = self._place(prepared, at, shows)
        if not known:
            return here, Place()
        if at < len(before.text):
            return here, self._place(before, at, shows)
        if not before.messages:
            return here, Place(part="text" if before.kind == "text" else None)
        return here, Place(
            len(before.messages),
            "assistant",
            self._part_of_answer(text[len(before.text) : at], old),
        )

    def _goes_on(self, rest: str, dropped: Sequence[int]) -> str:
        """Return the text of the entry from a place on, as far as the `dropped` tokens go.

        `rest` is the text of its prompt from that place on.
        """
        spelled = self.tokenizer.decode(dropped)
        return spelled if spelled.startswith(rest) else rest or spelled

    def _part_of_answer(self, begun: str, rest: str) -> str:
        """Return the part of the answer with which `rest` begins.

        The `begun` part of the answer comes before it, and may have opened a thinking block.
        """
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

    def _place(self, prepared: TokenizedPrompt, at: int | None, shows: bool = False) -> Place:
        """Return the place of the character at index `at` of a prompt.

        `shows`: PICTURE stands for a picture there.
        """
        if at is None or prepared.kind == "tokens":
            return Place()
        if prepared.kind == "text":
            return Place(part="text" if at < len(prepared.text) else None)
        text, messages = prepared.text, prepared.messages
        found = Rendered(self.tokenizer.render, messages, text, prepared.variables).place(at)
        if not shows or text[at] != PICTURE or found.message is None:
            return found
        earlier = sum(one["content"].count(PICTURE) for one in messages[: found.message])
        return found._replace(part="picture", picture=text[:at].count(PICTURE) - earlier + 1)

    def _character(self, prepared: TokenizedPrompt, prompt: TokenArray, index: int) -> int | None:
        """Return the index in the text at which token `index` begins.

        Return None if the tokens do not spell the text.
        """
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
        """Return the tokens as keyed hashes of 8 hexadecimal digits."""
        return [
            hashlib.blake2b(token.to_bytes(4, "little"), digest_size=4, key=self._key).hexdigest()
            for token in tokens
        ]

    def _text(self, tokens: Sequence[int]) -> str | None:
        """Return the text of the tokens; None if it may not be shown."""
        return self.tokenizer.decode(tokens) if self.log_text else None


def _from_begin(text: str, decoded: str) -> int | None:
    """Count the characters of `text` that the `decoded` tokens spell; None if they spell others.

    A decoder may drop or add spaces, and cut the last character in two.
    """
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
    """Return the index in `text` from which on the `decoded` tokens spell it.

    Return None if they spell another text.
    """
    whole = decoded.lstrip("\ufffd")
    spelled = len(whole) if text.endswith(whole) else _from_begin(text[::-1], whole[::-1])
    return None if spelled is None else max(0, len(text) - spelled - (whole != decoded))


def _after(text: str, letters: int) -> int:
    """Return the index behind the first `letters` characters that are not spaces."""
    for at, character in enumerate(text):
        if letters == 0:
            return at
        letters -= not character.isspace()
    return len(text)
