"""Plant each fault of tools/mutations.toml in a copy of this repository, and run its law's tests.

    .venv/bin/python tools/mutate.py [--law LAW] [--name PATTERN] [--new] [--jobs N] [--write]

Print the test that finds each fault. Exit with 1 if a fault is not found, or if its old text does
not stand exactly once in its file. `--write` records each finder in the file at once. A fault costs
about 6 seconds of processor time if the recorded test still finds it: all take about 15 minutes.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).parents[1]
FAULTS = ROOT / "tools" / "mutations.toml"
PARTS = "mlxrunner", "tests", "docs", "tools", "pyproject.toml"
PYTEST = "-m", "pytest", "-x", "-q", "--no-header", "-rfE", "--timeout=300"


def found_by(copy: Path, tests: Iterable[str]) -> str:
    """Return the first test that fails in `copy`, what else ended the run, or an empty string."""
    # Seeds are as in CI, so that two runs find the same.
    env = os.environ | {"PYTHONPATH": str(copy), "CI": "true"}
    ran = subprocess.run(
        [sys.executable, *PYTEST, *tests],
        cwd=copy,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode in (0, 4, 5):  # 4: no such test; 5: no test
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", ran.stdout, re.MULTILINE)
    return failed[1] if failed else f"exit code {ran.returncode}"


def plant(copy: Path, fault: dict[str, str], tests: list[str]) -> str:
    """Return the test that finds a fault, which is in `copy` meanwhile; an empty string if none.

    The test that found it before comes first, then a sample of the law's `tests`, then all.
    """
    path = copy / fault["file"]
    text = path.read_text()
    if text.count(fault["old"]) != 1:
        return ""
    compiled = Path(importlib.util.cache_from_source(str(path)))
    before = fault["found_by"].partition("::")[0]
    runs = [["--everything", fault["found_by"]]] if before and (copy / before).exists() else []
    try:
        path.write_text(text.replace(fault["old"], fault["new"]))
        compiled.unlink(missing_ok=True)
        runs += [tests, ["--everything", *tests]]
        return next((found for run in runs if (found := found_by(copy, run))), "")
    finally:
        path.write_text(text)
        compiled.unlink(missing_ok=True)


def copied(folder: Path) -> Path:
    """Return `folder`, with a copy of what the tests need."""
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, folder / part)
    return folder


def record(name: str, found: str) -> None:
    """Write the test that found a fault into the file."""
    before, line, after = FAULTS.read_text().partition(f'name = "{name}"\n')
    after = re.sub(
        r'^found_by = ".*"$', lambda _: f'found_by = "{found}"', after, count=1, flags=re.M
    )
    FAULTS.write_text(before + line + after)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--law", help="plant the faults of this law only")
    parser.add_argument(
        "--name", default="", help="plant the faults whose names match this pattern"
    )
    parser.add_argument("--new", action="store_true", help="plant those that nothing found before")
    parser.add_argument("--jobs", type=int, default=1, help="faults that are planted at once")
    parser.add_argument("--write", action="store_true", help="record what finds them")
    given = parser.parse_args()
    known = tomllib.loads(FAULTS.read_text())
    faults = [
        fault
        for fault in known["mutations"]
        if given.law in (None, fault["law"])
        and re.search(given.name, fault["name"])
        and not (given.new and fault["found_by"])
    ]
    copies: Queue[Path] = Queue()

    def found_in_a_copy(fault: dict[str, str]) -> str:
        copy = copies.get()
        try:
            return plant(copy, fault, known["laws"][fault["law"]])
        finally:
            copies.put(copy)

    missed = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.jobs) as pool:
        for number in range(given.jobs):
            (own := Path(folder, str(number))).mkdir()
            copies.put(copied(own))
        for fault, found in zip(faults, pool.map(found_in_a_copy, faults), strict=True):
            missed += not found
            print(f"{fault['law']}: {fault['name']}: {found or 'NOT FOUND'}", flush=True)
            if given.write:
                record(fault["name"], found)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
