"""Measure decode steps side by side: one request against Runner, many against mlx_lm's batch.

python benchmarks/decode.py [--rounds N] [--quick]

Both sides take a step in turn, in one process and on the same weights, so that whatever else the
machine does slows both. The figures are medians of the processor seconds of a step: on a busy
machine they vary less than those of a clock. On Linux first put a fast BLAS in front.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from arguments import parser_of, print_json, print_table
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache
from parallel import random_llama

from mlxrunner.bench.harness import Comparison, less_is_better
from mlxrunner.engine.engine import Engine
from mlxrunner.models.facts import facts_of
from mlxrunner.runner import Runner
from mlxrunner.testing import ByteTokenizer

Step = Callable[[], Any]
SIZE, SMALL = (512, 8, 8), (256, 4, 4)


def alone(size: tuple[int, int, int], prompt: int, rounds: int) -> Comparison:
    """Compare a step of the only request with one of Runner."""
    tokens, count = _tokens(0, prompt), rounds + 8

    def parts() -> tuple[Any, ByteTokenizer, Any]:
        model = random_llama(*size)
        return model, ByteTokenizer(), facts_of(model, vars(model.args))

    runner = Runner(*parts(), context=prompt + count)
    stepper = Engine(*parts(), context=prompt + count, max_sequences=4)
    its = iter(runner.generate(tokens, max_tokens=count, stop_tokens=[]))
    ours = iter(stepper.submit(tokens, max_tokens=count, stop_tokens=[]))
    took, theirs = _in_turn(lambda: next(ours), lambda: next(its), rounds)
    stepper.close()
    return less_is_better(
        f"{size[0]} x {size[1]}: one, {prompt} tokens, vs Runner", "ms", *_ms(took, theirs)
    )


def many(
    size: tuple[int, int, int], count: int, own: int, prefix: int, groups: int, rounds: int
) -> Comparison:
    """Compare a step of many requests with one of mlx_lm's, which copies each group's prefix."""
    trunks = [_tokens(group, prefix) for group in range(groups)]
    ends = [_tokens(100 + number, own + number % 5) for number in range(count)]
    model, most = random_llama(*size), rounds + 8
    context = prefix + own + 4 + most
    stepper = Engine(
        model,
        ByteTokenizer(),
        facts_of(model, vars(model.args)),
        max_sequences=count,
        context=context,
        kv_cache_tokens=groups * prefix + 2 * count * (own + 4 + most),
    )
    handles = [
        stepper.submit(trunks[number % groups] + end, max_tokens=most, stop_tokens=[])
        for number, end in enumerate(ends)
    ]
    while any(not handle._request.said for handle in handles):
        stepper.step()
    theirs = _mlx_lm(random_llama(*size), trunks, ends, most)
    took, its = _in_turn(stepper.step, theirs, rounds)
    for handle in handles:
        handle.cancel()
    stepper.close()
    shared = f", prefixes of {prefix} in {groups} groups" if prefix else ""
    return less_is_better(
        f"{size[0]} x {size[1]}: {count} of {own} tokens{shared}, vs batch_generate",
        "ms",
        *_ms(took, its),
    )


def _mlx_lm(model: Any, trunks: list[list[int]], ends: list[list[int]], most: int) -> Step:
    """Return a decode step of mlx_lm's generator, whose prompts are evaluated."""
    caches = []
    for trunk in trunks if trunks[0] else []:
        caches.append(make_prompt_cache(model))
        model(mx.array([trunk]), cache=caches[-1])
        mx.eval([layer.state for layer in caches[-1]])
    generator = BatchGenerator(
        model, max_tokens=most, completion_batch_size=len(ends), prefill_batch_size=len(ends)
    )
    copies = (
        [copy.deepcopy(caches[number % len(caches)]) for number in range(len(ends))]
        if caches
        else None
    )
    generator.insert(ends, caches=copies)
    seen = 0
    while seen < len(ends):
        responses = generator.next()
        seen += len(responses[1] if isinstance(responses, tuple) else responses)
    step: Step = generator.next
    return step


def _in_turn(ours: Step, theirs: Step, rounds: int) -> tuple[list[float], list[float]]:
    """Return the processor seconds of each step, after two to warm up."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 2):
        for step, taken in zip((ours, theirs), times, strict=True):
            began = time.process_time()
            step()
            taken.append(time.process_time() - began)
    return times[0][2:], times[1][2:]


def _ms(*sides: list[float]) -> list[list[float]]:
    return [[1e3 * seconds for seconds in side] for side in sides]


def _tokens(seed: int, count: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(10, 250, count).tolist()
    return tokens


def main() -> None:
    given = parser_of(__doc__, rounds=40, quick="small and few").parse_args()
    if given.quick:
        rows = [alone(SMALL, 20, 2), many(SMALL, 4, 8, 64, 2, 2)]
    else:
        rows = [
            alone(size, prompt, given.rounds) for size in (SMALL, SIZE) for prompt in (20, 2000)
        ]
        for shape in ((64, 8, 0, 1), (64, 60, 0, 1), (8, 16, 1024, 2), (16, 16, 4096, 1)):
            rows.append(many(SIZE, *shape, min(given.rounds, 20)))
    print_table(rows)
    print_json(rows)


if __name__ == "__main__":
    main()
