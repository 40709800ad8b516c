"""Tiny vision models of mlx-vlm with random weights, and made-up pictures for them."""

from __future__ import annotations

import copy
import importlib
import random
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from mlxrunner.cache.tokens import as_tokens
from mlxrunner.pictures.model import CrossingModel, SeeingModel
from mlxrunner.pictures.vision_encoder import Prepared, VisionEncoder
from mlxrunner.tokenizer.prompt import TokenizedPrompt

Part = tuple[str, Any]
"""A text of tokens ("text", ids), or the number of a picture ("picture", number)."""
VOCABULARY = 300
TOKEN = 290
"""The token that stands for each position of a picture."""
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "bos_token_id": 256,
}
EYES: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "patch_size": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "image_size": 32,
}
QWEN: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_patch_size": 4,
    "spatial_merge_size": 2,
}
SHAPES_OF_TILES = {1: 1, 2: 2, 3: 3, 4: 6}
"""A number of the aspect ratio for each number of tiles (mllama)."""
ENDS = {
    "image_token_id": TOKEN,
    "video_token_id": 291,
    "vision_start_token_id": 292,
    "vision_end_token_id": 293,
    "vision_token_id": 294,
}
THETA = {"rope_theta": 10000.0}


def _axes(*sections: int) -> dict[str, Any]:
    return {**THETA, "rope_scaling": {"type": "mrope", "mrope_section": list(sections)}}


def _beside(text: str, eyes: str, more: dict[str, Any] | None = None, **top: Any) -> dict[str, Any]:
    """Return a configuration whose parts have models `text` and `eyes` of their own."""
    return {
        "text_config": {"model_type": text, **TEXT, **(more or {})},
        "vision_config": {"model_type": eyes, **EYES},
        "image_token_index": TOKEN,
        "image_token_id": TOKEN,
        "vocab_size": VOCABULARY,
        **top,
    }


_TWO_AXES = {**QWEN, "out_hidden_size": 32, "intermediate_size": 64}
_PIXTRAL = _beside("mistral", "pixtral", {"head_dim": 8, **THETA}, spatial_merge_size=2)
_PIXTRAL["vision_config"] |= {"head_dim": 16, "image_size": 64}
_PIXTRAL["vision_feature_layer"] = -1
_GEMMA = {
    "head_dim": 8,
    "sliding_window": 32,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 8,
    "mm_tokens_per_image": 16,
}
_CROSSING = {
    "num_hidden_layers": 4,
    "cross_attention_layers": [1, 3],
    **THETA,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "vision_config": {**QWEN, "embed_dim": 32, "in_channels": 3, "mlp_ratio": 2.0},
        "tie_word_embeddings": True,
        **_axes(1, 1, 2),
        **TEXT,
        **ENDS,
    },
    "qwen2_5_vl": {
        "vision_config": {**_TWO_AXES, "window_size": 16, "fullatt_block_indexes": [1]},
        "tie_word_embeddings": True,
        **_axes(1, 1, 2),
        **TEXT,
        **ENDS,
    },
    "qwen3_vl": {
        "text_config": {"model_type": "qwen3_vl_text", "head_dim": 8, **_axes(2, 1, 1), **TEXT},
        "vision_config": {
            **_TWO_AXES,
            "depth": 3,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        "vocab_size": VOCABULARY,
        **ENDS,
    },
    "gemma3": _beside("gemma3_text", "siglip_vision_model", _GEMMA, hidden_size=32),
    "idefics3": _beside("llama", "idefics3_vision", THETA, scale_factor=2),
    "smolvlm": _beside("llama", "idefics3_vision", THETA, scale_factor=2),
    "mistral3": _PIXTRAL,
    "pixtral": _PIXTRAL,
    "internvl_chat": _beside("qwen2", "intern_vit_6b", downsample_ratio=0.5),
    "llava": _beside("llama", "clip_vision_model"),
    "mllama": _beside("mllama", "mllama_vision_model", _CROSSING),
}
CONFIGS["mllama"]["vision_config"] |= {
    "image_size": 16,
    "num_global_layers": 1,
    "intermediate_layers_indices": [0],
    "vision_output_dim": 64,
}
CONFIGS["llava"]["vision_config"] |= {"projection_dim": 32, "vocab_size": VOCABULARY}
for _kind, _config in CONFIGS.items():
    _config["model_type"] = _kind
    if "qwen" in _kind:
        _config["vision_config"]["model_type"] = _kind


def built(kind: str, seed: int = 3) -> Any:
    """Return a model of mlx-vlm whose answers depend on what it sees."""
    from mlx_vlm.utils import update_module_configs

    mx.random.seed(seed)
    module = importlib.import_module(f"mlx_vlm.models.{kind}")
    config = copy.deepcopy(CONFIGS[kind])
    if kind.startswith("qwen2"):
        config["text_config"] = {k: v for k, v in config.items() if k != "vision_config"}
    made = module.ModelConfig.from_dict(copy.deepcopy(config))
    model = module.Model(update_module_configs(made, module, config, ["text", "vision"]))
    model.eval()
    model.update(sharper(model.parameters()))
    open_gates(model)
    mx.eval(model.parameters())
    return model


def seeing_model(model: Any, sight: VisionEncoder) -> SeeingModel:
    """Return what runs a model of mlx-vlm."""
    return (CrossingModel if model.config.model_type == "mllama" else SeeingModel)(model, sight)


def sharper(parameters: Any) -> Any:
    """Return larger weights, so that tokens far away change the answer.

    A matrix whose numbers are all the same is drawn anew. That of Gemma 3's pictures would add up
    what has the mean 0, and its rows would be nothing but rounding.
    """

    def changed(one: mx.array) -> mx.array:
        if one.ndim < 2:
            return one
        is_constant = bool(mx.all(one == one.reshape(-1)[0]))
        return mx.random.normal(one.shape) / one.shape[0] ** 0.5 if is_constant else one * 3

    return tree_map(changed, parameters)


def open_gates(model: Any) -> None:
    """Let a model that crosses to pictures see something: its gates begin shut."""
    for name, module in model.named_modules():
        for gate in [key for key in module if "gate" in key and isinstance(module[key], mx.array)]:
            module[gate] = mx.full(module[gate].shape, 0.4 + 0.1 * (len(name) % 3))


def block_of(kind: str, seed: int) -> tuple[list[int], dict[str, np.ndarray[Any, Any]]]:
    """Return the tokens of a made-up picture, and what the encoder gets of it."""
    made = np.random.default_rng(seed)

    def noise(*shape: int) -> np.ndarray[Any, Any]:
        return made.normal(size=shape).astype(np.float32)

    if kind.startswith("qwen"):
        rows, columns = 4 + 2 * (seed % 3), 4
        grid = np.array([[1, rows, columns]])
        count = rows * columns
        inputs = {"pixel_values": noise(count, 96), "image_grid_thw": grid}
        return [292, *[TOKEN] * (count // 4), 293], inputs
    if kind in ("idefics3", "smolvlm"):
        return [295, *[TOKEN] * 16, 296], {"pixel_values": noise(1, 1, 3, 32, 32)}
    if kind in ("mistral3", "pixtral"):
        inputs = {"pixel_values": noise(1, 3, 24, 32), "image_sizes": np.array([[24, 32]])}
        many, rows = (4, 3) if kind == "mistral3" else (8, 6)
        return ([TOKEN] * many + [297]) * (rows - 1) + [TOKEN] * many + [298], inputs
    if kind == "mllama":
        tiles, mask = 1 + seed % 4, np.zeros((1, 1, 4), np.int64)
        mask[..., :tiles] = 1
        size = CONFIGS["mllama"]["vision_config"]["image_size"]
        pixels = noise(1, 1, 4, 3, size, size) * mask[..., None, None, None]
        ids = np.array([[SHAPES_OF_TILES[tiles]]])
        inputs = {"pixel_values": pixels.astype(np.float32), "aspect_ratio_ids": ids}
        return [TOKEN], {**inputs, "aspect_ratio_mask": mask}
    if kind == "llava":
        return [TOKEN] * 64, {"pixel_values": noise(1, 3, 32, 32)}
    return [295, *[TOKEN] * 16, 296], {"pixel_values": noise(1, 3, 32, 32)}


class MadeUpProcessor:
    """A processor whose picture is the one with the number of its first pixel."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.tokenizer = SimpleNamespace(decode=lambda block, **_: "?")

    def __call__(self, *, images: list[Any], **_: Any) -> dict[str, Any]:
        block, inputs = block_of(self.kind, images[0].getpixel((0, 0))[0])
        return {"input_ids": np.array([block]), "attention_mask": None, **inputs}


def prompt_of(kind: str, sight: VisionEncoder, history: list[Part]) -> TokenizedPrompt:
    """Return a prompt of texts and pictures, which holds what `sight` needs of these."""
    tokens, views = list[int](), list[Prepared]()
    for what, part in history:
        if what == "text":
            tokens += part
            continue
        views.append(sight.prepare(np.full((2, 2, 3), part, np.uint8)))
        block = as_tokens(block_of(kind, part)[0])
        tokens += sight.placed(block, views[-1:]).tolist()
    return TokenizedPrompt(as_tokens(tokens), pictures=len(views), views=views)


def histories(turns: int, seed: int, pictures: int = 4) -> list[list[Part]]:
    """Return prompts that go on, go back, change, drop and reorder what was there before."""
    drawn = random.Random(seed)

    def text() -> Part:
        return "text", [drawn.randrange(1, 280) for _ in range(drawn.randrange(1, 20))]

    history, found = [text()], list[list[Part]]()
    for turn in range(turns):
        places = [i for i, part in enumerate(history) if part[0] == "picture"]
        if turn % 4 == 1 or drawn.random() < 0.4:
            history = [*history, ("picture", drawn.randrange(pictures)), text()]
        elif turn % 4 == 2 and places:
            place = drawn.choice(places)
            change = drawn.choice(["another", "none", "first"])
            rest = [*history[:place], *history[place + 1 :]]
            if change == "another":
                history = [*history]
                history[place] = "picture", (history[place][1] + 1) % pictures
            else:
                history = rest if change == "none" and len(rest) else [history[place], *rest]
        elif turn % 4 == 3:
            history = [*history[: drawn.randrange(1, len(history) + 1)], text()]
        else:
            history = [*history, text()]
        found.append(history)
    return found
