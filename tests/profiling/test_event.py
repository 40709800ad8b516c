"""An event says what happened, in the fields of the schema, however the request ended."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner
from support.checks import ends, read_lines
from support.engine import Engine
from support.waiting import PATIENCE_S, until

from event_schema import event_schema
from mlxrunner import cli
from mlxrunner.errors import BusyError, ContextFullError
from mlxrunner.profiling.profile import Profile, logfmt
from mlxrunner.profiling.schema import Event
from mlxrunner.runner import Runner
from mlxrunner.testing import oracle_runner


@pytest.fixture
def runner(events: Path) -> Runner:
    """An oracle runner whose requests are written to `events`."""
    runner = oracle_runner(("full", "sliding"), prefill_step=16, context=128)
    Profile("python", events=events).watch(runner)
    return runner


def checked(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events, after holding them against the schema and against themselves."""
    for event in events:
        jsonschema.validate(event, event_schema(), format_checker=jsonschema.FormatChecker())
        left = event["prompt_tokens"] - event["cached_tokens"] - event["evaluated_tokens"]
        assert left == 0 or (left > 0 and event["finish"] in ("interrupted", "error"))
        assert event["lost_tokens"] <= event["evaluated_tokens"] + event["prefetched_tokens"]
        assert event["trimmed_tokens"] >= 0
        assert event["used_bytes"] <= event["cache_bytes"]
        spans = [(span["start_s"], span["duration_s"]) for span in event["spans"]]
        assert [start for start, _ in spans] == sorted(start for start, _ in spans)
        assert all(start + took <= event["total_s"] + 1e-6 for start, took in spans)
    return events


def test_each_request_is_one_event_of_the_schema(runner: Runner, events: Path) -> None:
    """Each kind of request, sampling and ending gives one event of the schema."""
    prompt = list(range(1, 50))
    list(runner.generate(prompt, max_tokens=3))
    list(runner.generate([*prompt, 60, 61], max_tokens=1))
    list(runner.generate(prompt, max_tokens=5, temperature=1, seed=1, logprobs=2))
    list(runner.generate([*prompt[:40], 99], max_tokens=5))
    list(runner.generate("text", max_tokens=60, overflow="shift", keep=1))
    list(runner.generate([{"role": "user", "content": "x" * 60}], max_tokens=90, overflow="shift"))
    with pytest.raises(ContextFullError):
        list(runner.generate("x" * 120, overflow="error"))
    found = checked(read_lines(events))
    assert [event["number"] for event in found] == list(range(1, 8))
    assert [event["finish"] for event in found] == [*["length"] * 6, "error"]
    kinds = [event["prompt_kind"] for event in found]
    assert kinds == [*["tokens"] * 4, "text", "messages", "text"]
    assert found[-1]["error"] == "ContextFullError"
    assert found[-2]["shifted_tokens"] > 0
    assert len({event["id"] for event in found}) == 7
    assert len({event["process"] for event in found}) == 1
    moment = datetime.fromisoformat(found[0]["time"])
    assert timedelta(0) <= datetime.now(UTC) - moment < timedelta(minutes=5)


def test_the_spans_are_the_chunks_that_were_run(runner: Runner, events: Path) -> None:
    """Nothing else is counted in a rate; the first token is not decode's."""
    usage = list(runner.generate(list(range(1, 50)), max_tokens=7))[-1].usage
    (event,) = checked(read_lines(events))
    assert usage is not None
    prefill = [span for span in event["spans"] if span["name"] == "prefill"]
    assert sum(span["tokens"] for span in prefill) == 49
    assert max(span["tokens"] for span in prefill) <= 16
    took = sum(span["duration_s"] for span in prefill)
    assert event["prefill_rate"] == pytest.approx(49 / took, rel=0.01)
    assert event["decode_rate"] == pytest.approx(6 / event["decode_s"], rel=0.01)
    names = [span["name"] for span in event["spans"]]
    assert names == ["tokenize", "lookup", *["prefill"] * len(prefill), "decode"]
    assert event["spans"][-1]["tokens"] == 6
    list(runner.generate([1, 2, 3, 99], max_tokens=1))
    again = checked(read_lines(events))[-1]
    assert ("rewind", 52) in [(span["name"], span["tokens"]) for span in again["spans"]]
    assert (again["decode_rate"], again["spans"][-1]["name"]) == (None, "prefill")


def test_what_an_event_has_of_usage_is_the_usage(runner: Runner, events: Path) -> None:
    """Field by field; an abandoned iterator is an interrupted request."""
    for prompt in ([1, 2, 3, 4], [1, 2, 3, 9, 9]):
        usage = list(runner.generate(prompt, max_tokens=4))[-1].usage
        assert usage is not None
        event = read_lines(events)[-1]
        told = usage.as_dict()
        times = "tokenize_s lookup_s prefill_s ttft_s decode_s".split()
        shared = event.keys() & told.keys() - set(times)
        assert {name: event[name] for name in shared} == {name: told[name] for name in shared}
        assert len(shared) >= 17
    chunks = runner.generate([1, 2], max_tokens=9)
    next(chunks)
    chunks.close()  # type: ignore[attr-defined]
    event = checked(read_lines(events))[-1]
    assert (event["finish"], event["completion_tokens"]) == ("interrupted", 1)
    assert event["entry_tokens_after"] == len(runner.entry.tokens)


def test_an_answer_that_is_not_awaited_to_its_last_end_is_no_interrupt(
    runner: Runner, events: Path
) -> None:
    """Whoever stops reading at the last chunk has read all of it."""
    for chunk in runner.generate([1, 2], max_tokens=2):
        if chunk.finish_reason:
            break
    del chunk
    runner.reset()
    assert [event["finish"] for event in read_lines(events)] == ["length"]


@pytest.mark.parametrize("then", ["generate", "evaluate", "keep", "reset"])
def test_a_request_whose_iterator_is_kept_is_told_of_before_the_entry_changes(
    then: str, runner: Runner, events: Path
) -> None:
    """A loop that leaves at the finish reason, and another call while its iterator still lives."""
    first = runner.generate([1, 2, 3, 4, 5], max_tokens=3, stop_tokens=[])
    assert any(chunk.finish_reason for chunk in first)  # stops there
    if then == "generate":
        list(runner.generate([9, 8], max_tokens=2, stop_tokens=[]))
    else:
        ways = {"evaluate": runner.evaluate, "keep": runner.cache.keep}
        ways.get(then, lambda _: runner.reset())([9, 8])
    first.close()  # type: ignore[attr-defined]
    written = checked(read_lines(events))
    assert [event["prompt_tokens"] for event in written] == [5, 2][: len(written)]
    assert [event["entry_tokens_after"] for event in written] == [7, 3][: len(written)]
    assert runner.usage is not None
    assert runner.usage.prompt_tokens == written[-1]["prompt_tokens"]


def test_a_request_that_is_refused_for_another_takes_nothing_from_its_event(
    runner: Runner, events: Path
) -> None:
    first = runner.generate(list(range(1, 40)), max_tokens=3, stop_tokens=[])
    next(first)
    with pytest.raises(BusyError):
        runner.generate([9, 8], max_tokens=2)
    list(first)
    (event,) = checked(read_lines(events))
    assert "prefill" in [span["name"] for span in event["spans"]]


def test_an_exception_in_the_model_is_named_without_its_text(runner: Runner, events: Path) -> None:
    """Texts of errors may hold what nobody wanted to write down."""

    def fail(*_: Any) -> Any:
        raise ValueError("secret")

    with pytest.raises(ValueError, match="secret"):
        list(runner.generate([1, 2], logits_processors=[fail]))
    assert checked(read_lines(events))[-1]["error"] == "ValueError"
    assert "secret" not in events.read_text()


def test_an_observer_that_fails_fails_no_request(caplog: pytest.LogCaptureFixture) -> None:
    runner = oracle_runner()
    runner.observers.append(lambda runner, observation: 1 / 0)
    assert len(list(runner.generate([1, 2], max_tokens=3))) == 3
    assert "the request was not recorded: ZeroDivisionError" in caplog.text


def test_nothing_is_made_that_nobody_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a file, a log level or anybody who listens, a profile only counts."""
    from mlxrunner.profiling import profile as module

    monkeypatch.setattr(module, "event_of", lambda *_: pytest.fail("an event was made"))
    runner, profile = oracle_runner(), Profile()
    profile.watch(runner)
    list(runner.generate([1, 2], max_tokens=2))
    assert profile.number == 1


def test_the_same_answers_with_and_without_events(events: Path) -> None:
    answers = []
    for watched in (False, True):
        runner = oracle_runner(("full", "sliding"))
        if watched:
            Profile(events=events, log_text=True, verify=1).watch(runner)
        prompts = ([1, 2, 3], [1, 2, 9], [1, 2])
        answers.append([[c.token for c in runner.generate(p, max_tokens=5)] for p in prompts])
    assert answers[0] == answers[1]


def test_requests_of_a_parallel_runner_are_events(events: Path) -> None:
    """Each with what it shared; a cancelled one too."""
    profile = Profile("python", events=events)
    messages = [{"role": "user", "content": "My name is Ana. What is my name?"}]
    with Engine.load("demo", max_sequences=2, context=128) as runner:
        profile.watch(runner)
        runner.run([messages, messages], max_tokens=4)
        runner.run(["My name is Bo"], max_tokens=2)
        handle = runner.submit(messages, speculate="off")  # one token for each step
        next(iter(handle))
        handle.cancel()
    profile.finish()
    first, second, third, cancelled = checked(read_lines(events))
    assert (first["reason"], first["run"]) == ("empty", "cold-miss")
    assert (second["outcome"], second["cached_tokens"]) == ("hit", second["prompt_tokens"] - 1)
    assert third["reason"] in ("diverged", "no_common_token")
    assert (cancelled["finish"], cancelled["completion_tokens"]) == ("interrupted", 1)
    assert [event["saved_s"] for event in (first, second, third)] == [None] * 3


@pytest.mark.exhaustive(0)
def test_answers_at_once_are_events_of_the_command(events: Path) -> None:
    """generate --n, and the file comes from the environment."""
    command, given = ["generate", "-p", "Hello!", "--n", "3"], {"MLXRUNNER_EVENTS": str(events)}
    ends(CliRunner().invoke(cli.main, command, env=given), 0)
    found = checked(read_lines(events))
    assert [(e["command"], e["number"]) for e in found] == [("generate", n) for n in (1, 2, 3)]


def test_verbose_logs_the_event_as_logfmt(caplog: pytest.LogCaptureFixture) -> None:
    """Counts and places, no text; one line."""
    logged: list[Event] = []
    runner = oracle_runner()
    Profile("python", log_text=True, sinks=[logged.append]).watch(runner)
    with caplog.at_level(logging.INFO, "mlxrunner"):
        list(runner.generate("hello you", max_tokens=2))
        list(runner.generate("hello there", max_tokens=2))
    first, second = caplog.messages
    head = "command=python number=1 outcome=miss reason=empty prompt_tokens=10 new_tokens=10 "
    assert first.startswith(f"{head}evaluated_tokens=10")
    assert "outcome=partial reason=diverged" in second
    assert "divergence_index=7 divergence_part=text" in second
    assert logged[1].divergence is not None
    assert logged[1].divergence.current.text == "there"
    assert "there" not in second
    assert second == logfmt(logged[1])


def test_logfmt_quotes_what_has_to_be() -> None:
    example = json.loads(Path(__file__).with_name("example.jsonl").read_text().splitlines()[0])
    hostile = {"evicted_by": 'a "reset"\n\x1b[31m', "error": "", "command": "a=b"}
    line = logfmt(Event.of(example | hostile))
    assert r'evicted_by="a \"reset\"\n\u001b[31m"' in line
    assert 'error=""' in line
    assert 'command="a=b"' in line
    assert "\n" not in line


def greetings(count: int, events: str) -> list[str]:
    """The command that answers `count` times and logs to `events`."""
    options = ["-p", "Hello!", "--repeat", str(count), "--events", events]
    return [sys.executable, "-m", "mlxrunner", "generate", *options]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_process_leaves_whole_lines(tmp_path: Path, number: signal.Signals) -> None:
    """In an endless run, Ctrl-C also leaves the event of the request that it ended."""
    file = tmp_path / "events"
    command = greetings(1_000_000, str(file))
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, **quiet)
    until(lambda: file.exists() and file.read_bytes().count(b"\n") >= 3)
    process.send_signal(number)
    process.wait(PATIENCE_S)
    found = checked(read_lines(file))
    assert [event["number"] for event in found] == list(range(1, len(found) + 1))
    assert len(found) >= 3
    if number == signal.SIGINT:
        assert process.returncode == 130


def test_a_full_disk_is_a_warning_and_the_answer_comes(full: int) -> None:
    stream = f"/dev/fd/{full}"
    command = greetings(3, stream)
    result = subprocess.run(command, capture_output=True, text=True, check=True, pass_fds=[full])
    assert result.stdout == "Hello! How can I help you?\n" * 3
    assert result.stderr == f"{stream}: not written: No space left on device\n"
