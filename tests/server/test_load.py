"""Many clients at once, some of which leave, stall or send nonsense: the server lives, and is idle
when they are gone.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import uvloop
from support.load import WIRES, Tally, load, request
from support.models import write_model, write_tokenizer
from support.program import program
from support.waiting import until

from mlxrunner.options import ServeSettings
from mlxrunner.profiling.metrics import RequestLog
from mlxrunner.server.manager import ModelManager, ModelNames
from mlxrunner.server.models import ModelLoader
from mlxrunner.server.server import HttpConnection, UvicornServer, application
from mlxrunner.server.supervisor import listen

TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
CONTEXT = 2000
CLIENTS = 16
ANSWERS = 30
KINDS = 16
"""Six protocols, turns in any of them, and nine things that other clients do."""
LONG = {
    "messages": [{"role": "user", "content": "Go on for ever."}],
    "max_tokens": CONTEXT,
    "stream": True,
    "logprobs": True,
    "top_logprobs": 20,
}
"""A request whose answer is too long for the buffers between a server and its client."""


class Running:
    """A server in a thread of this process."""

    def __init__(self, folder: Path, settings: ServeSettings) -> None:
        record = RequestLog()
        opening = ModelLoader(settings=settings, runner={"context": CONTEXT})
        self.manager = ModelManager(ModelNames(str(folder)), opening, record.watch)
        self.runner = self.manager.load_first().runner
        self.listening = listen(settings)
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}"
        app = application(self.manager, record, settings)
        self._server = UvicornServer(app, self.manager, 300, lambda: None)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        uvloop.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await self._server.serve(sockets=[self.listening])
        finally:
            await self.manager.close()

    def tasks(self) -> int:
        """Return the number of tasks of the server, its own one included."""

        async def count() -> int:
            return len(asyncio.all_tasks()) - 1

        return asyncio.run_coroutine_threadsafe(count(), self._loop).result()

    def connections(self) -> int:
        return len(self._server.server_state.connections)

    def model(self) -> dict[str, Any]:
        """Return what /slots says of the model."""
        found: dict[str, Any] = httpx.get(f"{self.url}/slots").json()["models"][0]
        return found

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose answers seldom end by themselves."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_model(folder, max_position_embeddings=CONTEXT, tokenizer=False)
    write_tokenizer(folder, chat_template=TEMPLATE)
    return folder


@contextmanager
def running(folder: Path, **settings: Any) -> Iterator[Running]:
    server = Running(folder, ServeSettings(port=0, **settings))
    try:
        until(lambda: server.manager and httpx.get(f"{server.url}/health").is_success)
        yield server
    finally:
        server.stop()


@pytest.mark.exhaustive(0)
def test_clients_of_all_kinds(folder: Path) -> None:
    """No answer is wrong, nothing is left of those who went away, and the budgets hold."""
    with running(
        folder, slots=3, max_queue=6, memory=200_000_000, disk_cache_bytes=2_000_000
    ) as server:
        until(lambda: not server.connections())
        before = server.tasks()

        def is_over(tally: Tally) -> bool:
            return bool(tally.wrong) or (tally.answers >= ANSWERS and len(tally.done) == KINDS)

        tally = asyncio.run(load(server.url, CLIENTS, is_over))
        assert tally.wrong == []
        until(lambda: not server.connections(), "for connections to close")
        until(lambda: server.tasks() == before, "for tasks to end")
        model = server.model()
        assert (model["busy"], model["waiting"]) == (0, 0)
        assert {one["state"] for one in model["conversations"]} == {"idle"}
        assert 0 < model["parked_bytes"] <= 2_000_000
        assert model["bytes"] <= 200_000_000
        assert _users(server) == 0
        assert 0 < tally.later <= server.manager.refused


def test_a_client_that_reads_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps its place among the requests that may wait for so long, and no longer."""
    monkeypatch.setattr(HttpConnection, "unread", 0.1)
    with running(folder, slots=1, max_queue=0, disk_cache=False) as server:
        before = server.tasks()
        server.listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", urlsplit(server.url).port or 0))
            client.sendall(request(WIRES[0].path, LONG))
            until(lambda: _users(server) == 1, "for the request to begin")
            until(lambda: _users(server) == 0, "for the request to end")
            assert b"[DONE]" not in b"".join(iter(lambda: client.recv(65536), b""))
        until(lambda: server.tasks() == before, "for tasks to end")


def _users(server: Running) -> int:
    return sum(place.users for place in server.manager.models_held)


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.exhaustive(0)
def test_kill_9_under_load(folder: Path, slots: int) -> None:
    """A parked conversation continues after the restart, while others ask, with the same answer."""
    options = (str(folder), "--slots", str(slots), "--context", str(CONTEXT))
    prompt = "Once upon a time " * 20
    with program(*options) as server, under_load(server.url):
        first = server.ask(prompt)
        until(lambda: not _has(server.url, first.headers["x-request-id"]), "to be parked")
        until(lambda: _busy(server.url) == slots)
        server.process.kill()
    with program(*options) as server, under_load(server.url):
        again = server.ask(prompt)
        assert again.json()["content"] == first.json()["content"]
        prompt_tokens = first.json()["usage"]["input_tokens"]
        assert again.json()["usage"]["cache_read_input_tokens"] == prompt_tokens - 1
        assert (
            "came back from disk"
            in httpx.get(f"{server.url}/explain/{again.headers['x-request-id']}").text
        )


@contextmanager
def under_load(url: str) -> Iterator[None]:
    """Let four clients ask until the block ends, or the server does."""
    over = threading.Event()

    def is_over(tally: Tally) -> bool:
        return over.is_set() or bool(tally.wrong)

    thread = threading.Thread(target=lambda: asyncio.run(load(url, 4, is_over)))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _conversations(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{url}/slots").json()["models"][0]["conversations"]
    return found


def _has(url: str, request: str) -> bool:
    """Return True if a slot holds the conversation of a request."""
    return any(one["request"] == request for one in _conversations(url))


def _busy(url: str) -> int:
    return sum(one["state"] == "busy" for one in _conversations(url))
