"""Real architectures of mlx-lm give warm answers equal to cold ones in long conversations.

They are tiny, with random float32 weights.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from itertools import cycle
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from support.models import ARCHITECTURES, tiny_config, tiny_model
from support.sample import fewer

from mlxrunner import Runner
from mlxrunner.models.facts import facts_of
from mlxrunner.testing import EOS, ByteTokenizer

MOVABLE = {"llama", "mistral", "qwen3", "gemma3_text", "gpt_oss"}
ANSWER = 6


def build(architecture: str, **options: Any) -> Runner:
    config = tiny_config(architecture, max_position_embeddings=16384, vocab_size=300)
    model = tiny_model(config)
    facts = facts_of(model, config)
    return Runner(model, ByteTokenizer(), facts, **options)


def cold(model: Any, prompt: list[int], n: int = ANSWER) -> tuple[list[int], list[float]]:
    """Run mlx-lm's model on its own caches in one piece; return tokens and log-probabilities."""
    cache = make_prompt_cache(model)
    logits = model(mx.array([prompt]), cache=cache)[0, -1]
    tokens, logprobs = [], []
    for _ in range(n):
        row = logits - mx.logsumexp(logits)
        token = int(mx.argmax(row).item())  # type: ignore[arg-type]
        tokens.append(token)
        logprobs.append(float(row[token].item()))  # type: ignore[arg-type]
        logits = model(mx.array([[token]]), cache=cache)[0, -1]
    return tokens, logprobs


def message(rng: random.Random, longest: int = 30) -> list[int]:
    return [*(rng.randrange(290) for _ in range(rng.randint(1, longest))), EOS]


class Talk:
    """A conversation as a template renders it: a system prompt, then messages.

    The last answers may have been thought about first.
    """

    def __init__(self, seed: str) -> None:
        self.rng = random.Random(seed)
        self.system = message(self.rng)
        self.messages: list[list[int]] = []

    def turns(self, count: int) -> Iterator[tuple[str, list[int]]]:
        kinds = ["append"] * 5 + [
            "edit early",
            "edit late",
            "regenerate",
            "cut",
            "cancel",
            "strip",
            "strip",
            "new",
        ]
        for turn in range(count):
            kind = self.rng.choice(kinds) if turn > 2 else "append"
            self.change(kind)
            yield kind, [*self.system, *(token for part in self.messages for token in part)]

    def change(self, kind: str) -> None:
        rng, messages = self.rng, self.messages
        if kind == "new":
            del messages[:]
        if kind == "edit early":
            messages[rng.randrange(len(messages) // 2 + 1)][0] = rng.randrange(290)
        elif kind == "edit late":
            messages[-1][-2 if len(messages[-1]) > 1 else 0] = rng.randrange(290)
        elif kind == "regenerate":
            del messages[-1]
            if not messages:
                messages.append(message(rng))
        elif kind == "cut":
            del messages[rng.randint(1, len(messages)) :]
        elif kind == "strip" and len(messages) > 1:
            messages[-1] = messages[-1][2:] or [
                EOS
            ]  # the thinking before the answer is not repeated
            messages.append(message(rng))
        else:
            messages.append(message(rng))


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that move and checkpoints that come every few tokens."""
    monkeypatch.setattr("mlxrunner.cache.layers.extents.STEP", 8)
    monkeypatch.setattr("mlxrunner.cache.entry.SPACING", 20)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_thirty_turns_warm_equal_cold(architecture: str) -> None:
    """All tokens equal mlx-lm's on a fresh cache, with log-probabilities within 1e-4."""
    runner = build(architecture, prefill_step=24, rewind_slack=10, checkpoint_interval=50)
    assert set(runner.facts.layers) == ARCHITECTURES[architecture]
    talk = Talk(architecture)
    seen: set[int] = set()
    hits = 0
    turns = fewer(30, 15)
    for kind, prompt in talk.turns(turns):
        if kind == "cancel":
            iterator = runner.generate(
                prompt, stop_tokens=[], progress=_give_up_after(len(prompt) // 2)
            )
            with suppress(KeyboardInterrupt):
                next(iterator)
            iterator.close()  # type: ignore[attr-defined]
            assert runner.entry.is_true
        chunks = list(runner.generate(prompt, max_tokens=ANSWER, stop_tokens=[], logprobs=0))
        usage = chunks[-1].usage
        assert usage is not None
        tokens = [chunk.token for chunk in chunks]
        expected, logprobs = cold(runner.model, prompt)
        assert tokens == expected, kind
        assert (
            max(
                abs((chunk.logprob or 0) - want)
                for chunk, want in zip(chunks, logprobs, strict=True)
            )
            < 1e-4
        )
        assert runner.entry.is_true
        hits += usage.outcome != "miss"
        seen.update(expected)
        talk.messages.append([*expected, EOS])
    assert len(seen) > 15, "the model says too little for the comparison to mean anything"
    assert hits >= turns - 10


def _give_up_after(tokens: int) -> Any:
    def progress(done: int, total: int) -> None:
        if done > tokens:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_over_the_edge_of_the_context(architecture: str) -> None:
    """Layers move their tokens, or the answer is a cold run's on what was kept, each time."""
    runner = build(architecture, context=90, prefill_step=24, rewind_slack=100)
    history: list[int] = list(range(12))
    shifted = 0
    for turn in range(12):
        history += [(turn * 37 + i * 11) % 290 for i in range(12)]
        before = len(runner.entry.tokens)
        chunks = list(
            runner.generate(history, max_tokens=4, stop_tokens=[], overflow="shift", keep=5)
        )
        usage = chunks[-1].usage
        assert usage is not None
        assert runner.entry.is_true
        assert len(runner.entry.tokens) <= 90
        shifted += usage.cache.shifted_tokens
        if architecture in MOVABLE:
            assert usage.evaluated_tokens + usage.cache.reevaluated_tokens <= 14 or before == 0
        elif usage.cache.shifted_tokens and not usage.cache.reevaluated_tokens:
            prompt = [*history[:5], *history[5 + usage.cache.shifted_tokens :]]
            assert [chunk.token for chunk in chunks] == cold(runner.model, prompt, 4)[0]
        history = [*runner.entry.tokens, chunks[-1].token or 0]
    assert shifted > 60


@pytest.mark.exhaustive(2)
@pytest.mark.parametrize(
    ("architecture", "pattern"),
    zip(
        [name for name, kinds in ARCHITECTURES.items() if kinds != {"full"}],
        cycle(["regenerate", "think-strip"]),
        strict=False,
    ),
)
def test_patterns_of_every_day_reuse_nearly_all_at_8k_tokens(
    architecture: str, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cached >= 0.95 * matched, also where mlx-lm's caches can't be trimmed."""
    monkeypatch.undo()
    runner = build(architecture)
    rng = np.random.default_rng(0)
    history = [*rng.integers(0, 290, 8000).tolist(), EOS, 1, 2, 3]
    for place in range(900, 8000, 900):
        history[place] = EOS
    answer = [
        chunk.token or 0 for chunk in runner.generate(history, max_tokens=300, stop_tokens=[])
    ]
    # 250 tokens of thinking are left out of the history, and the next message is there
    stripped = [*history, *answer[250:], EOS, *rng.integers(0, 290, 30).tolist(), EOS, 1, 2, 3]
    prompt = history if pattern == "regenerate" else stripped
    usage = list(runner.generate(prompt, max_tokens=2, stop_tokens=[]))[-1].usage
    assert usage is not None
    assert usage.cache.matched_tokens >= len(history) - 1
    assert usage.cached_tokens >= 0.95 * usage.cache.matched_tokens


def test_a_full_attention_model_never_evaluates_more_than_what_differs() -> None:
    """Any edit evaluates prompt - matched, or one token, and needs no checkpoint."""
    runner = build("llama")
    talk = Talk("full")
    for _, prompt in talk.turns(40):
        usage = list(runner.generate(prompt, max_tokens=3, stop_tokens=[]))[-1].usage
        assert usage is not None
        assert usage.evaluated_tokens == max(1, usage.prompt_tokens - usage.cache.matched_tokens)
        assert len(runner.entry.checkpoints) == 0
        talk.messages.append(message(talk.rng))
