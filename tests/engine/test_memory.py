"""One budget of bytes for cells, states and checkpoints of all conversations."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import pytest
from support.conversations import Trace, play
from support.engine import Engine, backend, scheduler
from support.histories import tiny_parts
from support.models import tiny_config
from support.sample import fewer

from mlxrunner.cache.account import Evicted
from mlxrunner.cache.entry import TokenBuffer
from mlxrunner.cache.prefix import PrefixCache
from mlxrunner.cache.protocol import END
from mlxrunner.engine.request import Observation
from mlxrunner.engine.scheduling.allocation import Slot
from mlxrunner.engine.scheduling.eviction import most_shared
from mlxrunner.models.load import LoadedModel

SETTINGS: dict[str, Any] = {"context": 300, "prefill_step": 64, "checkpoint_interval": 40}


def loaded(name: str, folder: Path) -> LoadedModel:
    config = tiny_config(name, max_position_embeddings=4096, vocab_size=300)
    model, tokenizer, facts = tiny_parts(name)
    return LoadedModel(name, folder, model, tokenizer, facts, config)


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "mamba2"])
def test_conversations_stay_within_the_budget(name: str, tmp_path: Path) -> None:
    """All bytes at the end of each request, within 2 %; none fails, and nothing else is needed."""
    given, slots = loaded(name, tmp_path), 4
    with Engine.of(given, max_sequences=slots, reserve=False, **SETTINGS) as runner:
        play(runner, trace())
        memory = scheduler(runner).residents.allocated_bytes // 2
    with Engine.of(
        given, max_sequences=slots, cache_memory=memory, reserve=False, **SETTINGS
    ) as runner:
        played = play(runner, trace())
        assert runner.kv_cache_tokens < slots * runner.context or name == "mamba2"
    assert not played.failures
    assert played.requests == trace().requests
    assert played.evicted > 0
    assert played.most_bytes <= memory * 1.02


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "mamba2", "llama4"])
def test_a_closed_runner_holds_no_bytes(name: str) -> None:
    """Also if something still refers to the runner, as the error of a request does."""
    given = tiny_parts(name)
    before = mx.get_active_memory()
    runner = Engine(*given, max_sequences=2, **SETTINGS)
    for prompt in ([5] * 90, [6] * 90):
        runner.complete(prompt, max_tokens=3, stop_tokens=[])
    held = mx.get_active_memory() - before
    runner.close()
    assert runner.num_tokens == 0
    assert mx.get_active_memory() - before < held // 20


def trace() -> Trace:
    return Trace(conversations=8, requests=fewer(50, 30), context=300, scale=0.3)


@pytest.mark.parametrize("is_full", [True, False], ids=["begin", "end"])
def test_the_event_says_who_was_given_up_for_whom(is_full: bool) -> None:
    """At the begin or at the end of a request; the next turn of that conversation says the same."""
    given, rng = tiny_parts("mamba2"), random.Random(0)
    one, two = ([rng.randrange(250) for _ in range(60)] for _ in range(2))
    found: list[list[Evicted]] = []

    def see(_: Any, observed: Observation) -> None:
        assert observed.scheduling is not None
        found.append(list(observed.scheduling.evicted))

    with Engine(*given, max_sequences=3, **SETTINGS) as runner:
        runner.observers.append(see)
        runner.complete(one, max_tokens=4, stop_tokens=[])
        residents = scheduler(runner).residents
        residents.memory = 1 if is_full else residents.allocated_bytes
        runner.complete(two, max_tokens=4, stop_tokens=[])
        residents.memory = None
        usage = runner.complete([*one, 1], max_tokens=4, stop_tokens=[]).usage
    assert [[(who.tokens, who.cause, who.parked) for who in each] for each in found] == [
        [],
        [(63, "memory", False)],
        [],
    ]
    assert (usage.reason, usage.cache.evicted_by) == ("evicted", "request 2")


@pytest.mark.parametrize("name", ["llama", "mamba2"])
def test_a_tail_that_a_shorter_prompt_gave_up_is_named(name: str) -> None:
    """A prompt that has to evaluate it again says by whom it was given up, and how much it was."""
    given, rng = tiny_parts(name), random.Random(0)
    whole, other = ([rng.randrange(250) for _ in range(60)] for _ in range(2))
    with Engine(*given, max_sequences=2, **SETTINGS) as runner:
        busy = runner.submit(other, stop_tokens=[])
        for prompt in (whole, whole[:30]):
            runner.complete(prompt, max_tokens=1, stop_tokens=[])
        usage = runner.complete([*whole, 1], max_tokens=1, stop_tokens=[]).usage
        again = runner.complete([*whole, 1, 2], max_tokens=1, stop_tokens=[]).usage
        assert not busy.finished
    assert (usage.outcome, usage.reason, usage.cache.evicted_by) == (
        "partial" if usage.cached_tokens else "miss",
        "evicted",
        "request 3",
    )
    assert usage.cache.lost_tokens == len(whole) - usage.cached_tokens > 0
    assert (again.outcome, again.reason, again.cache.lost_tokens) == ("hit", None, 0)


def test_the_plan_has_a_line_for_what_the_host_notes() -> None:
    """It is part of the total, and at least what the positions and owners of the cells take."""
    with Engine.load("demo", max_sequences=4, context=512) as runner:
        plan = runner.plan
        assert plan is not None
        (line,) = (line for line in plan.lines if line.what.startswith("places"))
        assert plan.total == sum(one.total for one in plan.lines)
        notes = [
            cells.positions.nbytes + cells.owners.nbytes
            for cells in (group._cells for group in backend(runner).groups)
        ]
        assert 0 < sum(notes) < line.total


@pytest.mark.parametrize("seed", range(20))
def test_the_most_that_slots_share_is_that_of_any_pair(seed: int) -> None:
    """Some are shifted, or none."""
    rng = random.Random(seed)
    known, slots = [[5, 256, 7, 300]], list[Slot]()
    for number in range(8):
        known.append(
            [*rng.choice(known)[: rng.randrange(5)], *rng.choices([1, 255, 256, 511], k=3)]
        )
        entry = SimpleNamespace(tokens=TokenBuffer(known[-1]))
        cache = cast("PrefixCache", SimpleNamespace(entry=entry))
        slots.append(Slot(number, cache, exact=rng.choice([2, 4]) if seed % 2 else END))
    for one in slots:
        tokens = one.tokens.array
        most = max(other.shared_with(tokens) for other in slots if other is not one)
        assert most_shared(slots)[one.number] == most
