"""Compare `mlxrunner generate` with `mlx_lm generate`: one prompt each, as whole processes.

PYTHONPATH=tests python benchmarks/oneshot.py [--folder DIR] [--tokens 32] [--rounds 9] [--quick]

On Linux first put a fast BLAS in front (`mlxrunner doctor` names it). Both load the same untrained
Llama (81 M in float32, a context of 8,192) and answer the same prompt, in turns. Wall time, time of
all processors, and the peak of the memory are those that the system counts for the process. "x":
how many times less mlxrunner takes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from arguments import parser_of, print_json, print_table
from untrained import write_untrained

from mlxrunner.bench.harness import Comparison, less_is_better

PROMPT = "Name three rivers in Europe and the seas they reach."
LAYERS, WIDTH = 14, 768
MOST = 1.1
"""The largest accepted ratio of our time or memory to theirs."""


def main() -> None:
    parser = parser_of(__doc__, rounds=9, quick="a model of two layers, three rounds")
    parser.add_argument("--folder", type=Path, help="keep the model there, and use it again")
    parser.add_argument(
        "--tokens", type=int, default=32, help="at most so many tokens of an answer"
    )
    parser.add_argument(
        "--open-end", action="store_true", help="let ours run without --max-tokens, to one more"
    )
    given = parser.parse_args()
    layers, width = (2, 64) if given.quick else (LAYERS, WIDTH)
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch) / "model"
        if not folder.exists():
            write_untrained(folder, "llama", layers=layers, width=width, context=8192)
        sides = {
            side: [sys.executable, "-m", *words, "--model", str(folder), "--prompt", PROMPT]
            for side, words in (
                ("ours", ["mlxrunner", "generate"]),
                ("theirs", ["mlx_lm.generate"]),
            )
        }
        for words in sides.values():
            words += ["--max-tokens", str(given.tokens)]
        rows = compared(sides, 3 if given.quick else given.rounds)
    print_table(rows)
    print_json(rows, tokens=given.tokens)


def compared(sides: dict[str, list[str]], rounds: int) -> list[Comparison]:
    """Run each command once to warm the files up, then in turns."""
    taken: dict[str, list[tuple[float, float, float]]] = {side: [] for side in sides}
    for number in range(rounds + 1):
        for side in sorted(sides, reverse=bool(number % 2)):
            figures = run(sides[side])
            if number:
                taken[side].append(figures)
    names = (("wall time", "s"), ("processor time", "s"), ("peak memory", "MB"))
    columns = zip(*(zip(*taken[side], strict=True) for side in ("ours", "theirs")), strict=True)
    return [
        replace(less_is_better(f"one prompt: {name}", unit, *of_both), target=1 / MOST)
        for (name, unit), of_both in zip(names, columns, strict=True)
    ]


def run(command: list[str]) -> tuple[float, float, float]:
    """Run a command; return its wall and processor seconds, and its peak memory in MB."""
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        said = process.stderr.read().decode(errors="replace") if process.stderr else ""
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - began
    if process.returncode:
        sys.exit(f"{' '.join(command)}: exit code {process.returncode}\n{said}")
    unit = 1e6 if sys.platform == "darwin" else 1e6 / 1024
    return wall, used.ru_utime + used.ru_stime, used.ru_maxrss / unit


if __name__ == "__main__":
    main()
