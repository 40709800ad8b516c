"""The files in `golden/` hold what users see: help, an event, a log and a report.

`UPDATE_GOLDEN=1 pytest tests/test_golden.py` writes the files again; read the difference before you
commit it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from support.events import afternoon
from support.golden import GOLDEN, check

from mlxrunner import cli
from mlxrunner.cli.program import USED

WIDTH = {"COLUMNS": "80", "TERMINAL_WIDTH": "80", "MLXRUNNER_MODEL": "demo", "NO_COLOR": "1"}
VOLATILE = re.compile(r"(_s|_rate|_bytes)$|^(id|time|process|fingerprint)$")
"""Names of what differs between two runs: times, rates, sizes, and who asked when."""
SAME_EACH_TIME = ("--speculate", "lookup")
"""Options of a command whose number of guessed tokens does not depend on measured times."""
TYPES = {type(None): "null", str: "string", bool: "boolean", int: "integer", float: "number"}


def run(*arguments: str, stdin: str = "") -> Result:
    """Run the program in this process, on a terminal of 80 columns."""
    result = CliRunner().invoke(
        cli.main, arguments, input=stdin, env=WIDTH, prog_name="mlxrunner", terminal_width=80
    )
    assert result.exit_code == 0, result.output
    return result


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of each command, the program itself (an empty path) first."""
    yield path
    for name, found in sorted(getattr(command, "commands", {}).items()):
        yield from commands(found, (*path, name))


PATHS = list(commands(cli.main))


def help_file(path: tuple[str, ...]) -> str:
    return f"help/{'-'.join(('mlxrunner', *path))}.txt"


@pytest.mark.exhaustive(len(PATHS))
@pytest.mark.parametrize("path", PATHS, ids=lambda path: " ".join(path) or "mlxrunner")
def test_the_help_of_a_command(path: tuple[str, ...]) -> None:
    """A new command fails here until its help has a golden file."""
    flag = "--help-all" if path and path[-1] in USED else "--help"
    check(help_file(path), run(*path, flag).stdout)


def test_each_help_file_belongs_to_a_command() -> None:
    """A command that is removed or renamed leaves no file behind."""
    found = {str(file.relative_to(GOLDEN)) for file in (GOLDEN / "help").iterdir()}
    assert found == {help_file(path) for path in PATHS}


def test_an_event_has_these_fields_in_this_order(tmp_path: Path) -> None:
    """Two requests of the demo model, the second of which diverges in its first message."""
    events = tmp_path / "events.jsonl"
    turns = "My name is Ana.\n/undo\nMy name is Bob. What is my name?\n"
    run("chat", "--events", str(events), "--max-tokens", "12", *SAME_EACH_TIME, stdin=turns)
    event = json.loads(events.read_text().splitlines()[-1])
    assert (event["outcome"], event["reason"]) == ("partial", "diverged")
    check("event.txt", "".join(f"{line}\n" for line in described("", event)))


def described(path: str, value: Any) -> Iterator[str]:
    """Yield `path: type = value` of each leaf in order, without values that differ by run."""
    if isinstance(value, dict):
        yield f"{path}: object" if path else "object"
        for name, inner in value.items():
            yield from described(f"{path}.{name}".removeprefix("."), inner)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        yield f"{path}: array"
        for number, item in enumerate(value):
            yield from described(f"{path}[{number}]", item)
    elif isinstance(value, list):  # hashes of tokens, salted per process
        yield (
            f"{path}: array of {len(value)} "
            f"{' or '.join(sorted({TYPES[type(item)] for item in value}))}"
        )
    elif value is None or not VOLATILE.search(path.rpartition(".")[2]):
        yield f"{path}: {TYPES[type(value)]} = {json.dumps(value)}"
    else:
        yield f"{path}: {TYPES[type(value)]}"


def test_the_log_of_generate_v() -> None:
    """One line of `name=value` pairs on stderr, the answer alone on stdout."""
    result = run("generate", "-v", "--prompt", "My name is Ana. What is my name?")
    pairs = [pair.partition("=") for pair in result.stderr.split()]
    masked = [
        f"{name}=..." if VOLATILE.search(name) else f"{name}={value}" for name, _, value in pairs
    ]
    check("generate-v.txt", f"stdout:\n{result.stdout}stderr:\n{' '.join(masked)}\n")


def test_the_report_of_an_afternoon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has 60 made-up requests, which are the same each time."""
    monkeypatch.chdir(tmp_path)
    Path("events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in afternoon(60)))
    check("report.txt", run("report", "events.jsonl").stdout)
