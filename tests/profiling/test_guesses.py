"""Guesses in a token log are those that the runner makes."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from mlxrunner import Runner, cli
from mlxrunner.profiling.profile import Profile
from mlxrunner.profiling.replay.trials import Guesses
from mlxrunner.profiling.tokenlog import read_token_log

PROMPTS = [
    *["My name is Zorblin. What is my name?"] * 2,
    *["Tell me a story about a bird and a bird."] * 2,
    "Say the same: one two three one two three one two three",
]


def test_a_log_is_guessed_as_its_runner_guessed(tmp_path: Path) -> None:
    """Passes, and guessed and right tokens of each source, in answers of full length."""
    file = tmp_path / "log"
    guesses, expected = Guesses(), []
    with Runner.load("demo", reserve=False) as runner:
        Profile(tokens=file).watch(runner)
        for text in PROMPTS:
            for count in (60, 40):
                options = {"max_tokens": count, "stop_tokens": [], "speculate": "lookup"}
                usage = runner.complete(text, **options).usage
                drafts = {one.source: (one.drafted, one.accepted) for one in usage.drafts}
                right = sum(accepted for _, accepted in drafts.values())
                expected.append((count - 1 - right, drafts))
    found = []
    for logged in read_token_log([file]):
        guesses.add(logged, is_beside=False)
        counts = {name: (one.drafted, one.accepted) for name, one in guesses.by_source.items()}
        found.append((guesses.passes, counts))
        guesses.passes = 0
        guesses.by_source.clear()
    assert found == expected
    assert {source for _, drafts in found for source in drafts} == {"earlier", "lookup"}


def test_simulate_says_what_guesses_save(tmp_path: Path) -> None:
    """In words and as JSON, and only if it is asked to."""
    file = tmp_path / "log"
    with Runner.load("demo", reserve=False) as runner:
        Profile(tokens=file).watch(runner)
        for _ in range(2):
            runner.complete(PROMPTS[0], max_tokens=20, stop_tokens=[])
    run = CliRunner()
    said = run.invoke(cli.main, ["simulate", str(file), "--speculate", "lookup"])
    assert said.exit_code == 0, said.output
    found = json.loads(
        run.invoke(cli.main, ["simulate", str(file), "--speculate", "lookup", "--json"]).stdout
    )["guesses"]
    assert found["tokens"] == 2 * 19
    assert found["passes"] == 38 - sum(one["accepted"] for one in found["drafts"]) < 30
    words = " ".join(said.stdout.split())
    assert f"{found['passes']} forward passes for the answers instead of 38." in words
    plain = run.invoke(cli.main, ["simulate", str(file), "--json"]).stdout
    assert "guesses" not in json.loads(plain)
