"""The size of the next piece of a prefill, from the speed of the last ones. Never imports mlx."""

from __future__ import annotations

FIRST = 64
"""Tokens of the first piece, whose speed is not known yet."""
FEWEST = 8
"""Tokens of the smallest piece."""


class Pace:
    """Sizes pieces so that each takes about `seconds`, and Ctrl-C need not wait longer.

    A forward pass cannot be interrupted, so the size of a piece is the only bound. A pace outlives
    a request: the next one begins with the speed that was measured.
    """

    def __init__(
        self, seconds: float, *, first: int = FIRST, fewest: int = FEWEST, growth: int = 16
    ) -> None:
        """Begin with `first` tokens. A piece has at least `fewest`, and `growth` times the last."""
        self.seconds = seconds
        self._size, self._fewest, self._growth = first, fewest, growth

    def size(self, most: int) -> int:
        """Return the tokens of the next piece, at most `most`."""
        return min(self._size, most)

    def measure(self, tokens: int, seconds: float) -> None:
        """Note that a piece of `tokens` tokens took `seconds`.

        A piece that was cut short by the end of a prompt says little about a longer one.
        """
        if 2 * tokens >= self._size or seconds > self.seconds:
            fitting = int(tokens * self.seconds / max(seconds, 1e-9))
            self._size = max(self._fewest, min(fitting, self._growth * self._size))
