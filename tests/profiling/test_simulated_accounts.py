"""A replay tells the four counts of a real run."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.accounts import ASK, FullMemory, writers
from support.engine import Engine
from support.histories import tiny_parts

from mlxrunner.profiling.profile import Profile
from mlxrunner.profiling.replay.trials import simulate
from mlxrunner.testing import oracle_runner

RUNNERS: dict[str, Callable[[], Any]] = {
    "one entry": lambda: oracle_runner(["full"], context=2000),
    "two slots": lambda: Engine(*tiny_parts("llama"), max_sequences=2, context=2000),
}


@pytest.mark.parametrize("kind", RUNNERS)
def test_a_replay_counts_as_the_run_did(tmp_path: Path, kind: str) -> None:
    """Conversations of several clients and sessions, with all kinds of edits."""
    rng, log, events = random.Random(3), tmp_path / "tokens", list[dict[str, int]]()
    runner, memory, talks = RUNNERS[kind](), FullMemory(), writers(rng)
    names = "prompt cached missed displaced new".split()

    def keep(event: object) -> None:
        events.append({name: getattr(event, f"{name}_tokens") for name in names})

    with Profile(tokens=log, sinks=[keep]).watch(runner):
        for _ in range(30):
            one = rng.choice(talks)
            result = runner.complete(one.tokenized(), **ASK)
            memory.check(one.prompt, one.name, result.usage)
            memory.add(one.prompt, result, one.name)
            one.go_on(list(result.tokens))
    row = simulate([log]).rows[0].as_dict()
    assert {name: row[name] for name in names} == {
        name: sum(event[name] for event in events) for name in names
    }
    assert row["missed"] > 0
    assert row["displaced"] > 0
