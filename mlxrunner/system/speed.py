"""Forecast the time of a prefill on this machine from earlier ones. No tensors.

A chunk that takes the cache from `a` to `b` tokens costs `fixed + linear * (b - a) + square *
(b**2 - a**2)` seconds, for the pass itself, for each token, and for attention, which grows with the
cached tokens. The scheduler's own costs of a step are in its pace.
"""

from __future__ import annotations

from typing import Any

Terms = tuple[float, float, float]
"""The fixed, the linear and the square part of a cost."""


class PrefillCurve:
    """A least-squares fit to all chunks so far, with no coefficient below zero.

    The fit is made again when there are a quarter more chunks, or a chunk that goes further or is
    longer than all before. Most requests only add their chunks to a list.
    """

    def __init__(self) -> None:
        self._products: Any = 0.0
        self._targets: Any = 0.0
        self._coming: list[tuple[Terms, float]] = []
        self._fitted: Terms = (0.0, 0.0, 0.0)
        self._count = 0
        self._reach = self._largest = 0

    def add(self, begin: int, end: int, seconds: float) -> None:
        """Add a chunk that took the entry from `begin` to `end` tokens in `seconds`."""
        self._coming.append((_row(begin, end), seconds))
        is_further = end > self._reach or end - begin > self._largest
        if is_further:
            self._reach, self._largest = max(self._reach, end), max(self._largest, end - begin)
        if is_further or 4 * len(self._coming) > self._count:
            self._fit()

    def seconds(self, tokens: int, step: int, begin: int = 0) -> float | None:
        """Estimate the seconds for `tokens` tokens of a prompt after its first `begin` ones.

        They are evaluated in chunks of `step` tokens, with other tokens beside them: a few of them
        take a small part of a chunk's fixed cost. Return None if that would be a guess: the tokens
        reach more than twice as far as any measurement, or the chunks are more than four times as
        long.
        """
        if tokens == 0:
            return 0.0
        if begin + tokens > 2 * self._reach or min(tokens, step) > 4 * self._largest:
            return None
        _, length, area = _row(begin, begin + tokens)
        fixed, linear, square = self._fitted
        return fixed * tokens / step + linear * length + square * area

    def most(self, step: int) -> int:
        """Return the most first tokens of a prompt of which `seconds` is not a guess."""
        reach, largest = 2 * self._reach, 4 * self._largest
        return reach if step <= largest else min(reach, largest)

    def _fit(self) -> None:
        """Add the new chunks to the normal equations, and solve these."""
        import numpy as np

        rows = np.array([row for row, _ in self._coming])
        self._products = self._products + rows.T @ rows
        self._targets = self._targets + rows.T @ [seconds for _, seconds in self._coming]
        self._count += len(self._coming)
        self._coming.clear()
        self._fitted = self._solve()

    def _solve(self) -> Terms:
        """Solve the normal equations, without the columns whose coefficient would be negative."""
        import numpy as np

        columns = [0, 1, 2]
        while columns:
            solution, _, rank, _ = np.linalg.lstsq(
                self._products[np.ix_(columns, columns)], self._targets[columns], rcond=1e-12
            )
            solved = solution.tolist() if rank == len(columns) else None
            if solved is not None and min(solved) >= 0:
                found = dict(zip(columns, solved, strict=True))
                return found.get(0, 0.0), found.get(1, 0.0), found.get(2, 0.0)
            worst = columns[solved.index(min(solved))] if solved is not None else None
            # Each token takes some time, so the linear column goes last.
            columns.remove(
                worst
                if worst is not None and worst != 1
                else next(c for c in (2, 0, 1) if c in columns)
            )
        return 0.0, 0.0, 0.0


def _row(begin: int, end: int) -> Terms:
    """Return the factors of the coefficients for a chunk, the square in thousands.

    So the columns have similar sizes.
    """
    return 1.0, float(end - begin), end * end / 1000 - begin * begin / 1000
