"""A batch loses the tokens that another order or a larger cache would have kept, no others."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from support.batches import filled
from support.models import tiny_config, tiny_model

from mlxrunner import ParallelRunner
from mlxrunner.batch.execution import BatchRequest, BatchResult, run_batch
from mlxrunner.batch.options import Order
from mlxrunner.batch.prompts import shared_before
from mlxrunner.cache.entry import as_tokens, common_prefix
from mlxrunner.engine.request import Observation
from mlxrunner.models.facts import facts_of
from mlxrunner.runner import Runner
from mlxrunner.testing import ByteTokenizer, oracle_runner

Prompts = Sequence[Sequence[int]]


def optimum(prompts: Prompts, order: Order = "prefix") -> int:
    """Nodes of the tree of all prefixes, and the last token of each prompt that is there again."""
    nodes: set[tuple[int, ...]] = set()
    again = 0
    for prompt in sorted(prompts) if order == "prefix" else prompts:
        again += tuple(prompt) in nodes
        nodes |= {tuple(prompt[:end]) for end in range(1, len(prompt) + 1)}
    return len(nodes) + again


def some_prompts(seed: int, most: int = 40) -> list[list[int]]:
    """Return prompts that share prefixes of all lengths, with repeats and beginnings of others."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(1, 250) for _ in range(rng.randint(1, 60))]]
    while len(prompts) < rng.randint(2, most):
        base = rng.choice(prompts)
        cut = rng.randint(0, len(base))
        tail = [rng.randrange(1, 4) for _ in range(rng.choice([0, 1, 5, 30]))]
        prompts.append((base[:cut] + tail) or [7])
    rng.shuffle(prompts)
    return prompts


def single(**options: Any) -> Runner:
    return oracle_runner(["full", "full"], context=512, **options)


def several() -> ParallelRunner:
    config = tiny_config("llama", max_position_embeddings=512, vocab_size=300)
    model = tiny_model(config)
    parts = model, ByteTokenizer(), facts_of(model, config)
    return ParallelRunner(*parts, max_sequences=4, context=128, prefill_step=64)


class Watch:
    """Sums over all requests of a runner, those that failed too."""

    def __init__(self, runner: Runner | ParallelRunner) -> None:
        self.evaluated = self.missed = 0
        self.reasons: dict[str | None, int] = {}
        runner.observers.append(self)

    def __call__(self, runner: Any, observed: Observation) -> None:
        usage = observed.usage
        self.evaluated += usage.evaluated_tokens
        missed = min(usage.missed_tokens, usage.evaluated_tokens)  # a failed one reached fewer
        self.missed += missed
        if missed:
            self.reasons[usage.reason] = self.reasons.get(usage.reason, 0) + missed


def run(
    runner: Runner | ParallelRunner, prompts: Prompts, order: Order = "prefix", **options: Any
) -> list[BatchResult]:
    requests = [BatchRequest(list(prompt)) for prompt in prompts]
    return list(run_batch(runner, requests, order=order, **{"max_tokens": 1, **options}))


@pytest.mark.parametrize("seed", range(12))
def test_lost_is_what_was_evaluated_beyond_the_tree(seed: int) -> None:
    """Exactly, with a reason that says what would mend it; in prefix order it is nothing.

    Where prompts part, nothing could have been kept.
    """
    prompts = some_prompts(seed)
    watch = Watch(runner := single())
    run(runner, prompts)
    assert (watch.evaluated, watch.missed) == (optimum(prompts), 0)
    watch = Watch(runner := single())
    run(runner, prompts, "input")
    assert watch.missed == watch.evaluated - optimum(prompts, "input")
    assert set(watch.reasons) <= {"batch_order"}


@pytest.mark.parametrize("order", ["prefix", "input"])
@pytest.mark.parametrize("seed", range(3))
def test_side_by_side_too(seed: int, order: Order) -> None:
    """Lines that run at the same time evaluate a few tokens twice."""
    prompts = some_prompts(seed, 25)
    with several() as runner:
        watch = Watch(runner)
        run(runner, prompts, order)
    assert watch.missed == watch.evaluated - optimum(prompts, order)
    assert set(watch.reasons) <= {"side_by_side" if order == "prefix" else "batch_order"}


@pytest.mark.parametrize("seed", range(6))
def test_windows_that_can_not_be_rewound_are_the_reason_themselves(seed: int) -> None:
    """Another order, or a checkpoint, would have saved what a layer could not keep."""
    prompts = some_prompts(seed)
    watch = Watch(runner := oracle_runner(["full", "sliding"], context=512, checkpoint_budget=0))
    run(runner, prompts)
    assert watch.missed == watch.evaluated - optimum(prompts)
    assert set(watch.reasons) <= {"rewind_limited"}


@pytest.mark.parametrize("seed", range(6))
def test_lines_that_fail_and_are_tried_again(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure loses what it throws away, and not what it had not reached."""
    prompts, runner = some_prompts(seed), single(prefill_step=8)
    watch, rng = Watch(runner), random.Random(seed)
    real = runner.model.on_layer

    def fail(index: int) -> None:
        real(index)
        if rng.random() < 0.05:
            raise RuntimeError("a layer fails")

    runner.model.on_layer = fail
    results = run(runner, prompts, retries=20)
    assert all(result.error is None for result in results)
    assert watch.missed == watch.evaluated - optimum(prompts)
    assert set(watch.reasons) <= {"line_failed", "entry_freed"}


@pytest.mark.parametrize("seed", range(30))
def test_what_a_line_shares_with_those_before_it(seed: int) -> None:
    """In one pass over the sorted lines, what comparing all pairs gives."""
    prompts = [as_tokens(prompt) for prompt in some_prompts(seed)]
    with filled(prompts) as store:
        found = shared_before(store.pending("prefix"), len(prompts))
    for index, prompt in enumerate(prompts):
        before = prompts[:index]
        shared = max((common_prefix(other, prompt) for other in before), default=0)
        assert found[index] == shared
