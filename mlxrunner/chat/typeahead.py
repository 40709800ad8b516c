"""Evaluate the known part of the next prompt while the user reads and types.

The model belongs to one thread. While another thread edits a line, this one evaluates in small
chunks, and looks at the typed text after each. The two share only a `Draft`. This knows nothing
about terminals.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Condition

logger = logging.getLogger("mlxrunner")

PAUSE_S = 0.15
"""Seconds without a key before the typed text is evaluated."""
SIGNAL_S = 1.0
"""Most seconds until a signal is handled that comes as a wait begins, which it does not end."""


class Draft:
    """A text that one thread edits and another one evaluates."""

    def __init__(self, text: str = "") -> None:
        self._condition = Condition()
        self._text, self._over = text, False

    @property
    def text(self) -> str:
        """The text typed so far."""
        return self._text

    @property
    def is_over(self) -> bool:
        """True once the editing has ended."""
        return self._over

    def update(self, text: str) -> None:
        """Replace the text."""
        with self._condition:
            self._text = text
            self._condition.notify_all()

    def finish(self) -> None:
        """End the editing."""
        with self._condition:
            self._over = True
            self._condition.notify_all()

    def changes(self, text: str, seconds: float | None = None) -> bool:
        """Wait until the draft differs from `text`, or is over.

        Return False if neither happens within `seconds`; None waits for ever.
        """
        with self._condition:
            return self._wait(lambda: self._over or self._text != text, seconds)

    def wait_until_over(self) -> None:
        """Wait until the editing has ended."""
        with self._condition:
            self._wait(lambda: self._over, None)

    def _wait(self, holds: Callable[[], bool], seconds: float | None) -> bool:
        while seconds is None and not self._condition.wait_for(holds, SIGNAL_S):
            pass
        return self._condition.wait_for(holds, seconds)


class TypeAhead:
    """Evaluates a draft while the user edits it."""

    def __init__(
        self,
        evaluate: Callable[[str, Callable[[], bool]], None],
        *,
        reads_draft: Callable[[], bool],
    ) -> None:
        """Call `evaluate(text, cancelled)` to evaluate a prompt that begins with `text`.

        It calls `cancelled` between chunks, and ends once that returns True. If `reads_draft`
        returns False, only the conversation before the draft is evaluated.
        """
        self._evaluate, self._reads_draft = evaluate, reads_draft

    def __call__(self, draft: Draft) -> None:
        """Work until the draft is over.

        Evaluate first what comes before the draft, and then, in each pause, the typed text.
        """
        reads_draft = self._reads_draft()
        evaluated = self._work("", draft)
        if not reads_draft:
            draft.wait_until_over()
        while not draft.is_over:
            text = draft.text
            if not draft.changes(text, None if text == evaluated else PAUSE_S):
                evaluated = self._work(text, draft)

    def _work(self, text: str, draft: Draft) -> str:
        """Evaluate `text` as long as the draft begins with it.

        Return `text` if it was evaluated, or "".
        """

        def outdated() -> bool:
            return draft.is_over or not draft.text.startswith(text)

        try:
            self._evaluate(text, outdated)
        except Exception as error:  # sending the message raises it again
            logger.debug("nothing evaluated ahead: %s", error)
        return "" if outdated() else text
