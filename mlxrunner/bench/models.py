"""Models to measure: those that are loaded, and ones of a given size with random weights, for who has none."""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.llama import Model, ModelArgs

from mlxrunner import device
from mlxrunner.errors import ModelError
from mlxrunner.models.facts import facts_of
from mlxrunner.models.load import LoadedModel, load_model
from mlxrunner.runner import Runner
from mlxrunner.testing import ByteTokenizer

RANDOM = re.compile(r"random:(\d+(?:\.\d+)?)([MG])", re.IGNORECASE)
VOCAB = 8192
HEAD_DIM = 64


def load_or_make(name: str, *, trust_remote_code: bool = False) -> LoadedModel:
    """As `load_model`; `random:100M` (or `random:1.5G`) is a Llama of about so many parameters that was never trained.

    Random weights are no slower than others, so anybody can compare machines without a download.
    """
    if not name.startswith("random:"):
        return load_model(name, trust_remote_code=trust_remote_code)
    match = RANDOM.fullmatch(name)
    if match is None:
        raise ModelError(
            f"{name}: a random model is named by its size: random:100M, or random:1.5G"
        )
    return random_llama(name, float(match[1]) * {"M": 1e6, "G": 1e9}[match[2].upper()])


def random_llama(name: str, parameters: float) -> LoadedModel:
    """The Llama (64 times as wide as it is deep, as small ones are) that comes nearest to so many parameters."""
    depth = min(range(1, 200), key=lambda layers: abs(_parameters(layers) - parameters))
    dtype, hidden = device.preferred_dtype() or mx.bfloat16, HEAD_DIM * depth
    need, offered = int(_parameters(depth) * dtype.size), device.offered_bytes()
    if need > offered:
        raise ModelError(
            f"{name}: its weights would take {need / 1e9:.1f} GB, and the device offers {offered / 1e9:.1f} GB"
        )
    args = ModelArgs(
        model_type="llama", hidden_size=hidden, num_hidden_layers=depth, intermediate_size=hidden * 8 // 3 // 32 * 32,
        num_attention_heads=depth, num_key_value_heads=depth, rms_norm_eps=1e-5, vocab_size=VOCAB, max_position_embeddings=32768,
        tie_word_embeddings=False,
    )  # fmt: skip
    mx.random.seed(0)
    model = Model(args)
    model.set_dtype(dtype)
    model.eval()
    mx.eval(model.parameters())
    # Most of its ids have no text in this tokenizer: as little to do for whoever decodes it.
    return LoadedModel(
        name, Path(), model, ByteTokenizer(), facts_of(model, vars(args)), vars(args)
    )


def random_runner(name: str = "random:98M") -> Runner:
    """On such a model, without taking any memory in advance."""
    loaded = load_or_make(name)
    return Runner(loaded.model, loaded.tokenizer, loaded.facts, name=name)


def _parameters(layers: int) -> float:
    hidden = HEAD_DIM * layers
    return float(12 * layers * hidden**2 + 2 * VOCAB * hidden)
