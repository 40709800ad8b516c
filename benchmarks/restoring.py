"""Measure restoring a saved conversation against evaluating it again.

python benchmarks/restoring.py [--quick]

On Linux first put a fast BLAS in front (`mlxrunner doctor` names it), and let nothing else run. A
random float32 Llama evaluates a prompt once; its entry is saved. Then, in turns: a fresh runner
opens the session and reads it for its first turn (the file is in the page cache, as it is when a
chat was left a moment ago; "cold disk": it was dropped from there first, where the system lets us).
5 % of the evaluation are 20 times. The next turn's tokens have to be those of the runner that never
left. "saving" is what the chat waits for after a turn: the text on the disk and a copy of the
caches; "writing" is what the thread behind it takes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlxrunner.chat.history import History, Spelling
from parallel import random_llama

from mlxrunner.bench.measurements import Comparison, less_is_better, print_json, print_table
from mlxrunner.models.facts import facts_of
from mlxrunner.runner import Runner
from mlxrunner.sessions.saver import Keeper
from mlxrunner.sessions.session import Branch, Session
from mlxrunner.sessions.store import CACHE, Sessions
from mlxrunner.testing import ByteTokenizer

PARTS = {"weights": "", "config": "", "tokenizer": "", "template": ""}
TURN = [5, 6, 7]


def runner_of(model: Any, context: int) -> Runner:
    """With its buffers allocated, as a chat has them at start."""
    runner = Runner(
        model,
        ByteTokenizer(),
        facts_of(model, vars(model.args)),
        context=context,
        whole=True,
        prefill_step=512,
    )
    list(runner.generate([1, 2], max_tokens=2, stop_tokens=[]))
    runner.reset()
    return runner


def answer(runner: Runner, prompt: list[int], count: int) -> tuple[list[int | None], Any]:
    """The tokens, and the usage."""
    chunks = list(runner.generate(prompt, max_tokens=count, stop_tokens=[]))
    return [chunk.token for chunk in chunks], chunks[-1].usage


def forget(file: Path) -> bool:
    """Drop a file from the page cache; whether that can be asked for here."""
    if not hasattr(os, "posix_fadvise"):
        return False
    with file.open("rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def restored(
    model: Any, context: int, store: Sessions, name: str, prompt: list[int]
) -> tuple[float, list[int | None], Any]:
    """Seconds to open a session and for its first turn to read it; the turn's tokens and usage."""
    runner = runner_of(model, context)
    keeper = Keeper(runner, PARTS, store)
    began = time.perf_counter()
    keeper.load(name)
    _ = runner.entry  # read now
    seconds = time.perf_counter() - began
    return seconds, *answer(runner, prompt, 8)


def compare(label: str, model: Any, length: int, rounds: int) -> list[Comparison]:
    context = length + 64
    said = np.random.default_rng(0).integers(10, 250, length).tolist()
    runner = runner_of(model, context)
    began = time.perf_counter()
    runner.evaluate(said)
    evaluated = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as folder:
        store = Sessions(Path(folder))
        session = Session("random", {"main": Branch(None, History(spelling=Spelling("", said)))})
        figures: dict[str, list[float]] = {
            name: [] for name in ("saving", "writing", "warm", "cold disk", "8 bits")
        }
        for _ in range(rounds):
            keeper = Keeper(runner, PARTS, store)
            began = time.perf_counter()
            keeper.save("whole", session)
            figures["saving"].append(time.perf_counter() - began)
            keeper.wait()
            figures["writing"].append(time.perf_counter() - began)
        packing = Keeper(runner, PARTS, store, kv_bits=8)
        packing.save("packed", session)
        packing.wait()
        expected, _ = answer(runner, [*said, *TURN], 8)
        usage = None
        for _ in range(rounds):
            seconds, tokens, usage = restored(model, context, store, "whole", [*said, *TURN])
            figures["warm"].append(seconds)
            if tokens != expected or usage.evaluated_tokens != len(TURN):
                raise SystemExit(
                    f"not the same: {tokens} instead of {expected}, {usage.evaluated_tokens} "
                    "evaluated"
                )
            if forget(store.folder / "whole" / CACHE):
                figures["cold disk"].append(
                    restored(model, context, store, "whole", [*said, *TURN])[0]
                )
            figures["8 bits"].append(restored(model, context, store, "packed", [*said, *TURN])[0])
        sizes = [store.nbytes(name)[1] / 1e6 for name in ("whole", "packed")]
    mx.clear_cache()
    name = f"{label}, {length}"
    rows = [
        replace(
            less_is_better(
                f"{name}: restored, and evaluated", "s", figures["warm"], [evaluated] * rounds
            ),
            target=20,
        ),
        less_is_better(f"{name}: the same in 8 bits", "s", figures["8 bits"], [evaluated] * rounds),
        less_is_better(
            f"{name}: a turn waits for saving, its thread for writing",
            "s",
            figures["saving"],
            figures["writing"],
        ),
        less_is_better(f"{name}: file in 8 bits, and whole", "MB", [sizes[1]], [sizes[0]]),
    ]
    if figures["cold disk"]:
        rows.insert(
            1,
            less_is_better(
                f"{name}: the same, cold disk", "s", figures["cold disk"], [evaluated] * rounds
            ),
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a small model and 1,000 tokens: does it work, not how fast is it",
    )
    given = parser.parse_args()
    label, size, length = (
        ("256 x 2", (256, 2, 4), 1000) if given.quick else ("98 M", (768, 12, 12), 8000)
    )
    rows = compare(label, random_llama(*size), length, given.rounds)
    print_table(rows)
    print_json(rows, versus="evaluating again", rounds=given.rounds)


if __name__ == "__main__":
    main()
