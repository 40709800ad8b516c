"""The models that are loaded: others come on demand, and the least useful ones make room.

All methods belong to the event loop. Models are loaded and closed in worker threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mlxrunner.parallel.threads.workers import run_in_worker
from mlxrunner.results import logger
from mlxrunner.serve.answering.opened import Opened, Opening
from mlxrunner.serve.answering.pace import look_at


@dataclass(eq=False)
class Place:
    """A model that requests use, or wait for."""

    name: str
    users: int = 0
    """Requests that use it or wait for it."""
    opened: Opened | None = None
    """The model, once it is loaded."""
    loading: asyncio.Task[None] | None = None
    """The task that loads it; its exception says why it could not."""
    used: float = 0.0
    """The moment of its last use, on `time.monotonic`."""
    expires: float | None = None
    """Unix time at which it is unloaded if nobody asks; None: never."""
    timer: asyncio.TimerHandle | None = None


class LoadedModels:
    """The models of a server within its budget of bytes."""

    def __init__(self, opening: Opening, on_open: Callable[[Opened], None]) -> None:
        """Hold no model yet. `on_open` is called with each one that was loaded."""
        self._opening, self._on_open = opening, on_open
        self._places: dict[str, Place] = {}
        self._leaving: list[Place] = []
        """Places that no new request gets, until their last request has ended."""
        self._door = asyncio.Lock()
        """Held while a model is loaded or unloaded."""
        self._left = asyncio.Event()
        """Set when a request has left its place."""

    def __iter__(self) -> Iterator[Place]:
        """Yield the places whose models are loaded."""
        return (place for place in [*self._places.values(), *self._leaving] if place.opened)

    def get(self, name: str) -> Place | None:
        """Return the place of a model that is loaded or being loaded; None if it is neither."""
        place = self._places.get(name)
        return None if place is None or _has_failed(place) else place

    def take_in(self, opened: Opened) -> None:
        """Add a model that was loaded before the server runs."""
        self._places[opened.name] = Place(opened.name, opened=opened, used=time.monotonic())
        self._on_open(opened)

    def enter(self, name: str) -> Place:
        """Return the place of a model, for a request that has to `leave` it.

        If the model is not loaded, its loading begins, once for all who wait for it.
        """
        place = self.get(name)
        if place is None:
            place = self._places[name] = Place(name)
            place.loading = asyncio.create_task(self._load(place))
            place.loading.add_done_callback(look_at)
        place.users += 1
        self._stop_timer(place)
        return place

    def leave(self, place: Place, keep_alive: float | None) -> None:
        """End the use of a place. `keep_alive`: seconds until it may go; None or less: for ever."""
        place.users -= 1
        place.used = time.monotonic()
        self._left.set()
        if place.users or keep_alive is None or keep_alive < 0:
            return
        place.expires = time.time() + keep_alive
        loop = asyncio.get_running_loop()
        place.timer = loop.call_later(keep_alive, self._expire, place)

    def give_up(self, place: Place) -> None:
        """Let no new request have a place whose model has failed."""
        if self._places.get(place.name) is place:
            del self._places[place.name]
            self._leaving.append(place)
            self._unload_soon(place)

    async def close(self) -> None:
        """Unload all models; what still runs there ends. What is being loaded is not waited for."""
        for place in self._places.values():
            if place.opened is None and place.loading is not None:
                place.loading.cancel()
        for place in list(self):
            self._stop_timer(place)
            await self._unload(place)

    async def _load(self, place: Place) -> None:
        async with self._door:
            needed = await run_in_worker(self._opening.least, place.name)
            budget = await run_in_worker(self._opening.budget)
            while self._bytes() + needed > budget and (other := self._least_useful(place)):
                await self._make_leave(other)
            room = budget - self._bytes()
            opened = await run_in_worker(self._opening.load, place.name, room)
            try:
                self._on_open(opened)
            except Exception:
                await asyncio.to_thread(opened.runner.close)
                raise
            place.opened, place.used = opened, time.monotonic()

    def _bytes(self) -> int:
        return sum(place.opened.bytes for place in self if place.opened)

    def _least_useful(self, wanted: Place) -> Place | None:
        """Return the place to give up first: an idle one that was used least recently."""
        others = [place for place in self if place is not wanted]
        return min(others, key=lambda place: (place.users > 0, place.used), default=None)

    async def _make_leave(self, place: Place) -> None:
        """Unload a model once its requests have ended. New ones load it again."""
        if self._places.get(place.name) is place:
            del self._places[place.name]
            self._leaving.append(place)
        while place.users:
            self._left.clear()
            await self._left.wait()
        await self._unload(place)

    async def _unload(self, place: Place) -> None:
        opened, place.opened, place.expires = place.opened, None, None
        if self._places.get(place.name) is place:
            del self._places[place.name]
        if place in self._leaving:
            self._leaving.remove(place)
        if opened is not None:
            logger.info("unloading %s", opened.name)
            await asyncio.to_thread(opened.runner.close)

    def _expire(self, place: Place) -> None:
        if not place.users and place.opened is not None:
            self.give_up(place)

    def _unload_soon(self, place: Place) -> None:
        async def unload() -> None:
            async with self._door:
                if place.opened is not None:
                    await self._make_leave(place)

        task = asyncio.create_task(unload())
        task.add_done_callback(look_at)
        place.loading = task  # a task that nothing refers to may be dropped

    def _stop_timer(self, place: Place) -> None:
        if place.timer is not None:
            place.timer.cancel()
        place.timer, place.expires = None, None


def _has_failed(place: Place) -> bool:
    loading = place.loading
    return place.opened is None and loading is not None and loading.done()
