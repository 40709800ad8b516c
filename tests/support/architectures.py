"""Tiny random models of most of mlx-lm's architectures: four layers of 64 numbers.

Windows and chunks have 32 tokens. Weights are scaled so that a model's logits differ enough for a
wrong token to show.
"""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

VOCAB = 256
_BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "use_conv_bias": True,
    "head_dim": 16,
    "sliding_window": 32,
    "partial_rotary_factor": 0.5,
}
_MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "shared_intermediate_size": 64,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
}
_MLA: dict[str, Any] = {
    **_MOE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "tie_word_embeddings": False,
    "head_dim": None,
}
_LINEAR: dict[str, Any] = {
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
_MAMBA: dict[str, Any] = {
    "mamba_num_heads": 4,
    "mamba_n_heads": 4,
    "mamba_head_dim": 32,
    "mamba_d_head": 32,
    "mamba_d_ssm": 128,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
    "ssm_state_size": 16,
    "state_size": 16,
    "conv_kernel": 4,
    "n_groups": 1,
}
_SCALES: dict[str, Any] = {
    "embedding_multiplier": 1.0,
    "attention_multiplier": 0.25,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
}
_SLIDING = ["sliding_attention", "full_attention"] * 2
_ROPES = {kind: {"rope_theta": 10000.0, "rope_type": "default"} for kind in _SLIDING}
_LLAMA4: dict[str, Any] = {
    **_BASE,
    "model_type": "llama4_text",
    "attention_chunk_size": 32,
    "interleave_moe_layer_step": 2,
    "intermediate_size": 64,
    "intermediate_size_mlp": 128,
    "num_experts_per_tok": 1,
    "num_local_experts": 4,
    "rope_scaling": None,
    "use_qk_norm": True,
}
_LONGCAT: dict[str, Any] = {
    **_MLA,
    "ffn_hidden_size": 128,
    "num_layers": 2,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 32,
    "zero_expert_num": 1,
    "zero_expert_type": "identity",
    "attention_method": "MLA",
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
_GPT: dict[str, Any] = {
    "n_ctx": 512,
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 4,
    "n_inner": 128,
    "n_positions": 512,
}
_YARN: dict[str, Any] = {
    "type": "yarn",
    "rope_type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": 4096,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "Klear": {**_MOE, "tie_word_embeddings": False},
    "afm7": {
        "hidden_dim": 64,
        "num_layers": 4,
        "num_kv_reuse_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "hidden_dim_scale_factor": 2.0,
    },
    "afmoe": {**_MOE, "layer_types": _SLIDING},
    "apertus": {"post_norm": False, "qk_norm": True},
    "baichuan_m1": {
        "sliding_window_layers": [0, 2],
        "conv_window": 2,
        "tie_word_embeddings": False,
    },
    "bailing_hybrid": {**_MLA, "layer_group_size": 2, "group_norm_size": 4, "head_dim": 16},
    "bailing_moe": {**_MOE, "use_qkv_bias": False},
    "bailing_moe_linear": {
        **_MOE,
        "layer_group_size": 2,
        "group_norm_size": 4,
        "rope_scaling": None,
        "use_qkv_bias": False,
        "moe_shared_expert_intermediate_size": 32,
        "moe_router_enable_expert_bias": True,
        "rope_traditional": False,
        "use_qk_norm": True,
        "score_function": "sigmoid",
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": True,
    },
    "cohere": {"logit_scale": 1.0},
    "cohere2": {"sliding_window_pattern": 2, "logit_scale": 1.0},
    "dbrx": {
        "d_model": 64,
        "n_layers": 4,
        "n_heads": 4,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek": {**_MOE, "moe_layer_freq": 1},
    "deepseek_v2": {**_MLA, "topk_method": "greedy", "rope_scaling": _YARN},
    "deepseek_v3": _MLA,
    "deepseek_v32": {**_MLA, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 32},
    "dots1": _MOE,
    "ernie4_5": {},
    "ernie4_5_moe": {**_MOE, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1},
    "exaone": {"num_layers": 4},
    "exaone4": {"sliding_window_pattern": "LLLG", "rope_scaling": None},
    "exaone_moe": {
        **_MOE,
        "layer_types": _SLIDING,
        "is_moe_layer": [False, True, True, True],
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "falcon_h1": _MAMBA,
    "gemma": {},
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": {
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
        "rope_local_base_freq": 10000.0,
    },
    "gemma3n": {
        "text_config": {
            **_BASE,
            "model_type": "gemma3n_text",
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB,
            "rope_local_base_freq": 10000.0,
            "final_logit_softcapping": 30.0,
            "layer_types": _SLIDING,
            "activation_sparsity_pattern": [0.0] * 4,
            "hidden_size_per_layer_input": 8,
            "altup_num_inputs": 2,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 8,
            "query_pre_attn_scalar": 16,
        }
    },
    "gemma4_text": {
        "global_head_dim": 32,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 0,
        "layer_types": _SLIDING,
        "use_double_wide_mlp": False,
    },
    "glm": {},
    "glm4": {},
    "glm4_moe": {**_MOE, "rope_scaling": None, "use_qk_norm": True, "tie_word_embeddings": False},
    "glm4_moe_lite": {**_MLA, "moe_layer_freq": 1, "topk_method": "noaux_tc"},
    "gpt2": _GPT,
    "gpt_bigcode": {**_GPT, "multi_query": True, "num_key_value_heads": 1},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.25, "num_key_value_heads": 4},
    "gpt_oss": {**_MOE, "rope_scaling": None, "layer_types": _SLIDING},
    "granite": _SCALES,
    "granitemoe": {**_MOE, **_SCALES},
    "granitemoehybrid": {**_MOE, **_SCALES, **_MAMBA, "layer_types": ["mamba", "attention"] * 2},
    "helium": {},
    "hunyuan": {
        **_MOE,
        "moe_topk": 2,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"factor": 1.0, "type": "dynamic", "alpha": 1000.0},
    },
    "hunyuan_v1_dense": {"rope_scaling": {"factor": 1.0, "type": "dynamic", "alpha": 1000.0}},
    "internlm2": {},
    "internlm3": {"rope_scaling": None},
    "iquestloopcoder": {"loop_window_size": 32, "loop_num": 2},
    "jamba": {
        **_MOE,
        **_MAMBA,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "kimi_linear": {
        **_MLA,
        "head_dim": 16,
        "linear_attn_config": {
            "kda_layers": [1, 3],
            "full_attn_layers": [2, 4],
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
        "model_max_length": 8192,
        "num_experts_per_token": 2,
        "rope_scaling": None,
    },
    "laguna": {**_MOE, "layer_types": _SLIDING},
    "lfm2": {
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 128,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1, 3],
        "layer_types": ["conv", "full_attention"] * 2,
    },
    "lfm2_moe": {
        **_MOE,
        "use_expert_bias": True,
        "num_dense_layers": 1,
        "conv_bias": False,
        "conv_L_cache": 3,
        "layer_types": ["conv", "full_attention"] * 2,
    },
    "lille-130m": {**_GPT, "block_size": 512, "n_kv_heads": 2},
    "llama": {},
    "llama4": {"text_config": _LLAMA4},
    "llama4_text": {
        "intermediate_size_mlp": 128,
        "no_rope_layers": [1, 1, 1, 0],
        "use_qk_norm": True,
    },
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": {**_LONGCAT, "ngram_vocab_size_ratio": 2},
    "mamba": {"state_size": 16, "conv_kernel": 4, "time_step_rank": 4},
    "mamba2": {
        **_MAMBA,
        "num_heads": 4,
        "head_dim": 32,
        "expand": 2,
        "time_step_limit": [0.0, 1e9],
        "time_step_rank": "auto",
        "chunk_size": 64,
    },
    "mellum": {**_MOE, "layer_types": _SLIDING, "rope_parameters": _ROPES},
    "mimo": {"num_nextn_predict_layers": 0},
    "minicpm": {"dim_model_base": 64, "scale_depth": 1.0, "scale_emb": 1.0},
    "minicpm3": {
        **_MLA,
        "dim_model_base": 64,
        "scale_depth": 1.0,
        "scale_emb": 1.0,
        "rope_scaling": {
            "type": "longrope",
            "original_max_position_embeddings": 4096,
            "short_factor": [1.0] * 4,
            "long_factor": [1.0] * 4,
        },
    },
    "minimax": {**_MOE, "rotary_dim": 8, "use_qk_norm": True},
    "ministral3": {
        "rope_parameters": {
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 64,
            "type": "default",
        },
        "layer_types": _SLIDING,
    },
    "mistral4": {
        **_MLA,
        "rope_parameters": {
            **_YARN,
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 64,
        },
    },
    "mixtral": _MOE,
    "muse_glimmer": {"layer_types": _SLIDING},
    "nanbeige": {"num_hidden_layers": 2, "num_loops": 2},
    "nanochat": {"num_key_value_heads": 4},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron_h": {
        **_MAMBA,
        "num_hidden_layers": 5,
        "hybrid_override_pattern": ["M", "*", "-", "M", "*"],
    },
    "olmo2": {},
    "olmo3": {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "olmo_hybrid": {
        **_LINEAR,
        "linear_allow_neg_eigval": True,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 4,
    },
    "olmoe": {**_MOE, "tie_word_embeddings": False},
    "openelm": {
        "num_transformer_layers": 4,
        "model_dim": 64,
        "ffn_dim_divisor": 16,
        "num_query_heads": [4] * 4,
        "num_kv_heads": [2] * 4,
        "ffn_multipliers": [1.0] * 4,
        "ffn_with_glu": True,
        "normalize_qk_projections": True,
        "share_input_output_layers": True,
        "rms_norm_eps": 1e-6,
        "rope_freq_constant": 10000,
    },
    "phi": {},
    "phi3": {},
    "phimoe": {
        **_MOE,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 8,
            "long_factor": [1.0] * 8,
            "short_mscale": 1.0,
            "long_mscale": 1.0,
        },
    },
    "phixtral": {
        "model_dim": 64,
        "num_heads": 4,
        "num_layers": 4,
        "rotary_dim": 8,
        "num_vocab": VOCAB,
    },
    "plamo": {"n_shared_head": 2, "num_key_value_heads": None},
    "plamo2": {**_MAMBA, "hidden_size_per_head": 16, "full_attention_idx": [1, 3], "mamba_step": 2},
    "plamo3": {"window_size": 32, "sliding_window_pattern": 2},
    "qwen": {"num_hidden_layers": 4, "kv_channels": 16, "layer_norm_epsilon": 1e-5},
    "qwen2": {},
    "qwen2_moe": _MOE,
    "qwen3": {},
    "qwen3_5": _LINEAR,
    "qwen3_5_moe": {**_MOE, **_LINEAR},
    "qwen3_moe": _MOE,
    "qwen3_next": {**_MOE, **_LINEAR},
    "qwen3_vl": {"text_config": {**_BASE, "model_type": "qwen3_vl_text"}},
    "recurrent_gemma": {
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": 32,
        "block_types": ["recurrent", "attention"] * 2,
        "embeddings_scale_by_sqrt_dim": True,
    },
    "rwkv7": {
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
    "solar_open": _MOE,
    "spark2_5": {"rope_parameters": _ROPES},
    "stablelm": {"use_qkv_bias": False},
    "starcoder2": {"norm_epsilon": 1e-5},
    "step3p5": {
        "num_attention_groups": 2,
        "layer_types": _SLIDING,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_intermediate_size": 32,
        "share_expert_dim": 32,
        "moe_layers_enum": "2,3",
    },
    "talkie": {},
    "telechat3": {},
    "youtu_llm": _MLA,
}
"""The settings of each architecture that differ from those of a Llama, or that a Llama lacks."""


def settings_of(architecture: str) -> dict[str, Any]:
    """Return the config.json of a tiny model."""
    return {"model_type": architecture, **_BASE, **CONFIGS[architecture]}


def build(architecture: str, **config: Any) -> Any:
    """Return a model with seeded random weights, in float32 and evaluated."""
    settings = settings_of(architecture) | config
    module = importlib.import_module(f"mlx_lm.models.{architecture}")
    model = module.Model(module.ModelArgs.from_dict(settings))
    mx.random.seed(0)
    parameters: Any = tree_flatten(model.parameters())
    model.update(tree_unflatten([(name, _weights(array)) for name, array in parameters]))
    model.eval()
    mx.eval(model.parameters())
    return model


def _weights(like: mx.array) -> mx.array:
    if like.ndim < 2:
        return like.astype(mx.float32)
    scale = 1.6 / float(like.shape[-1]) ** 0.5 if like.ndim == 2 else 0.3
    return (mx.random.normal(like.shape) * scale).astype(mx.float32)
