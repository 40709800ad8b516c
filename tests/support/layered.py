"""Small models with real layers of four kinds, whose answers a test writes.

The weights are random. Every token is evaluated and kept by layers of that kind, as in a large
model. Only the choice of the next token is the script's, so that calls of tools come out right.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from support.actor import TEMPLATE, Script
from support.engine import engine_of
from support.models import save_model, tiny_config, tiny_model

from mlxrunner.engine.sampling import Sampled
from mlxrunner.models.load import LoadProgress, tell_nobody
from mlxrunner.server.models import ModelLoader, ServedModel

VOCAB = 8192
CONTEXT = 65_536
END = "<|im_end|>"
ROOT = Path(__file__).parents[2]
STEP = 64
"""One logit in so many is remembered."""
SLOW = -6.0
"""The `A_log` of all states: they remember hundreds of tokens, so that a wrong state shows."""
NEAR = 1e-4
"""The largest difference of logits that is one of rounding, as a share of the largest logit."""
CHUNK = 1024
"""Tokens of one pass of a cold run."""
_WIDE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
KINDS: dict[str, dict[str, Any]] = {
    "full": {"model_type": "qwen3", **_WIDE},
    "sliding": {
        "model_type": "gemma3_text",
        **_WIDE,
        "num_hidden_layers": 2,
        "sliding_window": 1024,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 64,
    },
    "gated-delta": {
        "model_type": "qwen3_next",
        **_WIDE,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 1,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
    "mamba": {
        "model_type": "granitemoehybrid",
        **_WIDE,
        "layer_types": ["mamba", "attention"],
        "attention_bias": False,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 0.125,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "shared_intermediate_size": 128,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 64,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_proj_bias": False,
        "mamba_conv_bias": True,
        "position_embedding_type": "rope",
    },
}
"""A model of each kind: two layers, one of them of full attention."""


def write_kind(folder: Path, kind: str, tokenizer: bytes) -> Any:
    """Write the model of a `kind` to `folder` with a tokenizer.json. Return mlx-lm's model."""
    config = tiny_config(**KINDS[kind])
    model = tiny_model(config)
    decays = [pair for pair in tree_flatten(model.parameters()) if pair[0].endswith("A_log")]
    model.load_weights([(name, mx.full(a.shape, SLOW)) for name, a in decays], strict=False)
    save_model(folder, model, config)
    (folder / "tokenizer.json").write_bytes(tokenizer)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "chat_template": TEMPLATE.replace("\x1e", END),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return model


def trained_tokenizer() -> bytes:
    """Return a tokenizer.json of 8192 tokens, trained on this project's pages and modules.

    It writes about three characters of an agent's prompt with a token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>", "<|im_start|>", END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    files = [*(ROOT / "docs").glob("*.md"), *(ROOT / "mlxrunner").rglob("*.py")]
    tokenizer.train([str(path) for path in sorted(files)], trainer)
    written: str = tokenizer.to_str()
    return written.encode()


@dataclass
class Told:
    """A choice of tokens by a script. It takes the place of `engine.sampling.NextToken`."""

    answer: list[int]
    """The tokens of the answer, its end included."""
    place: int = 0
    first: mx.array | None = None
    """Some of the logits after the prompt."""
    is_greedy = is_plain = needs_history = may_draft = False

    def __call__(self, logits: mx.array, history: mx.array | None = None) -> Sampled:
        """Choose the script's token, or the answer's end if a logit is not a number."""
        if self.first is None:
            self.first = mx.take(logits[0], mx.arange(0, logits.shape[-1], STEP))
        token = self.answer[min(self.place, len(self.answer) - 1)]
        self.place += 1
        is_good = mx.isfinite(logits).all() & mx.isfinite(self.first).all()
        return Sampled(mx.where(is_good, token, self.answer[-1]).reshape(1))

    def rewind(self, count: int) -> None:
        """Go back to the state after the first `count` tokens."""
        self.place = count


@dataclass
class Played:
    """The requests of a model that plays a part."""

    script: Script
    prompts: list[np.ndarray] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)

    def begin(self) -> None:
        """Forget the requests so far."""
        self.prompts.clear()
        self.told.clear()

    def take(self, opened: ServedModel) -> None:
        """Let the script choose the tokens of all answers of a model."""
        stepper, tokenizer = engine_of(opened.runner), opened.loaded.tokenizer
        prepare = stepper.prepare
        (end,) = tokenizer.stop_tokens

        def prepared(prompt: Any, given: dict[str, Any]) -> Any:
            request = prepare(prompt, given)
            answer = self.script(request.prompt.text)
            told = Told([*tokenizer.encode_more(answer), end])
            request.next_token = told
            self.prompts.append(np.array(request.tokens))
            self.told.append(told)
            return request

        stepper.prepare = prepared  # type: ignore[method-assign]

    def most_different(self, model: Any) -> float:
        """Return the largest difference between logits and those of a cold run of `model`.

        It is a share of the largest logit. The cold run has the longest prompt, and tells the
        logits after all prompts that it begins with.
        """
        longest = max(self.prompts, key=len)
        warm = {
            len(tokens): np.array(told.first)
            for tokens, told in zip(self.prompts, self.told, strict=True)
            if np.array_equal(tokens, longest[: len(tokens)])
        }
        assert len(warm) > 1, "no prompt begins with another one"
        cold = cold_logits(model, longest, list(warm))
        return max(
            float(np.abs(warm[place] - cold[place]).max() / np.abs(cold[place]).max())
            for place in warm
        )


def cold_logits(model: Any, tokens: np.ndarray, places: list[int]) -> dict[int, np.ndarray]:
    """Return some of the logits after the first n tokens, for each n in `places`.

    mlx-lm's own caches keep the tokens.
    """
    cache, found = make_prompt_cache(model), dict[int, np.ndarray]()
    for at in range(0, len(tokens), CHUNK):
        part = tokens[at : at + CHUNK]
        logits = model(mx.array(part)[None], cache=cache)
        inside = [place for place in places if at < place <= at + len(part)]
        rows = [logits[0, place - at - 1, ::STEP] for place in inside]
        mx.eval(rows, [layer.state for layer in cache])
        found |= dict(zip(inside, map(np.array, rows), strict=True))
    return found


@dataclass(frozen=True, kw_only=True)
class LayeredOpening(ModelLoader):
    """An opening whose models play a part."""

    played: Played

    def load(self, name: str, room: int, progress: LoadProgress = tell_nobody) -> ServedModel:
        opened = super().load(name, room, progress)
        self.played.take(opened)
        return opened
