"""The manager loads models on demand, and unloads them."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from support.managers import (
    SETTINGS,
    Counting,
    asked,
    events_of,
    held_in,
    manager_of,
    opening,
    reached,
)

from mlxrunner.engine.parallel_runner import ParallelRunner
from mlxrunner.engine.thread import has_work
from mlxrunner.errors import ClosedError, MemoryPlanError, OptionError
from mlxrunner.models.load import LoadProgress, tell_nobody, without_weights
from mlxrunner.options import ServeSettings
from mlxrunner.profiling.metrics import RequestLog
from mlxrunner.server import manager as manager_module
from mlxrunner.server.events import AnswerEnd, ApiError, Ping
from mlxrunner.server.manager import ModelManager, ModelNames
from mlxrunner.server.models import ModelLoader, ServedModel
from tests.support.models import write_model


async def test_two_requests_load_a_model_once(folder: Path) -> None:
    """They wait for the same loading; the event loop continues meanwhile."""

    made = opening()
    async with manager_of(folder, made) as manager:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        ticking = asyncio.create_task(tick())
        both = [asyncio.create_task(events_of(manager, asked())) for _ in range(2)]
        answers = await asyncio.gather(*both)
        ticking.cancel()
        assert made.loads == ["first"]
        assert ticks > 5
        assert all(isinstance(events[-1], AnswerEnd) for events in answers)


async def test_beats_come_while_a_model_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client is told why it waits, and how far its prompt is."""
    monkeypatch.setattr(manager_module.Heartbeat.__init__, "__defaults__", (0.0, 0.0))

    async with manager_of(folder, opening()) as manager:
        events = await events_of(manager, asked("x" * 300))
        assert Ping() in events
        assert isinstance(events[-1], AnswerEnd)


async def test_another_model_makes_the_least_useful_one_leave(folder: Path) -> None:
    """The one that was used least recently goes; a model in use stays until its answer is there."""
    half = 180_000_000

    made = opening(first=half, second=half, third=half)
    async with manager_of(folder, made) as manager:
        await events_of(manager, asked())
        await events_of(manager, asked(model="second"))
        await events_of(manager, asked())
        assert made.loads == ["first", "second"]
        await events_of(manager, asked(model="third"))
        held = [Path(place.name).name for place in manager.models_held]
        assert held == ["first", "third"]
        answer = manager.answer(asked(options={"max_tokens": 300, "stop_tokens": []}))
        await anext(answer)
        later = asyncio.create_task(events_of(manager, asked(model="second")))
        rest = [event async for event in answer]
        assert rest[-1].usage.completion_tokens == 300
        assert isinstance((await later)[-1], AnswerEnd)


async def test_a_model_that_does_not_fit(folder: Path) -> None:
    """It is refused with a reason, and asking again tries again."""

    settings = ServeSettings(slots=2, disk_cache=False, memory=1000)
    made = ModelLoader(settings=settings)
    async with manager_of(folder, made) as manager:
        for _ in range(2):
            with pytest.raises(ApiError, match="give more --memory") as refused:
                await events_of(manager, asked())
            assert refused.value.status == 503


class Stuck(Counting):
    """An opening whose models take until a test lets them in."""

    may_load: threading.Event
    ended: threading.Event

    def load(self, name: str, room: int, progress: LoadProgress = tell_nobody) -> ServedModel:
        self.loads.append(Path(name).name)
        self.may_load.wait()
        self.ended.set()
        raise MemoryPlanError("too late")


async def test_a_stop_does_not_wait_for_a_model_that_is_loaded(folder: Path) -> None:
    """The request that waits for it is told so; another one that runs ends with its model."""

    made = Stuck(settings=SETTINGS)
    for name, value in {"loads": [], "needs": {}}.items():
        object.__setattr__(made, name, value)
    for name in ("may_load", "ended"):
        object.__setattr__(made, name, threading.Event())
    async with manager_of(folder, made) as manager:
        waiting = asyncio.create_task(events_of(manager, asked()))
        await reached(lambda: made.loads)
        await manager.close()
        assert not made.ended.is_set()
        assert has_work()
        done, _ = await asyncio.wait({waiting})
        error = done.pop().exception()
        assert isinstance(error, ApiError)
        assert (error.status, error.code) == (503, "stopping")
        made.may_load.set()
        await reached(lambda: not has_work())


@pytest.mark.exhaustive(0)
async def test_a_model_that_can_not_be_watched(folder: Path) -> None:
    """It is refused with the reason and not held; the next request tries again."""
    opened_ones = list[ParallelRunner]()

    def refuse(runner: ParallelRunner) -> None:
        opened_ones.append(runner)
        if len(opened_ones) == 1:
            raise OptionError("events: the disk is full")

    manager = ModelManager(ModelNames(str(folder / "first")), opening(), refuse)
    with pytest.raises(ApiError, match="the disk is full"):
        await events_of(manager, asked())
    assert list(manager.models_held) == []
    with pytest.raises(ClosedError):
        opened_ones[0].submit("x")
    await manager.hold("first", 0)  # is not there, so nothing is loaded to be unloaded
    assert len(opened_ones) == 1
    assert isinstance((await events_of(manager, asked()))[-1], AnswerEnd)
    await manager.close()


@pytest.mark.exhaustive(0)
async def test_a_model_that_is_loaded_again_is_recorded_once(folder: Path, tmp_path: Path) -> None:
    """The files of its first time are closed, and both times are in the record."""
    record = RequestLog(tmp_path / "events.jsonl")

    manager = ModelManager(ModelNames(str(folder / "first")), opening(), record.watch)
    for number in range(3):
        await events_of(manager, asked(id=f"msg_{number}", keep_alive=0))
        await reached(lambda: not list(manager.models_held))
    await manager.close()
    assert len(record._profiles) == 1
    assert [record.event(f"msg_{number}") is None for number in range(3)] == [False] * 3
    record.close()
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 3


@pytest.mark.exhaustive(0)
async def test_keep_alive(folder: Path) -> None:
    """0 unloads a model after its answer; a negative number keeps it, and so does None."""

    async with manager_of(folder, opening()) as manager:
        await events_of(manager, asked(keep_alive=0))
        await reached(lambda: not list(manager.models_held))
        await manager.hold("first", 1000)
        card = next(iter(manager.models()))
        assert card.is_loaded
        assert card.expires is not None
        await events_of(manager, asked(keep_alive=-1))
        assert next(iter(manager.models())).expires is None
        await manager.hold("first", 0)
        await reached(lambda: not list(manager.models_held))


async def test_cards_of_names(folder: Path) -> None:
    """Every name that a request may give has a card, in the form of the lists; no other has."""

    async with manager_of(folder, opening()) as manager:
        names = ["first", "second", "demo", "first:latest", ""]
        assert [manager.card(name).name for name in names] == [*names[:3], "first", "first"]
        assert manager.card("demo").architecture == "llama"
        assert not manager.card("demo").has_thinking
        with pytest.raises(ApiError, match="no model fourth") as raised:
            manager.card("fourth")
        assert raised.value.status == 404


@pytest.mark.exhaustive(0)
async def test_a_house_that_is_closed(folder: Path) -> None:
    """It takes no request, and running ones end with a reason."""

    async with manager_of(folder, opening()) as manager:
        await events_of(manager, asked())
        running = asyncio.create_task(
            events_of(manager, asked(options={"stop_tokens": [], "max_tokens": 390}))
        )
        runner = held_in(manager).runner
        await reached(lambda: runner.stats().busy)
        await manager.close()
        with pytest.raises(ApiError, match="stopping"):
            await events_of(manager, asked())
        done, _ = await asyncio.wait({running})
        error = done.pop().exception()
        assert error is None or (isinstance(error, ApiError) and error.status == 503)


CONTEXT = 500


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next", "jamba"])
@pytest.mark.parametrize("budget", [None, 200_000], ids=["usual", "given"])
def test_a_model_finds_room_in_its_least(kind: str, budget: int | None, tmp_path: Path) -> None:
    """The states of all slots and the checkpoints count: else others stay, and it has no room."""
    write_model(tmp_path / kind, kind)
    runner = {"context": CONTEXT, "prefill_step": 32, "checkpoint_budget": budget}
    settings = ServeSettings(slots=4, disk_cache=False, memory=50_000_000)
    opening = ModelLoader(settings=settings, runner=runner)
    name = str(tmp_path / kind)
    opened = opening.load(name, opening.least(name))
    with opened.runner:
        assert opened.room == CONTEXT


@pytest.mark.parametrize(
    ("kind", "memory", "slots"),
    [("llama", 30_000_000, 16), ("jamba", 3_000_000_000, 16), ("jamba", 1_000_000, 8)],
)
def test_a_model_has_more_slots_where_they_take_little(
    kind: str, memory: int, slots: int, tmp_path: Path
) -> None:
    """Each slot of a recurrent model has states of its own, whether they are used or not."""
    write_model(tmp_path / kind, kind)
    settings = ServeSettings(disk_cache=False, memory=memory)
    opening = ModelLoader(settings=settings, runner={"context": CONTEXT, "prefill_step": 32})
    name = str(tmp_path / kind)
    found = without_weights(name)
    assert opening.slots_of(found) == slots
    if memory > 1_000_000:
        opened = opening.load(name, opening.least(name))
        with opened.runner:
            assert opened.slots == opened.runner.stats().slots == slots
