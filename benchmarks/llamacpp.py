"""Serve an untrained model of `benchmarks/untrained.py` with llama.cpp's server.

pip install gguf xllamacpp
python benchmarks/llamacpp.py FOLDER --port PORT

`gguf` writes the model as a GGUF file, and `xllamacpp` runs llama.cpp's server in this process. It
has the default settings of `llama-server`: four slots that share the context of the model, prompts
of idle slots kept in up to 8 GiB, and checkpoints of what can't be rewound.
"""

from __future__ import annotations

import argparse
import json
import signal
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import xllamacpp
from untrained import END, LETTERS, MARKS, TEMPLATE

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.embedding_norm.weight": "token_embd_norm.weight",
    "lm_head.weight": "output.weight",
}
"""Names of tensors outside the layers."""
PARTS = {
    "input_layernorm": "attn_norm",
    "operator_norm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "conv.conv": "shortconv.conv",
}
"""Names of tensors within a layer."""
ARCHITECTURES = {"llama": "llama", "lfm2": "lfm2", "gemma3_text": "gemma3"}


def write_gguf(folder: Path) -> Path:
    """Write the model in `folder` as a GGUF file beside it, and return its path."""
    config = json.loads((folder / "config.json").read_text())
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config["model_type"]])
    _add_sizes(writer, config)
    _add_tokenizer(writer)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    for name, values in weights.items():
        array = np.array(values.astype(mx.float32))
        writer.add_tensor(_name(name, config["model_type"]), _as_written(name, array, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_sizes(writer: Any, config: dict[str, Any]) -> None:
    layers, kind = config["num_hidden_layers"], config["model_type"]
    heads = config["num_key_value_heads"]
    size = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_vocab_size(config["vocab_size"])
    if kind == "llama":
        writer.add_rope_dimension_count(size)
    if kind == "lfm2":
        writer.add_shortconv_l_cache(config["conv_L_cache"])
        has_attention = config["full_attn_idxs"]
        writer.add_head_count_kv([heads * (layer in has_attention) for layer in range(layers)])
    else:
        writer.add_head_count_kv(heads)
    if kind == "gemma3_text":
        every = config["sliding_window_pattern"]
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([(layer + 1) % every > 0 for layer in range(layers)])


def _add_tokenizer(writer: Any) -> None:
    kinds = gguf.TokenType
    types = [kinds.NORMAL] * len(LETTERS) + [kinds.CONTROL] * 2
    types += [kinds.USER_DEFINED] * (len(MARKS) - 2)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*LETTERS, *MARKS])
    writer.add_token_types(types)
    writer.add_token_merges(
        ["\u0100 \u0101"]
    )  # of letters that there are not: it takes no empty list
    writer.add_eos_token_id(len(LETTERS) + MARKS.index(END))
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def _name(name: str, kind: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    if part == "post_attention_layernorm":
        return (
            f"blk.{layer}.{'post_attention_norm' if kind == 'gemma3_text' else 'ffn_norm'}.weight"
        )
    return f"blk.{layer}.{PARTS[part]}.weight"


def _as_written(name: str, values: Any, config: dict[str, Any]) -> Any:
    """Return a tensor as llama.cpp expects it."""
    if config["model_type"] == "gemma3_text" and "norm" in name:
        return values + 1
    if name.endswith("conv.conv.weight"):
        return np.ascontiguousarray(values[:, :, 0])
    if config["model_type"] == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = config["num_attention_heads"]  # rotates neighbours, where mlx-lm rotates halves
        halves = values.reshape(heads, 2, len(values) // heads // 2, -1)
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=8080)
    given = parser.parse_args()
    wanted = xllamacpp.CommonParams()
    wanted.model.path = str(write_gguf(given.folder))
    wanted.port, wanted.n_parallel, wanted.kv_unified = given.port, 4, True
    wanted.n_ctx = 0
    wanted.cpuparams.n_threads = wanted.cpuparams_batch.n_threads = 1  # others spin while they wait
    wanted.use_jinja = True
    server = xllamacpp.Server(wanted)
    print(server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    main()
