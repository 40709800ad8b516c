"""Kill workers and the driver of a batch at random moments, and compare with an unbroken run.

python benchmarks/kills.py [--kills 50] [--lines 800] [--workers 2] [--pause SECONDS] [--quick]

The built-in model answers lines with shared beginnings, half of them greedy and half seeded. A
run over local workers is killed and resumed until all kills are used: every fifth kills the
driver, the others a worker, each with SIGKILL after answers came. With --pause, a worker is stopped
first for that long (SIGSTOP), once. The output has to have the bytes of one process, and each
moment's output has to be a beginning of them. Each event is noted in kills.log in --folder, where
all files stay, as they do if something differs. A folder that has the lines and the answers of one
process is used again. Linux only: it reads which process is whose from /proc.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DRIVER_EVERY = 5
PATIENCE_S = 600
"""Seconds after which the next kill comes even without an answer."""


def command(*arguments: str) -> list[str]:
    options = ["--no-usage", "--no-reserve", "--seed", "11"]
    return [sys.executable, "-m", "mlxrunner", "batch", "in.jsonl", *options, *arguments]


def write(lines: int) -> None:
    """Write lines with shared beginnings, half of them greedy."""
    chosen = random.Random(1)
    with open("in.jsonl", "w") as file:
        for number in range(lines):
            name = chosen.choice(["Ana", "Bo", "Zorblin", "Mira"])
            line = {"id": number, "prompt": f"My name is {name}. What is my name? {number}"}
            file.write(json.dumps(line | {"temperature": number % 2, "max_tokens": 24}) + "\n")


def workers_of(driver: int) -> list[int]:
    """Return the processes of the driver's workers: its children that Dask spawned."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            words = stat.with_name("cmdline").read_bytes()
        except (OSError, IndexError):
            continue
        if parent == driver and b"spawn_main" in words:
            found.append(int(stat.parent.name))
    return found


def output() -> bytes:
    return Path("out.jsonl").read_bytes() if Path("out.jsonl").exists() else b""


def progress() -> int:
    """Return how often a driver has said how many lines are answered."""
    log = Path("driver.log")
    return log.read_bytes().count(b" lines, ") if log.exists() else 0


class Killer:
    """Runs the batch, kills, and counts."""

    def __init__(self, workers: int, kills: int, pause: float) -> None:
        self._arguments = ["-o", "out.jsonl", "--workers", str(workers), "--resume"]
        self._left, self._pause = kills, pause
        self._chosen = random.Random(2)
        self._began = time.monotonic()
        self.workers = self.drivers = 0
        self.wrong = 0

    def run(self, expected: bytes) -> None:
        """Run until the batch is complete."""
        while output() != expected:
            with open("driver.log", "ab") as log:
                driver = subprocess.Popen(command(*self._arguments), stderr=log)
            while driver.poll() is None and (self._left or self._pause):
                self._wait(driver)
                if driver.poll() is None:
                    self._kill(driver)
                self.wrong += not expected.startswith(output())
            self._note(f"driver ended: {driver.wait()}")
            if driver.returncode == 0:
                return

    def _wait(self, driver: subprocess.Popen[bytes]) -> None:
        """Wait until answers came since the last kill, and a little longer."""
        before, end = progress(), time.monotonic() + PATIENCE_S
        while driver.poll() is None and progress() == before and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(self._chosen.uniform(0, 0.5))

    def _kill(self, driver: subprocess.Popen[bytes]) -> None:
        """Kill the driver, or one of its workers."""
        if self._pause and (found := workers_of(driver.pid)):
            self._stop(self._chosen.choice(found))
        elif self._left and self._left % DRIVER_EVERY == 0:
            driver.kill()
            driver.wait()
            self.drivers += 1
            self._left -= 1
            self._note("killed a driver")
        elif self._left and (found := workers_of(driver.pid)):
            os.kill(self._chosen.choice(found), signal.SIGKILL)
            self.workers += 1
            self._left -= 1
            self._note("killed a worker")

    def _stop(self, worker: int) -> None:
        """Stop a worker for a while, and let it continue."""
        os.kill(worker, signal.SIGSTOP)
        self._note("stopped a worker")
        time.sleep(self._pause)
        self._pause = 0
        try:
            os.kill(worker, signal.SIGCONT)
        except ProcessLookupError:
            self._note("the batch had ended without it")
        else:
            self._note("let it go on")

    def _note(self, what: str) -> None:
        with open("kills.log", "a") as log:
            seconds, lines = time.monotonic() - self._began, len(output().splitlines())
            print(f"{seconds:8.1f} s {lines:6} lines  {what}", file=log)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--lines", type=int, default=800)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--folder", help="a folder for all files, which stay")
    parser.add_argument(
        "--quick", action="store_true", help="2 kills, 40 lines: does it work, nothing else"
    )
    asked = parser.parse_args()
    kills, lines = (2, 40) if asked.quick else (asked.kills, asked.lines)
    folder = Path(asked.folder or tempfile.mkdtemp(prefix="mlxrunner-kills-"))
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    if not Path("whole.jsonl.done").exists():
        write(lines)
        subprocess.run(command("-o", "whole.jsonl", "-q"), check=True)
    expected = Path("whole.jsonl").read_bytes()
    killer, began = Killer(asked.workers, kills, asked.pause), time.monotonic()
    killer.run(expected)
    is_same = output() == expected
    found = {
        "workers_killed": killer.workers,
        "drivers_killed": killer.drivers,
        "lines": lines,
        "seconds": round(time.monotonic() - began),
        "same_bytes": is_same,
        "moments_with_wrong_output": killer.wrong,
    }
    print(json.dumps(found))
    if not is_same or killer.wrong:
        sys.exit(f"all files are in {folder}")
    if asked.folder is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
