"""Random histories of mixed requests: each answer is the one that a cold single runner gives, whatever went on beside it."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress
from functools import cache
from typing import Any

import mlx.core as mx
import pytest

from mlxrunner import Runner
from mlxrunner.cache.sequences import CacheFullError
from mlxrunner.models.facts import facts_of
from mlxrunner.parallel.handle import Handle
from mlxrunner.parallel.request import Result, StepFailedError
from mlxrunner.parallel.runner import ParallelRunner
from mlxrunner.parallel.slots import NoFreeSlotError
from mlxrunner.testing import ByteTokenizer
from mlxrunner.testing_models import tiny_config, tiny_model

SLIDING = {"head_dim": 16, "num_hidden_layers": 3, "rope_theta": 1e4}
WITH_WINDOWS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window_pattern": 3},
    "olmo3": SLIDING
    | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    "cohere2": SLIDING | {"sliding_window_pattern": 3, "layer_norm_eps": 1e-5, "logit_scale": 1.0},
    "gpt_oss": {},
    "exaone4": SLIDING
    | {"sliding_window_pattern": "LLG", "rope_scaling": {"rope_type": "default"}},
}
ARCHITECTURES: dict[str, dict[str, Any]] = WITH_WINDOWS | {
    "llama": {},
    "qwen3": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {
        "rope_theta": 1e4,
        "pad_token_id": 0,
        "partial_rotary_factor": 1.0,
        "original_max_position_embeddings": 4096,
    },
}
NEAR = 1e-4
Parts = tuple[Any, ByteTokenizer, Any]


@cache
def parts(name: str, window: int) -> Parts:
    windows = {"sliding_window": window} if name in WITH_WINDOWS else {}
    config = tiny_config(
        name,
        **({"max_position_embeddings": 4096, "vocab_size": 300} | ARCHITECTURES[name] | windows),
    )
    model = tiny_model(config, seed=window)
    return model, ByteTokenizer(), facts_of(model, config)


def check(
    given: Parts, context: int, prompt: list[int], options: dict[str, Any], got: Result
) -> None:
    """The same tokens, text and end as those of a cold single runner, and log-probabilities within NEAR."""
    expected = Result.of(list(Runner(*given, context=context).generate(prompt, **options)))
    pairs = zip(got.logprobs or [], expected.logprobs or [], strict=False)
    gaps = [abs(ours[0] - its[0]) for ours, its in pairs]
    said = f"{len(prompt)} tokens, context {context}, {options}: {got.tokens} is not {expected.tokens}, {gaps}"
    assert max(gaps, default=0) < NEAR, said
    assert (got.tokens, got.text, got.finish_reason) == (
        expected.tokens,
        expected.text,
        expected.finish_reason,
    ), said
    assert got.usage.shifted_tokens == expected.usage.shifted_tokens, said


class History:
    """One run of random events on one runner. `seen` counts what happened."""

    def __init__(self, given: Parts, rng: random.Random) -> None:
        self.given, self.rng, self.seen = given, rng, Counter[str]()
        self.context = rng.randint(30, 150)
        self.trunk = [rng.randrange(290) for _ in range(2 * self.context)]
        self.past: list[list[int]] = [[]]
        self.live: list[tuple[Handle, list[int], dict[str, Any]]] = []

    def run(self, events: int) -> Counter[str]:
        rng, sequences = self.rng, self.rng.randint(1, 5)
        cells = rng.choice([None, None, rng.randint(self.context, sequences * self.context)])
        with ParallelRunner(
            *self.given,
            max_sequences=sequences,
            capacity=self.context,
            max_batch=rng.choice([8, 32, 200]),
            cells=cells,
        ) as runner:
            for _ in range(events):
                rng.choices([self.submit, self.step, self.cancel, self.interrupt], [8, 12, 1, 0.5])[
                    0
                ](runner)
            while self.live:
                self.step(runner)
        return self.seen

    def prompt(self) -> list[int]:
        """A piece of the trunk or of a past conversation, and something new; sometimes too long for the context."""
        rng = self.rng
        base = rng.choice([self.trunk, self.trunk[1:], rng.choice(self.past)])
        base = base[
            : rng.choice([0, 1, len(base), rng.randint(0, len(base)), rng.randint(0, self.context)])
        ]
        return base + [
            rng.randrange(290) for _ in range(rng.choice([0, 1, 3, rng.randint(1, 40)]))
        ] or [7]

    def options(self) -> dict[str, Any]:
        rng = self.rng
        options: dict[str, Any] = {
            "stop_tokens": [],
            "max_tokens": rng.choice([1, 3, 10, 40]),
            "logprobs": 0,
        }
        if rng.random() < 0.5:
            keep = rng.choice([0, 1, rng.randint(0, self.context // 2), self.context - 2])
            options |= {
                "overflow": "shift",
                "keep": keep,
                "max_tokens": rng.randint(1, 3 * self.context),
            }
        more: list[dict[str, Any]] = [
            {"temperature": 1.0, "seed": rng.randrange(99), "top_k": 40},
            {"repetition_penalty": 1.3, "penalty_context": 64},
            {"stop_tokens": rng.sample(range(290), 30)},
            {"stop": [chr(97 + rng.randrange(26)), "ab"]},
            {"choices": ["yes", "no", "perhaps"]},
        ]
        return options | (rng.choice(more) if rng.random() < 0.4 else {})

    def submit(self, runner: ParallelRunner) -> None:
        prompt, options = self.prompt(), self.options()
        if len(prompt) >= self.context and "overflow" not in options:
            prompt = prompt[: self.context - 1]
        try:
            self.live.append((runner.submit(prompt, **options), prompt, options))
            self.seen["submitted"] += 1
        except (NoFreeSlotError, CacheFullError):
            self.step(runner)

    def step(self, runner: ParallelRunner) -> None:
        for _ in range(self.rng.choice([1, 1, 5, 30])):
            runner.step()
        for one in list(self.live):
            handle, prompt, options = one
            if not handle.finished:
                continue
            self.live.remove(one)
            result = handle.result()
            check(self.given, self.context, prompt, options, result)
            self.past.append(prompt + result.tokens)
            self.seen["answered"] += 1
            self.seen["shifted"] += result.usage.shifted_tokens > 0
            self.seen["evaluated again"] += result.usage.reevaluated_tokens > 0
            self.seen["reused"] += result.usage.cached_tokens > 0

    def cancel(self, runner: ParallelRunner) -> None:
        if self.live:
            self.live.pop(self.rng.randrange(len(self.live)))[0].cancel()
            self.seen["cancelled"] += 1

    def interrupt(self, runner: ParallelRunner) -> None:
        """Ctrl-C in some layer of a step."""
        view = self.rng.choice(runner._adapted._views)

        def fail(keys: mx.array, values: mx.array) -> Any:
            raise KeyboardInterrupt

        view.update_and_fetch = fail  # type: ignore[method-assign]
        try:
            runner.step()
        except KeyboardInterrupt:
            self.seen["interrupted"] += 1
            for handle, _, _ in self.live:
                with suppress(StepFailedError):
                    assert Result.of(list(handle)).finish_reason
            self.live = []
        finally:
            del view.update_and_fetch


def history(name: str, seed: int, events: int = 40) -> Counter[str]:
    rng = random.Random(f"{name} {seed}")
    window = rng.choice([4, 16, 33, 70]) if name in WITH_WINDOWS else 0
    return History(parts(name, window), rng).run(events)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_any_history_gives_the_answers_of_cold_single_runs(name: str) -> None:
    """Shared prefixes, shifts, stops, forms, cancels and interrupts, with windows of any size against the context, few cells or enough."""
    seen = Counter[str]()
    for seed in range(3):
        seen += history(name, seed)
    assert seen["answered"] > 10
    assert min(seen["shifted"], seen["reused"]) > 0
