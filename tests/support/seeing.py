"""Tiny models that see pictures, their folders, and what they answer."""

from __future__ import annotations

import copy
import importlib
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mlxrunner.cache.entry import as_tokens
from mlxrunner.models.facts import ModelFacts
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

    A matrix whose numbers are all the same is drawn again. That of Gemma 3's pictures would add up
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
    """Return prompts that continue, go back, change, drop and reorder what was there before."""
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


class Eyes:
    """A model that sees, and mlx-vlm beside it."""

    def __init__(self, kind: str, model: Any, other: Any) -> None:
        self.kind, self.other = kind, other
        self.sight = VisionEncoder(model, MadeUpProcessor(kind), "*", b"")
        self.facts = ModelFacts(kind, 2048, True, {"full": 2}, VOCABULARY, False)
        self.model = seeing_model(model, self.sight)

    def prompt(self, history: list[Part]) -> TokenizedPrompt:
        return prompt_of(self.kind, self.sight, history)

    def cold(self, history: list[Part], count: int = 6) -> list[int]:
        """Return what mlx-vlm's model says to all of it."""
        return cold_answer(self.kind, self.other, history, count)


def noise(seed: int) -> np.ndarray[Any, Any]:
    """Return the pixels of a picture of any size."""
    made = np.random.default_rng(seed)
    return made.integers(0, 255, (*made.integers(10, 60, 2), 3), dtype=np.uint8)


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


def joined(kind: str, pictures: list[dict[str, Any]]) -> dict[str, mx.array]:
    """Return what the encoder gets of several pictures at once."""
    axis = 1 if kind in ("idefics3", "smolvlm", "mllama") else 0
    names = pictures[0] if pictures else ()
    return {
        name: mx.array(np.concatenate([one[name] for one in pictures], axis=axis)) for name in names
    }


def looked_at(tokens: list[int], place: int, token: int) -> list[int]:
    """Return the numbers of the pictures that the token at `place` looks at (mllama)."""
    found, pictures = list[int](), 0
    for at in range(min(place + 1, len(tokens))):
        if tokens[at] == token:
            found = [*(found if at and tokens[at - 1] == token else []), pictures]
            pictures += 1
    return found


def masked_answer(
    model: Any, tokens: list[int], pictures: list[dict[str, Any]], count: int
) -> list[int]:
    """Return the greedy answer of a model that crosses to pictures, each token of it cold.

    All pictures are there at once, and a mask says which of their rows each token looks at. Tokens
    that look at none get nothing from the layers that cross.
    """
    from mlx_vlm.models.base import create_attention_mask

    token = model.config.image_token_index
    states, owners, answer = list[mx.array](), list[int](), list[int]()
    for number, inputs in enumerate(pictures):
        arrays = {name: mx.array(value) for name, value in inputs.items()}
        rows = model.get_input_embeddings(mx.array([[token]]), **arrays).cross_attention_states[0]
        kept = int(inputs["aspect_ratio_mask"].sum()) * 17
        states.append(rows)
        owners += [number] * kept + [-1] * (len(rows) - kept)
    text = model.language_model.model
    while True:
        both = [*tokens, *answer]
        looks = [looked_at(both[: len(tokens)], place, token) for place in range(len(both))]
        sees = mx.array([[owner in seen for owner in owners] for seen in looks])
        some = mx.array([[bool(seen)] for seen in looks])
        hidden = text.embed_tokens(mx.array([both]))
        causal = create_attention_mask(hidden, [None])
        for layer in text.layers:
            if not hasattr(layer, "cross_attn"):
                hidden = layer(hidden, mask=causal)
            elif pictures:
                mask = mx.where(sees, 0.0, -1e9)[None, None]
                given = {"cross_attention_states": mx.concatenate(states)[None]}
                found = layer.cross_attn(
                    layer.input_layernorm(hidden), attention_mask=mask, **given
                )
                hidden = hidden + mx.tanh(layer.cross_attn_attn_gate) * found * some
                found = layer.mlp(layer.post_attention_layernorm(hidden))
                hidden = hidden + mx.tanh(layer.cross_attn_mlp_gate) * found * some
        logits = model.language_model.lm_head(text.norm(hidden))
        answer.append(int(mx.argmax(logits[0, -1]).item()))
        if len(answer) == count:
            return answer


def cold_answer(kind: str, model: Any, history: list[Part], count: int) -> list[int]:
    """Return the greedy answer of `model` itself to a whole prompt of texts and pictures."""
    tokens, pictures = list[int](), list[dict[str, Any]]()
    for what, part in history:
        block, inputs = (part, {}) if what == "text" else block_of(kind, part)
        tokens += block
        pictures += [inputs] if what == "picture" else []
    if kind == "mllama":
        return masked_answer(model, tokens, pictures, count)
    return own_answer(model, tokens, joined(kind, pictures), count)


def own_answer(model: Any, tokens: list[int], inputs: dict[str, mx.array], count: int) -> list[int]:
    """Return the greedy answer of mlx-vlm to a whole prompt, by the calls of its `generate`."""
    from mlx_vlm.models.cache import make_prompt_cache

    language, given, later = model.language_model, dict[str, Any](), dict[str, Any]()
    if hasattr(language, "_rope_deltas"):
        language._rope_deltas = language._position_ids = None
    prompt = mx.array([tokens])
    mask = {"mask": mx.ones(prompt.shape, mx.int32)} if inputs else {}
    found = model.get_input_embeddings(prompt, **mask, **inputs)
    if found.position_ids is not None and inputs:
        later = {"rope_deltas": found.rope_deltas}
        given = {"position_ids": found.position_ids, **later}
    if found.deepstack_visual_embeds is not None and inputs:
        given["visual_pos_masks"] = found.visual_pos_masks
        given["deepstack_visual_embeds"] = found.deepstack_visual_embeds
    if found.cross_attention_states is not None:
        given = later = {"cross_attention_states": found.cross_attention_states}
    cache, answer = make_prompt_cache(language), list[int]()
    embeddings = found.inputs_embeds
    logits = language(prompt, inputs_embeds=embeddings, cache=cache, **given).logits
    while True:
        answer.append(int(mx.argmax(logits[0, -1]).item()))
        if len(answer) == count:
            return answer
        logits = language(mx.array([[answer[-1]]]), cache=cache, **later).logits
