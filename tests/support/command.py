"""The program in this process, as a user types it."""

from __future__ import annotations

from click.testing import CliRunner, Result

from mlxrunner import cli


def run(*arguments: object, stdin: str | bytes = "", **env: str) -> Result:
    return CliRunner().invoke(cli.main, [*map(str, arguments)], input=stdin, env=env)
