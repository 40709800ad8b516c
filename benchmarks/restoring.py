"""Measure restoring a saved conversation against evaluating it again.

python benchmarks/restoring.py [--quick]

On Linux first put a fast BLAS in front (`mlxrunner doctor` names it), and let nothing else run. A
random float32 Llama evaluates a prompt once; its entry is saved. Then, in turns: a fresh runner
opens the session and reads it for its first turn (the file is in the page cache, as it is when a
chat was left a moment ago; "cold disk": it was dropped from there first, where the system lets us).
5 % of the evaluation are 20 times. The next turn's tokens have to be those of the runner that never
left. "saving" is what the chat waits for after a turn: the text on the disk and a copy of the
caches; "writing" is what the thread after it takes.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from arguments import llama_of, parser_of, print_json, print_table
from parallel import random_llama

from mlxrunner.bench.harness import Comparison, less_is_better
from mlxrunner.models.facts import facts_of
from mlxrunner.runner import Runner
from mlxrunner.sessions.caches import Saver
from mlxrunner.sessions.session import Branch, History, Rendering, Session
from mlxrunner.sessions.store import CACHE, SessionStore
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
    model: Any, context: int, store: SessionStore, name: str, prompt: list[int]
) -> tuple[float, list[int | None], Any]:
    """Seconds to open a session and for its first turn to read it; the turn's tokens and usage."""
    runner = runner_of(model, context)
    saver = Saver(runner, PARTS, store)
    began = time.perf_counter()
    saver.load(name)
    _ = runner.entry  # read now
    seconds = time.perf_counter() - began
    return seconds, *answer(runner, prompt, 8)


class Saved:
    """A conversation of `length` tokens that a runner has evaluated and saved, whole and packed."""

    def __init__(self, model: Any, length: int, folder: Path) -> None:
        self.prompt = np.random.default_rng(0).integers(10, 250, length).tolist()
        self.model, self.context = model, length + 64
        self.runner = runner_of(model, self.context)
        began = time.perf_counter()
        self.runner.evaluate(self.prompt)
        self.evaluated = time.perf_counter() - began
        self.store = SessionStore(folder)
        self.session = Session(
            "random", {"main": Branch(None, History(rendering=Rendering("", self.prompt)))}
        )

    def save(self, name: str, **options: Any) -> tuple[float, float]:
        """Return the seconds that a turn waits for saving, and those until the file is written."""
        saver = Saver(self.runner, PARTS, self.store, **options)
        began = time.perf_counter()
        saver.save(name, self.session)
        waited = time.perf_counter() - began
        saver.wait()
        return waited, time.perf_counter() - began

    def restored(self, name: str) -> tuple[float, list[int | None], Any]:
        """Return the seconds to open and read the session, and its next turn's tokens and usage."""
        return restored(self.model, self.context, self.store, name, [*self.prompt, *TURN])

    def mbytes(self, name: str) -> float:
        return self.store.nbytes(name)[1] / 1e6


def measured(saved: Saved, rounds: int) -> dict[str, list[float]]:
    """Return the seconds by name. Stop the program if a restored session continues otherwise."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for name, took in zip(("saving", "writing"), saved.save("whole"), strict=True):
            seconds[name].append(took)
    saved.save("packed", kv_bits=8)
    expected, _ = answer(saved.runner, [*saved.prompt, *TURN], 8)
    for _ in range(rounds):
        took, tokens, usage = saved.restored("whole")
        seconds["warm"].append(took)
        if tokens != expected or usage.evaluated_tokens != len(TURN):
            raise SystemExit(
                f"not the same: {tokens} instead of {expected}, {usage.evaluated_tokens} evaluated"
            )
        if forget(saved.store.folder / "whole" / CACHE):
            seconds["cold disk"].append(saved.restored("whole")[0])
        seconds["8 bits"].append(saved.restored("packed")[0])
    return seconds


def compare(label: str, model: Any, length: int, rounds: int) -> list[Comparison]:
    with tempfile.TemporaryDirectory() as folder:
        saved = Saved(model, length, Path(folder))
        seconds = measured(saved, rounds)
        sizes = [saved.mbytes("packed")], [saved.mbytes("whole")]
    mx.clear_cache()

    def row(what: str, unit: str, ours: list[float], other: list[float]) -> Comparison:
        return less_is_better(f"{label}, {length}: {what}", unit, ours, other)

    again = [saved.evaluated] * rounds
    rows = [
        replace(row("restored, and evaluated", "s", seconds["warm"], again), target=20),
        row("the same in 8 bits", "s", seconds["8 bits"], again),
        row(
            "a turn waits for saving, its thread for writing",
            "s",
            seconds["saving"],
            seconds["writing"],
        ),
        row("file in 8 bits, and whole", "MB", *sizes),
    ]
    if seconds["cold disk"]:
        rows.insert(1, row("the same, cold disk", "s", seconds["cold disk"], again))
    return rows


def main() -> None:
    given = parser_of(__doc__, rounds=3, quick="a small model and 1,000 tokens").parse_args()
    label, size, length = llama_of(given)
    rows = compare(label, random_llama(*size), length, given.rounds)
    print_table(rows)
    print_json(rows, versus="evaluating again", rounds=given.rounds)


if __name__ == "__main__":
    main()
