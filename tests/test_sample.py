"""The sample is a part of everything."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parent
CONFTEST = """
from support.sample import add_options as pytest_addoption
from support.sample import configure as pytest_configure
from support.sample import deselect as pytest_collection_modifyitems
"""
CASES = """
import pytest

@pytest.mark.parametrize("case", range(5))
def test_cases(case):
    print("case", case)

@pytest.mark.exhaustive(0)
def test_left_to_everything():
    print("exhaustive")

def test_one():
    print("one")
"""
SHORTENED = """
from hypothesis import given, strategies
from support.sample import examples

@examples(80)
@given(strategies.integers())
def test_property(number):
    print("example")

def test_beside():
    print("beside")
"""
LOOP = """
from support.sample import fewer

def test_loop():
    for turn in range(fewer(5, 2)):
        print("turn", turn)
"""


def ran(folder: Path, *options: str) -> Counter[str]:
    """Return the lines that the tests of `folder` print, counted."""
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", *options]
    env = {**os.environ, "PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [*command, str(folder)], cwd=folder, env=env, capture_output=True, text=True, check=True
    )
    words = (line.lstrip(".") for line in done.stdout.splitlines())
    return Counter(word for word in words if word and " passed" not in word)


def test_the_sample_is_a_part_of_everything(tmp_path: Path) -> None:
    """It draws two cases, shortens properties and loops, and is the same each time."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = exhaustive\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name, text in {"cases": CASES, "shortened": SHORTENED, "loop": LOOP}.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    sample, whole = ran(tmp_path), ran(tmp_path, "--everything")
    cases = {f"case {number}" for number in range(5)}
    assert whole == Counter(
        [*cases, *(f"turn {n}" for n in range(5)), "exhaustive", "one", "beside"] + ["example"] * 80
    )
    assert sample < whole
    assert sum(sample[case] for case in cases) == 2
    assert sample - Counter(cases) == Counter(
        {"example": 10, "one": 1, "beside": 1, "turn 0": 1, "turn 1": 1}
    )
    assert ran(tmp_path) == sample
