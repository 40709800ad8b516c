"""A replay tells the four counts of a real run."""

from __future__ import annotations

import random
from pathlib import Path

from support.accounts import FullMemory, writers

from mlxrunner.profiling.profile import Profile
from mlxrunner.profiling.replay.trials import simulate
from mlxrunner.testing import oracle_runner


def test_a_replay_counts_as_the_run_did(tmp_path: Path) -> None:
    """Conversations of one client, with all kinds of edits, on one entry."""
    rng, log, events = random.Random(3), tmp_path / "tokens", list[dict[str, int]]()
    runner, memory = oracle_runner(["full"], context=2000), FullMemory()
    names = "prompt cached missed displaced new".split()

    def keep(event: object) -> None:
        events.append({name: getattr(event, f"{name}_tokens") for name in names})

    talks = writers(rng)
    for one in talks:
        one.name = ("", None)
    with Profile(tokens=log, sinks=[keep]).watch(runner):
        for _ in range(30):
            one = rng.choice(talks)
            result = runner.complete(one.prompt, max_tokens=5, stop_tokens=[])
            memory.check(one.prompt, one.name, result.usage)
            memory.add(one.prompt, list(result.tokens), one.name)
            one.go_on(list(result.tokens))
    row = simulate([log]).rows[0].as_dict()
    assert {name: row[name] for name in names} == {
        name: sum(event[name] for event in events) for name in names
    }
    assert row["missed"] > 0
    assert row["displaced"] > 0
