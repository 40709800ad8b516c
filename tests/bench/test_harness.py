"""Sides that take turns, and the rows of their comparison."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from support.models import tiny_config, tiny_model

from mlxrunner.bench.bench import (
    Ceilings,
    PassCost,
    compute_dtype,
    cost_of,
    measure_ceilings,
    num_parameters,
)
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
    answers = {"a": (1, 2), "b": (1, 3)}
    backends: Any = {
        name: lambda prompt, count, answer=answer: (token for token in answer)
        for name, answer in answers.items()
    }
    alternate(runner, backends, [5, 6], 2, rounds=1)
    assert "a, b: not the same tokens after 2" in capsys.readouterr().err


def test_both_sides_give_the_same_tokens_and_leave_a_true_entry() -> None:
    runner = Runner.load("demo", context=128, reserve=False)
    prompt = some_tokens(runner, 40)
    ours, other = (
        measure(make(runner), prompt, 6, runner) for make in (our_backend, mlx_lm_backend)
    )
    assert ours.tokens == other.tokens
    assert min(ours.ttft, ours.peak, ours.stored) > 0
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


TABLE = 288 * 64


def test_an_untied_table_of_embeddings_is_not_read() -> None:
    """The head is used for the last token only."""
    config = tiny_config("llama")
    model = tiny_model(config)
    total = sum(array.size for _, array in tree_flatten(model.parameters()))
    cost = cost_of(model, config)
    assert num_parameters(model) == total
    assert cost == PassCost(total - 2 * TABLE, TABLE, 4 * (total - TABLE))


def test_a_tied_table_is_the_head() -> None:
    config = tiny_config("llama", tie_word_embeddings=True)
    model = tiny_model(config)
    total = sum(array.size for _, array in tree_flatten(model.parameters()))
    assert cost_of(model, config) == PassCost(total - TABLE, TABLE, 4 * total)


def test_quantized_weights_count_by_their_stored_bytes_and_whole_numbers() -> None:
    """Packed four-bit weights are as many numbers as before, in fewer bytes."""
    config = tiny_config("llama")
    model = tiny_model(config)
    before = cost_of(model, config)
    nn.quantize(model, group_size=32, bits=4)
    after = cost_of(model, config)
    assert before is not None
    assert after is not None
    assert (after.body, after.head) == (before.body, before.head)
    assert after.nbytes < before.nbytes / 4
    assert compute_dtype(model) == mx.float32


def test_experts_depend_on_the_tokens() -> None:
    config = tiny_config("gpt_oss")
    assert cost_of(tiny_model(config), config) is None


@pytest.mark.parametrize(
    ("tokens", "stored", "expected"),
    [(1, 0, (1.0, "bandwidth")), (1, 50, (1.5, "bandwidth")), (100, 0, (20.2, "arithmetic"))],
)
def test_a_pass_is_bound_by_reading_or_by_computing(
    tokens: int, stored: int, expected: tuple[float, str]
) -> None:
    """One token reads all weights and caches; many compute twice per weight and token."""
    ceilings = Ceilings("float32", bandwidth=100, arithmetic=10)
    assert PassCost(body=1, head=1, nbytes=100).least_s(tokens, stored, ceilings) == pytest.approx(
        (expected[0], expected[1])
    )


def test_the_machine_has_ceilings() -> None:
    ceilings = measure_ceilings(tiny_model(tiny_config("llama")), quick=True)
    assert ceilings.dtype == "float32"
    assert ceilings.bandwidth > 1e6
    assert ceilings.arithmetic > 1e6
