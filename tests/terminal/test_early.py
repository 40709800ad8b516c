"""Ctrl-C while the program starts, wherever it comes, leaves no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.waiting import PATIENCE_S

from mlxrunner import __main__
from mlxrunner.terminal import early

PRESS = """
import runpy, signal, sys

class Press:
    count = 0
    def find_spec(self, name, path=None, target=None):
        if self.count or name == {first!r}:
            self.count += 1
            if self.count == {number}:
                signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Press())
sys.argv[:] = ["mlxrunner", *{arguments!r}]
runpy.run_module("mlxrunner", run_name="__main__", alter_sys=True)
"""
"""Runs the program, and presses Ctrl-C when the module `number`, counted from `first`, is sought.

The interpreter itself, and this package's folder, come before; what Python says then is its own.
"""
STARTED = "mlxrunner.terminal"
"""The first module that the program imports."""


def pressed(number: int, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    code = PRESS.format(first=STARTED, number=number, arguments=arguments)
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=PATIENCE_S,
    )


@pytest.mark.parametrize("number", [1, 2, 3, 5, 9, 17, 33, 65, 129, 257, 513])
@pytest.mark.parametrize(
    "arguments",
    [["generate", "-p", "Hello!"], ["models"], ["chat"]],
    ids=lambda arguments: arguments[0],
)
def test_ctrl_c_during_the_start_is_quiet(number: int, arguments: list[str]) -> None:
    """At each of the modules that are imported, ours and those of others: exit code 130."""
    result = pressed(number, arguments)
    if result.returncode == 0:  # it has fewer modules
        assert number > 100
        return
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_ctrl_c_after_the_end_is_quiet() -> None:
    """While the interpreter cleans up."""
    code = (
        "import atexit, os, signal, sys\n"
        "atexit.register(signal.raise_signal, signal.SIGINT)\n"
        "sys.argv[:] = ['mlxrunner', '--version']\n"
        "from mlxrunner.__main__ import main\n"
        "main()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (130, "")
    assert result.stdout.startswith("mlxrunner ")


def test_a_ctrl_c_that_the_parent_ignores_stays_ignored() -> None:
    """A shell ignores it for a background job."""
    code = PRESS.format(first=STARTED, number=5, arguments=["--version"])
    result = subprocess.run(
        ["sh", "-c", 'trap "" INT; exec "$0" -c "$1"', sys.executable, code],
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_the_command_and_the_module_start_alike() -> None:
    """The installed command is the same function."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"mlxrunner": "mlxrunner.__main__:main"}


def test_a_command_raises_what_the_start_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program can save and clean up."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    try:
        early.begin()
        signal.raise_signal(signal.SIGINT)
        assert left == [130]
        assert early.hand_over()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert not early.hand_over()
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_before_anything_is_set_up_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first lines of the program can be interrupted, too."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(early, "begin", interrupted)
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == early.INTERRUPTED
