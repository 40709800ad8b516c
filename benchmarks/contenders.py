"""Endpoints of any server, of servers started here, and of the engine; and answers of theirs."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from mlxrunner import Usage

START_S = 300
TRIES = 100
"""Most connections of a request: mlx_lm.server refuses some of many that come at once."""
ENGINE = "engine"
"""The name of the engine in this process, without a server."""
Body = dict[str, Any]
"""A chat completion as it is asked for, with a stream."""
Pieces = AsyncIterator[tuple[str, dict[str, Any]]]
"""The text and the usage of each event of a streamed answer; both may be empty."""
Ask = Callable[[Body], Pieces]


class Endpoint:
    """An OpenAI endpoint of any server."""

    def __init__(self, name: str, url: str, model: str) -> None:
        """Ask at the base URL `url`, with /v1, for answers of `model`."""
        self.name, self.url, self.model = name, url, model

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Ask]:
        """Yield a function that asks, on connections that are closed at the end."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self.url, timeout=None, verify=False, limits=limits
        ) as client:
            yield partial(_answer, client)

    def used(self) -> float:
        """Return the seconds of the processor that it has used, or 0 if nobody knows."""
        return 0.0

    def restart(self) -> None:
        """End the server in order, and start it again; do nothing to one of somebody else."""

    def stop(self) -> None:
        """End the server in order."""


class EndpointError(Exception):
    """A server that is not there, or refuses a request."""


async def _answer(client: httpx.AsyncClient, body: Body) -> Pieces:
    sent = {name: value for name, value in body.items() if name != "priority"}  # the engine's own
    async with client.stream("POST", "/chat/completions", json=sent) as answer:
        if answer.is_error:
            said = (await answer.aread()).decode(errors="replace")
            raise EndpointError(f"{client.base_url}: {answer.status_code}: {said[:2000]}")
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                found = json.loads(line[6:])
                text = "".join(_text(choice["delta"]) for choice in found.get("choices", ()))
                yield text, found.get("usage") or {}


def _text(delta: dict[str, Any]) -> str:
    """Return what a client would show of a piece, whatever the server calls thinking."""
    names = ("content", "reasoning_content", "reasoning")
    return "".join(delta.get(name) or "" for name in names)


@dataclass(frozen=True)
class Contender:
    """A program that serves a model."""

    name: str
    command: Callable[[Path, Path], Sequence[str]]
    """A function of the model's folder and of a folder that outlives a restart."""
    model: Callable[[Path], str]
    """A function that returns the name of the model in requests."""


def ours(**options: Any) -> Contender:
    """Return `mlxrunner serve` with options of its command line."""

    def command(folder: Path, kept: Path) -> list[str]:
        words = [sys.executable, "-m", "mlxrunner", "serve", str(folder)]
        for name, value in options.items():
            words += [f"--{name.replace('_', '-')}", str(value)]
        return ["env", f"XDG_CACHE_HOME={kept}", *words]

    return Contender("mlxrunner", command, lambda folder: folder.name)


def _mlx_lm(folder: Path, kept: Path) -> list[str]:
    words = ["-m", "mlx_lm", "server", "--model", str(folder), "--log-level", "ERROR"]
    return [sys.executable, *words]


def _llamacpp(folder: Path, kept: Path) -> list[str]:
    return [sys.executable, str(Path(__file__).with_name("llamacpp.py")), str(folder)]


CONTENDERS = {
    one.name: one
    for one in (
        ours(),
        Contender("mlx_lm", _mlx_lm, lambda folder: "default_model"),
        Contender("llama.cpp", _llamacpp, lambda folder: "default"),
    )
}


class Served(Endpoint):
    """A server in a process of its own."""

    def __init__(self, contender: Contender, folder: Path, kept: Path) -> None:
        """Start `contender` with the model in `folder`. `kept` outlives a restart."""
        self.folder, self._words = folder, [*contender.command(folder, kept)]
        self._log = folder / f"{contender.name}.log"
        super().__init__(contender.name, "", contender.model(folder))
        self._start()

    def _start(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.root = f"http://127.0.0.1:{port}"
        self.url = f"{self.root}/v1"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._words, "--port", str(port)],
                stdout=log,
                stderr=log,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )
        until = time.monotonic() + START_S
        while self._process.poll() is None and time.monotonic() < until:
            try:
                if httpx.get(f"{self.root}/health").is_success:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        self.stop()
        raise SystemExit(f"{self.name} did not start:\n{self._log.read_text()[-2000:]}")

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()

    def restart(self) -> None:
        self.stop()
        self._start()

    def processes(self) -> list[int]:
        """Return the ids of the process and its children."""
        return _with_children(self._process.pid)

    def used(self) -> float:
        return sum(map(used_by, self.processes()))


class EngineEndpoint(Endpoint):
    """The engine in this process, whose steps can be limited, and which knows priorities."""

    def __init__(self, folder: Path, kept: Path, slots: int, step_ms: float | None = None) -> None:
        """Load the model in `folder`. `step_ms`: as `max_step_ms`; None: as the engine chooses."""
        name = ENGINE if step_ms is None else f"{ENGINE}, {step_ms:g} ms"
        super().__init__(name, "", folder.name)
        self._settings: dict[str, Any] = {"max_sequences": slots, "max_step_ms": step_ms}
        self._settings |= {"disk_cache_bytes": 2**34, "disk_cache_dir": kept / name}
        self._folder = folder
        self._load()

    def _load(self) -> None:
        from mlxrunner import ParallelRunner

        self._runner = ParallelRunner.load(self._folder, context=8192, **self._settings)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Ask]:
        yield self._answer

    async def _answer(self, body: Body) -> Pieces:
        options: dict[str, Any] = {"priority": body.get("priority", "interactive")}
        options |= {name: body[name] for name in ("max_tokens", "temperature")}
        with self._runner.submit(body["messages"], stop_tokens=[], **options) as handle:
            async for chunk in handle:
                yield chunk.text, {} if chunk.usage is None else _usage(chunk.usage)

    def used(self) -> float:
        return time.process_time()

    def stop(self) -> None:
        self._runner.close()

    def restart(self) -> None:
        self.stop()
        self._load()


def _usage(used: Usage) -> dict[str, Any]:
    """Return a usage in OpenAI's words."""
    return {
        "prompt_tokens": used.prompt_tokens,
        "completion_tokens": used.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": used.cached_tokens},
    }


@contextmanager
def served(
    folder: Path,
    names: Sequence[str],
    slots: int | None = None,
    step_ms: Sequence[float | None] = (),
    context: int = 4096,
) -> Iterator[list[Endpoint]]:
    """Serve the model in `folder` with each of the named contenders.

    `slots`: of our server and engine; None: as many as they choose, and 16. `step_ms`: the limits
    of the steps of the engine, one for each. `context`: of a slot of our server.
    """
    found = list[Endpoint]()
    try:
        for number, name in enumerate(names):
            kept = folder / f"kept{number}"
            if name == ENGINE:
                found += [EngineEndpoint(folder, kept, slots or 16, ms) for ms in step_ms or [None]]
                continue
            options = {"context": context} | ({} if slots is None else {"slots": slots})
            contender = ours(**options) if name == "mlxrunner" else CONTENDERS[name]
            found.append(Served(contender, folder, kept))
        yield found
    finally:
        for one in found:
            one.stop()


def body_of(model: str, messages: Sequence[Any], tokens: int, **more: Any) -> Body:
    """Return a request for an answer of at most `tokens` tokens as a stream."""
    return {
        "model": model,
        "messages": [*messages],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }


@dataclass
class Answer:
    """An answer, while it is read and afterwards."""

    began: float = field(default_factory=time.perf_counter)
    moments: list[float] = field(default_factory=list)
    """The moments at which its pieces came."""
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    ended: float = 0.0

    @property
    def first(self) -> float:
        """Seconds until the first piece."""
        return (self.moments[0] if self.moments else self.ended) - self.began

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return int(self.usage.get("prompt_tokens", 0))

    @property
    def cached(self) -> int:
        """Tokens of the prompt that were not evaluated."""
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    async def read(self, ask: Ask, body: Body) -> Answer:
        """Read it to its end. A request whose connection is refused is sent again, on the clock."""
        for _ in range(TRIES):
            with suppress(httpx.ConnectError, httpx.ReadError):
                async for text, usage in ask(body):
                    self.usage = usage or self.usage
                    if text:
                        self.moments.append(time.perf_counter())
                        self.text += text
                self.ended = time.perf_counter()
                return self
            await asyncio.sleep(0.02)
        raise EndpointError(f"the connection was refused {TRIES} times: is a server there?")


@dataclass(frozen=True)
class Round:
    """One round's answers, and its times in seconds."""

    wall: float
    """From the first request to the last answer's end."""
    answers: list[Answer]
    used: float = 0.0
    """Seconds of the server's processor."""

    @property
    def _pauses(self) -> list[float]:
        return [b - a for one in self.answers for a, b in pairwise(one.moments)] or [0.0]

    @property
    def step(self) -> float:
        """The usual pause between two pieces."""
        return median(self._pauses)

    @property
    def gap(self) -> float:
        """The longest pause."""
        return max(self._pauses)

    @property
    def half(self) -> float:
        """The median time to the first token."""
        return median(one.first for one in self.answers)

    @property
    def most(self) -> float:
        """The 90th percentile of the times to the first token."""
        firsts = [one.first for one in self.answers]
        return quantiles(firsts, n=10)[-1] if len(firsts) > 1 else firsts[0]

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(one.usage.get("completion_tokens", 0) for one in self.answers)


async def play(endpoint: Endpoint, requests: Sequence[tuple[float, Body]]) -> Round:
    """Send each request at its moment, and read all answers."""

    async def answered(ask: Ask, after: float, body: Body) -> Answer:
        await asyncio.sleep(after)
        return await Answer().read(ask, body)

    async with endpoint.session() as ask:
        used, began = endpoint.used(), time.perf_counter()
        answers = await asyncio.gather(*(answered(ask, *one) for one in requests))
        return Round(time.perf_counter() - began, answers, endpoint.used() - used)


def _with_children(process: int) -> list[int]:
    words = ["ps", "-e", "-o", "pid=,ppid="]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in said.splitlines()]
    found = [process]
    for parent in found:
        found += [pid for pid, of in pairs if of == parent]
    return found


def used_by(process: int) -> float:
    """Return the seconds of the processor that a process has used."""
    stat = Path(f"/proc/{process}/stat")
    if stat.is_file():
        user, system = stat.read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    words = ["ps", "-o", "time=", "-p", str(process)]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    minutes, _, seconds = said.strip().rpartition(":")
    return 60 * int(minutes) + float(seconds)
