"""Tell thinking from the answer while both stream, by the tags that models write around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

_FINAL = "<|channel|>final<|message|>"
"""The header of an answer of gpt-oss, which the model also writes without thinking."""


class Tags(NamedTuple):
    """The texts that a model writes around its thinking."""

    begin: str
    """The text before the thinking."""
    end: str
    """The text after the thinking."""
    header: str = ""
    """The text between `end` and the answer."""


THINKING_TAGS = (
    Tags("<think>", "</think>"),
    Tags("<longcat_think>", "</longcat_think>"),
    Tags("<|think:start|>", "<|think:end|>"),
    Tags("<|channel>thought", "<channel|>"),
    Tags("[THINK]", "[/THINK]"),
    Tags("<|channel|>analysis<|message|>", "<|end|>", f"<|start|>assistant{_FINAL}"),
)
_SPLITS = (*((tags.begin, tags.end + tags.header) for tags in THINKING_TAGS), (_FINAL, ""))
"""The texts that an answer may begin with, each with the text before the answer proper."""


class ThinkingSplitter:
    """Splits a streamed answer into pieces `(is_thinking, text)`, without the tags."""

    def __init__(self, prompt: str = "") -> None:
        """Begin an answer that continues the text `prompt`, which may have opened the thinking."""
        ends = prompt.rstrip()
        self._close = next((close for begin, close in _SPLITS if ends.endswith(begin)), "")
        self._begun = bool(self._close)
        self._held = ""
        self._between = False  # right after the thinking, where empty lines are dropped

    @property
    def is_thinking(self) -> bool:
        """True while the answer is within its thinking."""
        return bool(self._close)

    def add(self, text: str) -> Iterator[tuple[bool, str]]:
        """Take `text` as the next part of the answer, and yield the pieces that are certain now."""
        self._held += text
        if not self._begun and not self._begins():
            return
        if self._close:
            thought = self._take_thinking()
            if thought:
                yield True, thought
        if not self._close and (rest := self._held.lstrip("\n") if self._between else self._held):
            self._held, self._between = "", False
            yield False, rest

    def finish(self) -> Iterator[tuple[bool, str]]:
        """End the answer, and yield what was held back."""
        if self._held:
            yield self.is_thinking, self._held
            self._held = ""

    def _begins(self) -> bool:
        """Look for a tag at the beginning. Return False while one may still come."""
        start = self._held.lstrip()
        if any(begin.startswith(start) for begin, _ in _SPLITS) and start not in dict(_SPLITS):
            return False
        self._begun = True
        for begin, close in _SPLITS:
            if start.startswith(begin):
                self._close, self._held = close, start[len(begin) :]
        return True

    def _take_thinking(self) -> str:
        """Return the thinking so far, and hold back what may be the beginning of its end tag."""
        thought, found, rest = self._held.partition(self._close)
        if found:
            self._close, self._held, self._between = "", rest, True
            return thought
        shown = len(thought) - overlap(thought, self._close)
        self._held = thought[shown:]
        return thought[:shown]


def overlap(text: str, tag: str) -> int:
    """Return the length of the longest end of `text` that begins `tag`, and is not all of it."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


def without_thinking(answer: str, prompt: str = "") -> str:
    """Return `answer` without its thinking. `prompt` is the text that the answer continues."""
    splitter = ThinkingSplitter(prompt)
    pieces = [*splitter.add(answer), *splitter.finish()]
    return "".join(text for is_thinking, text in pieces if not is_thinking)


def opens_thinking(prompt: str) -> bool:
    """Return True if `prompt` ends with a tag: it opens the answer's thinking, or skips it."""
    return prompt.rstrip().endswith(tuple(tag for tags in _SPLITS for tag in tags if tag))


def has_thinking(answer: str) -> bool:
    """Return True if `answer` has thinking that a template may leave out.

    If the prompt has opened the thinking, the answer has only the end tag.
    """
    has_end = any(close in answer for _, close in _SPLITS if close)
    return has_end or without_thinking(answer) != answer


def content_for_template(answer: str) -> str:
    """Return the part of `answer` that a template is given.

    The template of gpt-oss refuses messages that name their channels.
    """
    return without_thinking(answer) if answer.startswith("<|channel|>") else answer


def thinking_tokens(encode_more: Callable[[str], list[int]]) -> list[dict[str, list[int]]]:
    """Return the thinking tags that are tokens of a model's vocabulary, as token ids.

    `encode_more` is that of the model's tokenizer. Tags are left out if their begin has more than
    three tokens or their end more than one.
    """
    pairs = [(encode_more(tags.begin), encode_more(tags.end)) for tags in THINKING_TAGS]
    return [
        {"begin": begin, "end": end} for begin, end in pairs if len(begin) <= 3 and len(end) == 1
    ]
