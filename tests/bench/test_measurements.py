"""Rows of a comparison: gains, excesses, targets, the table."""

from __future__ import annotations

import pytest

from mlxrunner.bench.harness import excess, less_is_better, more_is_better, table_of


def test_gains_are_compared_round_by_round() -> None:
    """A round that was slow for both sides leaves its ratio alone."""
    row = more_is_better("decode", "tok/s", [100, 10, 90], [50, 5, 60], target=1.5)
    assert row.compared == [2, 2, 1.5]
    assert row.is_met
    assert row.as_dict()["gain"] == {"min": 1.5, "median": 2.0, "max": 2.0}
    assert less_is_better("peak", "MB", [10], [25]).compared == [2.5]


@pytest.mark.parametrize(("target", "verdict"), [(5, "<= 5 met"), (3, "<= 3 MISSED"), (None, "")])
def test_an_excess_has_an_upper_target(target: float | None, verdict: str) -> None:
    """A gain has a lower one; without a target nothing is judged."""
    row = excess("a token", "us", [14], [10], target=target)
    assert row.verdict == verdict
    assert table_of([row])[1].endswith(verdict)
    header = ["unit", "ours", "mlx-lm", "min", "median", "max"]
    assert table_of([row], "ours", "mlx-lm")[0].split() == header + ["target"] * (
        target is not None
    )
