"""Measure parking a conversation and bringing it back against evaluating it again.

PYTHONPATH=tests python benchmarks/parking.py [--behind] [--quick]

On Linux first put a fast BLAS in front (`mlxrunner doctor` names it), and let nothing else run. A
random float32 Llama evaluates a prompt once; its entry is parked, first whole, then with a turn
after it. Then, in turns, a fresh runner restores it: "cold disk": the files were dropped from the
page cache first, where the system lets us. 3 % of the evaluation are 33 times. The tokens of its
answer have to be those of the runner that never left. "find" is asked among 1,000 conversations of
10,000 tokens, of which the half share 3,000 tokens with the prompt. --behind: 16 clients hold
conversations with small models of four kinds instead; it prints how long after the end of a turn it
is on disk, and the bytes written beside those of the new rows.
"""

from __future__ import annotations

import logging
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from arguments import llama_of, parser_of, print_json, print_table
from parallel import random_llama
from untrained import KINDS, write_untrained

from mlxrunner import ParallelRunner
from mlxrunner.bench.harness import Comparison, less_is_better
from mlxrunner.cache.disk.disk_cache import DiskCache
from mlxrunner.cache.disk.index import DiskCacheIndex, StoredConversation
from mlxrunner.cache.disk.pieces import PieceFile
from mlxrunner.models.facts import facts_of
from mlxrunner.runner import Runner
from mlxrunner.system.folders import Folder
from mlxrunner.terminal.output import size
from mlxrunner.testing import ByteTokenizer

TURN = 500
"""Tokens of a turn."""


def runner_of(model: Any, context: int) -> Runner:
    """Return a runner whose buffers are allocated, as a server has them at start."""
    facts = facts_of(model, vars(model.args))
    runner = Runner(model, ByteTokenizer(), facts, context=context, prefill_step=512)
    list(runner.generate([1, 2], max_tokens=2, stop_tokens=[]))
    runner.reset()
    return runner


def timed(act: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that `act` takes, and its result."""
    began = time.perf_counter()
    found = act()
    return time.perf_counter() - began, found


def forget(folder: Path) -> bool:
    """Drop the files of a folder from the page cache; return False if that can't be asked for."""
    if not hasattr(os, "posix_fadvise"):
        return False
    os.sync()
    for file in folder.iterdir():
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def restored(runner: Runner, parking: DiskCache, parked: StoredConversation) -> None:
    """Read a conversation into the entry of `runner`."""
    runner.cache.adopt(parking.restore(parked), "the disk")
    _ = runner.entry  # read now


def compare(label: str, model: Any, length: int, rounds: int) -> list[Comparison]:
    context = length + rounds * TURN + 64
    said = np.random.default_rng(0).integers(10, 250, context).tolist()
    runner = runner_of(model, context)
    evaluated = timed(lambda: runner.evaluate(said[:length]))[0]
    names = ("turn", "evaluating", "warm", "cold disk", "written")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        parking = DiskCache(Path(folder), {"model": label}, limit=2**40)
        first, parked = timed(lambda: parking.offload(runner.entry))
        nbytes = parking.bytes
        for turn in range(1, rounds + 1):
            more = said[: length + turn * TURN]
            seconds["evaluating"].append(timed(partial(runner.evaluate, more))[0])
            before = parking.bytes
            seconds["turn"].append(timed(lambda: parking.offload(runner.entry))[0])
            seconds["written"].append((parking.bytes - before) / 1e6)
        _, parked = timed(lambda: parking.offload(runner.entry))
        prompt = [*more, 5, 6, 7]
        expected = [one.token for one in runner.generate(prompt, max_tokens=8, stop_tokens=[])]
        other = runner_of(model, context)
        for _ in range(rounds):
            for name in ("warm", "cold disk"):
                other.reset()
                if name == "warm" or forget(parking.folder):
                    seconds[name].append(timed(lambda: restored(other, parking, parked))[0])
        found = [one.token for one in other.generate(prompt, max_tokens=8, stop_tokens=[])]
        if found != expected:
            raise SystemExit(f"not the same: {found} instead of {expected}")
    whole = evaluated + sum(seconds["evaluating"])
    name = f"{label}, {len(more)}"
    rows = [
        replace(
            less_is_better(
                f"{name}: restored, and evaluated", "s", seconds["warm"], [whole] * rounds
            ),
            target=33,
        ),
        less_is_better(
            f"{name}: a turn of {TURN} parked, and evaluated",
            "s",
            seconds["turn"],
            seconds["evaluating"],
        ),
        less_is_better(
            f"{name}: the first {length} parked, and evaluated", "s", [first], [evaluated]
        ),
        less_is_better(
            f"{name}: written for a turn, and for the first {length}",
            "MB",
            seconds["written"],
            [nbytes / 1e6] * rounds,
        ),
    ]
    if seconds["cold disk"]:
        row = less_is_better(
            f"{name}: the same, cold disk", "s", seconds["cold disk"], [whole] * rounds
        )
        rows.insert(1, row)
    return rows


def finding(conversations: int, length: int) -> list[float]:
    """Return the milliseconds of each of 100 lookups."""
    random = np.random.default_rng(0)
    shelf = DiskCacheIndex(lambda name: None, 2**40)
    header = random.integers(0, 8000, length * 3 // 10)
    talks = []
    for number in range(conversations):
        tokens = random.integers(0, 8000, length).astype(np.int32)
        if number % 2:
            tokens[: len(header)] = header
        tokens[0] = 1
        talks.append(tokens)
        shelf.add(StoredConversation(str(number), tokens, [], [], length, has_only_rows=False))
    seconds = []
    for number in random.integers(0, conversations, 100):
        prompt = np.concatenate([talks[number], random.integers(0, 8000, 500)]).astype(np.int32)
        took, found = timed(partial(shelf.find, prompt))
        if found is None or found[1] != length:
            raise SystemExit("the conversation was not found")
        seconds.append(1e3 * took)
    return seconds


def behind(kind: str, turns: int, clients: int = 16) -> str:
    """Let clients talk with a model of a kind, and return what was written after their turns."""
    written, delays, wrote = Counter[str](), list[float](), PieceFile.write

    class Delays(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "after a turn's end" in record.msg and isinstance(record.args, tuple):
                delays.append(float(str(record.args[1])))

    def counted(file: PieceFile, folder: Folder, **options: bool) -> None:
        written[file.name.split("-")[0]] += file.nbytes
        wrote(file, folder, **options)

    logging.getLogger("mlxrunner").setLevel(logging.DEBUG)
    logging.getLogger("mlxrunner").handlers = [Delays()]
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(PieceFile, "write", counted):
        write_untrained(Path(folder, "model"), kind, layers=4, width=128)
        with ParallelRunner.load(
            Path(folder, "model"),
            max_sequences=clients,
            context=4096,
            disk_cache_bytes=2**34,
            disk_cache_dir=Path(folder, "disk"),
        ) as runner:

            def talk(number: int) -> None:
                rng = random.Random(number)
                prompt = rng.choices(range(90), k=400)
                for _ in range(turns):
                    most = rng.randrange(20, 200)
                    found = runner.complete(prompt, max_tokens=most, stop_tokens=[])
                    prompt = [*prompt, *found.tokens, *rng.choices(range(90), k=most)]
                    time.sleep(3 * rng.random())

            with ThreadPoolExecutor(clients) as threads:
                list(threads.map(talk, range(clients)))
            time.sleep(2)
            heads = [path.stat().st_size for path in Path(folder, "disk").glob("*/talk-*")]
            rows = sum(path.stat().st_size for path in Path(folder, "disk").glob("*/rows-*"))
            beside = (written.total() - written["rows"]) / len(delays)
            again = written["rows"] / max(rows, 1)
    return (
        f"{kind}: {len(delays)} saves of {clients * turns} turns, at most {max(delays):.1f} s "
        f"after their ends; rows written {again:.3f} times; beside them {size(beside)} a save, "
        f"where one copy of windows and states is {size(max(heads))}"
    )


def main() -> None:
    parser = parser_of(__doc__, rounds=3, quick="a small model and 1,000 tokens")
    parser.add_argument("--length", type=int, help="tokens of the conversation (default: 8000)")
    parser.add_argument("--behind", action="store_true", help="measure what is written behind")
    given = parser.parse_args()
    if given.behind:
        for kind in KINDS:
            print(behind(kind, 2 if given.quick else 8))
        return
    label, dimensions, length = llama_of(given)
    rows = compare(label, random_llama(*dimensions), given.length or length, given.rounds)
    print_table(rows)
    print_json(rows, versus="evaluating again", rounds=given.rounds)
    found = sorted(finding(*((100, 1000) if given.quick else (1000, 10_000))))
    print(f"find: {found[len(found) // 2]:.3f} ms, at most {found[-1]:.3f} ms")


if __name__ == "__main__":
    main()
