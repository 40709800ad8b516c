"""Measure the cut of a large batch for several machines.

python benchmarks/cutting.py [--quick] [--read]

A made-up batch of 10 million lines: 100,000 documents of 500 to 3,000 tokens after a system prompt
of 200, 100 questions on each, and answers of 64 tokens; and as many questions on a single document.
Only the cut is measured: the lines are numbers, as they are when a batch has been read and sorted.
--read also measures how long a store of as many shuffled lines is read for the cut: 40 tokens each,
of which 30 are those of a document, and no prompts. To write the store takes minutes, and 3 GB.
CPU: seconds that it computed. Memory: the most that the process ever had, and what it had before
the first cut. Uneven: how much longer the longest part takes than the mean one.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from mlxrunner.batch.order import LineCosts, cut, extra_of
from mlxrunner.batch.plan import costs_of
from mlxrunner.batch.store import Store, StoredLine

LINES, QUESTIONS = 10_000_000, 100
SYSTEM, ANSWER = 200, 64
SHARED, OWN, GROUP = 30, 10, 10_000
WORKERS = (8, 64, 1000)


def documents(lines: int, questions: int) -> LineCosts:
    """Return the costs of `questions` on each of many documents."""
    random = np.random.default_rng(0)
    is_first = np.arange(lines) % questions == 0
    lengths = np.repeat(random.integers(500, 3000, -(-lines // questions), np.int32), questions)
    reused = np.where(is_first, np.int32(SYSTEM), lengths[:lines] + np.int32(SYSTEM))
    evaluated = random.integers(10, 60, lines, np.int32)
    evaluated += np.where(is_first, lengths[:lines], np.int32(0))
    evaluated[0] += reused[0]
    reused[0] = 0
    return LineCosts(evaluated, reused, np.full(lines, ANSWER, np.int32))


def shuffled(lines: int) -> Iterator[StoredLine]:
    """Yield lines with the tokens of one of the documents and some of their own."""
    random = np.random.default_rng(0)
    shared = random.integers(0, 30_000, (-(-lines // QUESTIONS), SHARED), np.int32)
    order = random.permutation(lines)
    for first in range(0, lines, GROUP):
        those = order[first : first + GROUP] // QUESTIONS
        own = random.integers(0, 30_000, (len(those), OWN), np.int32)
        for index, tokens in enumerate(np.concatenate([shared[those], own], 1), first):
            yield StoredLine(index, index + 1, id=f"line {index:08}", tokens=tokens)


def read(lines: int) -> dict[str, float]:
    """Return the seconds of reading a store of these lines, and of cutting them."""
    with Store.create() as store:
        for line in shuffled(lines):
            store.add(line)
        store.finish()
        began, before = time.process_time(), time.perf_counter()
        costs_of(store.left(), {})
        return {
            "lines": lines,
            "read_cpu": time.process_time() - began,
            "read_seconds": time.perf_counter() - before,
        }


def peak_mb() -> float:
    unit = 1e3 if sys.platform == "linux" else 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="a hundredth of it: does it work, not how fast is it"
    )
    parser.add_argument("--read", action="store_true", help="read the lines from a store, too")
    args = parser.parse_args()
    lines = LINES // (100 if args.quick else 1)
    results: list[dict[str, object]] = []
    titles = ("CPU s", "peak MB", "more tokens", "uneven")
    print(f"{'':44}" + "".join(f"{title:>13}" for title in titles))
    for what, questions in (("many documents", QUESTIONS), ("one document", lines)):
        costs = documents(lines, questions)
        before = peak_mb()
        for workers in WORKERS:
            began = time.process_time()
            places = cut(costs, workers)
            seconds = time.process_time() - began
            parts = [costs.of(first, end) for first, end in pairwise(places)]
            found = {
                "lines": lines,
                "of": what,
                "workers": workers,
                "cpu": seconds,
                "peak_mb": peak_mb(),
                "before_mb": before,
                "extra": extra_of(costs, places) / int(costs.evaluated.sum(dtype=np.int64)),
                "uneven": max(parts) * workers / sum(parts) - 1,
            }
            print(
                f"{f'{lines:,} lines, {what}, {workers} workers':44}{found['cpu']:13.2f}"
                f"{found['peak_mb']:13.0f}{found['extra']:13.2%}{found['uneven']:13.2%}"
            )
            results.append(found)
        del costs
    if args.read:
        took = read(lines)
        print(f"{lines:,} lines read from a store: {took['read_cpu']:.1f} CPU s")
        results.append({**took})
    print(json.dumps({"results": results}))


if __name__ == "__main__":
    main()
