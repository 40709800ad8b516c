"""Conversations that find no slot are parked on disk, and evaluate only what is new."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.engine import Engine, park_in_pieces_of, scheduler
from support.histories import tiny_parts

from mlxrunner import ParallelRunner, Runner
from mlxrunner.cache.disk.disk_cache import DiskCache
from mlxrunner.cache.entry import as_tokens

SETTINGS = {"context": 400, "prefill_step": 32, "checkpoint_budget": 10**6}


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "deepseek_v3", "mamba2"])
def test_five_conversations_take_turns_in_two_slots(tmp_path: Path, name: str) -> None:
    """Answers are those of `Runner`, and each turn finds all of its conversation.

    The third turn comes after a restart, before which the slots are parked, too.
    """
    rng, parts = random.Random(0), tiny_parts(name)
    talks = [[rng.randrange(1, 250) for _ in range(90 + number)] for number in range(5)]
    for turns in (2, 1):
        parking = DiskCache(tmp_path, {"model": name}, limit=10**9)
        with Engine(*parts, max_sequences=2, parking=parking, **SETTINGS) as stepper:
            for _ in range(turns):
                for number, talk in enumerate(talks):
                    handle = stepper.submit(talk, max_tokens=6, stop_tokens=[])
                    while not handle.finished:
                        stepper.step()
                    found = handle.result()
                    cold = Runner(*parts, **SETTINGS).complete(talk, max_tokens=6, stop_tokens=[])
                    assert found.tokens == cold.tokens
                    if len(talk) > 94:
                        assert found.usage.cached_tokens == len(talk) - 11
                    new = [rng.randrange(1, 250) for _ in range(10)]
                    talks[number] = [*talk, *found.tokens, *new]
        parking.close()


def test_a_conversation_that_changes_while_it_is_parked_in_pieces_is_not_parked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are other ones now, in the same entry: only what both have may be on disk."""
    park_in_pieces_of(16, monkeypatch)
    parking = DiskCache(tmp_path, {"model": "llama"}, limit=10**9)
    with Engine(*tiny_parts("llama"), max_sequences=1, parking=parking, **SETTINGS) as stepper:
        stepper.complete(list(range(1, 121)), max_tokens=2, stop_tokens=[])
        slot = stepper.slots[0]
        before = list(slot.tokens)
        work = scheduler(stepper).residents.parking_ahead(slot)
        next(work)
        stepper.complete([*before[:-2], 200, 201, 202, 203], max_tokens=2, stop_tokens=[])
        assert len(slot.tokens) > len(before)
        for _ in work:
            pass
        found = parking.find(as_tokens([*before, 1]))
        assert found is None or found[1] < len(before)


def test_what_the_disk_gave_up_is_lost_and_no_hit(tmp_path: Path) -> None:
    """Where the disk cache is full, the next turn says so, although it has all of another slot."""
    header = list(range(20))
    one, two, three = ([*header, *[first] * 60] for first in (100, 110, 120))
    parking = DiskCache(tmp_path, {"model": "llama"}, limit=60_000)
    with Engine(*tiny_parts("llama"), max_sequences=1, parking=parking, **SETTINGS) as stepper:
        for prompt in (one, two, three, header):
            found = stepper.complete(prompt, max_tokens=1, stop_tokens=[]).usage
        assert stepper.parked_bytes
        usage = stepper.complete([*one, 1], max_tokens=1, stop_tokens=[]).usage
    assert found.outcome == "hit"
    cache = usage.cache
    assert (usage.cached_tokens, usage.reason, cache.evicted_by) == (
        20,
        "evicted",
        "disk_cache_bytes",
    )
    assert (usage.outcome, cache.lost_tokens) == ("partial", 60)


def test_stats_tell_what_is_on_disk() -> None:
    """In bytes, of all parked conversations."""
    with ParallelRunner.load(
        "demo", max_sequences=1, context=128, disk_cache_bytes=10**8, reserve=False
    ) as runner:
        assert (runner.stats().parked, runner.why_alone) == (0, None)
        for first in (5, 6):
            runner.complete([first] * 40, max_tokens=2, stop_tokens=[])
        assert runner.stats().parked > 0
