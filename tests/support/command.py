"""The program in this process, as a user types it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from click.testing import CliRunner, Result
from support.waiting import PATIENCE_S

from mlxrunner import cli


def run(*arguments: object, stdin: str | bytes = "", **env: str) -> Result:
    return CliRunner().invoke(cli.main, [*map(str, arguments)], input=stdin, env=env)


def in_shell(words: str, **given: Any) -> subprocess.CompletedProcess[str]:
    """Run the program in a process of its own, as a shell starts it: with redirections."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | given
    line = f"{sys.executable} -m mlxrunner {words}"
    return subprocess.run(line, shell=True, text=True, timeout=PATIENCE_S, **streams)
