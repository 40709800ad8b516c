"""Load a model to measure, or make one of a given size with random weights."""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.llama import Model, ModelArgs

from mlxrunner.errors import ModelError
from mlxrunner.models.facts import facts_of
from mlxrunner.models.load import LoadedModel
from mlxrunner.models.seeing import load_either
from mlxrunner.runner import Runner
from mlxrunner.system import device
from mlxrunner.tokenizer.base import ByteTokenizer

RANDOM = re.compile(r"random:(\d+(?:\.\d+)?)([MG])", re.IGNORECASE)
VOCAB = 8192
HEAD_DIM = 64


def load_or_make(name: str, *, trust_remote_code: bool = False) -> LoadedModel:
    """Load a model as `load_either` does, or make an untrained Llama.

    A name such as `random:100M` or `random:1.5G` makes a Llama with about that number of
    parameters. Random weights are as fast as others, so anybody can compare machines without a
    download. Raise ModelError if the name is not a size or the weights do not fit.
    """
    if not name.startswith("random:"):
        return load_either(name, trust_remote_code=trust_remote_code)
    match = RANDOM.fullmatch(name)
    if match is None:
        raise ModelError(
            f"{name} is not a size: name a random model like random:100M or random:1.5G"
        )
    return random_llama(name, float(match[1]) * {"M": 1e6, "G": 1e9}[match[2].upper()])


def random_llama(name: str, parameters: float) -> LoadedModel:
    """Make the Llama that comes nearest to `parameters`, with 64 times as much width as depth.

    Small models have such shapes. Raise ModelError if its weights do not fit into the memory of the
    device.
    """
    depth = min(range(1, 200), key=lambda layers: abs(_parameters(layers) - parameters))
    dtype, hidden = device.preferred_dtype() or mx.bfloat16, HEAD_DIM * depth
    need, offered = int(_parameters(depth) * dtype.size), device.offered_bytes()
    if need > offered:
        raise ModelError(
            f"{name}: its weights would take {need / 1e9:.1f} GB, and the device offers "
            f"{offered / 1e9:.1f} GB: name a smaller one"
        )
    args = ModelArgs(
        model_type="llama",
        hidden_size=hidden,
        num_hidden_layers=depth,
        intermediate_size=hidden * 8 // 3 // 32 * 32,
        num_attention_heads=depth,
        num_key_value_heads=depth,
        rms_norm_eps=1e-5,
        vocab_size=VOCAB,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
    )
    mx.random.seed(0)
    model = Model(args)
    model.set_dtype(dtype)
    model.eval()
    mx.eval(model.parameters())
    # Most ids have no text in this tokenizer, so decoding them costs next to nothing.
    return LoadedModel(
        name, Path(), model, ByteTokenizer(), facts_of(model, vars(args)), vars(args)
    )


def random_runner(name: str = "random:98M") -> Runner:
    """Return a runner on a model of `load_or_make` that reserves no memory."""
    loaded = load_or_make(name)
    return Runner(loaded.model, loaded.tokenizer, loaded.facts, name=name)


def _parameters(layers: int) -> float:
    """Return the number of parameters of a Llama with this number of layers."""
    hidden = HEAD_DIM * layers
    return float(12 * layers * hidden**2 + 2 * VOCAB * hidden)
