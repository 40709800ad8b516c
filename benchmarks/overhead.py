"""Measure the cost of the runner's layer caches alone, and of its Python over a bare loop.

python benchmarks/overhead.py [--quick]

On Linux first put a fast BLAS in front (`mlxrunner doctor` names it), and let nothing else run. The
sides take turns in one process, and are compared round by round. "x": how many times better the
runner is (1 is equal); "+": how much more it takes. `other` is mlx-lm's cache, or the bare loop.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
from arguments import print_json, print_table
from mlx_lm.models.cache import KVCache

from mlxrunner.bench.harness import (
    Backend,
    Comparison,
    Tokens,
    alternate,
    excess,
    in_turn,
    less_is_better,
    our_backend,
    some_tokens,
    wait,
)
from mlxrunner.cache.layers.attention import FullAttentionCache
from mlxrunner.cache.layers.factory import make_layer_caches
from mlxrunner.engine.sampling import dispatch
from mlxrunner.runner import Runner

PROMPT = 64


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="demo", help="a small one: a directory or a hub id (default: demo)"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="two rounds of short runs: does it work, not how fast is it",
    )
    given = parser.parse_args()
    rounds, growth, count = (2, 1024, 16) if given.quick else (7, 8192, 128)
    rows = [*cache_growth(growth, rounds), *own_python(Runner.load(given.model), count, rounds)]
    print_table(rows)
    print_json(rows, rounds=rounds)


def own_python(runner: Runner, count: int, rounds: int) -> Iterator[Comparison]:
    """Compare the time of a token with that of a bare loop on the same caches.

    The wall time hides what is done while the device computes. A machine's noise is larger than
    what is looked for here: many short runs.
    """
    sides = {"ours": our_backend(runner), "bare": bare_loop(runner)}
    runs = alternate(runner, sides, some_tokens(runner, PROMPT), count, 4 * rounds)
    ours, bare = ([run.decode / (count - 1) * 1e6 for run in runs[side]] for side in sides)
    yield excess(f"{runner.name}: a token over a bare loop", "us", ours, bare, target=150)
    ours, bare = ([run.python / (count - 1) * 1e6 for run in runs[side]] for side in sides)
    yield excess(f"{runner.name}: the same, CPU time of its thread", "us", ours, bare)


def bare_loop(runner: Runner) -> Backend:
    """Decode one step ahead with the least work, on the runner's caches and in its order."""
    model = runner.model

    def generate(prompt: list[int], max_tokens: int) -> Tokens:
        layers = make_layer_caches(model)
        for layer in layers:
            layer.reserve(len(prompt) + max_tokens)
        cache = [layer.model_cache for layer in layers]

        def following(tokens: mx.array) -> mx.array:
            token = mx.argmax(model(tokens[None], cache=cache)[:, -1, :], axis=-1)
            dispatch([token])
            return token

        model(mx.array(prompt[:-1])[None], cache=cache)
        mx.eval([layer.state for layer in layers])
        token = following(mx.array(prompt[-1:]))
        yield token.item()  # type: ignore[misc]  # of an integer array
        coming = following(token)
        for left in range(max_tokens - 1, 0, -1):
            token = coming
            if left > 1:
                coming = following(token)
            yield token.item()  # type: ignore[misc]  # of an integer array

    return generate


def cache_growth(
    tokens: int, rounds: int, layers: int = 8, heads: int = 8, head_dim: int = 64
) -> Iterator[Comparison]:
    """Grow layer caches token by token without a model.

    Ours have the room reserved; mlx-lm's grow by concatenation.
    """
    makers: dict[str, Callable[[], Any]] = {"ours": FullAttentionCache, "mlx-lm": KVCache}
    times: dict[str, list[float]] = {side: [] for side in makers}
    peaks: dict[str, list[float]] = {side: [] for side in makers}
    one = mx.random.normal((1, heads, 1, head_dim))
    mx.eval(one)
    for turn in range(rounds):
        for side in in_turn(makers, turn):
            wait()
            before, began = mx.get_active_memory(), time.perf_counter()
            mx.reset_peak_memory()
            caches = [makers[side]() for _ in range(layers)]
            if side == "ours":
                for cache in caches:
                    cache.reserve(tokens)
            for _ in range(tokens):
                for cache in caches:
                    cache.update_and_fetch(one, one)
                mx.eval([(cache.keys, cache.values) for cache in caches])
            times[side].append((time.perf_counter() - began) / tokens * 1e6)
            peaks[side].append((mx.get_peak_memory() - before) / 1e6)
            del caches, cache
    name = f"caches alone, grown to {tokens}"
    yield less_is_better(f"{name}: time of a token", "us", times["ours"], times["mlx-lm"])
    yield less_is_better(f"{name}: peak memory", "MB", peaks["ours"], peaks["mlx-lm"])


if __name__ == "__main__":
    main()
