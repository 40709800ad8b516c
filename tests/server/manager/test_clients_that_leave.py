"""A client that leaves frees its slot, and what was evaluated for it is kept."""

from __future__ import annotations

import asyncio
import gc
import threading
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from support.actor import playing
from support.managers import (
    SETTINGS,
    asked,
    events_of,
    held_in,
    manager_of,
    open_manager,
    opening,
    reached,
)

from mlxrunner import Handle
from mlxrunner.server import manager as manager_module
from mlxrunner.server.events import AnswerEvent, ApiError, TextDelta
from mlxrunner.server.manager import ModelNames


@pytest.mark.parametrize("way", ["closed", "cancelled"])
async def test_a_client_that_leaves(folder: Path, way: str) -> None:
    """Its slot is free after the step that runs, and what it had evaluated is reused."""
    async with manager_of(folder, opening()) as manager:
        endless = asked("x" * 100, options={"stop_tokens": []})
        await events_of(manager, asked())
        (place,) = manager.models_held
        runner = held_in(manager).runner
        answer, seen = manager.answer(endless), list[AnswerEvent]()

        async def read() -> None:
            async for event in answer:
                seen.append(event)

        if way == "closed":
            while not isinstance(await anext(answer), TextDelta):
                pass
            await answer.aclose()
        else:
            task = asyncio.create_task(read())
            await reached(lambda: any(isinstance(event, TextDelta) for event in seen))
            task.cancel()
            await asyncio.wait({task})
        steps = runner.stats().steps
        await reached(lambda: not runner.stats().busy)
        assert runner.stats().steps <= steps + 2
        assert place.users == 0
        ended = (await events_of(manager, asked("x" * 100)))[-1]
        assert ended.usage.cached_tokens > 100


async def test_what_a_client_saw_before_it_left_is_kept() -> None:
    """The prompt of its next request has the tokens that were generated, up to there."""

    endless = playing(lambda text: "Word " * 500)
    opening = endless(settings=SETTINGS, runner={"context": 4000})
    async with open_manager(ModelNames("actor", {}), opening) as manager:
        answer, seen = manager.answer(asked(options={})), ""
        async with aclosing(answer):
            async for event in answer:
                seen += event.text if isinstance(event, TextDelta) else ""
                if len(seen) > 20:
                    break
        maker = held_in(manager).maker
        await reached(lambda: len(maker.kept))
        sent = [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": seen},
            {"role": "user", "content": "Go on"},
        ]
        made = maker.make(asked(messages=sent))
        assert made.kept == 1
        assert made.prompt.text == made.rendered


async def test_a_client_that_leaves_while_its_prompt_is_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal that nobody is left to read is no error of the server's."""
    makes, may_refuse, complaints = threading.Event(), threading.Event(), list[Any]()

    def refuse(*_: Any) -> Any:
        makes.set()
        may_refuse.wait()
        raise ApiError(400, "the prompt is too long")

    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    async with manager_of(folder, opening()) as manager:
        await events_of(manager, asked())
        monkeypatch.setattr("mlxrunner.server.manager._begin", refuse)
        task = asyncio.create_task(events_of(manager, asked()))
        await reached(makes.is_set)
        task.cancel()
        await asyncio.wait({task})
        others = asyncio.all_tasks() - {asyncio.current_task()}
        may_refuse.set()
        await asyncio.wait(others)
        del task, others
        gc.collect()
    assert complaints == []


async def test_a_client_that_leaves_while_its_request_is_submitted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads its answer, so it ends."""
    begun, may_return = list[Any](), threading.Event()
    begin = manager_module._begin

    def begin_slowly(*given: Any) -> Any:
        begun.append(begin(*given))
        may_return.wait()
        return begun[0]

    async with manager_of(folder, opening()) as manager:
        await events_of(manager, asked())
        monkeypatch.setattr(manager_module, "_begin", begin_slowly)
        task = asyncio.create_task(events_of(manager, asked(options={"stop_tokens": []})))
        await reached(lambda: begun)
        task.cancel()
        await asyncio.wait({task})
        cancelled = list[Any]()
        monkeypatch.setattr(Handle, "cancel", lambda handle: cancelled.append(handle))
        may_return.set()
        await reached(lambda: cancelled)
        assert cancelled == [begun[0].handle]
