"""Damaged or made-up logs end in figures or one line in report, explain and simulate."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.events import afternoon, example_event

from mlxrunner import cli
from mlxrunner.profiling.profile import Profile
from mlxrunner.profiling.tokenlog import are_ids
from mlxrunner.testing import oracle_runner

TRIES = 80
VALUES: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**53, 2**53 + 1, 10**30, 10**400, 1e308, 0.5, 1e-320, "", "x",
    "\x00", "\u202e\x1b[31m", "a" * 10**5, "\ud800", [], {}, [[]], [None], [2**40],
    [1, "a" * 10**5], {"a": {}}, "NaN", "2026-99-99T00:00:00Z", "0001-01-01T00:00:00Z", "=1+1",
    [0] * 5000,
]  # fmt: skip  # values by rows
RAW = [
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"9" * 5000,
    b"[" * 10**5 + b"]" * 10**5,
    b'{"a":' * 5000 + b"1" + b"}" * 5000,
    b'"\xff"',
]
WHOLE = [b"", b"\n", b"\0" * 5000, b"\xff" * 100, b"\x1f\x8b123", b"null", b"[]", b"{" * 10**5]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every value in it, as what holds it and its key."""
    keys = (
        list(value)
        if isinstance(value, dict)
        else range(min(len(value), 20))
        if isinstance(value, list)
        else ()
    )
    for key in keys:
        yield value, key
        yield from places(value[key])


def mutated(rng: random.Random, log: bytes) -> bytes:
    """Return the lines with values replaced or left out, raw bytes, repeats, or an early end."""
    lines = log.splitlines()
    kind = rng.choice(["values", "values", "values", "raw", "bytes", "cut", "lines", "whole"])
    if kind == "values":
        for _ in range(rng.choice([1, 3, 40])):
            number = rng.randrange(len(lines))
            line = json.loads(lines[number])
            if not (found := list(places(line))):
                continue
            holder, key = rng.choice(found)
            if isinstance(holder, dict) and rng.random() < 0.15:
                del holder[key]
            else:
                holder[key] = rng.choice(
                    [*VALUES, *([holder[key] * 10**6] if type(holder[key]) is int else [])]
                )
            lines[number] = json.dumps(line).encode()
    elif kind == "raw":
        number = rng.randrange(len(lines))
        found = list(
            re.finditer(rb':(-?[0-9.]+|null|true|"[^"]*")', lines[number].replace(b": ", b":"))
        )
        if found:
            place, line = rng.choice(found), lines[number].replace(b": ", b":")
            lines[number] = line[: place.start() + 1] + rng.choice(RAW) + line[place.end() :]
    elif kind == "bytes":
        changed = bytearray(log)
        for _ in range(rng.choice([1, 50])):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed)
    elif kind == "cut":
        return log[: rng.randrange(len(log))]
    elif kind == "lines":
        lines = [line for line in lines for _ in range(rng.choice([0, 1, 1, 5]))]
        rng.shuffle(lines)
    else:
        return rng.choice(WHOLE)
    return b"\n".join(lines)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Events, and a token log of requests on layers of all kinds."""
    file = tmp_path_factory.mktemp("logs") / "log"
    runner, profile = (
        oracle_runner(["full", "sliding", "recurrent"], checkpoint_interval=10),
        Profile(tokens=file),
    )
    profile.watch(runner)
    for number in range(8):
        list(
            runner.generate([*range(1, 30 + number), 200 - number], max_tokens=5, overflow="shift")
        )
    profile.finish()
    events = "".join(json.dumps(event) + "\n" for event in [*afternoon(12), example_event()])
    return {"events": events.encode(), "tokens": file.read_bytes()}


@pytest.mark.exhaustive(2)
@pytest.mark.parametrize("command", ["report", "explain", "simulate"])
def test_a_damaged_log_is_read_as_far_as_it_can_be(
    command: str, logs: dict[str, bytes], tmp_path: Path
) -> None:
    """The exit code is 0, or 2 with one line that says why; pages and traces are whole."""
    file, codes = tmp_path / "log.jsonl", set()
    wanted = {
        "report": [
            "--html",
            str(tmp_path / "page"),
            "--csv",
            str(tmp_path / "rows"),
            "--trace",
            str(tmp_path / "trace"),
        ],
        "explain": ["--last"],
        "simulate": [],
    }[command]
    for seed in range(TRIES):
        rng = random.Random(f"{command} {seed}")
        log = logs["tokens" if command == "simulate" else "events"]
        file.write_bytes(mutated(rng, log))
        (tmp_path / "log.jsonl.1").write_bytes(mutated(rng, log))
        result = CliRunner().invoke(cli.main, [command, str(file), *wanted])
        codes.add(result.exit_code)
        assert result.exit_code in (0, 2), f"{command} {seed}: {result.stderr[:300]}"
        assert "internal error" not in result.stderr, f"{command} {seed}: {result.stderr[:300]}"
        assert isinstance(result.exception, SystemExit | None), (
            f"{command} {seed}: {result.exception!r}"
        )
        assert len(result.stderr) < 2000
        if result.exit_code == 2:
            assert result.stderr.count("\n") == 1, f"{command} {seed}: {result.stderr[:300]}"
        elif command == "report":
            json.loads((tmp_path / "trace").read_bytes())
            assert (tmp_path / "page").read_text().endswith("</html>\n")
    assert codes == {0, 2}


def test_a_text_among_token_ids_takes_no_memory() -> None:
    """Numpy would allocate its length for each of the others."""
    assert not are_ids([1] * 10**5 + ["a" * 10**6])
    assert not are_ids([1, True])
    assert not are_ids([2**40])
    assert are_ids([1, 2, 3])
