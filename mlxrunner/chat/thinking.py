"""Where a model thinks before it answers: telling the two apart while they stream. Knows nothing about terminals."""

from __future__ import annotations

from collections.abc import Iterator

from mlxrunner.tokenizer.thinking import ANALYSIS, THINKING

_FINAL = "<|channel|>final<|message|>"
TAGS = (
    *(
        (begin, f"{end}<|start|>assistant{_FINAL}" if begin == ANALYSIS else end)
        for begin, end in THINKING
    ),
    (_FINAL, ""),
)
"""The tags, and what of gpt-oss stands between thinking and answer; where it does not think, its answer is named all the same."""


class Thinking:
    """Splits an answer into pieces `(is_thinking, text)`; the tags belong to neither.

    `prompt`: what the answer goes on from. A template may have opened the thinking already.
    """

    def __init__(self, prompt: str = "") -> None:
        ends = prompt.rstrip()
        self._close = next((close for opening, close in TAGS if ends.endswith(opening)), "")
        self._begun = bool(self._close)
        self._held = ""
        self._between = False  # right behind the thinking, where empty lines are nobody's

    @property
    def is_thinking(self) -> bool:
        return bool(self._close)

    def add(self, text: str) -> Iterator[tuple[bool, str]]:
        """The pieces that are certain by now."""
        self._held += text
        if not self._begun:
            start = self._held.lstrip()
            if any(opening.startswith(start) for opening, _ in TAGS) and start not in dict(TAGS):
                return  # may still become one
            self._begun = True
            for opening, close in TAGS:
                if start.startswith(opening):
                    self._close, self._held = close, start[len(opening) :]
        if self._close:
            thought, found, rest = self._held.partition(self._close)
            if found:
                self._close, self._held, self._between = "", rest, True
            else:
                keep = next(
                    (
                        n
                        for n in range(len(self._close) - 1, 0, -1)
                        if thought.endswith(self._close[:n])
                    ),
                    0,
                )
                thought, self._held = thought[: len(thought) - keep], thought[len(thought) - keep :]
            if thought:
                yield True, thought
        if not self._close and (rest := self._held.lstrip("\n") if self._between else self._held):
            self._held, self._between = "", False
            yield False, rest

    def finish(self) -> Iterator[tuple[bool, str]]:
        """What was held back."""
        if self._held:
            yield self.is_thinking, self._held
            self._held = ""


def without_thinking(answer: str, prompt: str = "") -> str:
    """The answer proper; `prompt` as for `Thinking`."""
    thinking = Thinking(prompt)
    return "".join(
        text for is_thinking, text in [*thinking.add(answer), *thinking.finish()] if not is_thinking
    )


def opens_thinking(prompt: str) -> bool:
    """Whether the template begins an answer with thinking, or with an empty one so that there is none."""
    return prompt.rstrip().endswith(tuple(tag for tags in TAGS for tag in tags if tag))


def has_thinking(answer: str) -> bool:
    """Whether there is any in it that a template may leave out: also where a template had opened it, so that only its end is there."""
    return without_thinking(answer) != answer or any(close in answer for _, close in TAGS if close)


def for_template(answer: str) -> str:
    """What a template is given of it: the template of gpt-oss refuses messages that name their channels."""
    return without_thinking(answer) if answer.startswith("<|channel|>") else answer
