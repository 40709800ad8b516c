"""Streams of asyncio get the answers of a runner alone, and end with their tasks."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.threads import LONG, alone, asked, opened

from mlxrunner import BusyError, OptionError, ParallelRunner


def test_streams_of_asyncio_get_the_answers_of_a_runner_alone(llama: Any) -> None:
    """Forty tasks run on one loop, beside a thread that submits, too."""
    rng = random.Random(3)
    requests = [asked(rng, list(range(30))) for _ in range(40)]
    expected = [alone(llama, prompt, **options) for prompt, options in requests]

    async def one(runner: ParallelRunner, index: int) -> list[int | None]:
        prompt, options = requests[index]
        if index % 2:
            return [chunk.token async for chunk in runner.submit(prompt, **options)]
        return [chunk.token async for chunk in runner.stream(prompt, **options)]

    async def all_of_them(runner: ParallelRunner) -> list[list[int | None]]:
        return await asyncio.gather(*(one(runner, index) for index in range(len(requests))))

    with opened(llama, 3) as runner, ThreadPoolExecutor(1) as pool:
        beside = pool.submit(lambda: [runner.complete([i], **LONG).tokens for i in range(3)])
        assert asyncio.run(all_of_them(runner)) == expected
        assert beside.result() == [alone(llama, [i], **LONG) for i in range(3)]


@pytest.mark.parametrize("kind", ["handle", "stream"])
def test_cancelling_a_task_cancels_its_request(llama: Any, kind: str) -> None:
    """A task that waits for a chunk, of a request that waits for a slot."""

    async def cancelled(runner: ParallelRunner) -> None:
        async def read() -> None:
            source = runner.submit([1], **LONG) if kind == "handle" else runner.stream([1], **LONG)
            async for _ in source:
                pass

        task = asyncio.create_task(read())
        while runner.stats().waiting == 0:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while runner.stats().waiting:
            await asyncio.sleep(0.001)

    with opened(llama, 1) as runner:
        first = runner.submit([9], **LONG)
        asyncio.run(cancelled(runner))
        assert not first.finished or first.result().tokens


def test_leaving_a_stream_cancels_its_request(llama: Any) -> None:
    """After a break, and after an error in the task that reads."""

    async def leave(runner: ParallelRunner) -> None:
        async for _ in runner.stream([1], **LONG):
            break
        while runner.stats().busy:
            await asyncio.sleep(0.001)
        with pytest.raises(OptionError):
            async for _ in runner.stream([1], temperature=-1):
                pass

    with opened(llama, 1) as runner:
        asyncio.run(leave(runner))


def test_two_tasks_that_read_at_once_are_refused(llama: Any) -> None:
    """Two threads are, too."""

    async def twice(runner: ParallelRunner) -> None:
        first = runner.submit([9], **LONG)
        handle = runner.submit([1], max_tokens=1)
        waiting = asyncio.create_task(anext(handle))
        await asyncio.sleep(0)
        with pytest.raises(BusyError):
            await anext(handle)
        first.cancel()
        assert (await waiting).finish_reason == "length"

    with opened(llama, 1) as runner:
        asyncio.run(twice(runner))


def test_a_closed_event_loop_harms_nobody(llama: Any) -> None:
    """Its reader is gone; others get their answers."""
    with opened(llama, 1) as runner:
        first, handle = runner.submit([9], **LONG), runner.submit([1], max_tokens=3)
        loop = asyncio.new_event_loop()
        task = loop.create_task(anext(handle))
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        assert len(first.result().tokens) == 100
        assert runner.complete([3], max_tokens=3, stop_tokens=[]).tokens
        assert not task.done()
        task._log_destroy_pending = False  # type: ignore[attr-defined]
