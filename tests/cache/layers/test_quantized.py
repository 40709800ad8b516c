"""The quantized cache against mx.quantize of the rows, against mlx-lm's own, and in a runner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import QuantizedKVCache
from support.engine import Engine
from support.models import tiny_config, tiny_model, write_model
from support.sample import examples

from mlxrunner import OptionError, Runner
from mlxrunner.cache import RewindError
from mlxrunner.cache.layers import attention as module
from mlxrunner.cache.layers.attention import STEP, QuantizedAttentionCache
from mlxrunner.loading import plan_model
from mlxrunner.models.facts import facts_of
from mlxrunner.testing import ByteTokenizer

bits = pytest.mark.parametrize("bits", [8, 4], ids=lambda bits: f"{bits}-bits")


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEP", 8)


def rows(n: int, head_dim: int = 64, seed: int = 0, heads: int = 2) -> mx.array:
    """`[1, heads, n, head_dim]`, random."""
    return mx.array(
        np.random.default_rng(seed).normal(size=(1, heads, n, head_dim)).astype(np.float32)
    )


def same(found: Any, expected: Any) -> bool:
    """Bit for bit."""
    return all(mx.array_equal(a, b) for a, b in zip(found, expected, strict=True))


@bits
@pytest.mark.parametrize("context", [None, 200], ids=["growing", "whole"])
@examples(60)
@given(
    script=st.lists(
        st.tuples(st.sampled_from(["write", "write", "rewind"]), st.integers(1, 30)),
        min_size=2,
        max_size=12,
    )
)
def test_it_holds_exactly_what_quantize_makes_of_the_rows(
    small_steps: None, bits: int, context: int | None, script: list[tuple[str, int]]
) -> None:
    """Written in whatever chunks, rewound and written again: warm is cold, bit for bit."""
    cache = QuantizedAttentionCache(bits, context)
    keys, values = mx.zeros((1, 2, 0, 64)), mx.zeros((1, 2, 0, 64))
    for turn, (what, n) in enumerate(script):
        if what == "write" and keys.shape[2] + n <= 200:
            new_keys, new_values = rows(n, seed=turn), rows(n, seed=turn + 100)
            keys, values = (
                mx.concatenate([keys, new_keys], axis=2),
                mx.concatenate([values, new_values], axis=2),
            )
            found = cache.update_and_fetch(new_keys, new_values)
            assert all(same(a, b) for a, b in zip(found, cache.keys_and_values(), strict=True))
        elif what == "rewind":
            to = max(0, keys.shape[2] - n)
            cache.rewind(to)
            keys, values = keys[..., :to, :], values[..., :to, :]
        assert cache.offset == keys.shape[2]
        if cache.offset:
            found_keys, found_values = cache.keys_and_values()
            assert same(found_keys, mx.quantize(keys, group_size=64, bits=bits))
            assert same(found_values, mx.quantize(values, group_size=64, bits=bits))


def attention(cache: Any, seed: int, n: int, head_dim: int) -> mx.array:
    """Four query heads on two key heads, as mlx-lm's models do it."""
    queries, keys, values = (
        rows(n, head_dim, seed, heads=4),
        rows(n, head_dim, seed + 1),
        rows(n, head_dim, seed + 2),
    )
    mask = cache.make_mask(n, return_array=False, window_size=None)
    fetched = cache.update_and_fetch(keys, values)
    attended: mx.array = scaled_dot_product_attention(
        queries, *fetched, cache=cache, scale=head_dim**-0.5, mask=mask
    )
    return attended


@bits
@pytest.mark.parametrize(
    ("head_dim", "group"), [(64, 64), (128, 64), (32, 32), (96, 32)], ids=lambda number: str(number)
)
def test_attention_is_that_of_mlx_lm(
    small_steps: None, bits: int, head_dim: int, group: int
) -> None:
    """The same packed numbers, so the same sums; groups of 32 where a head has no groups of 64."""
    ours, theirs = QuantizedAttentionCache(bits), QuantizedKVCache(group_size=group, bits=bits)
    for turn, n in enumerate([5, 1, 1, 20, 1, 3]):
        assert mx.array_equal(
            attention(ours, turn, n, head_dim), attention(theirs, turn, n, head_dim)
        )
    assert ours.group_size == group
    assert all(
        same(a, b) for a, b in zip(ours.keys_and_values(), theirs.keys_and_values(), strict=True)
    )


@pytest.mark.parametrize(
    ("bits", "number"), [(8, 1 + 8 / 64), (4, 0.5 + 8 / 64)], ids=["8-bits", "4-bits"]
)
def test_the_bytes_of_a_number(bits: int, number: float) -> None:
    """Its bits, and a scale and a bias (here in float32) for each group of 64."""
    cache = QuantizedAttentionCache(bits, 500)
    for _ in range(5):
        cache.update_and_fetch(rows(20), rows(20))
    assert cache.nbytes == 2 * 2 * 500 * 64 * number
    assert cache.used_bytes == 2 * 2 * 100 * 64 * number
    cache.rewind(10)
    assert cache.used_bytes == 2 * 2 * 10 * 64 * number


def test_a_whole_context_is_one_allocation() -> None:
    """It stays when the cache is freed."""
    cache = QuantizedAttentionCache(8, 300)
    capacities = set()
    for _ in range(2):
        for n in (100, 199, 1):
            cache.update_and_fetch(rows(n), rows(n))
            capacities.add(cache.capacity)
        cache.free()
        assert cache.offset == 0
    assert capacities == {300}
    assert cache.nbytes > 0
    assert cache.used_bytes == 0


def test_without_a_context_it_grows_by_half() -> None:
    """In whole steps; freed, it holds nothing."""
    cache = QuantizedAttentionCache(8)
    capacities = []
    for _ in range(8):
        cache.update_and_fetch(rows(STEP), rows(STEP))
        capacities.append(cache.capacity // STEP)
    assert capacities == [1, 2, 3, 5, 5, 8, 8, 8]
    cache.free()
    assert (cache.offset, cache.nbytes, cache.state, cache.empty()) == (0, 0, [], True)


def test_a_rewind_forwards_is_refused() -> None:
    cache = QuantizedAttentionCache(8)
    cache.update_and_fetch(rows(10), rows(10))
    assert [to for to in range(13) if cache.can_rewind(to)] == list(range(11))
    with pytest.raises(RewindError, match="a full layer at offset 10 can't be rewound to 11"):
        cache.rewind(11)
    assert cache.offset == 10
    assert (cache.trim(4), cache.offset, cache.trim(7), cache.offset) == (4, 6, 0, 6)


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_model(tiny_config("llama", head_dim=32, vocab_size=300))


def build(model: Any, bits: int | None, prefill_step: int = 2048) -> Runner:
    facts = facts_of(model, tiny_config("llama"))
    return Runner(model, ByteTokenizer(), facts, kv_bits=bits, prefill_step=prefill_step)


def tokens(runner: Runner, prompt: list[int]) -> list[int | None]:
    return [chunk.token for chunk in runner.generate(prompt, max_tokens=8, stop_tokens=[])]


@bits
def test_a_warm_answer_is_the_cold_one(llama: Any, bits: int) -> None:
    """Appended, edited and cut prompts get the cold answer, as all tokens are quantized at once."""
    warm, history = build(llama, bits), list(range(40, 100))
    expected, found, reused = [], [], []
    for turn in range(8):
        answer = tokens(warm, history)
        found.append(answer)
        expected.append(tokens(build(llama, bits, prefill_step=[7, 2048][turn % 2]), history))
        reused.append(len(warm.entry.tokens))
        history += [token for token in answer if token is not None] + [turn, 200 + turn]
        if turn % 3 == 2:
            history = [*history[: len(history) // 2], 5, 6, turn]
        elif turn % 3 == 1:
            history[-4] = 77
    assert found == expected
    assert len({tuple(answer) for answer in found}) > 4, (
        "the model says too little for the comparison to mean anything"
    )
    kinds = {type(cache) for cache in warm.entry.caches}
    assert kinds == {QuantizedAttentionCache}


GPT_OSS = {
    "head_dim": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}
UNFIT = {
    "gpt_oss": (GPT_OSS, "does not support attention sinks"),
    "deepseek_v3": (
        {"kv_lora_rank": 64, "qk_rope_head_dim": 32},
        "its attention computes with the keys and values",
    ),
    "llama": ({"head_dim": 16}, "heads of 16 and 16 numbers can't be quantized in groups of 32"),
}


@pytest.mark.parametrize(
    ("kind", "config", "message"), [(kind, *UNFIT[kind]) for kind in UNFIT], ids=UNFIT
)
def test_a_model_that_cannot_use_it_says_so_when_it_is_planned_and_when_it_is_loaded(
    tmp_path: Path, kind: str, config: dict[str, Any], message: str
) -> None:
    """Not in the middle of an answer; without the option it is planned as ever."""
    write_model(tmp_path, kind, **config)
    assert plan_model(str(tmp_path)).total > 0
    with pytest.raises(
        OptionError, match=f"kv_bits: this model can't use a quantized cache: .*{message}"
    ):
        plan_model(str(tmp_path), kv_bits=8)
    with pytest.raises(OptionError, match=message):
        Runner.load(str(tmp_path), kv_bits=8)


def test_runners_made_of_parts_refuse_it_before_any_request() -> None:
    """The refusal is one line that names the option and what to do."""
    config = tiny_config("gpt_oss", **GPT_OSS)
    parts = tiny_model(config), ByteTokenizer(), facts_of(tiny_model(config), config)
    refused = pytest.raises(OptionError, match=r"^kv_bits: .* attention sinks; leave kv_bits out$")
    with refused:
        Runner(*parts, kv_bits=8)
    with refused:
        Engine(*parts, max_sequences=2, kv_bits=8)
