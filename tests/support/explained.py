"""Events as a user reads them: in the words of `mlxrunner explain`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from mlxrunner import cli

Lines = Callable[[Path], list[dict[str, Any]]]


def run(*arguments: Any, stdin: str = "", code: int = 0) -> Result:
    result = CliRunner().invoke(cli.main, [str(argument) for argument in arguments], input=stdin)
    assert result.exit_code == code, result.stderr
    return result


def said(events: Path) -> str:
    """Return `mlxrunner explain EVENTS --last` as one line in lower case."""
    return " ".join(run("explain", events, "--last").stdout.lower().split())
