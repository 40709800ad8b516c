"""The token log: what the entry was asked, again as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from support.checks import ends, has, read_lines, write_lines

from mlxrunner import cli
from mlxrunner.profiling.profile import Profile
from mlxrunner.profiling.tokenlog import ANEW, read_token_log
from mlxrunner.testing import oracle_runner


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Where the token log goes."""
    return tmp_path / "tokens.jsonl"


def watched(log: Path, **options: Any) -> Any:
    """Return an oracle runner with a token log, and its list of (prompt, entry afterwards).

    The list fills as the runner is asked.
    """
    runner, profile = oracle_runner(**options), Profile(tokens=log)
    profile.watch(runner)
    return runner, profile


def test_every_request_comes_back_whole(log: Path) -> None:
    """Prompt, answer and the runner's acts come back, also of an interrupted request."""
    runner, profile = watched(log, prefill_step=4)
    asked = []

    def ask(prompt: list[int], **options: Any) -> None:
        usage = list(runner.generate(prompt, max_tokens=3, **options))[-1].usage
        asked.append(
            (
                prompt,
                list(runner.entry.tokens)[len(prompt) :],
                usage.cache.matched_tokens,
                usage.cached_tokens,
            )
        )

    ask([1, 2, 3, 4, 5])
    ask([*runner.entry.tokens, 6, 7])
    ask([1, 2, 9, 9])
    ask([1, 2, 9, 9])
    with pytest.raises(KeyboardInterrupt):
        list(
            runner.generate(
                [*range(1, 20)], progress=lambda done, total: 1 / 0 if done < 0 else press(done)
            )
        )
    asked.append(([*range(1, 20)], [], 2, 2))
    ask([*range(1, 20)])
    profile.finish()
    read = read_token_log([log])
    found = [
        (one.prompt.tolist(), one.answer.tolist(), one.facts["matched"], one.facts["cached"])
        for one in read
    ]
    assert found == asked
    assert read.skipped.total() == 0
    interrupted = list(read)[4].facts
    assert (interrupted["evaluated"], interrupted["entry_after"]) == (10, 10)
    process = next(iter(read)).process
    has(process, context=4096, prefill_step=4, checkpoint_interval=1024)
    assert [(layer["kind"], layer["count"]) for layer in process["layers"]] == [("full", 2)]


def press(done: int) -> None:
    if done >= 10:
        raise KeyboardInterrupt


def test_a_turn_takes_a_line_of_a_turn(log: Path) -> None:
    """Not of a conversation; and now and then one that stands for itself."""
    runner, profile = watched(log)
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
    runner, profile = watched(log, context=24)
    list(runner.generate(list(range(1, 20)), max_tokens=10, overflow="shift", keep=2))
    profile.finish()
    (request,) = read_token_log([log])
    assert request.facts["entry"] == list(runner.entry.tokens)
    assert request.facts["shifted"] > 0
    assert request.prompt.tolist() == list(range(1, 20))


def test_a_lost_line_takes_those_that_share_with_it(log: Path) -> None:
    """It takes no more; others are read, each with its count."""
    runner, profile = watched(log)
    for prompt in ([1, 2], [1, 2, 3], [1, 2, 4], [7, 8]):
        list(runner.generate(prompt, max_tokens=1))
    profile.finish()
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
        {"answer": None},
        {"shared": -1},
        {"shared": 10**6},
        {"number": True},
    ],
    ids=str,
)
def test_a_line_that_makes_no_sense_is_skipped(log: Path, change: dict[str, Any]) -> None:
    """Anything may be in it."""
    runner, profile = watched(log)
    for prompt in ([1, 2], [1, 2, 3]):
        list(runner.generate(prompt, max_tokens=1))
    profile.finish()
    whole = log.read_text().splitlines()
    log.write_text("\n".join([*whole[:2], json.dumps(json.loads(whole[2]) | change)]))
    read = read_token_log([log])
    assert len(list(read)) == 1
    assert read.skipped.total() == 1


def test_a_log_of_an_earlier_program_is_read(log: Path) -> None:
    """Its fields have other names."""
    runner, profile = watched(log)
    list(runner.generate([1, 2, 3], max_tokens=3))
    profile.finish()
    process, request = read_lines(log)
    request |= {"freed_by": request.pop("evicted_by"), "beside": {"slot": 0}}
    write_lines(log, [process, request])
    (one,) = read_token_log([log])
    assert (one.facts["evicted_by"], one.facts["scheduling"]) == (None, {"slot": 0})


def test_the_layers_of_other_models_are_told(log: Path) -> None:
    """A window and a state have what is needed to replay them."""
    runner, profile = watched(
        log, kinds=("sliding", "full", "recurrent", "sliding"), rewind_slack=5
    )
    list(runner.generate([1, 2, 3, 4], max_tokens=2))
    profile.finish()
    (request,) = read_token_log([log])
    told = {layer["kind"]: layer for layer in request.process["layers"]}
    assert [(kind, layer["count"], layer["needs_checkpoints"]) for kind, layer in told.items()] == [
        ("sliding", 2, True),
        ("full", 1, False),
        ("recurrent", 1, True),
    ]
    assert told["sliding"]["slack"] == 5
    assert told["sliding"]["window"] > 0
    assert told["recurrent"]["checkpoint_fixed"] > 0
    assert request.facts["checkpoints"] == runner.entry.checkpoints.offsets
    assert np.array_equal(request.prompt, [1, 2, 3, 4])


def test_the_command_line_writes_it(log: Path) -> None:
    """--log-tokens, for the owner only."""
    ends(
        CliRunner().invoke(
            cli.main, ["generate", "-p", "Hello!", "--repeat", "2", "--log-tokens", str(log)]
        ),
        0,
    )
    first, second = read_token_log([log])
    assert np.array_equal(first.prompt, second.prompt)
    assert first.process["model"] == "demo"
    assert log.stat().st_mode & 0o777 == 0o600
