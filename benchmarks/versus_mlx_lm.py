"""The runner against mlx-lm's own generator, on the same loaded weights: python benchmarks/versus_mlx_lm.py [--quick]

On Linux first put a fast BLAS in front (`mlxrunner doctor` names it), and let nothing else run:

    LD_PRELOAD=.../libopenblas.so.0 OPENBLAS_NUM_THREADS=1 python benchmarks/versus_mlx_lm.py

The sides take turns in one process, another one begins each round, and they are compared round by round, so that what slows the
machine slows both. Times are wall time as the reader of the tokens sees it. "x": how many times better the runner is (1 is equal);
"+": how much more it takes. `other` is mlx-lm, but for "over a bare loop" that loop and for "first token" the same prompt cold.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import KVCache
from report import Row, excess, less_is_better, more_is_better, print_json, print_table
from sides import Side, bare_loop, mlx_lm_side, our_side, random_llama

from mlxrunner import device
from mlxrunner.cache.full import FullAttentionCache
from mlxrunner.runner import Runner


@dataclass(frozen=True)
class Sizes:
    """In tokens, but for the rounds. `decode`: read from the demo and from the Llama."""

    rounds: int = 7
    decode_prompt: int = 64
    decode: tuple[int, int] = (384, 64)
    prompts: tuple[int, ...] = (16, 512, 1024)
    growth: int = 8192


QUICK = Sizes(rounds=2, decode=(64, 8), prompts=(16, 128), growth=1024)


@dataclass(frozen=True)
class Run:
    """Seconds to the first token (`ttft`), from there to the last (`decode`), and of these the reading thread's own (`python`)."""

    tokens: list[int]
    ttft: float
    decode: float
    python: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="the small model: a directory or a hub id (default: demo)")
    parser.add_argument("--rounds", type=int, help="rounds of each comparison (default: 7)")
    parser.add_argument("--quick", action="store_true", help="two rounds of short runs: does it work, not how fast is it")
    given = parser.parse_args()
    sizes = QUICK if given.quick else Sizes()
    sizes = replace(sizes, rounds=given.rounds or sizes.rounds)
    about = {"mlx": version("mlx"), "mlx-lm": version("mlx-lm"), "device": device.backend(), "BLAS": device.blas().value}

    rows = list(cache_growth(sizes))
    for name, load, decode in zip(("demo", "llama"), (lambda: Runner.load(given.model), random_llama), sizes.decode, strict=True):
        runner = load()
        parameters: list[Any] = tree_flatten(runner.model.parameters())  # type: ignore[assignment]
        label = f"{name}, {sum(array.size for _, array in parameters) / 1e6:.0f} M"
        rows += decoding(runner, label, decode, sizes)
        rows += own_python(runner, label, decode // 3, sizes) if name == "demo" else []
        rows += cold_prefill(runner, label, sizes)
        rows += warm_turn(runner, label, sizes)
    print(*(f"{name} {value}" for name, value in about.items()), f"{sizes.rounds} rounds", sep=", ")
    print_table(rows)
    print_json(rows, versus="mlx-lm", rounds=sizes.rounds, **about)


def decoding(runner: Runner, label: str, count: int, sizes: Sizes) -> Iterator[Row]:
    """Tokens per second after the first."""
    sides = {"ours": our_side(runner), "mlx-lm": mlx_lm_side(runner)}
    runs = alternate(runner, sides, some_tokens(runner, sizes.decode_prompt), count, sizes.rounds)
    ours, other = ([(count - 1) / run.decode for run in runs[side]] for side in sides)
    yield more_is_better(f"{label}: decode {count}", "tok/s", ours, other, target=0.97)


def own_python(runner: Runner, label: str, count: int, sizes: Sizes) -> Iterator[Row]:
    """What a token takes over a bare loop on the same caches. The wall time hides what is done while the device computes.

    A machine's noise is larger than what is looked for here: many short runs.
    """
    sides = {"ours": our_side(runner), "bare": bare_loop(runner)}
    runs = alternate(runner, sides, some_tokens(runner, sizes.decode_prompt), count, 4 * sizes.rounds)
    ours, bare = ([run.decode / (count - 1) * 1e6 for run in runs[side]] for side in sides)
    yield excess(f"{label}: a token over a bare loop", "us", ours, bare, target=150)
    ours, bare = ([run.python / (count - 1) * 1e6 for run in runs[side]] for side in sides)
    yield excess(f"{label}: the same, CPU time of its thread", "us", ours, bare)


def cold_prefill(runner: Runner, label: str, sizes: Sizes) -> Iterator[Row]:
    """Prompt tokens over seconds to the first token, with nothing in the entry."""
    sides = {"ours": our_side(runner), "mlx-lm": mlx_lm_side(runner)}
    for length in sizes.prompts:
        runs = alternate(runner, sides, some_tokens(runner, length), 1, sizes.rounds)
        ours, other = ([length / run.ttft for run in runs[side]] for side in sides)
        yield more_is_better(f"{label}: cold prefill of {length}", "tok/s", ours, other, target=1.0)


def warm_turn(runner: Runner, label: str, sizes: Sizes) -> Iterator[Row]:
    """Time to the first token with 90 and 99 % of the prompt in the entry, against the same length with none."""
    length = max(sizes.prompts)
    times: dict[int, list[float]] = {0: [], 90: [], 99: []}
    for seed in range(sizes.rounds):
        prompt = some_tokens(runner, length, seed)
        runner.reset()
        for percent, those in times.items():
            kept = length * percent // 100
            # Different from its first token on, so that no more than `kept` can be reused of the entry that the last one left.
            prompt = prompt[:kept] + [(token + 1) % runner.facts.vocab for token in prompt[kept:]]
            those.append(measure(our_side(runner), prompt, 1).ttft * 1e3)
    for percent in (90, 99):
        yield less_is_better(f"{label}: first token of {length}, {percent} % reused", "ms", times[percent], times[0])


def cache_growth(sizes: Sizes, layers: int = 8, heads: int = 8, head_dim: int = 64) -> Iterator[Row]:
    """Layer caches that grow token by token, without a model: ours with the room reserved, mlx-lm's by concatenation."""
    makers: dict[str, Callable[[], Any]] = {"ours": FullAttentionCache, "mlx-lm": KVCache}
    times: dict[str, list[float]] = {side: [] for side in makers}
    peaks: dict[str, list[float]] = {side: [] for side in makers}
    one = mx.random.normal((1, heads, 1, head_dim))
    mx.eval(one)
    for turn in range(sizes.rounds):
        for side in in_turn(makers, turn):
            wait()
            before, began = mx.get_active_memory(), time.perf_counter()
            mx.reset_peak_memory()
            caches = [makers[side]() for _ in range(layers)]
            if side == "ours":
                for cache in caches:
                    cache.reserve(sizes.growth)
            for _ in range(sizes.growth):
                for cache in caches:
                    cache.update_and_fetch(one, one)
                mx.eval([(cache.keys, cache.values) for cache in caches])
            times[side].append((time.perf_counter() - began) / sizes.growth * 1e6)
            peaks[side].append((mx.get_peak_memory() - before) / 1e6)
            del caches, cache
    name = f"caches alone, grown to {sizes.growth}"
    yield less_is_better(f"{name}: time of a token", "us", times["ours"], times["mlx-lm"])
    yield less_is_better(f"{name}: peak memory", "MB", peaks["ours"], peaks["mlx-lm"])


def alternate(runner: Runner, sides: Mapping[str, Side], prompt: list[int], count: int, rounds: int) -> dict[str, list[Run]]:
    """`rounds` cold runs of each side after one that doesn't count; says so if they gave different tokens."""
    runs: dict[str, list[Run]] = {side: [] for side in sides}
    for turn in range(rounds + 1):
        for side in in_turn(sides, turn):
            runner.reset()
            runs[side].append(measure(sides[side], prompt, count))
    if len({tuple(run.tokens) for those in runs.values() for run in those}) > 1:
        print(f"{', '.join(sides)}: not the same tokens after {len(prompt)}", file=sys.stderr)
    return {side: those[1:] for side, those in runs.items()}


def in_turn(sides: Mapping[str, Any], turn: int) -> list[str]:
    return list(sides) if turn % 2 else list(sides)[::-1]


def measure(side: Side, prompt: list[int], count: int) -> Run:
    """All `count` tokens of an answer; a first token alone is read from an answer of two, whose second one nobody waits for."""
    wait()
    began = time.perf_counter()
    answer = side(prompt, max(count, 2))
    tokens = [next(answer)]
    first, first_python = time.perf_counter(), time.thread_time()
    while len(tokens) < count:
        tokens.append(next(answer))
    last, last_python = time.perf_counter(), time.thread_time()
    answer.close()
    return Run(tokens, first - began, last - first, last_python - first_python)


def wait() -> None:
    """For what the last run left on its way; and give back what it no longer needs."""
    mx.synchronize()
    mx.synchronize(generation_stream)
    gc.collect()
    mx.clear_cache()


def some_tokens(runner: Runner, count: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(runner.facts.vocab, size=count).tolist()
    return tokens


if __name__ == "__main__":
    main()
