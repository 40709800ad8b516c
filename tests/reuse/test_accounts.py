"""Each token of a prompt is cached, missed, displaced or new, as a full memory says."""

from __future__ import annotations

import random
from collections import deque
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


@pytest.mark.parametrize("seed", range(4))
def test_requests_side_by_side_count_what_began_before_them(seed: int) -> None:
    """Prompts of requests that run count as evaluated; their answers may be there or not."""
    rng, memory = random.Random(seed), FullMemory()
    talks = writers(rng)
    with Engine(*tiny_parts("llama"), max_sequences=2, **SETTINGS) as engine:
        for _ in range(10):
            asked = [(one, one.prompt) for one in rng.sample(talks, 3)]
            handles = deque((one, engine.submit(one.tokenized(), **ASK)) for one, _ in asked[:2])
            waiting, began = asked[2:], [prompt for _, prompt in asked[:2]]
            ended: list[tuple[Writer, list[int], Any]] = []
            while handles:
                engine.step()
                for pair in [pair for pair in handles if pair[1].finished]:
                    handles.remove(pair)
                    ended.append((pair[0], pair[0].prompt, pair[1].result()))
                    for one, prompt in waiting:
                        handles.append((one, engine.submit(one.tokenized(), **ASK)))
                        began.append(prompt)
                    waiting = []
            for one, prompt, result in ended:
                usage = result.usage
                before = began[: began.index(prompt)]
                least = max(memory.known(prompt), known_in(before, prompt))
                answers = [[*other, *done.tokens[:-1]] for _, other, done in ended]
                most = max(
                    least, known_in([a for a in answers if a[: len(prompt)] != prompt], prompt)
                )
                least, most = (
                    max(usage.cached_tokens, min(n, len(prompt) - 1)) for n in (least, most)
                )
                assert least <= usage.cached_tokens + usage.missed_tokens <= most
                counts = usage.missed_tokens + usage.displaced_tokens + usage.new_tokens
                assert counts + usage.cached_tokens == len(prompt)
            for one, prompt, result in ended:
                memory.add(prompt, list(result.tokens), one.name)
                one.go_on(list(result.tokens))


def known_in(texts: list[list[int]], prompt: list[int]) -> int:
    """Return the most first tokens of a prompt that one of the texts has."""
    return FullMemory(evaluated=texts).known(prompt)


@pytest.mark.parametrize("seed", range(3))
def test_interrupted_prompts_count_as_far_as_they_came(seed: int) -> None:
    """Ctrl-C in a prefill: the next request misses what was evaluated, and no more."""
    rng, memory = random.Random(seed), FullMemory()
    runner, talks = oracle_runner(["full"], context=2000, prefill_step=8), writers(rng)
    for _ in range(20):
        talk = rng.choice(talks)
        prompt, stop = talk.prompt, rng.randrange(200)
        reached = [0]

        def press(done: int, total: int, stop: int = stop, reached: list[int] = reached) -> None:
            reached[0] = done
            if stop <= done < total:
                raise KeyboardInterrupt

        try:
            result = runner.complete(talk.tokenized(), progress=press, **ASK)
        except KeyboardInterrupt:
            usage = runner.usage
            assert usage is not None
            memory.check(prompt, talk.name, usage)
            memory.evaluated.append(prompt[: usage.cached_tokens + usage.evaluated_tokens])
            memory.asked.append((talk.name, prompt))
            continue
        memory.check(prompt, talk.name, result.usage)
        memory.add(prompt, list(result.tokens), talk.name)
        talk.go_on(list(result.tokens))
