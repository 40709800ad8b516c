"""Work for the time in which the user reads and types: the next prompt is evaluated as far as it is known.

The model belongs to one thread. While a line is edited in another one, this one evaluates in small chunks and looks after each at what
is being typed: `Draft` is all that the two share. Knows nothing about terminals.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Condition

logger = logging.getLogger("mlxrunner")

PAUSE_S = 0.15
"""So long nothing has to be typed before what has been typed is evaluated."""
SIGNAL_S = 1.0
"""A signal that comes as a wait begins does not end it: so long it may go unheard."""


class Draft:
    """What is being typed, seen from two threads: `text` so far, and `is_over` once there will be no more of it."""

    def __init__(self, text: str = "") -> None:
        self._condition = Condition()
        self._text, self._over = text, False

    @property
    def text(self) -> str:
        return self._text

    @property
    def is_over(self) -> bool:
        return self._over

    def update(self, text: str) -> None:
        with self._condition:
            self._text = text
            self._condition.notify_all()

    def finish(self) -> None:
        with self._condition:
            self._over = True
            self._condition.notify_all()

    def changes(self, text: str, seconds: float | None = None) -> bool:
        """Wait until it is another text than `text`, or over; False if neither happened within `seconds`."""
        with self._condition:
            return self._wait(lambda: self._over or self._text != text, seconds)

    def wait_until_over(self) -> None:
        with self._condition:
            self._wait(lambda: self._over, None)

    def _wait(self, holds: Callable[[], bool], seconds: float | None) -> bool:
        while seconds is None and not self._condition.wait_for(holds, SIGNAL_S):
            pass
        return self._condition.wait_for(holds, seconds)


class Ahead:
    """`evaluate(text, cancelled)` evaluates the prompt that `text` would begin, asking `cancelled` between chunks.

    `types_ahead`: whether to look at the draft at all, or only at what comes before it.
    """

    def __init__(
        self,
        evaluate: Callable[[str, Callable[[], bool]], None],
        *,
        types_ahead: Callable[[], bool],
    ) -> None:
        self._evaluate, self._types_ahead = evaluate, types_ahead

    def __call__(self, draft: Draft) -> None:
        """Work until the draft is over: on what comes before it first, then on what has been typed, whenever nothing is for a while."""
        types_ahead = self._types_ahead()
        evaluated = self._work("", draft)
        if not types_ahead:
            draft.wait_until_over()
        while not draft.is_over:
            text = draft.text
            if not draft.changes(text, None if text == evaluated else PAUSE_S):
                evaluated = self._work(text, draft)

    def _work(self, text: str, draft: Draft) -> str:
        """Evaluate `text`, as long as the draft begins with it; returns how much of it is done, all or nothing."""

        def outdated() -> bool:
            return draft.is_over or not draft.text.startswith(text)

        try:
            self._evaluate(text, outdated)
        except Exception as error:  # whatever it is will be said when the turn is sent
            logger.debug("nothing evaluated ahead: %s", error)
        return "" if outdated() else text
