"""Models with random weights, in folders as the hub has them, that write text of visible letters.

Their tokenizer has a token for each letter, and one for each mark of a chat template, so that each
token of an answer is text that a client sees at once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END = "<|im_end|>"
MARKS = ("<|im_start|>", END, "<think>", "</think>", "system", "user", "assistant", "tool")
"""Texts that are one token each, and that no answer has."""
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {% for tool in tools %}{{ tool | tojson }}\n"
    "{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] "
    "}}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}{% endif %}"
)
LETTERS = [*map(chr, range(ord("!"), ord("~") + 1)), "\u0120", "\u010a"]
"""The visible letters, a space and a line feed, as a byte-level tokenizer writes them."""
SIZE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {"sliding_window": 256, "sliding_window_pattern": 2},
    "lfm2": {},
    "qwen3_next": {},
}
"""Full attention, windows, short convolutions, gated deltas: what differs from SIZE."""


def write_untrained(
    folder: Path, kind: str, *, layers: int = 2, width: int = 64, context: int = 32768
) -> None:
    """Write a model of a kind of KINDS to `folder`.

    `width`: the size of its states; its MLPs are twice as wide, and heads have 16 or more.
    """
    from support.models import save_model, tiny_config, tiny_model

    size: dict[str, Any] = SIZE | {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "max_position_embeddings": context,
    }
    if kind == "lfm2":
        size |= {"block_dim": width, "full_attn_idxs": [*range(1, layers, 2)]}
    config = tiny_config(kind, **size | KINDS[kind], vocab_size=len([*LETTERS, *MARKS]))
    model = tiny_model(config)
    _silence_marks(model)
    save_model(folder, model, config)
    _write_tokenizer(folder)


def _silence_marks(model: Any) -> None:
    """Give the marks the logit 0, which is never the highest one."""
    weights = dict[str, mx.array](tree_flatten(model.parameters()))
    name = next(name for name in ("lm_head.weight", "model.embed_tokens.weight") if name in weights)
    rows = weights[name]
    rows[len(LETTERS) :] = 0
    model.load_weights([(name, rows)], strict=False)
    mx.eval(model.parameters())


def _write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: token for token, letter in enumerate(LETTERS)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(MARKS[:2]))
    tokenizer.add_tokens(list(MARKS[2:]))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
