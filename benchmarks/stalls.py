"""Measure what prompts that arrive do to an answer that is being decoded, and what it does to them.

python benchmarks/stalls.py [--quick] [--prompt N] [--step-ms MS ...] [--parked]

On Linux first put a fast BLAS in front (`mlxrunner doctor` names it), and let nothing else run. One
answer decodes alone, and then while prompts are evaluated: one prompt, three at once, and a flood
of requests of priority "batch". For each: the largest gap between two tokens, as a multiple of the
usual one; the answer's speed as a share of its speed alone; and the time until the last prompt is
evaluated, as a multiple of the time that the prompts take when nothing else runs. `--step-ms`: the
limits to compare; "chosen" is the runner's own, and 0 is none. `--parked`: instead, a conversation
of N tokens is parked for the first time beside the answer, and comes back. `--cpu-time` counts the
processor time of this process in place of the time on the wall: for a machine that others use.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from parallel import SIZES, random_llama

from mlxrunner.cache.disk.disk_cache import DiskCache
from mlxrunner.engine.engine import Engine, EngineHandle
from mlxrunner.engine.scheduling.pacing import Priority
from mlxrunner.models.facts import facts_of
from mlxrunner.testing import ByteTokenizer

ALONE = 40
"""Tokens of the answer that decode alone before the prompts arrive."""
Prompts = list[list[int]]


@dataclass(frozen=True)
class Arrival:
    """Prompts that arrive together."""

    name: str
    count: int
    share: float = 1.0
    """Length of each, as a share of `--prompt`."""
    priority: Priority = "interactive"
    answer: int = 1


ARRIVALS = [
    Arrival("one prompt", 1),
    Arrival("three prompts", 3, 0.5),
    Arrival("a flood of batch requests", 6, 0.125, "batch", 16),
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="does it work, not how fast is it")
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of a prompt")
    parser.add_argument("--size", choices=SIZES, default="512 x 8")
    parser.add_argument("--step-ms", nargs="*", default=["chosen"])
    parser.add_argument("--parked", action="store_true")
    parser.add_argument("--cpu-time", action="store_true")
    given = parser.parse_args()
    if given.cpu_time:
        time.perf_counter = time.process_time
    model = random_llama(*((64, 2, 2) if given.quick else SIZES[given.size]))
    prompt = 200 if given.quick else given.prompt
    if given.parked:
        for limit in given.step_ms:
            step_ms = None if limit == "chosen" else float(limit)
            print(json.dumps({"step_ms": step_ms, **parked(model, prompt, step_ms)}), flush=True)
        return
    print(f"{'arriving':28}{'step ms':>8}{'gap':>8}{'speed':>8}{'prefill':>9}")
    for arrival in ARRIVALS:
        for limit in given.step_ms:
            step_ms = None if limit == "chosen" else float(limit)
            figures = measured(model, arrival, prompt, step_ms)
            gap, speed, slower = figures["gap"], figures["speed"], figures["prefill"]
            print(
                f"{arrival.name:28}{limit:>8}{gap:>7.1f}x{speed:>8.0%}{slower:>8.2f}x", flush=True
            )
            print(json.dumps({"arriving": arrival.name, "step_ms": step_ms, **figures}))


def measured(model: Any, arrival: Arrival, prompt: int, step_ms: float | None) -> dict[str, float]:
    rng = np.random.default_rng(0)
    length = int(prompt * arrival.share)
    prompts = [rng.integers(10, 250, length).tolist() for _ in range(arrival.count)]
    with Engine(
        model,
        ByteTokenizer(),
        facts_of(model, vars(model.args)),
        max_sequences=arrival.count + 1,
        context=max(prompt + 64, 6000),
        kv_cache_tokens=sum(map(len, prompts)) * 2 + 6000,
        max_step_ms=step_ms,
    ) as runner:
        alone = seconds_of(runner, arrival, prompts)
        # Other prompts of the same lengths: those above could be reused.
        fresh = [[token ^ 1 for token in one] for one in prompts]
        return beside_an_answer(runner, arrival, fresh, alone)


def parked(model: Any, prompt: int, step_ms: float | None) -> dict[str, float]:
    """Return the largest gaps of an answer while a conversation is parked, and while it returns."""
    talk = np.random.default_rng(0).integers(10, 250, prompt).tolist()
    arrival, figures = Arrival("a conversation", 1), dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        parking = DiskCache(Path(folder), {"model": "random"}, limit=2**34)
        with Engine(
            model,
            ByteTokenizer(),
            facts_of(model, vars(model.args)),
            max_sequences=2,
            context=max(prompt + 64, 6000),
            max_step_ms=step_ms,
            parking=parking,
        ) as runner:
            seconds_of(runner, arrival, [talk])
            other = [[token ^ 1 for token in talk[:8]]]
            for name, prompts in (("parked", other), ("returned", [[*talk, 5, 6]])):
                found = beside_an_answer(runner, arrival, prompts, 1.0)
                figures |= {f"{name}_{key}": found[key] for key in ("usual_ms", "gap", "gap_ms")}
                figures |= {f"{name}_{key}": found[key] for key in ("steps", "speed")}
                figures[f"{name}_s"] = found["prefill"]
            figures["megabytes"] = parking.bytes / 1e6
    return figures


def submit(runner: Engine, arrival: Arrival, prompts: Prompts) -> list[EngineHandle]:
    return [
        runner.submit(one, max_tokens=arrival.answer, stop_tokens=[], priority=arrival.priority)
        for one in prompts
    ]


def seconds_of(runner: Engine, arrival: Arrival, prompts: Prompts) -> float:
    """Return the seconds that requests take when nothing else runs."""
    began = time.perf_counter()
    handles = submit(runner, arrival, prompts)
    while not all(handle.finished for handle in handles):
        runner.step()
    return time.perf_counter() - began


def beside_an_answer(
    runner: Engine, arrival: Arrival, prompts: Prompts, alone: float
) -> dict[str, float]:
    answer = runner.submit([40, 41, 42], max_tokens=5900, stop_tokens=[], speculate="off")
    moments: list[float] = []

    def step() -> None:
        runner.step()
        moments.extend([time.perf_counter()] * len(answer.poll()))

    while len(moments) < ALONE:
        step()
    usual = median(np.diff(moments))
    began, handles, first = time.perf_counter(), submit(runner, arrival, prompts), len(moments)
    while not all(handle.finished for handle in handles):
        step()
    took = time.perf_counter() - began
    gaps = np.diff(moments[first - 1 :])
    answer.cancel()
    return {
        "usual_ms": usual * 1e3,
        "gap": float(max(gaps) / usual),
        "gap_ms": float(max(gaps) * 1e3),
        "steps": len(gaps),
        "speed": float(len(gaps) * usual / took),
        "prefill_alone_s": alone,
        "prefill": took / alone,
    }


if __name__ == "__main__":
    main()
