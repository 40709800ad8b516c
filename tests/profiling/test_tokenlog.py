"""The token log: what the entry was asked, again as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checks import has, read_lines, write_lines
from support.events import run

from mlxrunner.profiling.profile import Profile
from mlxrunner.profiling.tokenlog import ANEW, read_token_log
from mlxrunner.testing import oracle_runner


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Where the token log goes."""
    return tmp_path / "tokens.jsonl"


def asked(log: Path, *prompts: list[int], most: int = 1, **options: Any) -> Any:
    """Return an oracle runner that has answered the prompts with a token log."""
    runner = oracle_runner(**options)
    with Profile(tokens=log).watch(runner):
        for prompt in prompts:
            list(runner.generate(prompt, max_tokens=most))
    return runner


def test_every_request_comes_back_whole(log: Path) -> None:
    """Prompt, answer and the runner's acts come back, also of an interrupted request."""
    runner, profile = oracle_runner(prefill_step=4), Profile(tokens=log)
    profile.watch(runner)
    wanted = []

    def ask(prompt: list[int]) -> None:
        usage = list(runner.generate(prompt, max_tokens=3))[-1].usage
        assert usage is not None
        answer, found = list(runner.entry.tokens)[len(prompt) :], usage.cache.matched_tokens
        wanted.append((prompt, answer, found, usage.cached_tokens))

    def press(done: int, total: int) -> None:
        if done >= 10:
            raise KeyboardInterrupt

    long = [*range(1, 20)]
    for prompt in ([1, 2, 3, 4, 5], None, [1, 2, 9, 9], [1, 2, 9, 9]):
        ask(prompt or [*runner.entry.tokens, 6, 7])
    with pytest.raises(KeyboardInterrupt):
        list(runner.generate(long, progress=press))
    wanted.append((long, [], 2, 2))
    ask(long)
    profile.finish()
    read = read_token_log([log])
    lines = list(read)
    facts = [(one.facts["matched"], one.facts["cached"]) for one in lines]
    whole = [(one.prompt.tolist(), one.answer.tolist()) for one in lines]
    assert [(*one, *counts) for one, counts in zip(whole, facts, strict=True)] == wanted
    assert read.skipped.total() == 0
    has(lines[4].facts, evaluated=10, entry_after=10)
    process = lines[0].process
    has(process, context=4096, prefill_step=4, checkpoint_interval=1024)
    assert [(layer["kind"], layer["count"]) for layer in process["layers"]] == [("full", 2)]


def test_a_turn_takes_a_line_of_a_turn(log: Path) -> None:
    """Not of a conversation; and now and then one that stands for itself."""
    runner, profile = oracle_runner(), Profile(tokens=log)
    profile.watch(runner)
    prompt = list(range(1, 200))
    for turn in range(ANEW + 2):
        prompt = [*(list(runner.entry.tokens) or prompt), turn]
        list(runner.generate(prompt, max_tokens=2))
    profile.finish()
    requests = [line for line in read_lines(log) if line["kind"] == "request"]
    assert all(len(line["prompt"]) <= 2 for line in requests[1:] if line["shared"])
    assert [line["number"] for line in requests if not line["shared"]] == [1, ANEW + 1]
    assert list(read_token_log([log]))[-1].prompt.tolist() == prompt


def test_a_shifted_entry_is_written_whole(log: Path) -> None:
    """It is no longer the beginning of prompt and answer."""
    runner = oracle_runner(context=24)
    with Profile(tokens=log).watch(runner):
        list(runner.generate(list(range(1, 20)), max_tokens=10, overflow="shift", keep=2))
    (request,) = read_token_log([log])
    assert request.facts["entry"] == list(runner.entry.tokens)
    assert request.facts["shifted"] > 0
    assert request.prompt.tolist() == list(range(1, 20))


def test_a_lost_line_takes_those_that_share_with_it(log: Path) -> None:
    asked(log, [1, 2], [1, 2, 3], [1, 2, 4], [7, 8])
    whole = log.read_text().splitlines()
    log.write_text("\n".join([whole[0], whole[1], whole[2][:40], "{}", *whole[3:]]))
    read = read_token_log([log])
    assert [one.prompt.tolist() for one in read] == [[1, 2], [7, 8]]
    assert dict(read.skipped) == {"unreadable": 1, "foreign": 1, "lost": 1}


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": [-1]},
        {"prompt": "x"},
        {"prompt": [1.5]},
        {"prompt": [2**40]},
        {"prompt": [1, True]},
        {"prompt": [1, "a"]},
        {"kind": "reply"},
        {"cells": 2**60},
        {"conversation": ["a", 1, True]},
        {"answer": None},
        {"shared": -1},
        {"shared": 10**6},
        {"number": True},
    ],
    ids=str,
)
def test_a_line_that_makes_no_sense_is_skipped(log: Path, change: dict[str, Any]) -> None:
    asked(log, [1, 2], [1, 2, 3])
    whole = log.read_text().splitlines()
    log.write_text("\n".join([*whole[:2], json.dumps(json.loads(whole[2]) | change)]))
    read = read_token_log([log])
    assert len(list(read)) == 1
    assert read.skipped.total() == 1


def test_a_log_of_an_earlier_program_is_read(log: Path) -> None:
    asked(log, [1, 2, 3], most=3)
    process, request = read_lines(log)
    request |= {"freed_by": request.pop("evicted_by"), "beside": {"slot": 0}}
    write_lines(log, [process, request])
    (one,) = read_token_log([log])
    assert (one.facts["evicted_by"], one.facts["scheduling"]) == (None, {"slot": 0})


def test_the_layers_of_other_models_are_told(log: Path) -> None:
    kinds = ("sliding", "full", "recurrent", "sliding")
    runner = asked(log, [1, 2, 3, 4], most=2, kinds=kinds, rewind_slack=5)
    (request,) = read_token_log([log])
    told = {layer["kind"]: layer for layer in request.process["layers"]}
    has(told["full"], count=1, needs_checkpoints=False)
    has(told["recurrent"], count=1, needs_checkpoints=True)
    has(told["sliding"], count=2, needs_checkpoints=True, slack=5)
    assert told["sliding"]["window"] > 0
    assert told["recurrent"]["checkpoint_fixed"] > 0
    assert request.facts["checkpoints"] == runner.entry.checkpoints.offsets
    assert np.array_equal(request.prompt, [1, 2, 3, 4])


def test_the_command_line_writes_it(log: Path) -> None:
    run("generate", "-p", "Hello!", "--repeat", 2, "--log-tokens", log)
    first, second = read_token_log([log])
    assert np.array_equal(first.prompt, second.prompt)
    assert first.process["model"] == "demo"
    assert log.stat().st_mode & 0o777 == 0o600
