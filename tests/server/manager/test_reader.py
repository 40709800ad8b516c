"""The reader of a request's chunks: as they come, or when all of them are there."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import Any

import pytest
from support.histories import alone, tiny_parts
from support.threads import LONG, asked, opened

from mlxrunner import ClosedError, ParallelRunner
from mlxrunner.engine import thread
from mlxrunner.server import manager as manager_module
from mlxrunner.server.manager import FAST_S, GATHERED_S, ChunkReader


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_parts("llama")


async def tokens_of(reader: ChunkReader, seconds: float) -> list[int | None]:
    """Return all tokens, however often nothing comes within `seconds`."""
    tokens: list[int | None] = []
    while True:
        with suppress(TimeoutError):
            chunks = await reader.next(seconds)
            if not chunks:
                return tokens
            tokens += [chunk.token for chunk in chunks]
        await asyncio.sleep(0)


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("is_whole", [False, True], ids=["stream", "whole"])
def test_answers_are_those_of_a_runner_alone(llama: Any, *, is_whole: bool) -> None:
    """Twenty readers on one loop; beats come at any time, and take nothing away."""
    rng = random.Random(7)
    requests = [asked(rng, list(range(30))) for _ in range(20)]

    async def all_of_them(runner: ParallelRunner) -> list[list[int | None]]:
        readers = [
            ChunkReader(runner.submit(prompt, **options), is_whole=is_whole)
            for prompt, options in requests
        ]
        waits = [rng.choice([0, 0.0005, 60]) for _ in readers]
        return await asyncio.gather(*map(tokens_of, readers, waits))

    with opened(llama, 3) as runner:
        found = asyncio.run(all_of_them(runner))
    for (prompt, options), tokens in zip(requests, found, strict=True):
        assert [one for one in tokens if one is not None] == alone(llama, prompt, **options)


@pytest.mark.parametrize("seconds", [0.0005, 60.0])
def test_a_whole_answer_does_not_pause(
    llama: Any, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Nobody reads before its end, and few unread chunks are allowed."""
    monkeypatch.setattr(thread, "MOST_UNREAD", 4)

    async def read(runner: ParallelRunner) -> list[int | None]:
        return await tokens_of(ChunkReader(runner.submit([1], **LONG), is_whole=True), seconds)

    with opened(llama, 1) as runner:
        tokens = asyncio.run(read(runner))
    assert [one for one in tokens if one is not None] == alone(llama, [1], **LONG)


@pytest.mark.parametrize("is_whole", [False, True], ids=["stream", "whole"])
def test_a_task_that_is_cancelled_takes_nothing(llama: Any, *, is_whole: bool) -> None:
    """The request, which waits for a slot then, continues; closing the reader ends it."""

    async def twice(runner: ParallelRunner) -> list[int | None]:
        first = ChunkReader(runner.submit([9], **LONG), is_whole=is_whole)
        reader = ChunkReader(runner.submit([2], **LONG), is_whole=is_whole)
        waiting = asyncio.create_task(reader.next(60))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        first.close()
        assert len(await tokens_of(first, 60)) <= LONG["max_tokens"]
        return await tokens_of(reader, 60)

    with opened(llama, 1) as runner:
        tokens = asyncio.run(twice(runner))
    assert [one for one in tokens if one is not None] == alone(llama, [2], **LONG)


@pytest.mark.parametrize("is_whole", [False, True], ids=["stream", "whole"])
def test_a_runner_that_is_closed(llama: Any, *, is_whole: bool) -> None:
    """The reader says so, after the chunks that had come."""

    async def read(runner: ParallelRunner) -> None:
        endless = runner.submit([9], max_tokens=50_000, stop_tokens=[])
        reader = ChunkReader(runner.submit([1], **LONG), is_whole=is_whole)
        reading = asyncio.create_task(tokens_of(reader, 60))
        await asyncio.sleep(0)
        await asyncio.to_thread(runner.close)
        with pytest.raises(ClosedError):
            await reading
        assert endless.finished

    with opened(llama, 1, context=100_000) as runner:
        asyncio.run(read(runner))


class Made:
    """A request whose tokens come at set times, and the clock of those who read it."""

    error = None

    def __init__(self, times: list[float]) -> None:
        self.now = 0.0
        self._times = times

    def time(self) -> float:
        return self.now

    async def news(self, _: Any, seconds: float, *, at_end: bool) -> bool:
        """Let the time pass until there is a token, or to the last one or the end of `seconds`."""
        due = self._times[-1 if at_end else 0] if self._times else self.now
        self.now = max(self.now, min(due, self.now + seconds))
        return self.now >= due

    def poll(self) -> list[float]:
        come = [one for one in self._times if one <= self.now]
        del self._times[: len(come)]
        return come

    def delivered(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, list[float]]]:
        """Return each delivery: when it was, and the times of its tokens."""
        monkeypatch.setattr(manager_module, "news_of", self.news)
        monkeypatch.setattr(manager_module.asyncio, "get_running_loop", lambda: self)

        async def read() -> list[tuple[float, list[float]]]:
            reader: Any = ChunkReader(self)  # type: ignore[arg-type]
            found = []
            while self._times:
                tokens = await reader.next(60)
                found.append((self.now, tokens))
            return found

        reading = read()
        with pytest.raises(StopIteration) as ended:
            reading.send(None)
        return list(ended.value.value)


def test_slow_tokens_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [0.5 + 1.25 * FAST_S * n for n in range(40)]
    assert Made([*times]).delivered(monkeypatch) == [(one, [one]) for one in times]


def test_fast_tokens_share_deliveries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token and the end don't wait, and no token waits for longer than a delivery."""
    times = [0.5 + FAST_S / 8 * n for n in range(101)]
    found = Made([*times]).delivered(monkeypatch)
    assert found[0] == (times[0], times[:1])
    assert found[-1][0] == times[-1]
    assert [one for _, tokens in found for one in tokens] == times
    waits = [when - one for when, tokens in found for one in tokens]
    assert max(waits) <= GATHERED_S
    assert len(found) == 2 + int((times[-1] - times[0]) / GATHERED_S)


def test_a_stream_that_slows_down_is_delivered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = [0.5 + FAST_S / 8 * n for n in range(40)]
    slow = [fast[-1] + 0.1 * n for n in range(1, 5)]
    found = Made([*fast, *slow]).delivered(monkeypatch)
    assert found[-4:] == [(one, [one]) for one in slow]
