"""A request that is interrupted says so, and the next one says what that has cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.checks import has, read_lines
from support.events import said

from mlxrunner.profiling.profile import Profile
from mlxrunner.profiling.schema import Event
from mlxrunner.testing import oracle_runner


def test_interrupted(events: Path) -> None:
    """A prefill that Ctrl-C ends counts what it finished, and nothing else is lost."""
    runner, profile = oracle_runner(prefill_step=8), Profile(events=events)
    profile.watch(runner)
    prompt = list(range(1, 41))

    def press(done: int, total: int) -> None:
        if done == 16:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(runner.generate(prompt, max_tokens=2, progress=press))
    list(runner.generate(prompt, max_tokens=2))
    list(runner.generate([*prompt[:30], 90, 91], max_tokens=2))
    stopped, event, later = read_lines(events)
    has(stopped, finish="interrupted", completion_tokens=0, entry_tokens_after=16)
    assert (stopped["ttft_s"], stopped["decode_s"], stopped["prefill_s"]) == (None, None, None)
    assert [span["tokens"] for span in stopped["spans"] if span["name"] == "prefill"] == [8, 8]
    assert (stopped["evaluated_tokens"], stopped["lost_tokens"]) == (16, 0)
    has(event, reason="interrupted", cached_tokens=16, evaluated_tokens=24, lost_tokens=0)
    assert later["reason"] == "diverged"
    assert Event.of(event).explain().startswith("the previous prefill was interrupted")


# The program, which takes a second for each forward pass until a file is there.
SLOW = """
import sys, time
from pathlib import Path
from mlxrunner.cli import main
from mlxrunner.engine.backends.backend import SequentialModel

forward, file = SequentialModel._pass, Path(sys.argv.pop(1))

def slowly(self, *arguments, **options):
    for _ in range(100):
        if not file.exists():
            time.sleep(0.01)
    return forward(self, *arguments, **options)

SequentialModel._pass = slowly
main()
"""


@pytest.mark.exhaustive(0)
def test_interrupted_in_a_terminal(open_screen: Any, events: Path, tmp_path: Path) -> None:
    """A long message, Ctrl-C while it is evaluated, and the same message again."""
    go_on = tmp_path / "go on"
    options = ("--set", "no_type_ahead=true", "--prefill-step", "4", "--events", str(events))
    screen = open_screen("-c", SLOW, str(go_on), "chat", *options, size=(200, 40))
    for requests in (1, 2):
        screen.prompt()
        screen.child.send("and then " * 30 + "\r")
        if requests == 1:
            screen.until("evaluating")
            screen.child.sendintr()
            screen.until("interrupted")
            go_on.touch()
        screen.until(lambda n=requests: events.exists() and len(read_lines(events)) == n)
    stopped, again = read_lines(events)
    assert (stopped["finish"], stopped["completion_tokens"]) == ("interrupted", 0)
    assert again["reason"] == "interrupted"
    assert again["cached_tokens"] == stopped["entry_tokens_after"]
    assert stopped["evaluated_tokens"] == stopped["entry_tokens_after"] - stopped["cached_tokens"]
    assert (again["outcome"], again["lost_tokens"]) == ("hit", 0)
    assert "previous prefill was interrupted" in said(events)


def test_what_an_interrupted_request_lost_is_counted_once() -> None:
    """The rest of an interrupted request is evaluated by the next one and counted once."""
    runner, seen = oracle_runner(prefill_step=50, context=2000), []
    Profile(sinks=[seen.append]).watch(runner)
    list(runner.generate([1] * 1000, max_tokens=1))
    prompt = [1] * 500 + [2] * 500

    def press(done: int, total: int) -> None:
        if done == 550:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(runner.generate(prompt, max_tokens=1, progress=press))
    list(runner.generate(prompt, max_tokens=1))
    counts = [(event.reason, event.evaluated_tokens, event.lost_tokens) for event in seen[1:]]
    assert counts == [("diverged", 50, 0), ("interrupted", 450, 0)]


def test_interrupted_before_anything_was_evaluated() -> None:
    """The entry is empty then, and that is why; for another prompt it is just empty."""
    runner = oracle_runner(prefill_step=64)
    for prompt, reason, lost in (([1, 2, 3, 4], "interrupted", 0), ([5, 6], "empty", 0)):
        runner.reset()

        def press(done: int, total: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            list(runner.generate([1, 2, 3, 4], max_tokens=2, progress=press))
        usage = list(runner.generate(prompt, max_tokens=2))[-1].usage
        assert usage is not None
        assert (usage.reason, usage.cache.lost_tokens) == (reason, lost)
