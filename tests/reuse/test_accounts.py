"""Each token of a prompt is cached, missed, displaced or new, as a full memory says."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from support.accounts import FullMemory, Writer, writers
from support.engine import Engine
from support.histories import tiny_parts

from mlxrunner.cache.disk.disk_cache import DiskCache
from mlxrunner.testing import oracle_runner

SETTINGS = {"context": 2000, "prefill_step": 64}
ASK: dict[str, Any] = {"max_tokens": 5, "stop_tokens": []}


@pytest.mark.parametrize("kinds", [["full"], ["sliding", "full"], ["recurrent"]], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_a_runner_tells_what_a_full_memory_knows(seed: int, kinds: list[str]) -> None:
    """Its one entry is taken by one conversation after the other."""
    rng = random.Random(seed)
    runner, memory, talks = oracle_runner(kinds, context=2000), FullMemory(), writers(rng)
    for _ in range(30):
        talk = rng.choice(talks)
        turn(lambda prompt: runner.complete(prompt, **ASK), memory, talk)
        if rng.random() < 0.1:
            runner.reset()


def turn(complete: Any, memory: FullMemory, talk: Writer) -> None:
    """Ask, compare the account with the memory's, and go on."""
    prompt = talk.prompt
    result = complete(talk.tokenized())
    memory.check(prompt, talk.name, result.usage)
    memory.add(prompt, result.tokens, talk.name)
    talk.go_on(list(result.tokens))


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mamba2"])
@pytest.mark.parametrize("seed", range(3))
def test_slots_tell_it_too_with_evictions_and_restarts(
    tmp_path: Path, seed: int, name: str
) -> None:
    """Two slots and a small disk cache, which is opened again by another process now and then."""
    rng, memory, parts = random.Random(seed), FullMemory(), tiny_parts(name)
    talks = writers(rng)
    for _ in range(3):
        disk = DiskCache(tmp_path, {"model": name}, limit=rng.choice([60_000, 10**8]))
        with Engine(*parts, max_sequences=2, parking=disk, **SETTINGS) as engine:
            for _ in range(10):
                turn(lambda prompt: engine.complete(prompt, **ASK), memory, rng.choice(talks))
        disk.close()
        memory.asked.clear()  # the index outlives a restart, and earlier requests do not
