"""Answers with and without guesses, from tiny models of many architectures."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.optimizers import Adam
from support.architectures import VOCAB, build, settings_of

from mlxrunner import Runner
from mlxrunner.models.facts import facts_of
from mlxrunner.testing import ByteTokenizer

NAMES = (
    "llama qwen3 gemma2 gemma3_text gpt_oss cohere2 exaone4 olmo3 phi3 mixtral deepseek_v2 "
    "deepseek_v3 glm4_moe minicpm3 lfm2 mamba mamba2 falcon_h1 jamba granitemoehybrid nemotron_h "
    "qwen3_next kimi_linear olmo_hybrid"
).split()
"""Full, sliding, latent, recurrent and mixed architectures."""
NEAR = 1e-3
"""Two log-probabilities that differ by less may change places by the rounding of a pass."""


@dataclass
class Seen:
    """Counts of what was compared, and of what differed."""

    answers: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    near: int = 0
    """Answers that part where two tokens are as good as equally likely."""
    different: int = 0
    """Answers that part elsewhere."""


def runner_of(architecture: str, model: Any = None) -> Runner:
    """Return a runner on a tiny model: a random one, if none is given."""
    model = build(architecture) if model is None else model
    facts = facts_of(model, settings_of(architecture))
    return Runner(model, ByteTokenizer(), facts, context=512, prefill_step=64)


def prompts(seed: str, count: int) -> Iterator[list[int]]:
    """Yield prompts that repeat a part of themselves."""
    rng = random.Random(seed)
    for _ in range(count):
        part = [rng.randrange(VOCAB) for _ in range(rng.randint(2, 24))]
        yield [rng.randrange(VOCAB), *part * rng.randint(1, 3), *part[: rng.randint(1, len(part))]]


def compare(runner: Runner, seed: str, count: int, length: int = 16) -> Seen:
    """Answer `count` prompts both ways, greedily and sampled in turn.

    What the entry held before is guessed, too: each second time another answer to the prompt.
    """
    seen = Seen()
    for number, prompt in enumerate(prompts(seed, count)):
        options: dict[str, Any] = {"max_tokens": length, "stop_tokens": [], "logprobs": 2}
        if number % 2:
            options |= {"temperature": 0.3, "seed": number}
        runner.reset()
        plain = _answer(runner, prompt, "off", options)
        if number % 4 > 1:
            _answer(runner, prompt, "off", options | {"temperature": 0.7, "seed": number + 1000})
        guessed = _answer(runner, prompt, "lookup", options)
        assert runner.usage is not None
        seen.answers += 1
        seen.tokens += len(plain)
        seen.drafted += sum(use.drafted for use in runner.usage.drafts)
        seen.accepted += sum(use.accepted for use in runner.usage.drafts)
        for (token, top), (other, _) in zip(plain, guessed, strict=True):
            if token != other:
                first, second = list((top or {}).values())[:2]
                is_near = not number % 2 and first - second < NEAR
                seen.near += is_near
                seen.different += not is_near
                break
    return seen


def _answer(runner: Runner, prompt: list[int], how: str, options: dict[str, Any]) -> list[Any]:
    chunks = runner.generate(prompt, speculate=how, **options)
    return [(chunk.token, chunk.top_logprobs) for chunk in chunks]


def trained(architecture: str, steps: int) -> Any:
    """Return a model that was trained to go on with what repeats itself."""
    model, rng = build(architecture), random.Random(architecture)
    adam = Adam(learning_rate=2e-3)

    def loss(model: Any, tokens: mx.array) -> mx.array:
        return nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], reduction="mean")

    step = nn.value_and_grad(model, loss)
    model.train()
    for _ in range(steps):
        parts = [[rng.randrange(VOCAB) for _ in range(rng.randint(2, 16))] for _ in range(8)]
        rows = [(part * 33)[:64] for part in parts]
        _, gradients = step(model, mx.array(rows))
        adam.update(model, gradients)
        mx.eval(model.parameters(), adam.state)
    model.eval()
    return model
