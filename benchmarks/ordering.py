"""Measure time and memory of everything that a batch does beside the model.

python benchmarks/ordering.py [--quick]

First prompts of 500 tokens that share 50 beginnings, as token ids: stored, sorted, read in prefix
order. Then a file of short JSON lines with the demo model's tokenizer: read, checked, tokenized and
stored; sorted; planned (both orders); a result recorded for each, in groups; all results read in
the order of the input. Each in a process of its own. CPU: seconds that it computed, which do not
depend on who else uses the machine. Memory: the most that it ever had, in which Python and its
libraries are about 50 MB. The store is in a file in TMPDIR, which should be on a disk.
"""

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from mlxrunner.batch.inputs import lines_of_records, read_records
from mlxrunner.batch.options import ORDERS, BatchOptions
from mlxrunner.batch.plan import survey
from mlxrunner.batch.prompts import cost, tokenize_lines
from mlxrunner.batch.store import Store, StoredLine
from mlxrunner.models.load import tokenizer_of

LENGTH, SHARED, BEGINNINGS = 500, 250, 50
GROUP = 100
"""Results that are committed together."""
Stages = list[tuple[str, float, float, float]]


@contextmanager
def stage(stages: Stages, name: str) -> Iterator[None]:
    """Append the name of a stage with its seconds and memory.

    The seconds are those that it took and those that the process computed; the memory is the most
    so far, in MB.
    """
    began, computed = time.perf_counter(), time.process_time()
    yield
    unit = 1e3 if sys.platform == "linux" else 1e6
    seconds, computed = time.perf_counter() - began, time.process_time() - computed
    stages.append(
        (name, seconds, computed, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit)
    )


def long_prompts(count: int, folder: Path) -> Stages:
    stages: Stages = []
    random = np.random.default_rng(0)
    beginnings = random.integers(0, 128_000, (BEGINNINGS, SHARED), np.int32)
    with Store.create(folder / "long") as store:
        with stage(stages, "made up and stored"):
            for index in range(count):
                own = random.integers(0, 128_000, LENGTH - SHARED, np.int32)
                store.add(
                    StoredLine(
                        index,
                        index + 1,
                        tokens=np.concatenate([beginnings[random.integers(BEGINNINGS)], own]),
                    )
                )
        with stage(stages, "sorted"):
            store.finish()
        with stage(stages, "read in prefix order"):
            found = cost(entry.tokens for entry in store.pending())
        if found.evaluated != found.nodes + found.repeats or found.prompts != count:
            raise SystemExit(f"not in prefix order: {found}")
    return stages


def short_lines(count: int, folder: Path) -> Stages:
    stages: Stages = []
    file = folder / "lines.jsonl"
    with file.open("w") as stream:
        for index in range(count):
            stream.write(
                json.dumps(
                    {
                        "id": f"line {index}",
                        "prompt": f"My name is Bo{index % 1000}. How are you?",
                        "seed": index,
                    }
                )
                + "\n"
            )
    tokenizer = tokenizer_of("demo")
    with Store.create(folder / "short") as store:
        with stage(stages, "read, tokenized and stored"), file.open("rb") as lines:
            tokenize_lines(
                store,
                lines_of_records(read_records(lines), BatchOptions()),
                tokenizer,
                context=2048,
            )
        with stage(stages, "sorted"):
            store.finish()
        with stage(stages, "planned"):
            for order in ORDERS:
                survey(store.pending(order), {}, 2048)
        with stage(stages, "recorded"):
            for number, entry in enumerate(store.pending()):
                store.record(
                    entry.index,
                    b'{"id": "a", "index": 0, "text": "It is nice to meet you.", '
                    b'"finish_reason": "stop"}',
                )
                if number % GROUP == 0:
                    store.commit()
            store.commit()
        with stage(stages, "results read"):
            if sum(1 for _ in store.answers()) != count:
                raise SystemExit("results are missing")
    return stages


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="a hundredth of it: does it work, not how fast is it"
    )
    share = 100 if parser.parse_args().quick else 1
    results = []
    print(f"{'':60}  {'seconds':>8}  {'CPU':>8}  {'peak MB':>8}")
    for job, count, what in (
        (long_prompts, 100_000, f"prompts of {LENGTH} tokens"),
        (short_lines, 1_000_000, "short lines"),
    ):
        with tempfile.TemporaryDirectory() as folder, get_context("spawn").Pool(1) as process:
            for name, seconds, computed, peak in process.apply(job, (count // share, Path(folder))):
                print(
                    f"{f'{count // share:,} {what}: {name}':60}  {seconds:8.2f}  {computed:8.2f}  "
                    f"{peak:8.0f}"
                )
                results.append(
                    {
                        "job": what,
                        "count": count // share,
                        "stage": name,
                        "seconds": seconds,
                        "cpu": computed,
                        "peak_mb": peak,
                    }
                )
    print(json.dumps({"results": results}))


if __name__ == "__main__":
    main()
