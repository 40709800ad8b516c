"""/explain and /stats tell what a turn reused, and why not more."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest
from support.chats import Do

from mlxrunner.chat.commands import explanation, saved_seconds
from mlxrunner.chat.repl import Chat
from mlxrunner.profiling.schema import PARTING, REASONS, remedy
from mlxrunner.results import CacheUse, MemoryUse, Timing, Usage

FLAT = [
    field.name
    for part in (Usage, Timing, MemoryUse, CacheUse)
    for field in fields(part)
    if field.name not in ("timing", "memory", "cache")
]


def usage(**changes: Any) -> Usage:
    counts = dict.fromkeys(FLAT, 0) | {
        "outcome": "hit",
        "reason": None,
        "trim_limited_by": None,
    }
    return Usage.from_dict(counts | {"checkpoint": None, "evicted_by": None} | changes)


@pytest.mark.parametrize("reason", [None, *REASONS])
def test_every_reason_has_its_words(reason: str | None) -> None:
    """With what limited it, what freed it, what it cost."""
    lines = explanation(
        usage(
            prompt_tokens=50,
            matched_tokens=40,
            cached_tokens=30,
            prefetched_tokens=10,
            evaluated_tokens=20,
            missed_tokens=6,
            displaced_tokens=3,
            new_tokens=11,
            lost_tokens=9,
            trimmed_tokens=5,
            reason=reason,
            trim_limited_by="sliding",
            evicted_by="a reset",
            checkpoint=30,
            shifted_tokens=9,
            reevaluated_tokens=4,
        )
    )
    sentence = REASONS[reason].sentence if reason else "text moved after a change"
    assert lines[0].startswith(sentence)
    assert lines[0].endswith(
        "20 of 50 prompt tokens were reused, 10 had been evaluated in advance, 6 missed, "
        "3 displaced, 11 new"
    )
    assert ("(sliding)" in lines[0]) == (reason == "rewind_limited")
    assert ("(a reset)" in lines[0]) == (reason not in (None, "rewind_limited"))
    mend = remedy(reason, has_one_entry=True)
    assert lines[1:-5] == ([f"remedy: {mend}"] if mend else [])
    assert lines[-5:] == [
        "6 missed tokens had been evaluated before",
        "3 displaced tokens were in the turn before, too, after the place that changed",
        "a checkpoint at token 30 was used",
        "5 cached tokens were trimmed, because the prompt differs from there on",
        "the context was full: 9 of the oldest tokens were dropped, 4 evaluated again for it",
    ]


def test_explain_and_stats_tell_of_the_last_turn(do: Do) -> None:
    """After a turn that diverged."""
    lines = do(
        "My name is Ana.", "I have a dog.", "/undo 2", "My cat is Tom.", "/explain", "/stats"
    )
    assert any(
        line.startswith("the prompt leaves the cached text in the middle; ") for line in lines
    )
    assert any(
        re.fullmatch(r"last turn  partial \(diverged\): \d+ prompt tokens, \d+ matched", line)
        for line in lines
    )


def test_a_branch_that_made_way_for_another_one_is_no_request_of_others(do: Do) -> None:
    told = do(
        *("Ann is my name.", "/branch b", "I have a bird and a good friend."),
        *("/switch main", "Rex is my dog.", "/switch b", "Hello!", "/explain"),
    )
    where = next(i for i, line in enumerate(told) if line.startswith("other text has taken the"))
    assert told[where + 1] == "that is the effect of /switch"


@pytest.mark.parametrize("command", ["/clear", "/undo", "/edit 1", "/retry", "/system Be brief."])
def test_a_turn_that_the_user_parted_needs_no_remedy(do: Do, chat: Chat, command: str) -> None:
    """The command is named; /stats between does not count, and neither does the turn after it."""
    chat.write = lambda text: text + "!"  # type: ignore[method-assign]
    chat.edit = lambda text, after: text + "!"  # type: ignore[method-assign]
    follows = [] if command.startswith(("/edit", "/retry")) else ["Zed is my bike."]
    told = do("Ann is my name.", "Rex is my dog.", command, "/stats", *follows, "/explain")
    reason = chat.conversation.usages[-1].reason
    assert not any(line.startswith("remedy") for line in told)
    assert (f"that is the effect of {command.split()[0]}" in told) == (reason in PARTING)
    assert (reason in PARTING) or command == "/retry"
    assert not any("effect" in line for line in do("And now?", "/explain"))


def test_saved_seconds_are_those_of_the_events() -> None:
    """Saved seconds come from the events' curve, and exclude typing ahead and plain guesses."""
    first = usage(cached_tokens=0, evaluated_tokens=100, prefill_s=1.0)
    saved, is_all = saved_seconds(
        [first, usage(cached_tokens=60, prefetched_tokens=10, evaluated_tokens=1, prefill_s=0.01)],
        100,
    )
    assert saved == pytest.approx(0.5)
    assert is_all
    further = usage(cached_tokens=1000, evaluated_tokens=0)
    saved, is_all = saved_seconds([first, further], 100)
    assert saved == pytest.approx(2.0)
    assert not is_all
    assert saved_seconds([further], 100) == (0.0, False)
    assert saved_seconds([], 100) == (0.0, True)
