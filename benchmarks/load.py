"""Put a server under load: many clients, also bad ones, for minutes; does anything grow or fail?

PYTHONPATH=tests python benchmarks/load.py [--clients 64] [--seconds 600] [--slots 8] [--kind llama]

On Linux first put a fast BLAS in front (`mlxrunner doctor` names it). The clients speak all
protocols, as streams and not; some leave, stall, or send half bodies and nonsense
(`tests/support/load.py`). Everything stays on this machine. The exit code is 1 if anything was
wrong, or if memory grew.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from contenders import Contender, Served
from support.load import Tally, load
from untrained import KINDS, write_untrained

STALL_S = 20
"""Seconds for which clients do not read, now and then."""
SETTLED = 3
"""Memory is compared from this minute on, or from a third of the time: before, it fills."""
GROWTH = 0.05
"""The share by which memory may still grow."""


@dataclass
class Samples:
    """A record of what a server had in use, second by second."""

    resident: list[float] = field(default_factory=list)
    """Resident megabytes of the process."""
    stored: list[float] = field(default_factory=list)
    """Megabytes of keys, values and checkpoints in use."""
    parked: list[float] = field(default_factory=list)
    """Megabytes on disk."""
    waiting: list[int] = field(default_factory=list)


def command(given: argparse.Namespace, folder: Path, kept: Path) -> Sequence[str]:
    """Return the command that serves the model in `folder`."""
    options = {
        "context": 4096,
        "slots": given.slots,
        "memory": given.memory,
        "disk-cache-bytes": given.disk_cache_bytes,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    words += ["--set", f"max_queue={given.max_queue}"]
    program = [sys.executable, "-m", "mlxrunner", "serve", str(folder)]
    return ["env", f"XDG_CACHE_HOME={kept}", *program, *words]


def in_use(process: int) -> tuple[float, int]:
    """Return the resident megabytes of a process, and the number of its open files."""
    text = subprocess.run(
        ["ps", "-o", "rss=", "-p", str(process)], capture_output=True, text=True, check=True
    ).stdout
    files = Path(f"/proc/{process}/fd")
    return int(text) / 1024, len(os.listdir(files)) if files.is_dir() else 0


async def watch(server: Served, samples: Samples) -> None:
    """Sample what the server has in use, until this is cancelled."""
    async with server.client() as client:
        while True:
            model = (await client.get("/slots")).json()["models"][0]
            samples.resident.append(in_use(server.process)[0])
            samples.stored.append(model["bytes"] / 1e6)
            samples.parked.append(model["parked_bytes"] / 1e6)
            samples.waiting.append(model["waiting"])
            await asyncio.sleep(1)


async def run(server: Served, given: argparse.Namespace) -> tuple[Tally, Samples]:
    samples, end = Samples(), time.monotonic() + given.seconds
    watching = asyncio.create_task(watch(server, samples))
    tally = await load(
        server.url,
        given.clients,
        lambda tally: time.monotonic() > end or len(tally.wrong) > 20,
        stall=STALL_S,
        size=900,
    )
    watching.cancel()
    return tally, samples


def idle(server: Served, files: int) -> dict[str, Any]:
    """Wait until nothing runs and all connections are closed; return what is left."""
    for _ in range(60):
        model = httpx.get(f"{server.url}/slots").json()["models"][0]
        left = {name: model[name] for name in ("busy", "waiting")}
        left["files"] = in_use(server.process)[1] - files
        if not any(left.values()):
            break
        time.sleep(1)
    return left


def figures(tally: Tally, samples: Samples, given: argparse.Namespace) -> dict[str, Any]:
    """Return what the run has shown, with what must not be."""
    settled = min(SETTLED * 60, len(samples.resident) // 3)
    early = statistics.median(samples.resident[settled : 2 * settled])
    late = statistics.median(samples.resident[-settled:])
    return {
        "seconds": given.seconds,
        "clients": given.clients,
        "slots": given.slots,
        "answers": tally.answers,
        "told to come later": tally.later,
        "done": dict(sorted(tally.done.items())),
        "wrong": tally.wrong,
        "first token s": percentiles(tally.firsts),
        "gap s": percentiles(tally.gaps),
        "resident MB": {"first": samples.resident[0], "settled": early, "end": late},
        "most resident MB": max(samples.resident),
        "most stored MB": max(samples.stored),
        "most parked MB": max(samples.parked),
        "most waiting": max(samples.waiting),
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return some percentiles, and the largest value."""
    ordered = sorted(values) or [0.0]
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {
        name: round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4)
        for name, share in shares.items()
    }


def failures(found: dict[str, Any], given: argparse.Namespace) -> list[str]:
    """Return what must not be, in words."""
    resident, wrong = found["resident MB"], list[str]()
    if found["wrong"]:
        wrong.append(f"{len(found['wrong'])} answers were wrong")
    if resident["end"] > resident["settled"] * (1 + GROWTH):
        wrong.append("memory grew")
    if found["most stored MB"] > given.memory / 1e6:
        wrong.append("more was stored than --memory")
    if found["most parked MB"] > given.disk_cache_bytes / 1e6:
        wrong.append("more was parked than --disk-cache-bytes")
    if any(found["left"].values()):
        wrong.append(f"not idle at the end: {found['left']}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--max-queue", type=int, default=48)
    parser.add_argument("--memory", type=int, default=400_000_000)
    parser.add_argument("--disk-cache-bytes", type=int, default=200_000_000)
    parser.add_argument("--kind", choices=[*KINDS], default="llama")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        write_untrained(folder, given.kind)
        words = Contender("mlxrunner", lambda *paths: command(given, *paths), lambda _: "")
        server = Served(words, folder, Path(place) / "kept")
        try:
            files = in_use(server.process)[1]
            tally, samples = asyncio.run(run(server, given))
            found = figures(tally, samples, given)
            found["left"] = idle(server, files)
        finally:
            server.stop()
    print(json.dumps(found, indent=1))
    raise SystemExit("; ".join(failures(found, given)) or 0)


if __name__ == "__main__":
    main()
