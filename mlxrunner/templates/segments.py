"""Find the message, and the part of it, that a place in a rendered conversation belongs to.

The conversation is rendered once more with a mark in place of each content. The text between the
marks is the template's own, to the letter. It shows where each content begins and ends in the real
text, whatever that content is. If a template leaves a content out (the thinking of earlier turns),
moves it (a system prompt into the last message) or trims it, it does the same with the marks. No
tensors here.
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
from mlxrunner.templates.messages import THINKING_TAGS, PlainMessage, common, common_end

_OPEN, _CLOSE = "\ue0f0", "\ue0f1"
_MARK = re.compile(f"{_OPEN}(\\d+)\\.(\\d+){_CLOSE}")
_BLOCK = re.compile(
    "|".join(f"{re.escape(tags.begin)}.*?(?:{re.escape(tags.end)}|\\Z)" for tags in THINKING_TAGS),
    re.DOTALL,
)


class Place(NamedTuple):
    """The message and the part of it that a character of a rendered conversation belongs to."""

    message: int | None = None
    """Index of the message, or None if the text belongs to no message."""
    role: str | None = None
    """Role of the message, or None if the text belongs to no message."""
    part: str | None = None
    """Name of the part, such as "text" or "message_end", or None if it is not known."""
    picture: int | None = None
    """Number of the picture in the message, from 1, or None if none begins there."""


class Segment(NamedTuple):
    """A piece of a rendered conversation, which begins at the end of the piece before."""

    end: int
    """Index of the first character after it."""
    place: Place
    gap: int | None = None
    """Number of the gap between two contents, or None if the piece is a content."""


@dataclass
class Rendered:
    """A conversation and the text that a chat template made of it."""

    render: Callable[..., str]
    """The template, as `Tokenizer.render`."""
    messages: Sequence[PlainMessage]
    text: str
    """The text that the template made of `messages`."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template that the text was made with."""
    _fills: bool = field(default=True, init=False)
    """True to put a mark in place of an empty content, too.

    A template may test whether there is a content.
    """

    def place(self, at: int) -> Place:
        """Return the place of the character at index `at`; past the end an empty one."""
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
        """The contents and the gaps between them, in order.

        They end before the end of the text if the template does something unforeseen.
        """
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
            if at == len(self.text):
                return found
        return found

    def _end_of_content(self, at: int, content: str, following: str) -> int | None:
        """Return the end of `content`, whole or trimmed, if `following` comes after it, or None."""
        for variant in (content, content.strip(), content.lstrip(), content.rstrip()):
            end = at + len(variant)
            # A text that ends here is one whose last message is continued.
            if self.text.startswith(variant, at) and (
                end == len(self.text) or self.text.startswith(following, end)
            ):
                return end
        # Text that the template does not write (thinking that was kept) may stand before it.
        found = (
            self.text.find(content.strip() + following, at) if following and content.strip() else -1
        )
        return None if found < 0 else found + len(content.strip())

    def _in_gap(self, number: int, before: Place, here: Place, gap: str, offset: int) -> Place:
        """Return the place of the character at `offset` in the gap between two contents.

        A gap holds the end mark of the first content, messages without a content, and the header of
        the second content or the generation prompt.
        """
        first, following = -1 if before.message is None else before.message, here.message or 0
        if before.part == "thinking" and offset < min(
            (gap.find(tags.end) + len(tags.end) for tags in THINKING_TAGS if tags.end in gap),
            default=0,
        ):
            return before
        if first == following:  # between the thinking and the text of one message
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
        """Return the place of a character in `text`, written for a message without a content.

        `mark` is the text that ends another message.
        """
        is_end = bool(mark) and text.endswith(mark) and offset >= len(text) - len(mark)
        return _thinking(
            self._role(message, "message_end" if is_end else "template_header"), text, offset
        )

    @cached_property
    def _shown(self) -> set[int | None]:
        """Indices of the messages whose content is in the text."""
        return {segment.place.message for segment in self.segments if segment.gap is None}

    def _end_of(self, message: int, gap: str) -> int:
        """Return the length of the part of `gap` that belongs to messages up to `message`.

        That part is what the template writes if nothing, or an answer, follows.
        """
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
        """Return the text after the last content of the conversation up to `message`."""
        try:
            return _MARK.split(self._marked(message + 1, add_generation_prompt))[-1]
        except PromptError:
            return ""

    def _tools(self, number: int) -> list[tuple[int, int]]:
        """Return the begin and end of each piece that the template adds to a gap for its tools."""
        listed, unlisted = self._gaps
        if len(listed) != len(unlisted) or number >= len(listed):
            return []
        return _added(listed[number], unlisted[number])

    @cached_property
    def _gaps(self) -> tuple[list[str], list[str]]:
        """All gaps with the tools that the template was given, and all gaps without them.

        Both lists are empty if it was given none, or if it refuses to render.
        """
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
        marked: list[PlainMessage] = [
            {**message, "content": _mark(index, message, fills=self._fills)}
            for index, message in enumerate(self.messages[:count])
        ]
        variables = {**self.variables, **changed}
        return self.render(
            marked, add_generation_prompt=add_generation_prompt, is_partial=True, **variables
        )

    def _role(self, message: int, part: str | None = None) -> Place:
        return Place(
            message,
            self.messages[message]["role"] if message < len(self.messages) else "assistant",
            part,
        )


def is_thinking(text: str, at: int) -> bool:
    """Return True if the character at index `at` is in a thinking block of `text`."""
    return any(found.start() <= at < found.end() for found in _BLOCK.finditer(text))


def _thinking(place: Place, text: str, at: int) -> Place:
    return (
        place._replace(part="thinking")
        if place.role == "assistant" and is_thinking(text, at)
        else place
    )


def _pieces(message: PlainMessage) -> list[str]:
    """Return a content as its thinking and the rest, or as one piece."""
    content = message["content"]
    for begin, end, _ in THINKING_TAGS if message["role"] == "assistant" else ():
        if content.lstrip().startswith(begin) and end in content:
            thought, _, rest = content.lstrip()[len(begin) :].partition(end)
            return [thought, rest]
    return [content]


def _mark(index: int, message: PlainMessage, *, fills: bool) -> str:
    """Return the content of a message with a mark in place of each piece.

    An empty piece stays empty. If `fills` is true, an empty last piece gets a mark, too.
    """
    pieces = _pieces(message)
    marks = [
        f"{_OPEN}{index}.{number}{_CLOSE}"
        if piece.strip() or (fills and number == len(pieces) - 1)
        else piece
        for number, piece in enumerate(pieces)
    ]
    if len(pieces) == 1:
        return marks[0]
    content = message["content"].lstrip()
    tags = next(tags for tags in THINKING_TAGS if content.startswith(tags.begin))
    return f"{tags.begin}{marks[0]}{tags.end}{marks[1]}"


def _added(text: str, without: str) -> list[tuple[int, int]]:
    """Return the begin and end of each piece that `text` has and `without` has not.

    That is one piece if it explains the difference, or else the difference line by line.
    """
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
    """Return begin and end of the part of `text` between what both texts begin and end with.

    The second value is True if that part is the only difference.
    """
    begin = common(text, without)
    after = common_end(text[begin:], without[begin:])
    end, is_all = len(text) - after, begin + after == len(without)
    while (
        is_all and 0 < begin < end and text[begin - 1] == text[end - 1]
    ):  # the same difference may begin earlier
        begin, end = begin - 1, end - 1
    return (begin, end), is_all
