"""Managers of models for tests, with openings that count."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.scripted import serving

from mlxrunner.models.load import LoadProgress, tell_nobody
from mlxrunner.options import ServeSettings
from mlxrunner.profiling.metrics import RequestLog
from mlxrunner.server.events import AnswerEvent, ServerRequest
from mlxrunner.server.manager import ModelManager, ModelNames
from mlxrunner.server.models import ModelLoader, ServedModel
from mlxrunner.server.server import application

CHATML = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SETTINGS = ServeSettings(slots=2, max_queue=1, disk_cache=False, memory=400_000_000)


class Counting(ModelLoader):
    """An opening that counts, and needs as many bytes as a test says."""

    loads: list[str]
    needs: dict[str, int]

    def load(self, name: str, room: int, progress: LoadProgress = tell_nobody) -> ServedModel:
        self.loads.append(Path(name).name)
        found = super().load(name, min(room, 200_000_000), progress)
        return replace(found, bytes=self.needs.get(Path(name).name, 1))

    def least(self, name: str) -> int:
        super().least(name)
        return self.needs.get(Path(name).name, 1)

    def budget(self) -> int:
        return 400_000_000


def opening(settings: ServeSettings = SETTINGS, **needs: int) -> Counting:
    found = Counting(settings=settings, runner={"context": 400})
    object.__setattr__(found, "loads", [])
    object.__setattr__(found, "needs", needs)
    return found


@asynccontextmanager
async def manager_of(folder: Path, opening: ModelLoader) -> AsyncIterator[ModelManager]:
    aliases = {name: str(folder / name) for name in ("second", "third")}
    async with open_manager(ModelNames(str(folder / "first"), aliases), opening) as manager:
        yield manager


@asynccontextmanager
async def open_manager(
    names: ModelNames, opening: ModelLoader, record: RequestLog | None = None
) -> AsyncIterator[ModelManager]:
    """Return a manager with an opening of any kind, and close it."""
    watching = [lambda opened: None] if record is None else [record.watch, record.ended]
    manager = ModelManager(names, opening, *watching)
    try:
        yield manager
    finally:
        await manager.close()


@contextmanager
def served(
    name: str, opening: ModelLoader, record: RequestLog | None = None
) -> Iterator[tuple[str, ServedModel]]:
    """Serve a model over HTTP, and yield the address and the model."""
    record = RequestLog() if record is None else record
    manager = ModelManager(ModelNames(name), opening, record.watch, record.ended)
    opened = manager.load_first()
    with serving(application(manager, record, opening.settings)) as url:
        yield url, opened


def asked(text: str = "Hello", **more: Any) -> ServerRequest:
    more.setdefault("options", {"max_tokens": 4, "stop_tokens": []})
    given = {"protocol": "chat", "model": "", "messages": [{"role": "user", "content": text}]}
    return ServerRequest(**{**given, **more})


async def events_of(manager: ModelManager, one: ServerRequest) -> list[AnswerEvent]:
    return [event async for event in manager.answer(one)]


async def reached(holds: Callable[[], object]) -> None:
    """Wait until a state is reached."""
    async with asyncio.timeout(300):
        while not holds():
            await asyncio.sleep(0.005)


def held_in(manager: ModelManager) -> ServedModel:
    """Return the first model that a manager has loaded."""
    opened = next(iter(manager.models_held)).opened
    assert opened is not None
    return opened
