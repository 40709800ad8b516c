"""Sizes of tiny models with composite layers, for plans of their memory."""

from __future__ import annotations

from typing import Any

FALCON: dict[str, Any] = {"hidden_size": 64, "head_dim": 16, "mamba_d_head": 16}
FALCON |= {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_state": 16, "mlp_expansion_factor": 2}
BAICHUAN: dict[str, Any] = {"rope_theta": 1e4, "sliding_window": 64, "conv_window": 2}
BAICHUAN |= {"sliding_window_layers": [1, 3]}
