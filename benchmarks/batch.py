"""Measure a batch of 200 prompts that share prefixes, against mlx-lm.

PYTHONPATH=tests python benchmarks/batch.py [--scale S] [--only MODEL] [--rounds N] [--quick]

On Linux first put a fast BLAS in front (`mlxrunner doctor` names it). Sides, on the same weights,
in one process, in turn:

- ours, one at a time, and ours, 8 at a time: `run_batch` on a Runner and on a ParallelRunner
- stream_generate: a loop over mlx_lm.stream_generate in the order of the input, with its own prompt
  cache, which is trimmed by hand to what each prompt has in common with the one before
- batch_generate: mlx_lm.batch_generate with all prompts, its default sizes

Times are from the first prompt to the last token, for 16 greedy tokens each; ours include the
ordering. At --scale 1 the prompts have 388,000 tokens and up to 1,979 each; S scales the lengths of
what they are made of, and of the answers.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
from arguments import print_json, print_table, random_runner
from mlx_lm import batch_generate, stream_generate
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from support.prompts import DOCUMENT, SYSTEM, shared_prefixes

from mlxrunner.batch.execution import BatchRequest, run_batch
from mlxrunner.batch.order import sort_key
from mlxrunner.batch.plan import MOST
from mlxrunner.batch.prompts import cost
from mlxrunner.bench.harness import Comparison, SameDecoder, less_is_better
from mlxrunner.cache.entry import TokenArray, common_prefix
from mlxrunner.engine.parallel_runner import ParallelRunner
from mlxrunner.runner import Runner

ANSWER = 16
Prompts = Sequence[TokenArray]
Answers = list[list[int]]
Backend = Callable[[Runner, Prompts, int], tuple[Answers, int]]
"""Takes the length of the answers; returns them and the number of prompt tokens evaluated."""


def alone(runner: Runner, prompts: Prompts, length: int) -> tuple[Answers, int]:
    runner.reset()
    return _ours(runner, prompts, length)


def together(runner: Runner, prompts: Prompts, length: int) -> tuple[Answers, int]:
    capacity = max(map(len, prompts)) + length
    with ParallelRunner(
        runner.model,
        runner.tokenizer,
        runner.facts,
        max_sequences=MOST,
        context=capacity,
        prefill_step=256,
    ) as several:
        return _ours(several, prompts, length)


def _ours(runner: Runner | ParallelRunner, prompts: Prompts, length: int) -> tuple[Answers, int]:
    requests = (BatchRequest(prompt.tolist()) for prompt in prompts)
    results = [
        result.result for result in run_batch(runner, requests, max_tokens=length, stop_tokens=[])
    ]
    answered = [result for result in results if result is not None]
    return [result.tokens for result in answered], sum(
        result.usage.evaluated_tokens for result in answered
    )


def streamed(runner: Runner, prompts: Prompts, length: int) -> tuple[Answers, int]:
    tokenizer, cache = SameDecoder(runner.tokenizer), make_prompt_cache(runner.model)
    entry, answers, evaluated = np.empty(0, np.int32), [], 0
    for prompt in prompts:
        shared = min(common_prefix(entry, prompt), len(prompt) - 1)
        trim_prompt_cache(cache, len(entry) - shared)
        rest = prompt[shared:].tolist()
        responses = list(
            stream_generate(runner.model, tokenizer, rest, max_tokens=length, prompt_cache=cache)
        )
        answers.append([response.token for response in responses])
        entry = np.concatenate([prompt, np.array(answers[-1], np.int32)])[: cache[0].offset]
        evaluated += len(rest)
    return answers, evaluated


def batched(runner: Runner, prompts: Prompts, length: int) -> tuple[Answers, int]:
    tokenizer = TextlessDecoder(runner.tokenizer)
    response = batch_generate(
        runner.model,
        tokenizer,
        [prompt.tolist() for prompt in prompts],
        max_tokens=length,
        return_token_ids=True,
    )
    return response.token_ids, sum(map(len, prompts))


class TextlessDecoder(SameDecoder):
    """mlx-lm's batches need a text in the end; what it costs is not a part of this comparison."""

    def decode(self, tokens: list[int]) -> str:
        return ""


def scaled(prompts: Prompts, scale: float) -> list[TokenArray]:
    """Each part of a prompt cut to a share of it, at least a token."""
    return [
        np.concatenate(
            [
                part[: max(1, round(len(part) * scale))]
                for part in np.split(prompt, [SYSTEM, SYSTEM + DOCUMENT])
            ]
        )
        for prompt in prompts
    ]


def compare(
    label: str, runner: Runner, scale: float, rounds: int, count: int | None = None
) -> list[Comparison]:
    prompts, length = scaled(shared_prefixes()[:count], scale), max(1, round(ANSWER * scale))
    sides: dict[str, Backend] = {
        "stream_generate": streamed,
        "batch_generate": batched,
        "alone": alone,
        "together": together,
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    found: dict[str, tuple[Answers, int]] = {}
    for turn in range(rounds):
        for name in list(sides)[:: -1 if turn % 2 else 1]:
            gc.collect()
            mx.clear_cache()
            began = time.perf_counter()
            found[name] = sides[name](runner, prompts, length)
            seconds[name].append(time.perf_counter() - began)
            print(
                f"{label}: {name} {seconds[name][-1]:.1f} s, {found[name][1]} tokens evaluated",
                flush=True,
            )
    least = cost(sorted(prompts, key=sort_key))
    for name, (answers, _) in found.items():
        same = sum(a == b for a, b in zip(answers, found["alone"][0], strict=True))
        print(f"{label}: {same} of {len(prompts)} answers of {name} equal ours, one at a time")
    evaluated = found["alone"][1]
    print(
        f"{label}: evaluated {evaluated}; nodes of the tree {least.nodes} + repeats {least.repeats}"
    )
    if evaluated != least.nodes + least.repeats:
        raise SystemExit("not the least that is possible")
    rows = [
        less_is_better(
            f"{label}: prompt tokens evaluated, vs stream_generate",
            "",
            [evaluated],
            [found["stream_generate"][1]],
        )
    ]
    for ours, shown in (("alone", "one at a time"), ("together", f"{MOST} at a time")):
        for other, target in (("stream_generate", 5.0), ("batch_generate", 2.0)):
            ratio = [b / a for a, b in zip(seconds[ours], seconds[other], strict=True)]
            rows.append(
                Comparison(
                    f"{label}: {shown}, vs {other}",
                    "s",
                    seconds[ours],
                    seconds[other],
                    ratio,
                    target=target,
                )
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="of the prompts' lengths (default: 1, as long as the demo model's context allows)",
    )
    parser.add_argument(
        "--large-scale", type=float, help="of those for the 98 M model (default: the same)"
    )
    parser.add_argument("--only", choices=("demo", "llama"), help="one of the two models")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="few, short prompts on the demo model: does it work, not how fast is it",
    )
    given = parser.parse_args()
    if given.quick:
        rows = compare("demo", Runner.load("demo", reserve=False), 0.1, given.rounds, 12)
    else:
        rows = []
        if given.only != "llama":
            rows += compare(
                "demo, 3 M", Runner.load("demo", reserve=False), given.scale, given.rounds
            )
        if given.only != "demo":
            rows += compare(
                "llama, 98 M", random_runner(), given.large_scale or given.scale, given.rounds
            )
    print_table(rows)
    print_json(
        rows, versus="mlx_lm", scale=given.scale, large_scale=given.large_scale or given.scale
    )


if __name__ == "__main__":
    main()
