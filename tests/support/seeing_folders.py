"""Directories of tiny vision models, as the hub has them, with processors that need no network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from support.seeing import CONFIGS, built
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TILES = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
SPECIAL = {
    "qwen": ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"],
    "gemma3": ["<start_of_image>", "<image_soft_token>", "<end_of_image>"],
    "idefics3": ["<fake_token_around_image>", "<image>", "<global-img>", *TILES],
    "mllama": ["<|image|>", "<|python_tag|>", "<|eom_id|>"],
}
MARKERS = {
    "qwen": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3": "<start_of_image>",
    "idefics3": "<image>",
    "mllama": "<|image|>",
}
TOKENS = {
    "qwen": "<|image_pad|>",
    "gemma3": "<image_soft_token>",
    "idefics3": "<image>",
    "mllama": "<|image|>",
}
HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 4,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": 64,
        "max_pixels": 1024,
    },
    "gemma3": {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": 32, "width": 32},
        "image_seq_length": 16,
        **HALVES,
    },
    "idefics3": {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": 64},
        "max_image_size": {"longest_edge": 32},
        "do_image_splitting": True,
        "do_pad": True,
        "resample": 1,
        **HALVES,
    },
    "mllama": {
        "image_processor_type": "MllamaImageProcessor",
        "size": {"height": 16, "width": 16},
        "max_image_tiles": 4,
        **HALVES,
    },
}
CLASSES = {
    "qwen": "Qwen2VLProcessor",
    "gemma3": "Gemma3Processor",
    "idefics3": "Idefics3Processor",
    "mllama": "MllamaProcessor",
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}MARKER{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def family(kind: str) -> str:
    return "qwen" if kind.startswith("qwen") else kind


def write_seeing(folder: Path, kind: str) -> Path:
    """Write a model of this architecture into `folder`, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    own = family(kind)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>", *SPECIAL[own]])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"boi_token": SPECIAL[own][0], "image_token": TOKENS[own], "eoi_token": SPECIAL[own][2]}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "pad_token": "<s>",
        "chat_template": TEMPLATE.replace("MARKER", MARKERS[own]),
        **({**names, "extra_special_tokens": names} if own == "gemma3" else {}),
    }
    ids = {name: tokenizer.token_to_id(name) for name in SPECIAL[own]}
    config = {**CONFIGS[kind], "eos_token_id": tokenizer.token_to_id("<|im_end|>")}
    config |= dict.fromkeys(("image_token_id", "image_token_index"), ids[TOKENS[own]])
    if own == "qwen":
        config["video_token_id"] = ids["<|video_pad|>"]
        config["vision_start_token_id"] = ids["<|vision_start|>"]
        config["vision_end_token_id"] = ids["<|vision_end|>"]
    sizes = {"image_seq_len": 16, "image_seq_length": 16}
    for name, content in (
        ("tokenizer_config.json", settings),
        ("config.json", config),
        ("preprocessor_config.json", PROCESSORS[own]),
        ("processor_config.json", {"processor_class": CLASSES[own], **sizes}),
    ):
        (folder / name).write_text(json.dumps(content))
    weights = dict(tree_flatten(built(kind).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder
