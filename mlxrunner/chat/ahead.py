"""Work for the time in which the user reads and types: the next prompt is evaluated as far as it is known.

The model belongs to one thread. While a line is edited in another one, this one evaluates in small chunks and looks after each at what
is being typed: `Draft` is all that the two share. Knows nothing about terminals.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from threading import Condition

logger = logging.getLogger("mlxrunner")

PAUSE_S = 0.15
"""So long nothing has to be typed before what has been typed is evaluated."""


class Draft:
    """What is being typed, seen from two threads: `text` so far, and `is_over` once there will be no more of it."""

    def __init__(self, text: str = "") -> None:
        self._condition = Condition()
        self._text, self._over, self._version = text, False, 0

    @property
    def text(self) -> str:
        return self._text

    @property
    def is_over(self) -> bool:
        return self._over

    def update(self, text: str) -> None:
        with self._condition:
            self._text, self._version = text, self._version + 1
            self._condition.notify_all()

    def finish(self) -> None:
        with self._condition:
            self._over = True
            self._condition.notify_all()

    def wait(self, seconds: float | None = None) -> bool:
        """Until it changes or is over; False if neither happened within `seconds`."""
        with self._condition:
            seen = self._version
            return self._condition.wait_for(lambda: self._over or self._version != seen, seconds)

    def wait_until_over(self) -> None:
        while not self._over:
            self.wait()


class Ahead:
    """`evaluate(text, cancelled)` evaluates the prompt that `text` would begin, asking `cancelled` between chunks.

    `types_ahead`: whether to look at the draft at all, or only at what comes before it.
    """

    def __init__(self, evaluate: Callable[[str, Callable[[], bool]], None], *, types_ahead: Callable[[], bool]) -> None:
        self._evaluate, self._types_ahead = evaluate, types_ahead

    def __call__(self, draft: Draft) -> None:
        """Work until the draft is over: on what comes before it first, then on what has been typed, whenever nothing is for a while."""
        types_ahead = self._types_ahead()
        evaluated: str | None = None
        while not draft.is_over:
            text = draft.text if types_ahead and evaluated is not None else ""
            if text == evaluated:
                draft.wait()
            elif evaluated is None or not draft.wait(PAUSE_S):
                outdated = partial(_is_outdated, draft, text)
                self._work(text, outdated)
                evaluated = "" if outdated() else text

    def _work(self, text: str, cancelled: Callable[[], bool]) -> None:
        try:
            self._evaluate(text, cancelled)
        except Exception as error:  # whatever it is will be said when the turn is sent
            logger.debug("nothing evaluated ahead: %s", error)


def _is_outdated(draft: Draft, text: str) -> bool:
    """Whether evaluating `text` is of no use any more: the draft is over, or begins otherwise."""
    return draft.is_over or not draft.text.startswith(text)
