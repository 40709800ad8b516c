"""Download a model of the hub because a client asks for it, and say how far it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

from mlxrunner.models.resolve import pull
from mlxrunner.serve.apis.delivery import end
from mlxrunner.serve.apis.ollama.writing import line
from mlxrunner.serve.apis.refusals import refusal_of

Pull = Callable[..., Path]
"""A function that downloads a model: `mlxrunner.models.resolve.pull`."""
PERIOD_S = 0.2
"""Seconds between two lines about one file."""


class StoppedError(Exception):
    """The client has left: nobody waits for the download."""


async def progress(name: str, pull: Pull = pull) -> AsyncGenerator[dict[str, Any], None]:
    """Download a model, and yield what Ollama's clients are told meanwhile.

    Closing this ends the download; what came of a file is kept. Raise ModelError.
    """
    yield {"status": "pulling manifest"}
    reached: dict[str, tuple[int, int]] = {}
    is_left = False

    def tell(file: str, present: int, whole: int) -> None:
        if is_left:
            raise StoppedError
        reached[file] = present, whole

    work = asyncio.ensure_future(asyncio.to_thread(pull, name, tell=tell))
    said: dict[str, tuple[int, int]] = {}
    try:
        while not work.done():
            await asyncio.wait({work}, timeout=PERIOD_S)
            for file, (present, whole) in list(reached.items()):
                if said.get(file) != (present, whole):
                    said[file] = present, whole
                    yield {
                        "status": f"pulling {file}",
                        "digest": file,
                        "total": whole,
                        "completed": present,
                    }
        work.result()
        yield {"status": "success"}
    finally:
        is_left = True
        await end(work)


async def present() -> AsyncGenerator[dict[str, Any], None]:
    """Yield what Ollama's clients are told of a model that is here, and not from the hub."""
    yield {"status": "pulling manifest"}
    yield {"status": "success"}


async def lines(
    events: AsyncGenerator[dict[str, Any], None],
) -> AsyncGenerator[bytes, None]:
    """Yield the lines of a stream. An error is the last line, as the status has been sent."""
    try:
        async for event in events:
            yield line(event)
    except Exception as error:  # the client has to be told in any case
        yield line({"error": refusal_of(error).message})
    finally:
        await events.aclose()
