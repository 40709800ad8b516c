"""Measure how much many interleaved conversations reuse, with several numbers of slots.

PYTHONPATH=tests python benchmarks/conversations.py [--slots K ...] [--memory MB]
    [--disk MB] [--log FOLDER]

40 conversations of agents and chats send 1,000 requests: common headers, growing turns, edits,
retries, titles, compaction, subagents that start together (tests/support/conversations.py). Each
request begins as soon as its conversation has its last answer and a slot is free. The model is a
tiny Llama: what is measured is what is reused, not how fast. "shareable" are the prompt tokens that
had been evaluated before for any request: a cache that never forgets would reuse all of them. With
--log, "predicted" is what `simulate` says from the log of the run with the first number of slots.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.conversations import Played, Trace, play
from support.histories import tiny_parts

from mlxrunner.cache.disk.disk_cache import DiskCache
from mlxrunner.cache.layers.factory import CacheOptions, layouts_of
from mlxrunner.engine.engine import Engine
from mlxrunner.profiling.profile import Profile
from mlxrunner.profiling.replay.trials import simulate

CONTEXT = 1024
TARGET = 0.97
POINT = 0.01
"""Most difference between the share of prompt tokens that was reused and the predicted one."""
HEAD = (
    *("slots", "requests", "shareable", "reused", "share", "restored", "evicted", "lost"),
    *("failed", "peak MB", "rate", "parked MB", "seconds"),
)


def run(
    model: str, slots: int, memory: int, disk: int, requests: int, log: Path | None
) -> dict[str, Any]:
    """Play the trace on a new runner of `slots` slots and `memory` bytes, with a place to park."""
    given = tiny_parts(model)
    row = sum(layout.row_bytes for layout in layouts_of(given[0], CacheOptions()))
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)  # a log of earlier runs would be predicted, too
    began, profile = time.perf_counter(), Profile(tokens=log)
    parking = DiskCache(None, {"model": model}, limit=disk)
    try:
        with Engine(
            *given,
            max_sequences=slots,
            context=CONTEXT,
            kv_cache_tokens=min(memory // max(row, 1), slots * CONTEXT),
            prefill_step=256,
            cache_memory=memory,
            parking=parking,
        ) as runner:
            profile.watch(runner)
            played = play(runner, Trace(requests=requests, context=CONTEXT))
        parked = parking.bytes
    finally:
        parking.close()
        profile.finish()
    seconds = time.perf_counter() - began
    return {"slots": slots, **figures(played), "parked_mb": parked / 1e6, "seconds": seconds}


def figures(played: Played) -> dict[str, Any]:
    return {
        "requests": played.requests,
        "shareable": played.shareable,
        "reused": played.reused,
        "share": played.share,
        "restored": played.restored,
        "evicted": played.evicted,
        "lost": played.lost,
        "failed": len(played.failures),
        "peak_mb": played.most_bytes / 1e6,
        "rate": played.reused / played.prompt,
    }


def line(found: dict[str, Any]) -> str:
    shown = {**found, "share": f"{found['share']:.1%}", "rate": f"{found['rate']:.2%}"}
    return "  ".join(
        f"{value:>9,.1f}" if isinstance(value, float) else f"{value:>9}" for value in shown.values()
    )


def predict(log: Path, found: Sequence[dict[str, Any]]) -> None:
    """Add to each result what the replay of a log predicts, and print both."""
    made = simulate([log], slots=[one["slots"] for one in found])
    rates = {row.what.slots: row.hit_rate for row in made.rows}
    for one in found:
        one["predicted"] = rates[one["slots"]]
        print(f"{one['slots']} slots: {one['rate']:.2%}, predicted {one['predicted']:.2%}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument(
        "--memory", type=float, default=8.0, help="megabytes of keys and values (default 8)"
    )
    parser.add_argument(
        "--disk",
        type=float,
        default=1000.0,
        help="megabytes on disk (default 1000)",
    )
    parser.add_argument("--model", default="llama", help="architecture of the tiny model")
    parser.add_argument(
        "--log", type=Path, metavar="FOLDER", help="write the token log of each run there"
    )
    parser.add_argument("--quick", action="store_true", help="100 requests: does it work")
    given = parser.parse_args(arguments)
    print("  ".join(f"{name:>9}" for name in HEAD), flush=True)
    found = []
    for slots in given.slots:
        log = None if given.log is None else given.log / f"{slots}-slots.jsonl"
        requests = 100 if given.quick else 1000
        memory, disk = int(given.memory * 1e6), int(given.disk * 1e6)
        found.append(run(given.model, slots, memory, disk, requests, log))
        print(line(found[-1]), flush=True)
    if given.log is not None:
        predict(given.log / f"{given.slots[0]}-slots.jsonl", found)
    print(json.dumps({"results": found, "target": TARGET}))
    if any(abs(one["rate"] - one.get("predicted", one["rate"])) > POINT for one in found):
        sys.exit("MISSED: a prediction differs by more than a point")
    most = given.memory * 1.02
    if not all(
        one["share"] >= TARGET and not one["failed"] and one["peak_mb"] <= most for one in found
    ):
        sys.exit(f"MISSED: {TARGET:.0%} of the shareable tokens, no failed request, {most:.1f} MB")


if __name__ == "__main__":
    main()
