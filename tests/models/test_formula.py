"""Llama and Mistral compute what their papers say, held against the formulas in numpy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.models import LLAMA3, save_model, tiny_config, tiny_model, write_model, write_tokenizer

from mlxrunner import Runner
from mlxrunner.models.load import load_model

LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama one head per group": {"model_type": "llama", "num_key_value_heads": 4},
    "llama one group": {"model_type": "llama", "num_key_value_heads": 1},
    "llama with biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama rope linear": {"model_type": "llama", "rope_scaling": LINEAR},
    "llama rope llama3": {"model_type": "llama", "rope_scaling": LLAMA3, "rope_theta": 500000.0},
    "llama rope yarn": {"model_type": "llama", "rope_scaling": YARN},
    "llama rope traditional": {"model_type": "llama", "rope_traditional": True},
    "mistral": {"model_type": "mistral"},
    "mistral tied": {"model_type": "mistral", "tie_word_embeddings": True},
    "mistral without head_dim": {"model_type": "mistral", "head_dim": None},
    "mistral rope yarn": {"model_type": "mistral", "rope_scaling": YARN},
    "llama of transformers 5": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
    },
    "llama3 of transformers 5": {
        "model_type": "llama",
        "rope_parameters": LLAMA3 | {"rope_theta": 500000.0},
    },
    "mistral of transformers 5": {
        "model_type": "mistral",
        "rope_theta": None,
        "rope_parameters": {"rope_theta": 300.0},
    },
}
cases = pytest.mark.parametrize("config", CASES.values(), ids=CASES.keys())


class Reference:
    """The forward pass of Llama (Touvron et al.

    2023, GQA: Ainslie et al. 2023), of all tokens at once, in float32 numpy.
    """

    def __init__(self, config: dict[str, Any], weights: dict[str, mx.array]) -> None:
        self.config = config
        self.weights = {name: np.array(array) for name, array in weights.items()}
        self.heads, self.groups = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config.get("head_dim") or config["hidden_size"] // self.heads

    def logits(self, tokens: list[int]) -> np.ndarray:
        """`[n, vocab]`."""
        embeddings = self.weights["model.embed_tokens.weight"]
        x = embeddings[tokens]
        for layer in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            x = x + self.attention(f"{name}.self_attn", self.norm(f"{name}.input_layernorm", x))
            x = x + self.mlp(f"{name}.mlp", self.norm(f"{name}.post_attention_layernorm", x))
        x = self.norm("model.norm", x)
        return x @ embeddings.T if self.config["tie_word_embeddings"] else self.linear("lm_head", x)

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        """`count` tokens after `tokens`, everything computed again for each."""
        sequence = list(tokens)
        for _ in range(count):
            sequence.append(int(self.logits(sequence)[-1].argmax()))
        return sequence[len(tokens) :]

    def attention(self, name: str, x: np.ndarray) -> np.ndarray:
        n = len(x)
        queries = self.rope(self.heads_of(f"{name}.q_proj", x, self.heads))
        keys = self.rope(self.heads_of(f"{name}.k_proj", x, self.groups))
        values = self.heads_of(f"{name}.v_proj", x, self.groups)
        out = np.empty_like(queries)
        for head in range(self.heads):
            group = head * self.groups // self.heads
            scores = queries[head] @ keys[group].T / math.sqrt(self.head_dim)
            scores = np.where(np.tril(np.ones((n, n), bool)), scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            out[head] = weights / weights.sum(axis=-1, keepdims=True) @ values[group]
        return self.linear(f"{name}.o_proj", out.transpose(1, 0, 2).reshape(n, -1))

    def mlp(self, name: str, x: np.ndarray) -> np.ndarray:
        gate = self.linear(f"{name}.gate_proj", x)
        up = self.linear(f"{name}.up_proj", x)
        return self.linear(f"{name}.down_proj", gate / (1 + np.exp(-gate)) * up)

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        mean = np.mean(x * x, axis=-1, keepdims=True)
        root = np.sqrt(mean + np.float32(self.config["rms_norm_eps"]))
        return x / root * self.weights[f"{name}.weight"]

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        bias = self.weights.get(f"{name}.bias", np.float32(0))
        return x @ self.weights[f"{name}.weight"].T + bias

    def heads_of(self, name: str, x: np.ndarray, heads: int) -> np.ndarray:
        """`[heads, n, head_dim]`."""
        return self.linear(name, x).reshape(len(x), heads, self.head_dim).transpose(1, 0, 2)

    def rope(self, x: np.ndarray) -> np.ndarray:
        """Rotate the pairs of `x [heads, n, head_dim]`.

        Pairs are (i, i + half), or neighbours where `rope_traditional` says so.
        """
        frequencies, scale = rope_frequencies(self.config, self.head_dim)
        angles = np.arange(x.shape[1])[:, None] * frequencies
        cos, sin = (np.float32(scale) * f(angles).astype(np.float32) for f in (np.cos, np.sin))
        half = self.head_dim // 2
        traditional = self.config.get("rope_traditional", False)
        first, second = (
            (x[..., 0::2], x[..., 1::2]) if traditional else (x[..., :half], x[..., half:])
        )
        rotated = (first * cos - second * sin, first * sin + second * cos)
        if traditional:
            return np.stack(rotated, axis=-1).reshape(x.shape)
        return np.concatenate(rotated, axis=-1)


def rope_frequencies(config: dict[str, Any], dims: int) -> tuple[np.ndarray, float]:
    """Radians per position of each pair, and the factor on queries and keys.

    Linear: Chen et al. 2023. Llama 3: its reference code. YaRN: Peng et al. 2023, with its defaults
    beta_fast 32 and beta_slow 1.
    """
    parameters = config.get("rope_parameters", {})
    base = parameters.get("rope_theta") or config.get("rope_theta", 10000.0)
    scaling = config.get("rope_scaling") or parameters
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    frequencies = base ** (-np.arange(0, dims, 2) / dims)
    if kind == "default":
        return frequencies, 1.0
    factor = scaling["factor"]
    if kind == "linear":
        return frequencies / factor, 1.0
    trained = scaling["original_max_position_embeddings"]
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        smooth = np.clip((trained * frequencies / (2 * math.pi) - low) / (high - low), 0, 1)
        return smooth * frequencies + (1 - smooth) * frequencies / factor, 1.0
    edges = [
        dims * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(base))
        for rotations in (32, 1)
    ]
    first, last = max(math.floor(edges[0]), 0), min(math.ceil(edges[1]), dims - 1)
    ramp = np.clip((np.arange(dims // 2) - first) / max(last - first, 0.001), 0, 1)
    return frequencies * (1 - ramp) + frequencies / factor * ramp, 0.1 * math.log(factor) + 1


def write(folder: Path, config: dict[str, Any]) -> Reference:
    """A model directory, and the formula for it with the weights that are in its file."""
    write_model(folder, **config)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    return Reference(tiny_config(**config), weights)


@cases
def test_the_logits_are_those_of_the_formula(tmp_path: Path, config: dict[str, Any]) -> None:
    """Every position's logits, of a prompt long enough for the rope scalings to differ."""
    reference = write(tmp_path, config)
    tokens = np.random.default_rng(1).integers(0, 256, 48).tolist()
    logits = np.array(load_model(str(tmp_path)).model(mx.array([tokens]))[0])
    np.testing.assert_allclose(logits, reference.logits(tokens), atol=1e-4)


@cases
def test_greedy_generation_is_that_of_the_formula(tmp_path: Path, config: dict[str, Any]) -> None:
    """Chunks, decoding and a reused prefix give what the formula computes from nothing."""
    reference = write(tmp_path, config)
    runner = Runner.load(str(tmp_path), prefill_step=7)
    prompt = np.random.default_rng(2).integers(0, 256, 30).tolist()
    for tokens in (prompt, [*prompt[:20], 5, 6]):
        answer = [chunk.token for chunk in runner.generate(tokens, max_tokens=12, stop_tokens=[])]
        assert answer == reference.greedy(tokens, 12)


@pytest.mark.parametrize(
    "name", ["llama rope linear", "llama rope llama3", "llama rope yarn", "llama rope traditional"]
)
def test_each_rope_variant_changes_the_logits(name: str) -> None:
    """Otherwise the comparison with the formula would prove nothing about it."""
    model, plain = (tiny_model(tiny_config(**config)) for config in (CASES[name], CASES["llama"]))
    tokens = mx.arange(48)[None]
    assert mx.abs(model(tokens) - plain(tokens)).max() > 1e-3


@pytest.mark.usefixtures("on_cpu")
def test_half_precision_weights_are_computed_in_float32_on_a_cpu(tmp_path: Path) -> None:
    """Rounded weights agree with the formula within 1e-4, which float16 would not reach."""
    config = tiny_config("mistral", torch_dtype="float16")
    model = tiny_model(config)
    model.set_dtype(mx.float16)
    save_model(tmp_path, model, config)
    write_tokenizer(tmp_path)
    weights: Any = mx.load(str(tmp_path / "model.safetensors"))
    assert {array.dtype for array in weights.values()} == {mx.float16}
    reference = Reference(
        config, {name: array.astype(mx.float32) for name, array in weights.items()}
    )
    tokens = list(range(40))
    logits = np.array(load_model(str(tmp_path)).model(mx.array([tokens]))[0])
    np.testing.assert_allclose(logits, reference.logits(tokens), atol=1e-4)
