"""What was found, and what it means. Arithmetic and text only: knows nothing about models.

A device does not compute the same numbers in every order of sums. So the limit is measured: cold runs are held against cold runs of the
same prompts in other prefill steps, and a warm run may differ from a cold one by a few times the most that was seen there. A limit
above what one wrong token makes proves nothing: what is within it is called untested.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

FACTOR = 8
"""A warm run may differ by FACTOR times the noise ..."""
LAST_PLACES = 4
"""... and always by LAST_PLACES units in the last place of the largest logit."""
UNNOTICED = 1000
"""The noise of a row of two is believed up to FACTOR limits, or to one part in so many of what a wrong token makes: beyond, it is no
noise."""
OK, DIFFERENT, NOT_TESTED = "ok", "DIFFERENT", "not tested"
HIDDEN = "one wrong token would be within the limit"


@dataclass(frozen=True)
class Difference:
    """Two answers to one prompt: `equal` of `tokens` tokens are the same from the first on; `logits` is the largest difference of the
    logits up to and including the first token that differs, since what follows has another history."""

    equal: int
    tokens: int
    logits: float


@dataclass(frozen=True)
class Row:
    """One way to come to a warm entry. `found`: warm against cold; `noise`: cold against cold, in other steps.

    `reused` of `prompt` tokens came from the entry. `limit`: of a row that does not compare logits, with its own bound. `apart`: the noise
    of a row on several prompts at once: with nothing in common, and in another order of sums. `fault`: what is wrong whatever the numbers
    say. `untested`: why there is nothing to compare.
    """

    name: str
    found: Difference | None = None
    noise: Difference | None = None
    reused: int | None = None
    prompt: int | None = None
    limit: float | None = None
    apart: Difference | None = None
    fault: str | None = None
    untested: str | None = None


@dataclass
class Report:
    """`epsilon`: of the logits' type; `largest`: the largest logit seen; `wrong_token`: what one other token near the end of a prompt
    changes, so that it can be said how small an error would be found. `rows` grow while the verification runs."""

    model: str
    device: str
    context: int
    about: str = ""
    epsilon: float = 0.0
    largest: float = 0.0
    wrong_token: float | None = None
    is_complete: bool = False
    rows: list[Row] = field(default_factory=list)

    @property
    def noise(self) -> float:
        """The largest difference between cold runs."""
        return _largest([row.noise.logits for row in self.rows if row.noise is not None])

    @property
    def limit(self) -> float:
        """Of a difference of logits between warm and cold."""
        return _largest([FACTOR * self.noise, LAST_PLACES * self.epsilon * self.largest])

    def limit_of(self, row: Row) -> float:
        """Of this row's difference."""
        if row.limit is not None:
            return row.limit
        return (
            self.limit if row.apart is None else _largest([self.limit, FACTOR * row.apart.logits])
        )

    def verdict(self, row: Row) -> str:
        if row.untested is not None:
            return NOT_TESTED
        # Not `>`: what is not a number is different.
        if (
            row.found is None
            or self.fault_of(row) is not None
            or not row.found.logits <= self.limit_of(row)
        ):
            return DIFFERENT
        return NOT_TESTED if self._hides(row) else OK

    def fault_of(self, row: Row) -> str | None:
        """Return the error of the row that no limit excuses: its own fault, or a noise that no device makes."""
        believed = _largest([FACTOR * self.limit, (self.wrong_token or 0.0) / UNNOTICED])
        if row.fault is None and row.apart is not None and not row.apart.logits <= believed:
            return f"its own noise, {_short(row.apart.logits)}, is more than a device makes"
        return row.fault

    def _hides(self, row: Row) -> bool:
        """True if the change made by one wrong token would be within the row's limit."""
        return (
            row.limit is None
            and self.wrong_token is not None
            and not self.limit_of(row) < self.wrong_token
        )

    @property
    def is_blind(self) -> bool:
        """True if the limit hides the change made by one wrong token: then equal rows prove nothing."""
        return self.wrong_token is not None and not self.limit < self.wrong_token

    @property
    def is_different(self) -> bool:
        return any(self.verdict(row) == DIFFERENT for row in self.rows)

    @property
    def passed(self) -> bool:
        """All was run, no row is different, and one wrong token would have been seen."""
        return self.is_complete and not self.is_blind and not self.is_different

    def as_dict(self) -> dict[str, Any]:
        rows = [asdict(row) | {"verdict": self.verdict(row)} for row in self.rows]
        sums = {
            "noise": self.noise,
            "limit": self.limit,
            "is_blind": self.is_blind,
            "passed": self.passed,
        }
        found: dict[str, Any] = _finite(asdict(self) | sums | {"rows": rows})
        return found

    def table(self) -> str:
        """For people: a line per row, then what it means."""
        lines = [
            ("", "reused", "tokens equal", "warm - cold", "cold - cold", ""),
            *map(self._line, self.rows),
        ]
        wide = [max(len(line[i]) for line in lines) for i in range(5)]
        text = [
            "  ".join([f"{line[0]:<{wide[0]}}", *(f"{cell:>{width}}" for cell, width in zip(line[1:], wide[1:], strict=False)), line[5]])
            for line in lines
        ]  # fmt: skip
        return "\n".join([self.about, *(line.rstrip() for line in text), *self._conclusion()])

    def _line(self, row: Row) -> tuple[str, ...]:
        reused = "" if row.reused is None or row.prompt is None else f"{row.reused} of {row.prompt}"
        tokens = (
            ""
            if row.found is None or not row.found.tokens
            else f"{row.found.equal} of {row.found.tokens}"
        )
        found, noise = (
            _short(one.logits) if one is not None else ""
            for one in (row.found, row.noise or row.apart)
        )
        hidden = HIDDEN if self.verdict(row) == NOT_TESTED else None
        remark = row.untested or self.fault_of(row) or hidden
        return (
            row.name,
            reused,
            tokens,
            found,
            noise,
            f"{self.verdict(row)}{f': {remark}' if remark else ''}",
        )

    def _conclusion(self) -> list[str]:
        lines = [
            f"Cold runs differ from each other by up to {_short(self.noise)} in their logits (of up to {_short(self.largest)}); "
            f"a warm run may differ by {_short(self.limit)}."
        ]
        if self.wrong_token is not None:
            lines.append(
                f"One wrong token near the end of the prompt makes {_short(self.wrong_token)}."
            )
        if self.is_blind:
            lines.append(
                "That is within the limit: a mistake of one token can't be told from how cold runs differ by themselves. Nothing is proved."
            )
        different = [row.name for row in self.rows if self.verdict(row) == DIFFERENT]
        if different:
            lines.append(
                f"DIFFERENT: {', '.join(different)}. Reuse changes the output here; please report it with this table."
            )
        tested = [row for row in self.rows if self.verdict(row) != NOT_TESTED]
        if not self.is_complete:
            lines.append(f"Interrupted after {len(self.rows)} rows.")
        elif self.passed:
            lines.append(
                f"{len(tested)} of {len(self.rows)} rows tested, and reuse changes nothing in them."
            )
        return lines


def _largest(values: Sequence[float]) -> float:
    """As max, but what is not a number stays visible."""
    return next((value for value in values if value != value), max(values, default=0.0))


def _finite(value: Any) -> Any:
    """JSON has no word for what is not a number: null."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _short(value: float) -> str:
    return f"{value:.2g}"
