"""`mlxrunner serve` in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

STARTED = b"Ollama clients:"


class Running:
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[bytes], said: bytes) -> None:
        self.process, self.said = process, said.decode()
        self.url = self.said.partition(" at ")[2].partition(" ")[0]

    def body(self, text: str, **more: Any) -> dict[str, Any]:
        return {
            "model": "tiny",
            "max_tokens": 20,
            "messages": [{"role": "user", "content": text}],
            **more,
        }

    def ask(self, text: str, **more: Any) -> httpx.Response:
        body = self.body(text, **more)
        return httpx.post(f"{self.url}/v1/messages", json=body, timeout=300)


@contextmanager
def program(*arguments: str, code: str | None = None) -> Iterator[Running]:
    """Run `mlxrunner serve` on a free port until the block ends. `code`: what runs in its place.

    Its passes are small, because it tries the largest one when it starts.
    """
    python = ["-m", "mlxrunner"] if code is None else ["-c", code]
    command = [sys.executable, *python, "serve", "--port", "0", "--prefill-step", "64", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield started(process)
    finally:
        process.kill()
        process.communicate()


def started(process: subprocess.Popen[bytes]) -> Running:
    """Wait until the server in `process` answers."""
    assert process.stderr is not None
    said = b""
    while STARTED not in said:
        line = process.stderr.readline()
        assert line, said.decode()
        said += line
    return Running(process, said)
