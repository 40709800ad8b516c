"""Histories whose every answer is held against that of a cold single runner."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from support.engine import DrivenHandle as Handle
from support.engine import Stepper
from support.histories import History, Parts, tiny_parts

from mlxrunner import Runner
from mlxrunner.errors import CacheFullError, NoFreeSlotError
from mlxrunner.results import Result, Usage

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


@cache
def parts(name: str, window: int) -> Parts:
    windows = {"sliding_window": window} if name in WITH_WINDOWS else {}
    return tiny_parts(name, seed=window, **ARCHITECTURES.get(name, {}), **windows)


def cold(given: Parts, context: int, prompt: list[int], options: dict[str, Any]) -> Result:
    """Return the answer of a new single runner."""
    return Result.of(list(Runner(*given, context=context).generate(prompt, **options)))


def check(
    expected: Result, context: int, prompt: list[int], options: dict[str, Any], got: Result
) -> None:
    """Check that tokens, text and end are the expected ones, log-probabilities within NEAR."""
    pairs = zip(got.logprobs or [], expected.logprobs or [], strict=False)
    gaps = [abs(ours[0] - its[0]) for ours, its in pairs]
    said = (
        f"{len(prompt)} tokens, context {context}, {options}: {got.tokens} is not "
        f"{expected.tokens}, {gaps}"
    )
    assert max(gaps, default=0) < NEAR, said
    assert (got.tokens, got.text, got.finish_reason) == (
        expected.tokens,
        expected.text,
        expected.finish_reason,
    ), said
    assert got.usage.cache.shifted_tokens == expected.usage.cache.shifted_tokens, said


class CheckedHistory(History):
    """Each answer is held against that of a cold single runner."""

    def __init__(self, given: Parts, rng: random.Random) -> None:
        super().__init__(given, rng)
        self._cold: dict[str, Result] = {}

    def cold(self, prompt: list[int], options: dict[str, Any]) -> Result:
        """Return the answer of a new single runner, computed once."""
        asked = repr((prompt, options))
        if asked not in self._cold:
            self._cold[asked] = cold(self.given, self.context, prompt, options)
        return self._cold[asked]

    def options(self) -> dict[str, Any]:
        rng = self.rng
        options: dict[str, Any] = {
            "stop_tokens": [],
            "max_tokens": rng.choice([1, 3, 10, 40]),
            "logprobs": 0,
        }
        if rng.random() < 0.5:
            options |= self.shift()
        more: list[dict[str, Any]] = [
            {"temperature": 1.0, "seed": rng.randrange(99), "top_k": 40},
            {"repetition_penalty": 1.3, "penalty_context": 64},
            {"stop_tokens": rng.sample(range(290), 30)},
            {"stop": [chr(97 + rng.randrange(26)), "ab"]},
            {"choices": ["yes", "no", "perhaps"]},
        ]
        return options | (rng.choice(more) if rng.random() < 0.4 else {})

    def submit(self, runner: Stepper) -> None:
        prompt, options = self.prompt(), self.options()
        if len(prompt) >= self.context and "overflow" not in options:
            prompt = prompt[: self.context - 1]
        try:
            self.live.append((runner.submit(prompt, **options), prompt, options))
            self.seen["submitted"] += 1
        except (NoFreeSlotError, CacheFullError):
            self.step(runner)

    def ended(self, handle: Handle, prompt: list[int], options: dict[str, Any]) -> Usage:
        result = handle.result()
        check(self.cold(prompt, options), self.context, prompt, options, result)
        self.past.append(prompt + result.tokens)
        self.seen["answered"] += 1
        return result.usage

    def failed(self, handle: Handle, prompt: list[int], options: dict[str, Any]) -> None:
        """Check that what came of the answer is the beginning of a cold single runner's."""
        tokens = [chunk.token for chunk in handle.poll() if chunk.token is not None]
        expected = self.cold(prompt, options)
        assert tokens == expected.tokens[: len(tokens)]
        super().failed(handle, prompt, options)
