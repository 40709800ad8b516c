"""Damaged or made-up logs end in figures or one line in report, explain and simulate."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.damage import BROKEN, FOREIGN, HOSTILE, Raw, changed, encoded, scrambled
from support.events import afternoon, example_event

from mlxrunner import cli
from mlxrunner.profiling.profile import Profile
from mlxrunner.testing import oracle_runner

TRIES = 80


def mutated(rng: random.Random, log: bytes) -> bytes:
    """Return the lines with other values, repeats, or other bytes; or something else."""
    lines = log.splitlines()
    kind = rng.choice(["values", "values", "values", "broken", "bytes", "lines", "whole"])
    if kind == "bytes":
        return scrambled(rng, log)
    if kind == "whole":
        return rng.choice([*FOREIGN.values()])
    if kind == "lines":
        lines = [line for line in lines for _ in range(rng.choice([0, 1, 1, 5]))]
        rng.shuffle(lines)
    else:
        values = HOSTILE if kind == "values" else [*BROKEN, Raw("NaN"), Raw("1e999")]
        for _ in range(rng.choice([1, 3, 40]) if kind == "values" else 1):
            number = rng.randrange(len(lines))
            line = json.loads(lines[number])
            changed(rng, line, values)
            lines[number] = encoded(line).encode("utf-8", "surrogatepass")
    return b"\n".join(lines)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Events, and a token log of requests on layers of all kinds."""
    file = tmp_path_factory.mktemp("logs") / "log"
    runner = oracle_runner(["full", "sliding", "recurrent"], checkpoint_interval=10)
    with Profile(tokens=file).watch(runner):
        for number in range(8):
            prompt = [*range(1, 30 + number), 200 - number]
            list(runner.generate(prompt, max_tokens=5, overflow="shift"))
    events = "".join(json.dumps(event) + "\n" for event in [*afternoon(12), example_event()])
    return {"events": events.encode(), "tokens": file.read_bytes()}


@pytest.mark.exhaustive(2)
@pytest.mark.parametrize("command", ["report", "explain", "simulate"])
def test_a_damaged_log_is_read_as_far_as_it_can_be(
    command: str, logs: dict[str, bytes], tmp_path: Path
) -> None:
    """The exit code is 0, or 2 with one line that says why; pages and traces are whole."""
    file, codes = tmp_path / "log.jsonl", set()
    results = f"--html {tmp_path}/page --csv {tmp_path}/rows --trace {tmp_path}/trace"
    wanted = {"report": results, "explain": "--last", "simulate": ""}[command].split()
    for seed in range(TRIES):
        rng = random.Random(f"{command} {seed}")
        log = logs["tokens" if command == "simulate" else "events"]
        file.write_bytes(mutated(rng, log))
        (tmp_path / "log.jsonl.1").write_bytes(mutated(rng, log))
        result = CliRunner().invoke(cli.main, [command, str(file), *wanted])
        codes.add(result.exit_code)
        told = f"{command} {seed}: {result.exception!r} {result.stderr[:300]}"
        assert result.exit_code in (0, 2), told
        assert "internal error" not in result.stderr, told
        assert isinstance(result.exception, SystemExit | None), told
        assert len(result.stderr) < 2000
        if result.exit_code == 2:
            assert result.stderr.count("\n") == 1, told
        elif command == "report":
            json.loads((tmp_path / "trace").read_bytes())
            assert (tmp_path / "page").read_text().endswith("</html>\n")
    assert codes == {0, 2}
