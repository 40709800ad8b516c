"""Tiny model directories with seeded random weights, saved as the hub has them.

Knows how a model is written, not how one is loaded: what comes back is decided by
`mlxrunner.models`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

BOS, EOS = 256, 257
"""Ids of "<s>" and "</s>" in the tokenizer of `write_tokenizer`; each id below stands for one byte.
"""

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""Settings of a scaled rope."""
_LLAMA: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 288,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_TINY: dict[str, dict[str, Any]] = {
    "mistral": {"head_dim": 24, "rope_theta": 1e6},
    "gemma3_text": {
        "head_dim": 16,
        "num_hidden_layers": 3,
        "sliding_window": 16,
        "sliding_window_pattern": 3,
    },
    "lfm2": {
        "num_hidden_layers": 3,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1],
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "qwen3": {"head_dim": 16, "rope_theta": 1e6},
    "qwen3_next": {
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1e4,
        "full_attention_interval": 2,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "num_experts": 0,
        "num_experts_per_tok": 0,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 16,
        "mlp_only_layers": [0, 1],
        "moe_intermediate_size": 16,
    },
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "num_experts": 2,
        "num_experts_per_tok": 1,
    },
    "mamba2": {
        "hidden_size": 32,
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 8,
        "conv_kernel": 4,
        "n_groups": 1,
        "expand": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": [0.0, 100.0],
        "time_step_rank": "auto",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        "head_dim": 16,
        "sliding_window": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_theta": 1e4,
    },
    "llama4": {
        "text_config": {
            "model_type": "llama4_text",
            "attention_bias": False,
            "attention_chunk_size": 16,
            "head_dim": 8,
            "hidden_size": 32,
            "interleave_moe_layer_step": 2,
            "intermediate_size": 32,
            "intermediate_size_mlp": 48,
            "max_position_embeddings": 4096,
            "num_attention_heads": 4,
            "num_experts_per_tok": 1,
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "num_local_experts": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e4,
            "rope_scaling": None,
            "use_qk_norm": True,
            "vocab_size": 300,
            "attn_temperature_tuning": 4,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        }
    },
}
"""Settings of other architectures that a Llama lacks, or has with another value."""
ARCHITECTURES: dict[str, set[str]] = {
    "llama": {"full"},
    "mistral": {"full"},
    "qwen3": {"full"},
    "deepseek_v3": {"full"},
    "gemma3_text": {"full", "sliding"},
    "gpt_oss": {"full", "sliding"},
    "llama4": {"full", "chunked"},
    "qwen3_next": {"full", "recurrent"},
    "lfm2": {"full", "recurrent"},
    "jamba": {"full", "recurrent"},
    "mamba2": {"recurrent"},
}
"""A representative of each family that is known, and the kinds of its layers."""


def tiny_config(model_type: str = "llama", **config: Any) -> dict[str, Any]:
    """Return the tiny config.json of `model_type` with `config` over it, without None values."""
    settings = {"model_type": model_type, **_LLAMA, **_TINY.get(model_type, {}), **config}
    return {name: value for name, value in settings.items() if value is not None}


def tiny_model(config: dict[str, Any], seed: int = 0) -> Any:
    """Return mlx-lm's evaluated float32 model for `config`.

    Matrices are normal * 0.1, biases too, norms 1 + normal * 0.1.
    """
    from mlx_lm.utils import _get_classes

    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    random = np.random.default_rng(seed)
    parameters: Any = tree_flatten(model.parameters())
    model.load_weights([(name, _weights(random, name, array.shape)) for name, array in parameters])
    model.eval()
    mx.eval(model.parameters())
    return model


def write_model(
    folder: Path, model_type: str = "llama", *, seed: int = 0, tokenizer: bool = True, **config: Any
) -> Any:
    """Write a tiny model to `folder`, which is made: config.json, model.safetensors, a tokenizer.
    Returns mlx-lm's model.
    """
    settings = tiny_config(model_type, **config)
    model = tiny_model(settings, seed)
    save_model(folder, model, settings)
    if tokenizer:
        write_tokenizer(folder)
    return model


def save_model(folder: Path, model: Any, config: dict[str, Any], shards: int = 1) -> None:
    """config.json and the model's weights, in `shards` files with an index if there are several."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    if shards == 1:
        mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
        return
    placed = {
        name: f"model-{index % shards + 1:05}-of-{shards:05}.safetensors"
        for index, name in enumerate(weights)
    }
    for file in set(placed.values()):
        part = {name: weights[name] for name in weights if placed[name] == file}
        mx.save_safetensors(str(folder / file), part, {"format": "mlx"})
    total = sum(array.nbytes for array in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def write_tokenizer(folder: Path, **config: Any) -> None:
    """Write a tokenizer.json with one token per byte, BOS and EOS.

    `config` goes into tokenizer_config.json (a chat_template, say).
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: token for token, letter in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def change_json(file: Path, **settings: Any) -> None:
    """Change settings of a JSON file, or write it; None takes a setting away."""
    found = json.loads(file.read_text()) if file.exists() else {}
    kept = {name: value for name, value in (found | settings).items() if value is not None}
    file.write_text(json.dumps(kept))


def _weights(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> mx.array:
    values = random.normal(size=shape) * 0.1 + (len(shape) == 1 and not name.endswith("bias"))
    return mx.array(values.astype(np.float32))


def error_line(kind: type[Exception], call: Callable[..., object], *given: Any, **more: Any) -> str:
    """Return the message of the error of this kind that a call raises, which is one line."""
    with pytest.raises(kind) as error:
        call(*given, **more)
    return one_line(error)


def one_line(error: pytest.ExceptionInfo[Any]) -> str:
    """The message, which is one line without a traceback."""
    text = str(error.value)
    assert "\n" not in text
    assert "Traceback" not in text
    assert len(text) < 1000
    return text
