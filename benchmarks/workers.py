"""Measure a batch over 1, 2 and 4 local workers beside one process.

python benchmarks/workers.py [--lines 400] [--workers 1 2 4] [--quick]

The built-in model answers questions on documents, half of them greedy and half seeded. Tokens:
those evaluated by all workers, and by each. Uneven: how far the worker with the fewest lies below
the one with the most. Processes that share few cores end at the same time even if their work is not
equal, so look at their tokens. The output of each run has to have the bytes of one process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

QUESTIONS = 20
"""The questions on each document."""


def write(lines: int) -> None:
    """Write shuffled questions on documents of about 100 tokens, half of them greedy."""
    chosen = random.Random(1)
    words = "the a cat bird town river told asked friend manager".split()
    documents = [" ".join(chosen.choices(words, k=80)) for _ in range(-(-lines // QUESTIONS))]
    asked = [
        {
            "id": number,
            "prompt": f"{documents[number // QUESTIONS]} What of {number} things?",
            "temperature": number % 2,
            "max_tokens": 24,
        }
        for number in range(lines)
    ]
    chosen.shuffle(asked)
    Path("in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in asked))


def run(name: str, *arguments: str) -> dict[str, Any]:
    """Run the batch into a folder of that name. Return what its workers did."""
    events = Path(f"{name}.events")
    options = ["--no-usage", "--no-reserve", "--seed", "11", "--events", str(events), "-q"]
    command = [sys.executable, "-m", "mlxrunner", "batch", "in.jsonl", "-o", f"{name}.jsonl"]
    began = time.monotonic()
    driver = subprocess.Popen([*command, *options, *arguments])
    tokens: dict[str, int] = {}
    ended: dict[str, float] = {}
    read, is_over = 0, False
    while not is_over:
        is_over = driver.poll() is not None
        written = events.read_bytes() if events.exists() else b""
        whole = written[: written.rfind(b"\n") + 1]
        for line in whole[read:].splitlines():
            event = json.loads(line)
            process = event["process"]
            tokens[process] = tokens.get(process, 0) + event["evaluated_tokens"]
            ended[process] = time.monotonic() - began
        read = len(whole)
        time.sleep(0.1)
    if driver.returncode:
        sys.exit(f"{name}: the batch ended with exit code {driver.returncode}")
    return {
        "run": name,
        "evaluated": sum(tokens.values()),
        "tokens": sorted(tokens.values()),
        "uneven": round(uneven(list(tokens.values())), 3),
        "ends_s": sorted(round(one, 1) for one in ended.values()),
        "seconds": round(time.monotonic() - began, 1),
    }


def uneven(found: list[int]) -> float:
    """Return how far the least lies below the most, as a share of that."""
    return 1 - min(found) / max(found) if any(found) else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines", type=int, default=400)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--quick", action="store_true", help="40 lines, 2 workers: does it work")
    asked = parser.parse_args()
    lines, counts = (40, [2]) if asked.quick else (asked.lines, asked.workers)
    with tempfile.TemporaryDirectory(prefix="mlxrunner-workers-") as folder:
        os.chdir(folder)
        write(lines)
        results = [run("whole")]
        results += [run(f"{count} workers", "--workers", str(count)) for count in counts]
        expected = Path("whole.jsonl").read_bytes()
        for found in results:
            found["same_bytes"] = Path(f"{found['run']}.jsonl").read_bytes() == expected
            found["more"] = found["evaluated"] / results[0]["evaluated"] - 1
            print(
                f"{found['run']:10} {found['evaluated']:8,} tokens ({found['more']:+.1%}), of each "
                f"{found['tokens']}, uneven by {found['uneven']:.1%}, last answers at "
                f"{found['ends_s']} s, same bytes: {found['same_bytes']}"
            )
        os.chdir("/")
    print(json.dumps({"lines": lines, "results": results}))
    if not all(found["same_bytes"] for found in results):
        sys.exit("an output has other bytes than that of one process")


if __name__ == "__main__":
    main()
