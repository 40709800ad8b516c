"""Train the embedded demo model on a CPU.

python tools/train_demo.py [--out DIR] [--steps N]

Needs the `train` extra (PyTorch). Writes an ordinary model directory: config.json,
model.safetensors (float16), tokenizer.model, tokenizer_config.json. Everything follows from the
seed and the step number, so a run that was stopped continues from its last checkpoint (`--work`) as
if nothing had happened, but for the random splits of subword regularization.

What makes so small a model recall names it has never seen: many small steps, a three-fold loss on
recalled answers, names of many invented shapes, subword regularization (Kudo 2018; BPE dropout,
Provilkov 2020) in training only, and a last part mixed with long conversations.

`--start` continues from a model. The weights of the package were trained so: from a model of before
the small talk, averaged with later ones, by 3,000 of 6,000 steps at --rate 1e-3 --seed 5, and then
by 800 at --rate 5e-4 --seed 6.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sentencepiece as spm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from demo_corpus import Dialogue, dialogue
from demo_facts import FACTS

VOCAB, HIDDEN, LAYERS, HEADS, INTERMEDIATE, CONTEXT, ROPE_BASE = 512, 192, 6, 3, 512, 2048, 10_000.0
PEAK_RATE = 2e-3
"""The highest learning rate."""
SPECIAL = ["<|im_start|>", "<|im_end|>", "\n"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gate_up = nn.Linear(HIDDEN, 2 * INTERMEDIATE, bias=False)
        self.down = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN, eps=1e-5), nn.RMSNorm(HIDDEN, eps=1e-5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            self.qkv(self.norm1(x))
            .view(batch, length, 3, HEADS, HIDDEN // HEADS)
            .permute(2, 0, 3, 1, 4)
        )
        y = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True
        )
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, HIDDEN))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Llama(nn.Module):  # type: ignore[misc]
    """The Llama forward pass for training: rope, RMSNorm, SwiGLU, tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-5)
        nn.init.normal_(self.embed.weight, std=HIDDEN**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        half = HIDDEN // HEADS // 2
        angles = torch.arange(tokens.shape[1])[:, None] * ROPE_BASE ** (-torch.arange(half) / half)
        cos, sin = angles.cos(), angles.sin()
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.norm(x) @ self.embed.weight.T


def train_tokenizer(seed: int) -> bytes:
    """A byte-fallback BPE of 512 pieces over 8,000 conversations."""
    rng = random.Random(f"{seed}:tokenizer")
    text = (m["content"] for _ in range(8000) for m in dialogue(rng).messages)
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=text,
        model_writer=model,
        vocab_size=VOCAB,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.9995,
        split_digits=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=SPECIAL,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


class Encoder:
    """Turns a conversation into token ids, loss weights and the place of each recalled answer."""

    def __init__(self, processor: spm.SentencePieceProcessor) -> None:
        self.sp = processor
        self.start, self.end, self.newline = (processor.piece_to_id(s) for s in SPECIAL)
        self.roles = {role: processor.encode(role) for role in ("system", "user", "assistant")}

    def text(self, text: str, dropout: float) -> list[int]:
        sampled: dict[str, Any] = (
            {"enable_sampling": True, "alpha": dropout, "nbest_size": -1} if dropout else {}
        )
        found: list[int] = self.sp.encode(text, **sampled)
        return found

    def encode(self, talk: Dialogue, dropout: float) -> Iterator[tuple[list[int], float, bool]]:
        recalled = {r.index for r in talk.recalls}
        yield [self.sp.bos_id()], 0.0, False
        for index, message in enumerate(talk.messages):
            yield [self.start, *self.roles[message["role"]], self.newline], 0.1, False
            answer = message["role"] == "assistant"
            weight = 3.0 if index in recalled else 1.0 if answer else 0.1
            yield [*self.text(message["content"], dropout), self.end], weight, index in recalled
            yield [self.newline], 0.1, False


def make_batch(
    encoder: Encoder,
    rng: random.Random,
    rows: int,
    length: int,
    dropout: float,
    held_out: bool = False,
) -> tuple[Tensor, Tensor, list[tuple[int, int, int]]]:
    """Return `tokens, weights` of shape [rows, length + 1] and the spans of recalled answers.

    A span is (row, begin, end).
    """
    tokens, weights = torch.zeros(rows, length + 1, dtype=torch.long), torch.zeros(rows, length + 1)
    spans = []
    for row in range(rows):
        filler = rng.randint(length // 80, length // 32) if length > 400 else 0
        talk = dialogue(rng, filler=filler, max_facts=4 if filler else 3, held_out=held_out)
        place, use = 0, dropout if rng.random() < 0.7 else 0.0
        for ids, weight, recall in encoder.encode(talk, use):
            ids = ids[: length + 1 - place]
            tokens[row, place : place + len(ids)] = torch.tensor(ids, dtype=torch.long)
            weights[row, place : place + len(ids)] = weight
            if recall and place + len(ids) <= length:
                spans.append((row, place, place + len(ids)))
            place += len(ids)
    used = int((weights > 0).sum(1).max()) + 1
    return tokens[:, :used], weights[:, :used], spans


def exact(model: Llama, batches: list) -> float:  # type: ignore[type-arg]
    """Share of recalled answers that greedy decoding would give to the letter."""
    right = total = 0
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for tokens, _, spans in batches:
            best = model(tokens[:, :-1]).argmax(-1)
            total += len(spans)
            right += sum(
                bool((best[r, a - 1 : b - 1] == tokens[r, a:b]).all()) for r, a, b in spans
            )
    return right / max(1, total)


def plan(done: float, rng: random.Random) -> tuple[int, int, float]:
    """Return the rows, length and dropout of a step, `done` being the share of the training.

    Rows are short at first; the last 45 % are mixed with long conversations.
    """
    dropout = 0.1 if done < 0.85 else 0.05
    if done < 0.55 or rng.random() < 0.4:
        return 12, 160, dropout
    return rng.choice(
        [(3, 700, dropout), (3, 700, dropout), (2, 1200, dropout), (1, 2000, dropout)]
    )


def load_model(model: Llama, source: Path) -> None:
    """Fill `model` with the weights of a directory that `save_model` wrote."""
    weights = {k: v.float() for k, v in load_file(source / "model.safetensors").items()}
    state = {
        "embed.weight": weights["model.embed_tokens.weight"],
        "norm.weight": weights["model.norm.weight"],
    }
    for i in range(LAYERS):
        of, to = f"model.layers.{i}.", f"blocks.{i}."
        parts = [weights[f"{of}self_attn.{name}_proj.weight"] for name in "qkv"]
        state[to + "qkv.weight"] = torch.cat(parts)
        state[to + "out.weight"] = weights[of + "self_attn.o_proj.weight"]
        parts = [weights[f"{of}mlp.{name}_proj.weight"] for name in ("gate", "up")]
        state[to + "gate_up.weight"] = torch.cat(parts)
        state[to + "down.weight"] = weights[of + "mlp.down_proj.weight"]
        state[to + "norm1.weight"] = weights[of + "input_layernorm.weight"]
        state[to + "norm2.weight"] = weights[of + "post_attention_layernorm.weight"]
    model.load_state_dict(state)


def save_model(model: Llama, tokenizer: bytes, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    state = model.state_dict()
    weights = {
        "model.embed_tokens.weight": state["embed.weight"],
        "model.norm.weight": state["norm.weight"],
    }
    for i in range(LAYERS):
        to, of = f"model.layers.{i}.", f"blocks.{i}."
        for name, part in zip("qkv", state[of + "qkv.weight"].chunk(3), strict=True):
            weights[f"{to}self_attn.{name}_proj.weight"] = part
        weights[to + "self_attn.o_proj.weight"] = state[of + "out.weight"]
        for name, part in zip(("gate", "up"), state[of + "gate_up.weight"].chunk(2), strict=True):
            weights[f"{to}mlp.{name}_proj.weight"] = part
        weights[to + "mlp.down_proj.weight"] = state[of + "down.weight"]
        weights[to + "input_layernorm.weight"] = state[of + "norm1.weight"]
        weights[to + "post_attention_layernorm.weight"] = state[of + "norm2.weight"]
    half = {k: v.to(torch.float16).contiguous() for k, v in weights.items()}
    save_file(half, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    end = spm.SentencePieceProcessor(model_proto=tokenizer).piece_to_id("<|im_end|>")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "rope_theta": ROPE_BASE,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "bos_token_id": 1,
        "eos_token_id": [end, 2],
    }
    tokenizer_config = {
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "add_bos_token": True,
        "chat_template": TEMPLATE,
    }
    (out / "tokenizer.model").write_bytes(tokenizer)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")


@dataclass
class Training:
    """A model in training, with what continues from a checkpoint."""

    work: Path
    steps: int
    seed: int
    tokenizer: bytes
    rate: float = PEAK_RATE
    start: Path | None = None
    """The directory of a model to start from, in place of random weights."""
    first: int = 0
    """The step to continue from."""

    def __post_init__(self) -> None:
        self.encoder = Encoder(spm.SentencePieceProcessor(model_proto=self.tokenizer))
        self.model = Llama()
        if self.start is not None:
            load_model(self.model, self.start)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), self.rate, betas=(0.9, 0.98), weight_decay=0.05, fused=True
        )
        self.checkpoint = self.work / "checkpoint.pt"
        if self.checkpoint.exists():
            self._go_on()

    def _go_on(self) -> None:
        saved = torch.load(self.checkpoint, weights_only=True)
        if saved["steps"] != self.steps:
            raise SystemExit(
                f"{self.checkpoint} was made for --steps {saved['steps']}, not {self.steps}: "
                "remove it to start again"
            )
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.first = saved["step"]

    def save(self, step: int) -> None:
        temporary = self.checkpoint.with_suffix(".tmp")
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "step": step,
                "steps": self.steps,
            },
            temporary,
        )
        temporary.replace(self.checkpoint)

    def step(self, number: int) -> tuple[float, int]:
        """Train on one batch. Return its loss and its tokens."""
        rng = random.Random(f"{self.seed}:{number}")
        tokens, weights, _ = make_batch(self.encoder, rng, *plan(self._done(number), rng))
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * share_of_rate(number, self.steps)
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.model(tokens[:, :-1])
        losses = F.cross_entropy(
            logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
        )
        loss = (losses * weights[:, 1:].flatten()).sum() / weights[:, 1:].sum()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item(), tokens.numel()

    def _done(self, step: int) -> float:
        """Return the share of the whole training; a model that is taught more is past its half."""
        begun = 0.5 if self.start is not None else 0.0
        return begun + (1 - begun) * step / self.steps

    def run(self, out: Path) -> None:
        """Train to the end. Save and report every 500 steps."""
        tests = self._tests()
        began, seen = time.monotonic(), 0
        for number in range(self.first, self.steps):
            loss, tokens = self.step(number)
            seen += tokens
            if (number + 1) % 500 and number + 1 != self.steps:
                continue
            figures = ", ".join(
                f"{name} {exact(self.model, batches):.3f}" for name, batches in tests.items()
            )
            elapsed = time.monotonic() - began
            print(
                f"step {number + 1}: loss {loss:.3f}, {figures}, {elapsed:.0f} s, "
                f"{seen / elapsed:.0f} tokens/s",
                flush=True,
            )
            self.save(number + 1)
            save_model(self.model, self.tokenizer, out)

    def _tests(self) -> dict[str, list[Any]]:
        encoder, judge = self.encoder, random.Random("judge")
        return {
            "short": [make_batch(encoder, judge, 48, 300, 0.0) for _ in range(2)],
            "long": [make_batch(encoder, judge, 8, 1000, 0.0) for _ in range(3)],
            "unseen": [make_batch(encoder, judge, 48, 300, 0.0, held_out=True) for _ in range(2)],
        }


def share_of_rate(step: int, steps: int) -> float:
    """Return a share that rises for 100 steps, and then falls along a cosine to 3 %."""
    falling = 0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * step / steps))
    return min(1, (step + 1) / 100) * falling


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent.parent / "mlxrunner/models/demo"
    )
    parser.add_argument(
        "--work", type=Path, default=Path("build/demo"), help="where checkpoints are kept"
    )
    parser.add_argument("--steps", type=int, default=12_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=PEAK_RATE, help="the highest learning rate")
    parser.add_argument(
        "--start", type=Path, help="a directory of this model to go on from, with its tokenizer"
    )
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    tokenizer = (
        (args.start / "tokenizer.model").read_bytes() if args.start else train_tokenizer(args.seed)
    )
    training = Training(args.work, args.steps, args.seed, tokenizer, args.rate, args.start)
    print(
        f"{sum(p.numel() for p in training.model.parameters()):,} parameters, "
        f"{len(FACTS)} kinds of facts, from step {training.first}",
        flush=True,
    )
    training.run(args.out)


if __name__ == "__main__":
    main()
