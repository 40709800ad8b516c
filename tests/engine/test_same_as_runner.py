"""One slot is the single runner's entry: the same history gives the same answers and lookups."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from support.engine import Engine
from support.histories import tiny_parts
from support.models import ARCHITECTURES

from mlxrunner import Profile, Runner
from mlxrunner.profiling.logs import read_events
from mlxrunner.results import Usage
from mlxrunner.testing import EOS

SETTINGS: dict[str, Any] = {"rewind_slack": 10, "checkpoint_interval": 50, "context": 2000}


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that move and checkpoints that come every few tokens."""
    monkeypatch.setattr("mlxrunner.cache.layers.extents.STEP", 8)
    monkeypatch.setattr("mlxrunner.cache.entry.SPACING", 20)


def talks(rng: random.Random, count: int) -> list[list[int]]:
    """Return prompts that continue, go back, leave out the middle, repeat or begin again."""
    prompts, talk = [], [rng.randrange(290) for _ in range(rng.randint(1, 40))]
    for _ in range(count):
        kind = rng.choice(["on", "on", "on", "edit", "cut", "again", "new"])
        if kind == "edit":
            talk[rng.randrange(len(talk))] = rng.randrange(290)
        elif kind == "cut":
            del talk[rng.randint(1, len(talk)) :]
        elif kind == "new":
            talk = []
        if kind != "again" or not talk:
            talk = [*talk, *(rng.randrange(290) for _ in range(rng.randint(1, 60))), EOS]
        prompts.append(list(talk))
        talk = talk[:600]
    return prompts


def facts(usage: Usage) -> dict[str, Any]:
    """Return what a usage says of the reuse, without times and bytes."""
    cache = usage.cache
    return {
        "reused": (usage.cached_tokens, usage.evaluated_tokens, cache.matched_tokens),
        "lost": (cache.lost_tokens, usage.outcome, usage.reason, cache.evicted_by),
        "rewound": (cache.trim_limited_by, cache.checkpoint),
    }


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_one_slot_finds_what_the_single_runner_finds(name: str) -> None:
    """The answers; tokens reused, the reason, the loss, and the checkpoint that was used."""
    given, rng = tiny_parts(name), random.Random(name)
    single = Runner(*given, prefill_step=24, **SETTINGS)
    with Engine(*given, max_sequences=1, prefill_step=24, **SETTINGS) as slots:
        for number, prompt in enumerate(talks(rng, 12)):
            options: dict[str, Any] = {"max_tokens": rng.randint(1, 30), "stop_tokens": []}
            options["speculate"] = "off"  # which tokens are guessed depends on measured times
            ours, theirs = slots.complete(prompt, **options), single.complete(prompt, **options)
            said = f"request {number} of {len(prompt)} tokens"
            assert ours.tokens == theirs.tokens, said
            # A window of the single runner keeps some more tokens until its buffer is full.
            if "sliding" not in ARCHITECTURES[name]:
                assert facts(ours.usage) == facts(theirs.usage), said


EQUAL = """
prompt_tokens matched_tokens cached_tokens evaluated_tokens completion_tokens lost_tokens
entry_tokens entry_tokens_after outcome reason evicted_by finish checkpoint trim_limited_by
messages prompt_kind
""".split()
"""Fields of an event that don't depend on times, bytes or the kind of runner."""


def told(event: dict[str, Any]) -> dict[str, Any]:
    """Return the comparable fields of an event. Tokens are hashed with a key of each runner."""
    parted = event["divergence"]
    place = ("index", "message", "role", "part")
    return {field: event[field] for field in EQUAL} | {
        "divergence": parted and [parted[field] for field in place]
    }


def test_one_slot_tells_what_the_single_runner_tells(tmp_path: Path) -> None:
    """The events of a chat with edits: where prompt and entry part, and why tokens are lost."""
    given, rng = tiny_parts("qwen3_next"), random.Random(5)
    names = [chr(rng.randrange(97, 123)) * rng.randint(3, 30) for _ in range(12)]
    chats = [[{"role": "user", "content": name} for name in names[:count]] for count in (1, 3, 5)]
    chats += [[*chats[2][:2], {"role": "user", "content": "edited"}], chats[1], chats[0]]
    events = []
    for kind in ("single", "slots"):
        path = tmp_path / f"{kind}.jsonl"
        with Profile("python", events=path) as profile:
            runner: Any = (
                Runner(*given, prefill_step=24, **SETTINGS)
                if kind == "single"
                else Engine(*given, max_sequences=1, prefill_step=24, **SETTINGS)
            )
            profile.watch(runner)
            for chat in chats:
                runner.complete(chat, max_tokens=5, stop_tokens=[], speculate="off")
        events.append([event.as_dict() for event in read_events([path])])
    assert len(events[0]) == len(chats)
    assert any(event["divergence"] for event in events[0])
    single, slots = ([told(event) for event in one] for one in events)
    for ours, its in zip(slots, single, strict=True):
        assert ours == its
