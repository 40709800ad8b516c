"""Measure rewinding a long conversation, and decoding at its full depth, against mlx-lm.

PYTHONPATH=tests python benchmarks/rewinding.py [--quick]

On Linux first put a fast BLAS in front (`mlxrunner doctor` names it), and let nothing else run.
Random float32 weights; the sides take turns in one process. First a Llama: both answers are open at
once and read in turn; memory is what each held beside the weights. Then models that can't be
trimmed, after messages of 60 and 340 tokens: the same prompt again; a next turn with half of the
answer left out ("thinking"); the last message edited. Tokens: evaluated for the first one of the
answer; ms: until it is there. mlx-lm's sides are the two of its server, whose LRUPromptCache trims
where can_trim_prompt_cache says so: "single", stream_generate, starts again where not; "batched"
also saves copies of its caches at the end of the system prompt and of each prompt.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from arguments import print_json, print_table
from mlx_lm import stream_generate
from mlx_lm.generate import BatchGenerator, generation_stream
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache
from support.models import tiny_config, tiny_model

from mlxrunner.bench.harness import (
    Comparison,
    SameDecoder,
    Tokens,
    in_turn,
    less_is_better,
    more_is_better,
    our_backend,
    wait,
)
from mlxrunner.models.facts import facts_of
from mlxrunner.runner import Runner
from mlxrunner.testing import EOS, ByteTokenizer

SYSTEM, HEADER = (
    120,
    [1, 2, 3],
)  # tokens of the system prompt; what a template puts before an answer
SHAPE = {
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "intermediate_size": 1024,
    "vocab_size": 300,
    "max_position_embeddings": 16384,
}
WIDE = SHAPE | {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "vocab_size": 8192,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
SIDES = dict.fromkeys(("ours", "single", "batched"))
MODELS = {
    "gemma3_text": tiny_config(
        "gemma3_text", **SHAPE, head_dim=64, sliding_window=512, sliding_window_pattern=6
    ),
    "lfm2": tiny_config("lfm2", **SHAPE | {"block_dim": 256, "full_attn_idxs": [2, 5]}),
}


class Sides:
    """Each keeps what it can for its next prompt.

    After its tokens it yields how many it evaluated for the first one.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner, self.saved, self.batch = runner, LRUPromptCache(), BatchGenerator(runner.model)

    def ours(self, prompt: list[int], count: int) -> Tokens:
        for chunk in self.runner.generate(prompt, max_tokens=count, stop_tokens=[]):
            yield chunk.token  # type: ignore[misc]  # each chunk of such an answer has one
        yield chunk.usage.evaluated_tokens  # type: ignore[union-attr]  # the last chunk has it

    def single(self, prompt: list[int], count: int) -> Tokens:
        cache, rest = self.saved.fetch_nearest_cache("", prompt)
        cache, tokens = cache or make_prompt_cache(self.runner.model), list(prompt)
        for response in stream_generate(
            self.runner.model, SameDecoder(ByteTokenizer()), rest, count, prompt_cache=cache
        ):
            tokens.append(response.token)
            yield response.token
        self.saved.insert_cache("", tokens, cache)
        yield len(rest)

    def batched(self, prompt: list[int], count: int) -> Tokens:
        cache, rest = self.saved.fetch_nearest_cache("", prompt)
        kept = len(prompt) - len(rest)
        self.batch.insert_segments(
            [[prompt[kept:SYSTEM], prompt[max(kept, SYSTEM) :]]], [count], [cache], [prompt[:kept]]
        )
        for parts, responses in iter(self.batch.next, ([], [])):
            ended = self.batch.extract_cache(
                [part.uid for part in parts if part.end_of_segment and not part.end_of_prompt]
            )
            for cache, tokens in ended.values():
                self.saved.insert_cache("", tokens[:], cache)
            for response in responses:
                yield response.token
        self.saved.insert_cache("", response.all_tokens[:], response.prompt_cache)
        yield len(rest)


def conversation(length: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(0).integers(0, 290, length).tolist()
    for end in [SYSTEM, *range(length, SYSTEM + 60, -400), *range(length - 60, SYSTEM, -400)]:
        tokens[end - 1] = EOS
    return tokens


def going_back(
    label: str, config: dict[str, Any], length: int, count: int, rounds: int
) -> Iterator[Comparison]:
    model, said = tiny_model(config), conversation(length)
    prompts = {
        "again": said + HEADER,
        "thinking left out": [],
        "edited": [*said[:-10], *said[-20:-11], EOS, *HEADER],
    }
    figures: dict[tuple[str, str], list[tuple[int, float]]] = {
        (what, name): [] for what in prompts for name in SIDES
    }
    for turn in range(rounds):
        for name in in_turn(SIDES, turn):
            side = getattr(Sides(Runner(model, ByteTokenizer(), facts_of(model, config))), name)
            *answer, _ = side(said + HEADER, count)
            prompts["thinking left out"] = [
                *said,
                *HEADER,
                *answer[count // 2 :],
                EOS,
                *said[-60:],
                *HEADER,
            ]
            for what, prompt in prompts.items():
                wait()
                began = time.perf_counter()
                tokens = side(prompt, count)
                next(tokens)
                seconds = time.perf_counter() - began
                *_, evaluated = tokens
                figures[what, name].append((evaluated, seconds * 1e3))
    for what in prompts:
        for name, target in {"single": 20, "batched": None}.items():
            (tokens, ms), (others, other_ms) = (
                zip(*figures[what, side], strict=True) for side in ("ours", name)
            )
            row = less_is_better(f"{label}, {length}: {what}, vs {name}", "tok", tokens, others)
            yield replace(row, target=target)
            yield replace(less_is_better(row.name, "ms", ms, other_ms), target=target and 1)


def read(tokens: Tokens, count: int, memory: list[int]) -> float:
    """Seconds of `count` tokens, and of all that they have started.

    `memory`: bytes that this answer holds, and the most it held.
    """
    wait()
    mx.reset_peak_memory()
    before, began = mx.get_active_memory(), time.perf_counter()
    for _ in range(count):
        next(tokens)
    mx.synchronize()
    mx.synchronize(generation_stream)
    seconds = time.perf_counter() - began
    memory[:] = (
        memory[0] + mx.get_active_memory() - before,
        max(memory[1], memory[0] + mx.get_peak_memory() - before),
    )
    return seconds


def full_depth(length: int, count: int, bursts: int, step: int) -> Iterator[Comparison]:
    config = tiny_config("llama", **WIDE)
    model, prompt = tiny_model(config), conversation(length)
    runner = Runner(
        model,
        ByteTokenizer(),
        facts_of(model, config),
        context=length + count + 16,
        prefill_step=step,
        whole=True,
    )
    responses = stream_generate(
        model, SameDecoder(runner.tokenizer), prompt, count + 2, prefill_step_size=step
    )
    sides = {
        "ours": our_backend(runner)(prompt, count + 2),
        "mlx-lm": (response.token for response in responses),
    }
    memory = {name: [0, 0] for name in sides}
    for name, tokens in sides.items():
        read(tokens, 2, memory[name])  # from here on both are one token ahead
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(bursts):
        for name in in_turn(sides, turn):
            rates[name].append(count // bursts / read(sides[name], count // bursts, memory[name]))
    both = rates["ours"], rates["mlx-lm"]
    yield more_is_better(f"llama, {length}: decode {count}", "tok/s", *both, target=0.98)
    yield less_is_better(
        f"llama, {length}, step {step}: peak of all",
        "MB",
        *([peak / 1e6] for _, peak in memory.values()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="short contexts: does it work, not how fast is it"
    )
    length, count, bursts, step, said = (
        (1500, 16, 2, 256, 16) if parser.parse_args().quick else (8000, 512, 16, 512, 80)
    )
    going = (
        row
        for label, config in MODELS.items()
        for row in going_back(label, config, length, said, rounds=2)
    )
    rows = [*full_depth(length, count, bursts, step), *going]
    print_table(rows)
    print_json(rows, versus="mlx-lm", rounds=2)


if __name__ == "__main__":
    main()
