"""The findings of a verification, and their meaning. Arithmetic and text: no models.

A device does not compute the same numbers in every order of sums. Therefore the limit is measured:
cold runs are compared with cold runs of the same prompts in other prefill steps. A warm run may
differ from a cold one by a few times the largest such difference. A limit above the change that one
wrong token makes proves nothing: a check within it counts as not tested.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

FACTOR = 8
"""Factor of the noise by which a warm run may differ."""
LAST_PLACES = 4
"""Smallest limit, in units in the last place of the largest logit."""
UNNOTICED = 1000
"""Divisor of the change that one wrong token makes, for the largest credible noise.

The noise of two prompts at once is credible up to FACTOR limits, or up to this part of that change.
More is an error, not noise.
"""
OK, DIFFERENT, NOT_TESTED = "ok", "DIFFERENT", "not tested"
HIDDEN = "one wrong token would be within the limit"


@dataclass(frozen=True)
class Difference:
    """The difference of two answers to one prompt."""

    equal: int
    """Number of equal tokens, from the first on."""
    tokens: int
    """Number of tokens of the longer answer."""
    logits: float
    """The largest difference of the logits, up to and including the first token that differs.

    The logits of later tokens depend on another history.
    """


@dataclass(frozen=True)
class Check:
    """A row of the table: the comparison for one way of reuse."""

    name: str
    found: Difference | None = None
    """The difference of the warm and the cold run."""
    noise: Difference | None = None
    """The difference of two cold runs in other prefill steps."""
    reused: int | None = None
    """Tokens of the prompt that came from the entry."""
    prompt: int | None = None
    limit: float | None = None
    """Its own limit, if it does not compare logits."""
    apart: Difference | None = None
    """The noise of several prompts at once: with nothing in common, in another order of sums."""
    fault: str | None = None
    """An error that no limit excuses; None if there is none."""
    untested: str | None = None
    """The reason why there is nothing to compare; None if there is something."""


@dataclass
class Findings:
    """All checks of a verification, with the measured noise and limits."""

    model: str
    device: str
    context: int
    about: str = ""
    epsilon: float = 0.0
    """The relative rounding step of the logits' type."""
    largest: float = 0.0
    """The largest logit so far."""
    wrong_token: float | None = None
    """The change of the logits that one wrong token near the end of a prompt makes.

    None: not measured.
    """
    is_complete: bool = False
    checks: list[Check] = field(default_factory=list)
    """The checks so far. The list grows while the verification runs."""

    @property
    def noise(self) -> float:
        """The largest difference between cold runs."""
        return _largest([row.noise.logits for row in self.checks if row.noise is not None])

    @property
    def limit(self) -> float:
        """The largest accepted difference of logits between warm and cold runs."""
        return _largest([FACTOR * self.noise, LAST_PLACES * self.epsilon * self.largest])

    def limit_of(self, row: Check) -> float:
        """Return the limit of a check's difference."""
        if row.limit is not None or row.apart is None:
            return self.limit if row.limit is None else row.limit
        return _largest([self.limit, FACTOR * row.apart.logits])

    def verdict(self, row: Check) -> str:
        """Return the verdict on a row: OK, DIFFERENT or NOT_TESTED."""
        if row.untested is not None:
            return NOT_TESTED
        limit = self.limit_of(row)
        # Not `>`: NaN counts as different.
        if row.found is None or self.fault_of(row) is not None or not row.found.logits <= limit:
            return DIFFERENT
        return NOT_TESTED if row.limit is None and self._hides_a_token(limit) else OK

    def fault_of(self, row: Check) -> str | None:
        """Return the error of a check that no limit excuses, also too much noise; or None."""
        believed = _largest([FACTOR * self.limit, (self.wrong_token or 0.0) / UNNOTICED])
        if row.fault is None and row.apart is not None and not row.apart.logits <= believed:
            return f"its own noise, {_short(row.apart.logits)}, is more than a device makes"
        return row.fault

    def _hides_a_token(self, limit: float) -> bool:
        return self.wrong_token is not None and not limit < self.wrong_token

    @property
    def is_blind(self) -> bool:
        """True if the limit hides one wrong token, so that equal answers prove nothing."""
        return self._hides_a_token(self.limit)

    @property
    def is_different(self) -> bool:
        """True if any row is DIFFERENT."""
        return any(self.verdict(row) == DIFFERENT for row in self.checks)

    @property
    def passed(self) -> bool:
        """True if all checks were run, none differs, and the limit would show a wrong token."""
        return self.is_complete and not self.is_blind and not self.is_different

    def as_dict(self) -> dict[str, Any]:
        rows = [asdict(row) | {"verdict": self.verdict(row)} for row in self.checks]
        sums = {name: getattr(self, name) for name in ("noise", "limit", "is_blind", "passed")}
        facts = {name: value for name, value in asdict(self).items() if name != "checks"}
        found: dict[str, Any] = _finite(facts | {"rows": rows} | sums)
        return found

    def table(self) -> str:
        """Return a table for users: a line per check, then the conclusion."""
        lines = [
            ("", "reused", "tokens equal", "warm - cold", "cold - cold", ""),
            *map(self._line, self.checks),
        ]
        wide = [max(len(line[i]) for line in lines) for i in range(5)]
        text = []
        for name, *figures, verdict in lines:
            cells = [f"{cell:>{width}}" for cell, width in zip(figures, wide[1:], strict=True)]
            text.append("  ".join([f"{name:<{wide[0]}}", *cells, verdict]).rstrip())
        return "\n".join([self.about, *text, *self._conclusion()])

    def _line(self, row: Check) -> tuple[str, ...]:
        reused = tokens = ""
        if row.reused is not None and row.prompt is not None:
            reused = f"{row.reused} of {row.prompt}"
        if row.found is not None and row.found.tokens:
            tokens = f"{row.found.equal} of {row.found.tokens}"
        sides = row.found, row.noise or row.apart
        found, noise = ("" if one is None else _short(one.logits) for one in sides)
        verdict = self.verdict(row)
        remark = row.untested or self.fault_of(row) or (HIDDEN if verdict == NOT_TESTED else None)
        return row.name, reused, tokens, found, noise, verdict + (f": {remark}" if remark else "")

    def _conclusion(self) -> list[str]:
        lines = [
            f"Cold runs differ from each other by up to {_short(self.noise)} in their logits "
            f"(of up to {_short(self.largest)}); a warm run may differ by {_short(self.limit)}."
        ]
        if self.wrong_token is not None:
            lines.append(
                f"One wrong token near the end of the prompt makes {_short(self.wrong_token)}."
            )
        if self.is_blind:
            lines.append(
                "That is within the limit: a mistake of one token can't be told from how cold runs "
                "differ by themselves. Nothing is proved."
            )
        different = [row.name for row in self.checks if self.verdict(row) == DIFFERENT]
        if different:
            lines.append(
                f"DIFFERENT: {', '.join(different)}. Reuse changes the output here; "
                "please report it with this table."
            )
        tested = [row for row in self.checks if self.verdict(row) != NOT_TESTED]
        if not self.is_complete:
            lines.append(f"Interrupted after {len(self.checks)} rows.")
        elif self.passed:
            lines.append(
                f"{len(tested)} of {len(self.checks)} rows tested, "
                "and reuse changes nothing in them."
            )
        return lines


def _largest(values: Sequence[float]) -> float:
    """Return the largest value; unlike max, return NaN if any value is not a number."""
    return next((value for value in values if value != value), max(values, default=0.0))


def _finite(value: Any) -> Any:
    """Return `value` with None for each number that is not finite, which JSON can't hold."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _short(value: float) -> str:
    return f"{value:.2g}"
