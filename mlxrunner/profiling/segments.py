"""Which part of which message a place in a rendered conversation belongs to, as the chat template itself lays it out. No tensors.

The conversation is rendered once more with a mark in place of each content. What lies between the marks is the template's own, to the
letter, and tells where each content begins and ends in the real text, whatever that says. A template that leaves something out (the
thinking of earlier turns), moves it (a system prompt into the last message) or trims it does the same with the marks.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from mlxrunner.errors import PromptError
from mlxrunner.tokenizer.base import Message
from mlxrunner.tokenizer.thinking import THINKING

_OPEN, _CLOSE = "\ue0f0", "\ue0f1"
_MARK = re.compile(f"{_OPEN}(\\d+)\\.(\\d+){_CLOSE}")
_BLOCK = re.compile(
    "|".join(f"{re.escape(begin)}.*?(?:{re.escape(end)}|\\Z)" for begin, end in THINKING), re.DOTALL
)


class Place(NamedTuple):
    """`message` and `role` are None where the text is of no message, `part` where it is not known."""

    message: int | None = None
    role: str | None = None
    part: str | None = None


class Segment(NamedTuple):
    """The text up to character `end` belongs to `place`. `gap`: its number, if it is the template's, between two contents."""

    end: int
    place: Place
    gap: int | None = None


@dataclass
class Rendered:
    """A conversation: its `messages`, and the `text` that the template (`render`: `Tokenizer.render`) made of them with `variables`."""

    render: Callable[..., str]
    messages: Sequence[Message]
    text: str
    variables: Mapping[str, Any] = field(default_factory=dict)
    _fills: bool = field(default=True, init=False)
    """Whether there is a mark in place of an empty content, too. Templates may ask whether there is a content."""

    def place(self, at: int) -> Place:
        """What the character at index `at` belongs to; past the end: nothing."""
        if at >= len(self.text):
            return Place()
        segments = self.segments
        index = bisect_right([segment.end for segment in segments], at)
        if index == len(segments):
            return Place()
        begin = segments[index - 1].end if index else 0
        segment = segments[index]
        if segment.gap is None:
            return _thinking(segment.place, self.text[begin : segment.end], at - begin)
        before = segments[index - 1].place if index else Place()
        return self._in_gap(
            segment.gap, before, segment.place, self.text[begin : segment.end], at - begin
        )

    @cached_property
    def segments(self) -> list[Segment]:
        """The contents and the gaps between them; shorter than the text where the template does something that was not foreseen."""
        ways = []
        for self._fills in (True, False):
            ways.append(self._segments())
            if ways[-1] and ways[-1][-1].end == len(self.text):
                return ways[-1]
        reached = [found[-1].end if found else 0 for found in ways]
        self._fills = reached[0] >= reached[1]
        return ways[not self._fills]

    def _segments(self) -> list[Segment]:
        try:
            template = self._marked(len(self.messages), True)
        except PromptError:
            return []
        found: list[Segment] = []
        literals, marks = _MARK.split(template)[::3], _MARK.findall(template)
        at = 0
        for index, literal in enumerate(literals):
            message = int(marks[index][0]) if index < len(marks) else len(self.messages)
            if not self.text.startswith(literal, at):
                return found
            at += len(literal)
            if literal:
                found.append(Segment(at, self._role(message), index))
            if index == len(marks):
                return found if at == len(self.text) else []
            pieces, number = _pieces(self.messages[message]), int(marks[index][1])
            end = self._end_of_content(at, pieces[number], literals[index + 1])
            if end is None:
                return found
            at = end
            found.append(
                Segment(at, self._role(message, "thinking" if number < len(pieces) - 1 else "text"))
            )
        return found

    def _end_of_content(self, at: int, content: str, following: str) -> int | None:
        """Where `content`, as it is or trimmed, ends and the template goes on with `following`."""
        for variant in (content, content.strip(), content.lstrip(), content.rstrip()):
            end = at + len(variant)
            if self.text.startswith(variant, at) and self.text.startswith(following, end):
                return end
        # Something that the template would not have written (thinking that was kept) stands before it.
        found = (
            self.text.find(content.strip() + following, at) if following and content.strip() else -1
        )
        return None if found < 0 else found + len(content.strip())

    def _in_gap(self, number: int, before: Place, here: Place, gap: str, offset: int) -> Place:
        """Between two contents: the end mark of the one, messages without any content, the header of the other or the generation prompt."""
        first, following = -1 if before.message is None else before.message, here.message or 0
        if before.part == "thinking" and offset < min(
            (gap.find(end) + len(end) for _, end in THINKING if end in gap), default=0
        ):
            return before
        if first == following:  # its thinking, and its text
            return here._replace(part="text")
        held = [
            first,
            *(message for message in range(first + 1, following) if message not in self._shown),
        ]
        ends = [self._end_of(message, gap) if message >= 0 else 0 for message in held]
        for begin, end in self._tools(number):
            if begin <= offset < end:
                return self._role(
                    next(
                        (message for message, to in zip(held, ends, strict=True) if begin < to),
                        following,
                    ),
                    "tools",
                )
        if offset < ends[0]:
            return before._replace(part="message_end")
        for message, (begin, end) in zip(held[1:], pairwise(ends), strict=True):
            if begin <= offset < end:
                return self._in_empty(message, gap[begin:end], gap[: ends[0]], offset - begin)
        if following < len(self.messages):
            return _thinking(here._replace(part="template_header"), gap, offset)
        return Place(len(self.messages), "assistant", "generation_prompt")

    def _in_empty(self, message: int, text: str, mark: str, offset: int) -> Place:
        """In a message without any content: all that the template writes for it; `mark`: what ends another one."""
        is_end = bool(mark) and text.endswith(mark) and offset >= len(text) - len(mark)
        return _thinking(
            self._role(message, "message_end" if is_end else "template_header"), text, offset
        )

    @cached_property
    def _shown(self) -> set[int | None]:
        """Messages whose content the text has."""
        return {segment.place.message for segment in self.segments if segment.gap is None}

    def _end_of(self, message: int, gap: str) -> int:
        """How much of the gap behind a content belongs to messages up to this one: what stands there when nothing, or an answer, follows."""
        ended = self._tail(message, False)
        begun = self._tail(message, True).removesuffix(self._generation_prompt)
        whole = [len(tail) for tail in (ended, begun) if gap.startswith(tail)]
        return max(whole) if whole else max(common(gap, ended), common(gap, begun))

    @cached_property
    def _generation_prompt(self) -> str:
        last = len(self.messages) - 1
        ended, begun = self._tail(last, False), self._tail(last, True)
        return begun.removeprefix(ended) if begun.startswith(ended) else ""

    def _tail(self, message: int, add_generation_prompt: bool) -> str:
        """What the template writes behind the last content of a conversation that ends with `message`."""
        try:
            return _MARK.split(self._marked(message + 1, add_generation_prompt))[-1]
        except PromptError:
            return ""

    def _tools(self, number: int) -> list[tuple[int, int]]:
        """Begin and end of each piece that the template adds, in this gap, for the tools that it was given."""
        listed, unlisted = self._gaps
        if len(listed) != len(unlisted) or number >= len(listed):
            return []
        return _added(listed[number], unlisted[number])

    @cached_property
    def _gaps(self) -> tuple[list[str], list[str]]:
        """All gaps with the tools that the template was given, and without; nothing where it was given none, or refuses that."""
        if not self.variables.get("tools"):
            return [], []
        try:
            both = [
                self._marked(len(self.messages), True, tools=tools)
                for tools in (self.variables["tools"], None)
            ]
        except PromptError:
            return [], []
        return _MARK.split(both[0])[::3], _MARK.split(both[1])[::3]

    def _marked(self, count: int, add_generation_prompt: bool, **changed: Any) -> str:
        marked: list[Message] = [
            {**message, "content": _mark(index, message, fills=self._fills)}
            for index, message in enumerate(self.messages[:count])
        ]
        return self.render(
            marked, add_generation_prompt=add_generation_prompt, **{**self.variables, **changed}
        )

    def _role(self, message: int, part: str | None = None) -> Place:
        return Place(
            message,
            self.messages[message]["role"] if message < len(self.messages) else "assistant",
            part,
        )


def is_thinking(text: str, at: int) -> bool:
    """Whether the character at `at` lies in a thinking block of `text`."""
    return any(found.start() <= at < found.end() for found in _BLOCK.finditer(text))


def _thinking(place: Place, text: str, at: int) -> Place:
    return (
        place._replace(part="thinking")
        if place.role == "assistant" and is_thinking(text, at)
        else place
    )


def _pieces(message: Message) -> list[str]:
    """A content as a thinking block and the rest, or as one piece."""
    content = message["content"]
    for begin, end in THINKING if message["role"] == "assistant" else ():
        if content.lstrip().startswith(begin) and end in content:
            thought, _, rest = content.lstrip()[len(begin) :].partition(end)
            return [thought, rest]
    return [content]


def _mark(index: int, message: Message, *, fills: bool) -> str:
    """The content with marks in place of its pieces. What is empty stays empty; if `fills`, only thinking does."""
    pieces = _pieces(message)
    marks = [
        f"{_OPEN}{index}.{number}{_CLOSE}"
        if piece.strip() or (fills and number == len(pieces) - 1)
        else piece
        for number, piece in enumerate(pieces)
    ]
    if len(pieces) == 1:
        return marks[0]
    begin, end = next(pair for pair in THINKING if message["content"].lstrip().startswith(pair[0]))
    return f"{begin}{marks[0]}{end}{marks[1]}"


def _added(text: str, without: str) -> list[tuple[int, int]]:
    """Begin and end of what `text` has and `without` has not: one piece if that explains it, else line by line."""
    (begin, end), is_all = _middle(text, without)
    if is_all:
        return [(begin, end)] if begin < end else []
    lines, old = (one.splitlines(keepends=True) for one in (text, without))
    found, at = [], [0, *accumulate(map(len, lines))]
    for kind, first, last, old_first, old_last in SequenceMatcher(
        None, lines, old, autojunk=False
    ).get_opcodes():
        if kind in ("delete", "replace"):
            (begin, end), _ = _middle("".join(lines[first:last]), "".join(old[old_first:old_last]))
            found.append((at[first] + begin, at[first] + end))
    return found


def _middle(text: str, without: str) -> tuple[tuple[int, int], bool]:
    """What is between the beginning and the end that both have, and whether that is all that is different."""
    begin = common(text, without)
    after = common(text[begin:][::-1], without[begin:][::-1])
    end, is_all = len(text) - after, begin + after == len(without)
    while (
        is_all and 0 < begin < end and text[begin - 1] == text[end - 1]
    ):  # it may as well be said to begin earlier
        begin, end = begin - 1, end - 1
    return (begin, end), is_all


def common(a: str, b: str) -> int:
    """Length of the common prefix."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a.startswith(b[:middle]):
            low = middle
        else:
            high = middle - 1
    return low
