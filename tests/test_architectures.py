"""Real architectures of mlx-lm with tiny random float32 weights: long conversations with edits, warm against cold."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlxrunner import Runner
from mlxrunner.models.facts import facts_of
from mlxrunner.testing import ByteTokenizer
from mlxrunner.testing_models import tiny_config, tiny_model

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16, "rope_theta": 1e6},
    "gemma3_text": {},
    "qwen3_next": {
        "head_dim": 16, "partial_rotary_factor": 0.5, "rope_theta": 1e4, "full_attention_interval": 2,
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4, "num_experts": 0, "num_experts_per_tok": 0, "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 16, "mlp_only_layers": [0, 1], "moe_intermediate_size": 16,
    },
    "jamba": {
        "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2, "mamba_d_conv": 4,
        "mamba_d_state": 8, "mamba_expand": 2, "num_experts": 2, "num_experts_per_tok": 1,
    },
    "lfm2": {},
    "deepseek_v3": {},
}  # fmt: skip
KINDS = {
    "llama": {"full"}, "qwen3": {"full"}, "gemma3_text": {"full", "sliding"}, "qwen3_next": {"full", "recurrent"},
    "jamba": {"full", "recurrent"}, "lfm2": {"full", "recurrent"}, "deepseek_v3": {"full"},
}  # fmt: skip
ANSWER = 6


def build(architecture: str, prefill_step: int = 2048) -> Runner:
    config = tiny_config(architecture, max_position_embeddings=4096, vocab_size=300, **ARCHITECTURES[architecture])
    model = tiny_model(config)
    return Runner(model, ByteTokenizer(), facts_of(model, config), prefill_step=prefill_step)


def cold(model: Any, prompt: list[int], n: int = ANSWER) -> tuple[list[int], list[float]]:
    """mlx-lm's model on mlx-lm's own caches, the prompt in one piece: tokens and their log-probabilities."""
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


def turns(rng: random.Random, history: list[int]) -> Iterator[tuple[str, list[int]]]:
    """40 prompts, each made from the conversation so far: appended, edited early or late, regenerated, cut, or begun anew."""
    for turn in range(40):
        new = [rng.randrange(290) for _ in range(rng.randint(1, 30))]
        kind = (
            rng.choice(["append", "append", "append", "edit", "late edit", "regenerate", "cut", "cancel"]) if turn else "append"
        )
        if kind == "edit":
            history[rng.randrange(len(history))] = rng.randrange(290)
        elif kind == "late edit":
            history[-rng.randint(1, min(5, len(history)))] = rng.randrange(290)
        elif kind == "cut":
            del history[rng.randint(1, len(history)) :]
        elif kind != "regenerate":
            history += new
        yield kind, history


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_forty_turns_warm_equal_cold(architecture: str) -> None:
    """The same tokens as mlx-lm on a fresh cache, and log-probabilities within 1e-4, after every kind of turn."""
    runner = build(architecture, prefill_step=24)
    assert set(runner.facts.layers) == KINDS[architecture]
    history: list[int] = []
    seen: set[int] = set()
    hits = 0
    for kind, prompt in turns(random.Random(architecture), history):
        if kind == "cancel":
            iterator = runner.generate(prompt, stop_tokens=[], progress=_give_up_after(len(prompt) // 2))
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
        assert max(abs((chunk.logprob or 0) - want) for chunk, want in zip(chunks, logprobs, strict=True)) < 1e-4
        assert runner.entry.is_true
        hits += usage.outcome != "miss"
        seen.update(expected)
        history += expected
    assert len(seen) > 20, "the model says too little for the comparison to mean anything"
    assert hits > 10


def _give_up_after(tokens: int) -> Any:
    def progress(done: int, total: int) -> None:
        if done > tokens:
            raise KeyboardInterrupt

    return progress


def test_a_full_attention_model_never_evaluates_more_than_what_differs() -> None:
    """Whatever the edit: evaluated = prompt - matched, or one token."""
    runner = build("llama")
    for _, prompt in turns(random.Random(0), []):
        usage = list(runner.generate(list(prompt), max_tokens=3, stop_tokens=[]))[-1].usage
        assert usage is not None
        assert usage.evaluated_tokens == max(1, usage.prompt_tokens - usage.matched_tokens)
