"""Servers in processes of their own, and a client that measures an answer of each."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from traces import Ask

ANSWER = 8
"""Tokens of each answer."""
START_S = 300


@dataclass(frozen=True)
class Contender:
    """A program that serves a model."""

    name: str
    command: Callable[[Path, Path], Sequence[str]]
    """A function of the model's folder and of a folder that outlives a restart."""
    model: Callable[[Path], str]
    """A function that returns the name of the model in requests."""


def _ours(folder: Path, kept: Path) -> list[str]:
    words = [sys.executable, "-m", "mlxrunner", "serve", str(folder), "--context", "4096"]
    return ["env", f"XDG_CACHE_HOME={kept}", *words]


def _mlx_lm(folder: Path, kept: Path) -> list[str]:
    words = ["-m", "mlx_lm", "server", "--model", str(folder), "--log-level", "ERROR"]
    return [sys.executable, *words]


def _llamacpp(folder: Path, kept: Path) -> list[str]:
    return [sys.executable, str(Path(__file__).with_name("llamacpp.py")), str(folder)]


CONTENDERS = {
    one.name: one
    for one in (
        Contender("mlxrunner", _ours, lambda folder: folder.name),
        Contender("mlx_lm", _mlx_lm, lambda folder: "default_model"),
        Contender("llama.cpp", _llamacpp, lambda folder: "default"),
    )
}


@dataclass(frozen=True)
class Measured:
    """An answer to a request, and what it cost."""

    prompt: int
    """Tokens of the prompt."""
    cached: int
    """Tokens of the prompt that were not evaluated."""
    first: float
    """Seconds until the first text."""
    text: str


class Served:
    """A server that runs. Call `stop` at the end."""

    def __init__(self, contender: Contender, folder: Path, kept: Path) -> None:
        self.name = contender.name
        self._words = [*contender.command(folder, kept)]
        self._model = contender.model(folder)
        self._log = folder / f"{contender.name}.log"
        self._start()

    def _start(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
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
                if httpx.get(f"{self.url}/health").is_success:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        self.stop()
        raise SystemExit(f"{self.name} did not start:\n{self._log.read_text()[-2000:]}")

    def stop(self) -> None:
        """End the server in order."""
        self._process.terminate()
        self._process.wait()

    def restart(self) -> None:
        """End the server in order, and start it again."""
        self.stop()
        self._start()

    @property
    def process(self) -> int:
        """The id of the process."""
        return self._process.pid

    def used(self) -> float:
        """Return the seconds of the processor that the process and its children have used."""
        return sum(used_by(process) for process in _with_children(self.process))

    def client(self) -> httpx.AsyncClient:
        """Return a client for `ask`."""
        return httpx.AsyncClient(base_url=self.url, timeout=None, verify=False)

    async def ask(self, client: httpx.AsyncClient, ask: Ask) -> Measured:
        """Ask for an answer as a stream."""
        body: dict[str, Any] = {
            "model": self._model,
            "messages": list(ask.messages),
            "max_tokens": ANSWER,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "chat_template_kwargs": {"enable_thinking": ask.thinks},
        }
        body |= {"tools": list(ask.tools)} if ask.tools else {}
        began, first, parts, usage = time.perf_counter(), 0.0, list[str](), dict[str, Any]()
        async for new, used in answer_of(client, "/v1/chat/completions", body):
            usage = used or usage
            first = first or (time.perf_counter() - began if new else 0.0)
            parts.append(new)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return Measured(usage["prompt_tokens"], cached, first, "".join(parts))


async def answer_of(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Yield the text and the usage of each event of a streamed answer; both may be empty."""
    async with client.stream("POST", path, json=body) as answer:
        if answer.is_error:
            raise SystemExit(f"{client.base_url}: {(await answer.aread()).decode()}")
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                found = json.loads(line[6:])
                text = "".join(_text(choice["delta"]) for choice in found.get("choices", ()))
                yield text, found.get("usage") or {}


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


def _text(delta: dict[str, Any]) -> str:
    """Return what a client would show of a piece, whatever the server calls thinking."""
    names = ("content", "reasoning_content", "reasoning")
    return "".join(delta.get(name) or "" for name in names)
