"""Going back in a long conversation, and decoding at its full depth, against mlx-lm: python benchmarks/rewinding.py [--quick]

On Linux first put a fast BLAS in front (`mlxrunner doctor` names it), and let nothing else run. Random weights in float32; the sides
take turns in one process. First a Llama: two answers are open at once and read in turn; memory is what each held beside the weights.
Then models that can't be trimmed, after messages of 60 and 340 tokens: the same prompt again; a next turn without the first half of
the answer ("thinking"); the last message edited. "cache": stream_generate on a prompt cache that is trimmed, or a fresh one where
can_trim_prompt_cache says no. "server": as mlx_lm.server does it, which also saves the caches at the end of the system prompt and of
each prompt (LRUPromptCache). Tokens are those evaluated before the first one of the answer, times go up to that one.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm import stream_generate
from mlx_lm.generate import BatchGenerator, generation_stream
from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache
from report import Row, less_is_better, more_is_better, print_json, print_table
from sides import SameDecoder, Side, Tokens, our_side
from versus_mlx_lm import in_turn, wait

from mlxrunner.cache.tokens import as_tokens, common_prefix
from mlxrunner.models.facts import facts_of
from mlxrunner.runner import Runner
from mlxrunner.testing import EOS, ByteTokenizer
from mlxrunner.testing_models import tiny_config, tiny_model

SYSTEM, HEADER = 120, [1, 2, 3]
"""Tokens of the system prompt; what a template puts before an answer."""
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
MODELS = {
    "gemma3_text": tiny_config("gemma3_text", **SHAPE, head_dim=64, sliding_window=512, sliding_window_pattern=6),
    "lfm2": tiny_config("lfm2", **SHAPE | {"block_dim": 256, "full_attn_idxs": [2, 5]}),
}
tokenizer = ByteTokenizer()


def ours(runner: Runner) -> Side:
    """This side and the next two keep what they can for the next prompt. After its tokens comes how many it evaluated for the first."""

    def answer(prompt: list[int], count: int) -> Tokens:
        for chunk in runner.generate(prompt, max_tokens=count, stop_tokens=[]):
            yield chunk.token  # type: ignore[misc]  # each chunk of such an answer has one
        yield chunk.usage.evaluated_tokens  # type: ignore[union-attr]  # the last chunk has it

    return answer


def own_cache(runner: Runner) -> Side:
    cache, held = make_prompt_cache(runner.model), list[int]()

    def answer(prompt: list[int], count: int) -> Tokens:
        kept = common_prefix(as_tokens(held), as_tokens(prompt[:-1]))
        if kept < len(held) and not can_trim_prompt_cache(cache):
            cache[:], kept = make_prompt_cache(runner.model), 0
        trim_prompt_cache(cache, len(held) - kept if kept else 0)
        held[:] = prompt
        for response in stream_generate(runner.model, SameDecoder(tokenizer), prompt[kept:], count, prompt_cache=cache):
            held.append(response.token)
            yield response.token
        yield len(prompt) - kept

    return answer


def server(runner: Runner) -> Side:
    batch, saved = BatchGenerator(runner.model), LRUPromptCache()

    def answer(prompt: list[int], count: int) -> Tokens:
        cache, rest = saved.fetch_nearest_cache("", prompt)
        kept = len(prompt) - len(rest)
        segments = [part for part in (prompt[kept:SYSTEM], prompt[max(kept, SYSTEM) :]) if part]
        batch.insert_segments([segments], [count], [cache], [prompt[:kept]])
        is_open = True
        while is_open:
            parts, responses = batch.next()
            ends = batch.extract_cache([part.uid for part in parts if part.end_of_segment and not part.end_of_prompt])
            for saving, tokens in ends.values():
                saved.insert_cache("", tokens[:], saving)
            for response in responses:
                is_open = response.finish_reason is None
                yield response.token
        saved.insert_cache("", response.all_tokens[:], response.prompt_cache)
        yield len(rest)

    return answer


def conversation(length: int) -> list[int]:
    """A system prompt and messages, a short one last."""
    tokens: list[int] = np.random.default_rng(0).integers(0, 290, length).tolist()
    end, sizes = length, cycle((60, 340))
    while end > SYSTEM:
        tokens[end - 1] = EOS
        end -= next(sizes)
    tokens[SYSTEM - 1] = EOS
    return tokens


def going_back(label: str, config: dict[str, Any], length: int, count: int, rounds: int) -> Iterator[Row]:
    model, said = tiny_model(config), conversation(length)
    sides: dict[str, Callable[[Runner], Side]] = {"ours": ours, "cache": own_cache, "server": server}
    figures: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for turn in range(rounds):
        for name in in_turn(sides, turn):
            side = sides[name](Runner(model, tokenizer, facts_of(model, config)))
            *answer, _ = side(said + HEADER, count)
            following = [*said, *HEADER, *answer[count // 2 :], EOS, *said[-60:], *HEADER]
            edited = [*said[:-10], *(289 - token for token in said[-10:-1]), EOS, *HEADER]
            for what, prompt in {"again": said + HEADER, "thinking left out": following, "edited": edited}.items():
                wait()
                began = time.perf_counter()
                tokens = side(prompt, count)
                next(tokens)
                seconds = time.perf_counter() - began
                *_, evaluated = tokens
                figures.setdefault((what, name), []).append((evaluated, seconds * 1e3))
    for what, name in figures:
        if name != "ours":
            (evaluated, ms), (others, others_ms) = (zip(*figures[what, side], strict=True) for side in ("ours", name))
            for row in less_is_better("", "tok", evaluated, others), less_is_better("", "ms", ms, others_ms):
                target = None if name == "server" else 20 if row.unit == "tok" else 1
                yield replace(row, name=f"{label}, {length}: {what}, vs {name}", target=target)


class Open:
    """An answer that is read in parts. `peak`: the most bytes that it held at once."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens, self._held, self.peak = tokens, 0, 0

    def read(self, count: int) -> float:
        """Seconds of `count` tokens, and of all that they have started."""
        wait()
        before, began = mx.get_active_memory(), time.perf_counter()
        mx.reset_peak_memory()
        for _ in range(count):
            next(self._tokens)
        mx.synchronize()
        mx.synchronize(generation_stream)
        seconds = time.perf_counter() - began
        self.peak = max(self.peak, self._held + mx.get_peak_memory() - before)
        self._held += mx.get_active_memory() - before
        return seconds


def full_depth(length: int, count: int, bursts: int, step: int) -> Iterator[Row]:
    config = tiny_config("llama", **WIDE)
    model, prompt = tiny_model(config), conversation(length)
    runner = Runner(model, tokenizer, facts_of(model, config), context=length + count + 16, prefill_step=step, whole=True)
    lasting = stream_generate(model, SameDecoder(tokenizer), prompt, count + 2, prefill_step_size=step)
    sides = {"ours": Open(our_side(runner)(prompt, count + 2)), "mlx-lm": Open(r.token for r in lasting)}
    seconds = {name: [side.read(1)] for name, side in sides.items()}
    for side in sides.values():
        side.read(1)  # from here on both are one token ahead
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(bursts):
        for name in in_turn(sides, turn):
            rates[name].append(count // bursts / sides[name].read(count // bursts))
    label, peaks = f"llama, step {step}, {length}", [[side.peak / 1e6] for side in sides.values()]
    yield less_is_better(f"{label}: first token", "s", *seconds.values())
    yield more_is_better(f"{label}: decode {count}", "tok/s", *rates.values(), target=0.98)
    yield less_is_better(f"{label}: peak of both", "MB", *peaks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="of going back (default: 2)")
    parser.add_argument("--quick", action="store_true", help="short contexts: does it work, not how fast is it")
    given = parser.parse_args()
    length, count, bursts, step = (1500, 16, 2, 256) if given.quick else (8192, 512, 16, 512)
    rows = list(full_depth(length, count, bursts, step))
    for label, config in MODELS.items():
        rows += going_back(label, config, length, 16 if given.quick else 100, given.rounds)
    print_table(rows)
    print_json(rows, versus="mlx-lm", rounds=given.rounds)


if __name__ == "__main__":
    main()
