"""Plant each fault of tools/mutations.toml in a copy of this repository, and run its law's tests.

    .venv/bin/python tools/mutate.py [--law LAW] [--name PATTERN] [--write]

Print the test that finds each fault. Exit with 1 if a fault is not found, or if its old text does
not stand exactly once in its file. `--write` records the finders in the file. The whole run takes
about 10 minutes of processor time.
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
from pathlib import Path

ROOT = Path(__file__).parents[1]
FAULTS = ROOT / "tools" / "mutations.toml"
PARTS = "mlxrunner", "tests", "docs", "pyproject.toml"


def found_by(copy: Path, tests: list[str]) -> str:
    """Return the first test that fails in `copy`, what else ended the run, or an empty string."""
    words = [
        "-m",
        "pytest",
        "--everything",
        "-x",
        "-q",
        "--no-header",
        "-rfE",
        "--timeout=300",
        *tests,
    ]
    # Seeds are as in CI, so that two runs find the same.
    env = os.environ | {"PYTHONPATH": str(copy), "CI": "true"}
    ran = subprocess.run(
        [sys.executable, *words], cwd=copy, env=env, capture_output=True, text=True, check=False
    )
    if ran.returncode in (0, 4):  # 4: no such test
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", ran.stdout, re.MULTILINE)
    return failed[1] if failed else f"exit code {ran.returncode}"


def plant(copy: Path, fault: dict[str, str], tests: list[str]) -> str:
    """Return the test of `tests` that finds a fault, which is in `copy` meanwhile."""
    path = copy / fault["file"]
    text = path.read_text()
    if text.count(fault["old"]) != 1:
        return ""
    compiled = Path(importlib.util.cache_from_source(str(path)))
    try:
        path.write_text(text.replace(fault["old"], fault["new"]))
        compiled.unlink(missing_ok=True)
        return found_by(copy, tests)
    finally:
        path.write_text(text)
        compiled.unlink(missing_ok=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--law", help="plant the faults of this law only")
    parser.add_argument(
        "--name", default="", help="plant the faults whose names this pattern is found in"
    )
    parser.add_argument("--write", action="store_true", help="record what finds them")
    given = parser.parse_args()
    known = tomllib.loads(FAULTS.read_text())
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in PARTS:
            (shutil.copytree if (ROOT / part).is_dir() else shutil.copy)(ROOT / part, copy / part)
        for fault in known["mutations"]:
            if given.law not in (None, fault["law"]) or not re.search(given.name, fault["name"]):
                continue
            # The test that found it before comes first, if there still is one of that name.
            found = plant(copy, fault, [fault["found_by"]]) if fault["found_by"] else ""
            found = found or plant(copy, fault, known["laws"][fault["law"]])
            missed += not found
            print(f"{fault['law']}: {fault['name']}: {found or 'NOT FOUND'}", flush=True)
            if given.write:
                record(fault["name"], found)
    return int(missed > 0)


def record(name: str, found: str) -> None:
    """Write the test that found a fault into the file."""
    before, line, after = FAULTS.read_text().partition(f'name = "{name}"\n')
    after = re.sub(r'^found_by = ".*"$', f'found_by = "{found}"', after, count=1, flags=re.M)
    FAULTS.write_text(before + line + after)


if __name__ == "__main__":
    sys.exit(main())
