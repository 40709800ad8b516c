"""Sides that take turns, and the rows of their comparison."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mlxrunner.bench.harness import (
    alternate,
    excess,
    in_turn,
    less_is_better,
    measure,
    mlx_lm_backend,
    more_is_better,
    our_backend,
    some_tokens,
    table_of,
)
from mlxrunner.runner import Runner
from mlxrunner.testing import oracle_runner


def test_another_side_begins_each_round() -> None:
    """Neither side always follows the other."""
    order: list[str] = []
    runner = oracle_runner()

    def backend(name: str) -> Iterator[int]:
        order.append(name)
        yield from (1, 2, 3)

    backends = {name: (lambda prompt, count, name=name: backend(name)) for name in ("a", "b")}
    runs = alternate(runner, backends, [1], 2, rounds=3)  # type: ignore[arg-type]  # generators
    assert order == ["b", "a", "a", "b", "b", "a", "a", "b"]
    assert [len(those) for those in runs.values()] == [3, 3]
    assert in_turn(backends, 1) == ["a", "b"]


def test_sides_that_disagree_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """A side that gives other tokens has done other work."""
    runner = oracle_runner()
    backends = {"a": lambda prompt, count: iter_of(1, 2), "b": lambda prompt, count: iter_of(1, 3)}
    alternate(runner, backends, [5, 6], 2, rounds=1)  # type: ignore[arg-type]  # generators
    assert "a, b: not the same tokens after 2" in capsys.readouterr().err


def iter_of(*tokens: int) -> Iterator[int]:
    yield from tokens


def test_both_sides_give_the_same_tokens_and_leave_a_true_entry() -> None:
    """On the embedded model, from a cold start."""
    runner = Runner.load("demo", context=128, reserve=False)
    prompt = some_tokens(runner, 40)
    ours, other = (
        measure(make(runner), prompt, 6, runner) for make in (our_backend, mlx_lm_backend)
    )
    assert ours.tokens == other.tokens
    assert ours.ttft > 0
    assert ours.peak > 0
    assert ours.stored > 0
    assert runner.entry.is_true
    assert len(runner.entry.tokens) >= 45


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
