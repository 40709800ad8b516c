"""The movement of stored keys is proved channel by channel, or refused."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from support.histories import Parts, tiny_parts

from mlxrunner import Runner
from mlxrunner.cache.layers.factory import make_layer_caches
from mlxrunner.engine.backends.backend import _rotator, _stay, rotators

SLOW, MIDDLE, FAST = 31, 12, 0
"""Channels of a head of 64, each with its partner 32 further."""


def with_outlier(outlier: float, channel: int, head: int | None, dtype: mx.Dtype) -> Parts:
    """Return a Qwen2 with huge key biases in one channel pair of one head, or of all."""
    model, *more = tiny_parts("qwen2", head_dim=64, hidden_size=256, rope_theta=1e6)
    bias = 0.1 * np.random.default_rng(0).standard_normal(2 * 64).astype(np.float32)
    for one in (0, 1) if head is None else (head,):
        bias[64 * one + channel] += outlier
        bias[64 * one + channel + 32] += outlier / 2
    for layer in model.layers:
        keys = layer.self_attn.k_proj
        keys.weight, keys.bias = keys.weight * 0.4, mx.array(bias)
    model.set_dtype(dtype)
    return model, *more


@pytest.mark.exhaustive(20)
@pytest.mark.parametrize(
    "dtype", [mx.float32, mx.bfloat16, mx.float16], ids=["float32", "bfloat16", "float16"]
)
@pytest.mark.parametrize("head", [0, None], ids=["one head", "all heads"])
@pytest.mark.parametrize("channel", [SLOW, MIDDLE, FAST], ids=["slow", "middle", "fast"])
@pytest.mark.parametrize("outlier", [0, 30, 100, 200, 1000])
def test_a_large_channel_hides_no_other(
    outlier: int, channel: int, head: int | None, dtype: mx.Dtype
) -> None:
    """Each channel of the first layer's shifted keys is within its rounding of a cold run's."""
    given = with_outlier(outlier, channel, head, dtype)
    runner, model = Runner(*given, context=100), given[0]
    options: dict[str, Any] = {"stop_tokens": [], "overflow": "shift", "keep": 4}
    usage = runner.complete([i * 37 % 290 for i in range(90)], max_tokens=20, **options).usage
    assert (usage.cache.shifted_tokens, usage.cache.reevaluated_tokens) == (48, 0)
    tokens, own = list(runner.entry.tokens), runner.entry.caches[0]
    moved = own.keys[..., : len(tokens), :].astype(mx.float32)  # type: ignore[attr-defined]
    cold = make_layer_caches(model)
    model(mx.array([tokens]), cache=[cache.model_cache for cache in cold])
    computed = cold[0].keys[..., : len(tokens), :].astype(mx.float32)  # type: ignore[attr-defined]
    pairs = computed.reshape(*computed.shape[:3], 2, 32)
    scale = mx.sqrt((pairs * pairs).sum(axis=3)).max(axis=(0, 2))  # of each pair of channels
    apart = mx.abs(moved - computed).reshape(pairs.shape).max(axis=(0, 2, 3))
    assert (apart / scale).max().item() < max(1e-4, 4 * mx.finfo(dtype).eps)


def test_a_layer_whose_rope_raises_is_one_that_cannot_be_moved() -> None:
    """DeepSeek-V2 continues over the edge by evaluating again, as its rope takes part of a head."""
    yarn = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}
    yarn |= {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}
    latent = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "v_head_dim": 16}
    latent |= {"qk_nope_head_dim": 16, "n_routed_experts": None, "num_key_value_heads": 4}
    given = tiny_parts("deepseek_v2", rope_scaling=yarn, max_position_embeddings=512, **latent)
    assert rotators(given[0], make_layer_caches(given[0]), -9) is None
    runner = Runner(*given, context=40)
    options: dict[str, Any] = {"stop_tokens": [], "overflow": "shift", "keep": 4}
    usage = runner.complete(list(range(30)), max_tokens=30, **options).usage
    assert usage.cache.shifted_tokens == usage.cache.reevaluated_tokens == 2 * 18
    assert runner.entry.is_true


class Layer(nn.Module):  # type: ignore[misc,name-defined]
    """Has the rope that its keys may have been turned with."""

    def __init__(self, base: float = 10_000.0) -> None:
        super().__init__()
        self.rope = nn.RoPE(16, base=base)


def turned_by(rope: Any, keys: mx.array, by: int) -> tuple[mx.array, mx.array]:
    """Keys of four tokens `[1, 2, 4, 16]`, each at position `by` + 1 and at 1."""
    each = keys.transpose(2, 1, 0, 3)
    there, here = (rope(each, offset=at).transpose(2, 1, 0, 3) for at in (by + 1, 1))
    return there, here


def test_the_better_of_two_explanations_is_taken() -> None:
    """Keys are found unturned, turned by the layer's rope, or turned by another one."""
    keys = mx.random.normal((1, 2, 4, 16), key=mx.random.key(0))
    layer = Layer()
    assert _rotator(layer, keys, keys, -9) is _stay
    there, here = turned_by(layer.rope, keys, 9)
    way = _rotator(layer, there, here, -9)
    assert way is not None
    assert way is not _stay
    assert mx.abs(way(there, -9) - here).max().item() < 1e-5  # type: ignore[operator]
    assert _rotator(Layer(base=50_000.0), there, here, -9) is None


@pytest.mark.parametrize("value", [0.0, float("nan")], ids=["no keys", "not a number"])
def test_keys_that_prove_nothing_are_not_moved(value: float) -> None:
    """Keys that are always or never equal after a rotation are not moved."""
    keys = mx.full((1, 2, 4, 16), value)
    assert _rotator(Layer(), keys, keys, -9) is None


def test_a_channel_that_only_one_way_explains_decides() -> None:
    """All keys but the fastest pair's are empty or slow: what is left says enough."""
    keys = mx.zeros((1, 1, 4, 16))
    keys[..., 0] = 1e-3
    keys[..., 7] = 500.0
    layer = Layer()
    there, here = turned_by(layer.rope, keys, 7)
    assert _rotator(layer, there, here, -7) not in (None, _stay)
