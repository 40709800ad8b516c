"""Each token of a prompt is cached, missed, displaced or new, as a full memory says."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.test_supervisor import worker_of
from support.accounts import ASK, FullMemory, Watch, Writer, usage_of, writers
from support.engine import Engine
from support.histories import tiny_parts
from support.models import write_model
from support.program import Running, program
from support.threads import opened

from mlxrunner import BatchRequest, run_batch
from mlxrunner.cache.account import NAME
from mlxrunner.cache.disk.disk_cache import DiskCache
from mlxrunner.cache.entry import as_tokens
from mlxrunner.results import Usage
from mlxrunner.testing import oracle_runner

SETTINGS = {"context": 2000, "prefill_step": 64}


def turn(complete: Any, memory: FullMemory, talk: Writer) -> None:
    """Ask, compare the account with the memory's, and continue."""
    prompt = talk.prompt
    result = complete(talk.tokenized())
    memory.check(prompt, talk.name, result.usage)
    memory.add(prompt, result, talk.name)
    talk.go_on(list(result.tokens))


@pytest.mark.parametrize("kinds", [["full"], ["sliding", "full"], ["recurrent"]], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_a_runner_tells_what_a_full_memory_knows(seed: int, kinds: list[str]) -> None:
    """Its one entry is taken by one conversation after the other."""
    rng = random.Random(seed)
    runner, memory, talks = oracle_runner(kinds, context=2000), FullMemory(), writers(rng)
    for _ in range(30):
        turn(lambda prompt: runner.complete(prompt, **ASK), memory, rng.choice(talks))
        if rng.random() < 0.1:
            runner.reset()


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


def test_conversations_on_disk_count_as_evaluated_if_the_index_is_lost(tmp_path: Path) -> None:
    parts, prompt = tiny_parts("llama"), [*range(1, 120)]
    for is_known in (False, True):
        disk = DiskCache(tmp_path, {"model": "llama"}, limit=10**8)
        index = disk.prefixes()
        shared = index.shared(index.fingerprints(as_tokens(prompt))[0])
        assert shared == ((len(prompt), True) if is_known else (0, False))
        with Engine(*parts, max_sequences=2, parking=disk, **SETTINGS) as engine:
            engine.complete(prompt, **ASK)
        disk.close()
        (disk.folder / NAME).unlink()


def apart(talks: list[Writer]) -> list[Writer]:
    """Return writers that are clients of their own: all of one come one after the other."""
    for number, one in enumerate(talks):
        one.name = (f"client {number}", one.name[1])
    return talks


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mamba2"])
@pytest.mark.parametrize("way", ["threads", "tasks"])
def test_clients_side_by_side_count_what_began_before_them(name: str, way: str) -> None:
    """Threads and tasks share two slots; prompts of requests that run count, or not yet."""
    rng, watch = random.Random(name), Watch()
    talks = [(one, random.Random(f"{name}{number}")) for number, one in enumerate(writers(rng))]
    apart([one for one, _ in talks])

    def in_thread(runner: Any, talk: tuple[Writer, random.Random]) -> None:
        one, own = talk
        one._rng = own
        for _ in range(6):
            one.go_on(list(runner.complete(one.tokenized(), **ASK).tokens))

    async def in_task(runner: Any, talk: tuple[Writer, random.Random]) -> None:
        one, own = talk
        one._rng = own
        for _ in range(6):
            chunks = [chunk async for chunk in runner.stream(one.tokenized(), **ASK)]
            one.go_on([chunk.token for chunk in chunks if chunk.token is not None])

    async def all_tasks(runner: Any) -> None:
        await asyncio.gather(*(in_task(runner, talk) for talk in talks))

    with opened(tiny_parts(name), 2, **SETTINGS) as runner:
        runner.observers.append(watch)
        if way == "tasks":
            asyncio.run(all_tasks(runner))
        else:
            with ThreadPoolExecutor(len(talks)) as pool:
                list(pool.map(lambda talk: in_thread(runner, talk), talks))
    assert len(watch.seen) == 6 * len(talks)
    watch.check()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("slots", [1, 4])
def test_lines_of_a_batch_are_compared_with_no_other_line(slots: int, seed: int) -> None:
    """Their common beginnings are cached or missed; the rest of each is new."""
    rng, watch = random.Random(seed), Watch()
    prompts = []
    for one in writers(rng):
        for _ in range(5):
            prompts.append(one.prompt)
            one.go_on([rng.randrange(1, 250) for _ in range(9)])
    runner: Any = (
        oracle_runner(["full"], context=2000)
        if slots == 1
        else opened(tiny_parts("llama"), slots, **SETTINGS)
    )
    with runner:
        runner.observers.append(watch)
        list(run_batch(runner, map(BatchRequest, prompts), order="input", max_tokens=5))
    assert len(watch.seen) == len(prompts)
    assert all(observed.prepared.conversation is None for observed, *_ in watch.seen)
    watch.check()


@pytest.mark.parametrize("seed", range(3))
def test_interrupted_prompts_count_as_far_as_they_came(seed: int) -> None:
    """Ctrl-C in a prefill: the next request misses what was evaluated, and no more."""
    rng, memory = random.Random(seed), FullMemory()
    runner, talks = oracle_runner(["full"], context=2000, prefill_step=8), writers(rng)
    for _ in range(20):
        talk = rng.choice(talks)
        prompt, stop = talk.prompt, rng.randrange(200)

        def press(done: int, total: int, stop: int = stop) -> None:
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
        memory.add(prompt, result, talk.name)
        talk.go_on(list(result.tokens))


def over_http(server: Running, talk: Writer) -> Usage | None:
    """Ask for one token, and return the usage; None if the server was killed meanwhile."""
    client, session = talk.name
    headers = {"user-agent": client} | ({"x-session-id": session} if session else {})
    body = {"model": "tiny", "prompt": talk.prompt, "max_tokens": 1}
    try:
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=300)
    except httpx.TransportError:
        return None
    if answer.status_code >= 500:
        return None
    found = answer.json()
    return usage_of(**found["mlxrunner"], prompt_tokens=found["usage"]["prompt_tokens"])


@pytest.mark.exhaustive(0)
def test_a_server_tells_it_over_http_also_after_kills(tmp_path: Path) -> None:
    """Three clients, two slots, a small disk cache, SIGKILL of the worker and of the program.

    An answer of one token is not evaluated, so a full memory of the prompts is one of everything.
    """
    write_model(tmp_path / "tiny", max_position_embeddings=4096)
    rng, memory = random.Random(0), FullMemory()
    talks = apart(writers(rng))[:3]
    options = ["--slots", "2", "--disk-cache-bytes", "300000"]
    beside, usages = list[list[int]](), list[Usage]()
    for _ in range(2):
        with program(str(tmp_path / "tiny"), *options) as server:
            for number in range(30):
                talk = rng.choice(talks)
                if number % 10 == 9:
                    beside.append(talk.prompt)
                    with ThreadPoolExecutor(1) as pool:
                        asked = pool.submit(over_http, server, talk)
                        os.kill(worker_of(server), signal.SIGKILL)
                        usage = asked.result()
                    memory.asked.clear()
                    if usage is None:
                        continue
                else:
                    usage = over_http(server, talk)
                assert usage is not None
                usages.append(usage)
                memory.check(talk.prompt, talk.name, usage, beside)
                memory.evaluated.append(talk.prompt)
                memory.asked.append((talk.name, talk.prompt))
                talk.go_on([rng.randrange(1, 250) for _ in range(9)])
        memory.asked.clear()
    for kind in ("cached", "missed", "displaced", "new"):
        assert sum(getattr(usage, f"{kind}_tokens") for usage in usages) > 200
    assert {"restarted", "evicted"} & {usage.reason for usage in usages}
