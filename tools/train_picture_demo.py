"""Train the embedded picture demo on a CPU.

python tools/train_picture_demo.py [--out DIR] [--steps N]

Needs the `vision` extra. Writes an ordinary model directory of the Gemma 3 architecture, which
mlx-vlm loads. Everything follows from the seed and the step number: a stopped run continues from
its last checkpoint (`--work`). The embedded model was trained with `--steps 4000`, and from
there with `--steps 8500`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_vlm.models.gemma3 import Model, ModelConfig
from mlx_vlm.models.gemma3.config import TextConfig, VisionConfig
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from picture_corpus import drawn, question, scene

VOCAB, PIXELS, PLACES = 384, 48, 9
"""Tokens of the vocabulary, rows and columns that the encoder sees, and tokens of a picture."""
BATCH, PICTURES, PEAK_RATE = 16, 2, 3e-3
"""Conversations of a step, most pictures of each, and the highest learning rate."""
IMAGE = ("<start_of_image>", "<image_soft_token>", "<end_of_image>")
SPECIAL = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", *IMAGE]
SEEN = f"\n\n{IMAGE[0]}{IMAGE[1] * PLACES}{IMAGE[2]}\n\n"
"""The text in which the processor of Gemma 3 puts a picture."""
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<start_of_image>{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NUMBER = re.compile(r"\d|no$")
"""The tokens that say how many there are: they count four times."""
BLIND = "I see no picture. Show me one with shapes."


def settings(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the model's config.json."""
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "hidden_size": 64,
        "vocab_size": VOCAB,
        "image_token_index": tokenizer.token_to_id(IMAGE[1]),
        "pad_token_id": tokenizer.token_to_id("<pad>"),
        "eos_token_id": [tokenizer.token_to_id(one) for one in ("<|im_end|>", "</s>")],
        "torch_dtype": "float16",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 512,
            "sliding_window_pattern": 2,
            "mm_tokens_per_image": PLACES,
            "max_position_embeddings": 2048,
            "vocab_size": VOCAB,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "patch_size": 8,
            "image_size": PIXELS,
        },
    }


def built(config: dict[str, Any]) -> Model:
    """Return mlx-vlm's model with random weights."""
    parts = {
        "text_config": TextConfig.from_dict(config["text_config"]),
        "vision_config": VisionConfig.from_dict(config["vision_config"]),
    }
    model = Model(ModelConfig.from_dict({**config, **parts}))

    def initial(name: str, array: mx.array) -> mx.array:
        if array.ndim == 1:
            is_one = name.endswith("weight") and ("layer_norm" in name or "layernorm" in name)
            is_plain = is_one and name.startswith("vision_tower")
            return mx.ones(array.shape) if is_plain else mx.zeros(array.shape)
        fan = array.shape[0] if "mm_input" in name else math.prod(array.shape[1:])
        scale = 0.02 if "embed" in name else 1 / math.sqrt(fan)
        return mx.random.normal(array.shape) * scale

    drawn_first: Any = tree_flatten(model.parameters())
    weights = [(name, initial(name, one)) for name, one in drawn_first]
    model.update(tree_unflatten(weights))
    mx.eval(model.parameters())
    return model


def tokenizer_of(corpus: Iterator[str]) -> Tokenizer:
    """Return a byte-level BPE of VOCAB tokens, trained on `corpus`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def marked(asked: str, answer: str) -> tuple[str, str]:
    """Return a turn up to its answer, and the answer, as the chat template writes them."""
    before = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    return before, f"{answer}<|im_end|>"


def pixels_of(picture: Image.Image) -> np.ndarray[Any, Any]:
    """Return what the processor makes of a picture, `[PIXELS, PIXELS, 3]` from -1 to 1."""
    small = picture.resize((PIXELS, PIXELS), Image.Resampling.BILINEAR)
    return np.asarray(small, np.float32) / 127.5 - 1


def conversation(rng: random.Random) -> tuple[list[tuple[str, str]], list[np.ndarray[Any, Any]]]:
    """Return turns (user's text, answer), and the pictures whose places are in the texts."""
    turns, pictures = list[tuple[str, str]](), list[np.ndarray[Any, Any]]()
    if rng.random() < 0.1:
        turns.append((question(scene(rng), rng).text, BLIND))
    for _ in range(PICTURES if rng.random() < 0.15 else 1):
        shown = scene(rng)
        pictures.append(pixels_of(drawn(shown, rng)))
        for number in range(rng.randint(1, 2) if len(pictures) > 1 else rng.randint(3, 4)):
            asked = question(shown, rng)
            turns.append((("" if number else SEEN) + asked.text, asked.answer))
    return turns, pictures


def batch(tokenizer: Tokenizer, rng: random.Random) -> dict[str, mx.array]:
    """Return the inputs of a step: tokens, weights of the loss, pictures, and their rows."""
    rows, weights, places = list[list[int]](), list[list[float]](), list[list[int]]()
    pictures = list[np.ndarray[Any, Any]]()
    image: Any = tokenizer.token_to_id(IMAGE[1])
    for _ in range(BATCH):
        turns, shown = conversation(rng)
        begin: Any = tokenizer.token_to_id("<s>")
        tokens, weight = [begin], [0.0]
        for asked, answer in turns:
            before, said = marked(asked, answer)
            for text, share in ((before, 0.0), (said, 1.0), ("\n", 0.0)):
                found = tokenizer.encode(text, add_special_tokens=False)
                tokens += found.ids
                weight += [share * (4 if NUMBER.search(one) else 1) for one in found.tokens]
        first = len(pictures) * PLACES
        own = np.array(tokens) == image
        places.append((first + np.maximum(np.cumsum(own) - 1, 0)).tolist())
        pictures += shown
        rows.append(tokens)
        weights.append(weight)
    longest = -(-max(map(len, rows)) // 32) * 32
    most = BATCH * PICTURES
    padded = np.zeros((most, PIXELS, PIXELS, 3), np.float32)
    padded[: len(pictures)] = pictures

    def even(lists: list[list[Any]], kind: Any) -> mx.array:
        return mx.array(np.array([one + [0] * (longest - len(one)) for one in lists], kind))

    return {
        "tokens": even(rows, np.int32),
        "weights": even(weights, np.float32),
        "places": even(places, np.int32),
        "pictures": mx.array(padded[: -(-len(pictures) // 8) * 8]),
    }


def loss_of(model: Model, image: int, inputs: dict[str, mx.array]) -> mx.array:
    tokens, language = inputs["tokens"], model.language_model
    language.lm_head.weight = language.model.embed_tokens.weight  # mlx-vlm loads no other one
    hidden, _, _ = model.vision_tower(inputs["pictures"], output_hidden_states=True)
    seen = model.multi_modal_projector(hidden) / model.config.hidden_size**0.5
    rows = seen.reshape(-1, seen.shape[-1])[inputs["places"]]
    text = language.model.embed_tokens(tokens)
    embeddings = mx.where((tokens == image)[..., None], rows, text)
    logits = language(tokens, inputs_embeds=embeddings).logits[:, :-1]
    weights = inputs["weights"][:, 1:]
    return (nn.losses.cross_entropy(logits, tokens[:, 1:]) * weights).sum() / weights.sum()


def rate(step: int, steps: int) -> float:
    """Return the learning rate: a short rise, then a cosine down to a hundredth."""
    rise = min(1.0, (step + 1) / 200)
    return PEAK_RATE * rise * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def train(work: Path, steps: int, seed: int) -> tuple[Model, Tokenizer, dict[str, Any]]:
    rng = random.Random(seed)
    turns = (turn for _ in range(1000) for turn in conversation(rng)[0])
    texts = (text for turn in turns for text in marked(*turn))
    tokenizer = tokenizer_of(re.sub("|".join(map(re.escape, SPECIAL)), " ", one) for one in texts)
    config = settings(tokenizer)
    mx.random.seed(seed)
    model = built(config)
    image: Any = tokenizer.token_to_id(IMAGE[1])
    optimizer = optim.AdamW(learning_rate=PEAK_RATE, weight_decay=0.01, betas=[0.9, 0.98])
    optimizer.init(model.trainable_parameters())
    begin, state = 0, work / "state.safetensors"
    if state.exists():
        loaded: Any = mx.load(str(state), return_metadata=True)
        saved, about = loaded
        model.update(tree_unflatten([(k[2:], v) for k, v in saved.items() if k[0] == "m"]))
        optimizer.state = tree_unflatten([(k[2:], v) for k, v in saved.items() if k[0] == "o"])
        begin = int(about["step"])
    graded: Any = nn.value_and_grad(model, partial(loss_of, model, image))  # type: ignore[attr-defined]
    since, total = time.perf_counter(), 0.0
    for step in range(begin, steps):
        optimizer.learning_rate = rate(step, steps)
        loss, gradient = graded(batch(tokenizer, random.Random(f"{seed} {step}")))
        gradient, _ = optim.clip_grad_norm(gradient, 1.0)  # type: ignore[no-untyped-call]
        optimizer.update(model, gradient)
        mx.eval(model.parameters(), optimizer.state, loss)
        total += loss.item()
        if (step + 1) % 50 == 0:
            seconds = (time.perf_counter() - since) / 50
            print(f"{step + 1} of {steps}: loss {total / 50:.4f}, {seconds:.2f} s", flush=True)
            since, total = time.perf_counter(), 0.0
        if (step + 1) % 250 == 0 or step + 1 == steps:
            pairs: Any = [*tree_flatten({"m": model.parameters(), "o": optimizer.state})]
            both = dict(pairs)
            new = work / "new.safetensors"
            mx.save_safetensors(str(new), both, {"step": str(step + 1)})
            new.replace(state)
    return model, tokenizer, config


def write(out: Path, model: Model, tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    """Write the model directory, with weights in half precision."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    names = dict(zip(("boi_token", "image_token", "eoi_token"), IMAGE, strict=True))
    halves = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "pad_token": "<pad>",
        "chat_template": TEMPLATE,
        "extra_special_tokens": names,
        **names,
    }
    sight = {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": PIXELS, "width": PIXELS},
        "image_seq_length": PLACES,
        **halves,
    }
    processor = {"processor_class": "Gemma3Processor", "image_seq_length": PLACES}
    for name, content in (
        ("config.json", config),
        ("tokenizer_config.json", about),
        ("preprocessor_config.json", sight),
        ("processor_config.json", processor),
    ):
        (out / name).write_text(json.dumps(content, indent=2) + "\n")
    parameters: Any = tree_flatten(model.parameters())
    weights = {k: v.astype(mx.float16) for k, v in parameters}
    del weights["language_model.lm_head.weight"]
    mx.save_safetensors(str(out / "model.safetensors"), weights, {"format": "mlx"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    folder = Path(__file__).parent.parent / "mlxrunner" / "models" / "demo_pictures"
    parser.add_argument("--out", type=Path, default=folder)
    parser.add_argument("--work", type=Path, default=Path("build/picture_demo"))
    parser.add_argument("--steps", type=int, default=8500)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    write(given.out, *train(given.work, given.steps, given.seed))


if __name__ == "__main__":
    main()
