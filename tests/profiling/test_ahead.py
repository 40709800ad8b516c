"""Reasons and explanations tell what evaluating in advance has cost and saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.checks import has, read_lines

from mlxrunner.profiling.profile import Profile
from mlxrunner.runner import Runner
from mlxrunner.testing import oracle_runner


def test_what_was_evaluated_in_advance_is_no_interrupted_request(events: Path) -> None:
    """It is there or not yet there; nothing was lost, and nothing was saved."""
    runner, profile = oracle_runner(prefill_step=8), Profile(events=events)
    profile.watch(runner)
    asked = iter([False, False, True])
    assert 0 < runner.evaluate(list(range(1, 41)), cancelled=lambda: next(asked)) < 40
    list(runner.generate(list(range(1, 41)), max_tokens=2))
    (event,) = read_lines(events)
    assert (event["outcome"], event["reason"], event["lost_tokens"]) == ("miss", "empty", 0)
    assert (event["saved_tokens"], event["saved_s"]) == (0, 0.0)
    assert event["prefetched_tokens"] == event["cached_tokens"] > 0


# The program, which adds each prompt that was evaluated in advance to a file once that is done.
TELLS = """
import sys
from mlxrunner.cli import main
from mlxrunner.runner import Runner

evaluate, file = Runner.evaluate, sys.argv.pop(1)

def told(self, prompt, **options):
    count = evaluate(self, prompt, **options)
    with open(file, "a") as stream:
        stream.write(self.tokenizer.decode(self.entry.tokens))
    return count

Runner.evaluate = told
main()
"""


def test_typing_ahead_hides_no_loss_in_a_terminal(
    open_screen: Any, events: Path, tmp_path: Path
) -> None:
    """A turn, /clear, another one, all of it evaluated while it is typed."""
    evaluated = tmp_path / "evaluated"
    screen = open_screen(
        "-c",
        TELLS,
        str(evaluated),
        "chat",
        "--set",
        "no_input_history=true",
        "--events",
        str(events),
    )
    for text in (
        "My name is Ana and I live in Rome.",
        "/clear",
        "My name is Tom and I live in Oslo.",
    ):
        screen.prompt()
        screen.child.send(text)
        screen.until(
            lambda text=text: (
                text.startswith("/") or (evaluated.exists() and text[:25] in evaluated.read_text())
            )
        )
        screen.child.send("\r")
    screen.until(lambda: len(read_lines(events)) == 2)
    first, second = read_lines(events)
    assert (first["run"], first["saved_tokens"]) == ("cold-miss", 0)
    assert (second["run"], second["reason"]) == ("warm-partial", "diverged")
    assert second["divergence"].items() >= {"message": 0, "role": "user", "part": "text"}.items()
    assert second["missed_tokens"] == second["displaced_tokens"] == 0
    assert first["prefetched_tokens"] > 0
    assert second["prefetched_tokens"] > 0


def test_what_is_evaluated_in_advance_leaves_the_explanation_to_the_request(events: Path) -> None:
    """In a chat something is evaluated before nearly every turn."""
    runner, other, profile = oracle_runner(), oracle_runner(), Profile(events=events)
    profile.watch(runner)
    list(other.generate([1, 2, 3], max_tokens=2))
    told = list(other.entry.tokens)
    runner.cache.adopt(other.entry.export(), "session a")
    runner.evaluate([*told, 9])
    list(runner.generate([*told, 9, 8], max_tokens=1))
    (event,) = read_lines(events)
    assert (event["reason"], event["run"]) == ("restored", "cold-restored")


def test_a_restored_entry_that_was_given_up_unread_says_so(events: Path) -> None:
    """Nothing was restored then."""
    runner, other, profile = oracle_runner(), oracle_runner(), Profile(events=events)
    profile.watch(runner)
    list(other.generate([1, 2, 3], max_tokens=2))
    runner.cache.adopt(other.entry.export(), "session a")
    runner.reset()
    list(runner.generate([1, 2, 3], max_tokens=1))
    (event,) = read_lines(events)
    assert (event["outcome"], event["reason"], event["run"]) == ("miss", "entry_freed", "cold-miss")


def test_a_draft_that_was_evaluated_and_not_sent_costs_nothing(events: Path) -> None:
    """An unsent draft loses nothing of the last request, and its used part is not saved."""
    runner, profile = Runner.load("demo", reserve=False), Profile(events=events, log_text=True)
    profile.watch(runner)
    messages = [{"role": "user", "content": "My name is Ana."}]
    answer = "".join(chunk.text for chunk in runner.generate(messages))
    messages.append({"role": "assistant", "content": answer})
    runner.evaluate(
        [*messages, {"role": "user", "content": "I have a parrot and much more to say about it"}]
    )
    list(runner.generate([*messages, {"role": "user", "content": "I have a dog."}]))
    _, event = read_lines(events)
    has(event, outcome="hit", reason=None, divergence=None, lost_tokens=0)
    assert event["saved_tokens"] == event["entry_tokens"] == event["matched_tokens"]
    assert 0 < event["prefetched_tokens"] < event["prompt_tokens"] - event["saved_tokens"]


@pytest.mark.parametrize(
    "drafts", [[], [""], ["you"], ["me", "you"]], ids=["none", "before", "typed", "changed"]
)
def test_what_is_evaluated_in_advance_hides_no_loss(
    family: Any, talk: Callable[..., Any], drafts: list[str]
) -> None:
    """A conversation that begins anew: the same reason, place and loss as without it."""
    talking = talk(family.name, log_text=True)
    talking.ask([{"role": "user", "content": "Dear old friend"}], "fine")
    for draft in drafts:
        talking.runner.evaluate([{"role": "user", "content": "Dear " + draft}])
    event = talking.ask([{"role": "user", "content": "Dear you"}], "fine")
    place = {"message": 0, "role": "user", "part": "text"}
    has(event, reason="diverged", outcome="partial", run="warm-partial")
    assert event["divergence"].items() >= place.items()
    assert event["divergence"]["previous"].items() >= place.items()
    assert event["divergence"]["previous"]["text"].startswith("old friend")
    assert (
        event["saved_tokens"]
        <= event["matched_tokens"]
        == event["divergence"]["index"]
        <= event["saved_tokens"] + 1
    )
    assert event["displaced_tokens"] == 0  # the words are new
    assert event["missed_tokens"] == max(0, event["matched_tokens"] - event["cached_tokens"])
    assert (event["prefetched_tokens"] > 0) == ("you" in drafts)


def test_what_was_evaluated_in_advance_for_nothing_may_be_what_freed_the_rest() -> None:
    """A draft that leaves the entry early, or cannot be taken back, is what freed the rest."""
    for kind, budget, reason in (("full", 0, "entry_freed"), ("recurrent", 0, "rewind_limited")):
        runner, seen = oracle_runner((kind,), checkpoint_budget=budget), []
        Profile(sinks=[seen.append]).watch(runner)
        prompt = list(range(1, 41))
        list(runner.generate(prompt, max_tokens=1))
        runner.evaluate([*prompt[:30], 99])
        list(runner.generate([*prompt, 98], max_tokens=2))
        event = seen[-1]
        kept = 30 if kind == "full" else 0
        has(event, reason=reason, saved_tokens=kept, missed_tokens=40 - event.cached_tokens)
        assert event.trim_limited_by == (None if kind == "full" else kind)


def test_a_reset_after_something_was_evaluated_in_advance_says_what_it_cost() -> None:
    """The tokens of the last request count, not those of the draft."""
    runner, seen = oracle_runner(), []
    Profile(sinks=[seen.append]).watch(runner)
    list(runner.generate([1, 2, 3, 4], max_tokens=1))
    runner.evaluate([1, 2, 9, 9])
    runner.reset()
    list(runner.generate([1, 2, 3, 5], max_tokens=1))
    has(seen[-1], reason="entry_freed", lost_tokens=3, prefetched_tokens=0)


def test_a_shift_moves_what_was_evaluated_in_advance_too() -> None:
    """A full context before the request: the share of the draft is no saving."""
    runner, seen = Runner.load("demo", reserve=False, context=64), []
    Profile(sinks=[seen.append]).watch(runner)
    prompt = list(range(1, 41))
    list(runner.generate(prompt, max_tokens=1))
    runner.evaluate([*prompt, *range(101, 121)])
    list(runner.generate([*prompt, *range(101, 131)], max_tokens=1, overflow="shift", keep=4))
    event = seen[-1]
    assert event.shifted_tokens > 0
    assert event.prefetched_tokens == 20
    assert event.saved_tokens == event.cached_tokens - 20 == 40 - event.shifted_tokens
