"""Measure how many lines of a batch at a time are fastest.

python benchmarks/lanes.py [--lines N] [--answers N,N] [--new N,N] [--quick]

`mlxrunner batch` chooses by these figures (`mlxrunner/batch/plan.py`). The prompts of a case share
256 tokens. A case sets the number of prompts, of new tokens in each, and of tokens in each answer.
The same prompts run one at a time and several at a time, in turn, on the same weights. The figure
is the speed of several at a time, as a multiple of the speed of one at a time.
"""

from __future__ import annotations

import argparse
import gc
import time

import mlx.core as mx
import numpy as np
from arguments import print_json, print_table, random_runner

from mlxrunner.batch.execution import BatchRequest, run_batch
from mlxrunner.batch.work import MAX_BATCH
from mlxrunner.bench.harness import Comparison, less_is_better
from mlxrunner.engine.engine import Engine
from mlxrunner.runner import Runner

COMMON = 256
LANES = (4, 8, 16)


def seconds(runner: Runner | Engine, prompts: list[list[int]], answer: int) -> float:
    began = time.perf_counter()
    results = list(run_batch(runner, map(BatchRequest, prompts), max_tokens=answer, stop_tokens=[]))
    if any(result.result is None for result in results):
        raise SystemExit(f"a line failed: {results}")
    return time.perf_counter() - began


def several(runner: Runner, lanes: int, prompts: list[list[int]], answer: int) -> float:
    capacity = max(map(len, prompts)) + answer
    with Engine(
        runner.model,
        runner.tokenizer,
        runner.facts,
        max_sequences=lanes,
        context=capacity,
        prefill_step=max(MAX_BATCH, lanes),
    ) as parallel:
        return seconds(parallel, prompts, answer)


def compare(
    label: str, runner: Runner, new: int, answer: int, lines: int, rounds: int
) -> list[Comparison]:
    random = np.random.default_rng(new)
    common = random.integers(10, 500, COMMON).tolist()
    prompts = [[*common, *random.integers(10, 500, new).tolist()] for _ in range(lines)]
    alone: list[float] = []
    together: dict[int, list[float]] = {lanes: [] for lanes in LANES}
    for _ in range(rounds):
        gc.collect()
        mx.clear_cache()
        runner.reset()
        alone.append(seconds(runner, prompts, answer))
        for lanes in LANES:
            together[lanes].append(several(runner, lanes, prompts, answer))
    rows = [
        less_is_better(
            f"{label}: {new} new tokens, {answer} of answer, {lanes} at a time", "s", took, alone
        )
        for lanes, took in together.items()
    ]
    print_table(rows)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines", type=int, default=16)
    parser.add_argument("--answers", default="8,64")
    parser.add_argument("--new", default="32,128,256,512,1024")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="few, short prompts on the demo model: does it work, not how fast is it",
    )
    given = parser.parse_args()
    runners = [("demo, 3 M", Runner.load("demo", reserve=False))]
    if given.quick:
        given.lines, given.answers, given.new = 4, "2", "16"
    else:
        runners.append(("llama, 98 M", random_runner()))
    rows = [
        row
        for label, runner in runners
        for new in map(int, given.new.split(","))
        for answer in map(int, given.answers.split(","))
        for row in compare(label, runner, new, answer, given.lines, given.rounds)
    ]
    print_json(rows, lines=given.lines)


if __name__ == "__main__":
    main()
