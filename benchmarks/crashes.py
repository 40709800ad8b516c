"""Kill the worker of a server under load at random moments, and count what its clients see.

python benchmarks/crashes.py [--clients 64] [--seconds 600] [--kills 10] [--model demo] [--quick]

Each client holds a conversation in OpenAI's protocol, every other one as streams. A client whose
connection breaks asks again, as client libraries do. It may have to wait, and may be told to come
later (429). A refused connection, another status, an answer that a server without a disk cache
gives otherwise count as failures, and
the exit code is then 1. The worker gets SIGKILL and SIGABRT in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

TURNS = 8
"""Turns after which a client begins another conversation."""
WORDS = ("ships", "rivers", "Zorblin", "lamps", "a dog", "music", "the sea", "trains")


@contextmanager
def served(model: str, cache: str, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Serve a model, with its files and its log in `cache`; yield the parent and its address."""
    command = [sys.executable, "-m", "mlxrunner", "serve", model, "--port", "0", "-vv", *options]
    log = Path(cache, "log")
    with log.open("wb") as file:
        environment = {**os.environ, "XDG_CACHE_HOME": cache}
        process = subprocess.Popen(command, stderr=file, env=environment)
    try:
        while "Ollama clients:" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        yield process, log.read_text().partition(" at ")[2].partition(" ")[0]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def worker_of(parent: int) -> int | None:
    """Return the process of the worker, or None while there is none."""
    found = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, check=True)
    pairs = [tuple(map(int, line.split())) for line in found.stdout.splitlines()]
    return next((pid for pid, of in pairs if of == parent), None)


@dataclass
class Load:
    """The clients of one server, and what they saw."""

    url: str
    seen: Counter[str] = field(default_factory=Counter)
    waits: list[float] = field(default_factory=list)
    """Seconds until each answer was whole."""
    asked: list[tuple[list[dict[str, str]], str]] = field(default_factory=list)
    """Messages and their answers, of which some are compared."""
    evaluated: int = 0
    prompts: int = 0

    async def client(self, number: int, until: float) -> None:
        """Hold conversations until a moment."""
        rng, begun = random.Random(number), 0
        async with httpx.AsyncClient(timeout=None) as client:
            while time.monotonic() < until:
                begun += 1
                first = f"I am client {number}.{begun}. Tell me about {rng.choice(WORDS)}."
                messages = [{"role": "user", "content": first}]
                for _ in range(TURNS):
                    if time.monotonic() >= until:
                        break
                    answer = await self.answer(client, messages, is_stream=number % 2 == 0)
                    self.asked.append(([*messages], answer))
                    messages += [
                        {"role": "assistant", "content": answer},
                        {"role": "user", "content": f"And {rng.choice(WORDS)}?"},
                    ]
                    await asyncio.sleep(rng.random())

    async def answer(
        self, client: httpx.AsyncClient, messages: list[dict[str, str]], *, is_stream: bool
    ) -> str:
        """Ask until there is a whole answer."""
        body: dict[str, Any] = {"messages": messages, "temperature": 0, "max_tokens": 24}
        if is_stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        began = time.monotonic()
        while True:
            try:
                response = await client.post(f"{self.url}/v1/chat/completions", json=body)
            except httpx.ConnectError as error:
                self.seen[f"FAILED: {type(error).__name__}"] += 1
            except httpx.TransportError:
                self.seen["asked again"] += 1
                continue
            else:
                if response.status_code == 200:
                    self.waits.append(time.monotonic() - began)
                    self.seen["answered"] += 1
                    return self._read(response.text, is_stream=is_stream)
                told = "told to come later" if response.status_code == 429 else "FAILED: status"
                self.seen[f"{told} ({response.status_code})"] += 1
            await asyncio.sleep(1)

    def _read(self, text: str, *, is_stream: bool) -> str:
        events = (
            [text]
            if not is_stream
            else [line[6:] for line in text.splitlines() if line.startswith("data: {")]
        )
        found, usage = "", None
        for event in map(json.loads, events):
            for choice in event["choices"]:
                said = choice.get("delta") or choice.get("message") or {}
                found += said.get("content") or ""
            usage = event.get("usage") or usage
        assert usage is not None
        self.prompts += usage["prompt_tokens"]
        self.evaluated += usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        return found


async def run(given: argparse.Namespace, parent: subprocess.Popen[bytes], url: str) -> Load:
    """Let clients ask while workers are killed."""
    load, until = Load(url), time.monotonic() + given.seconds
    clients = [asyncio.create_task(load.client(one, until)) for one in range(given.clients)]
    rng, pause = random.Random(1), given.seconds / (given.kills + 1)
    for number in range(given.kills):
        await asyncio.sleep(pause * (0.5 + rng.random()))
        if (worker := await asyncio.to_thread(worker_of, parent.pid)) is not None:
            os.kill(worker, (signal.SIGKILL, signal.SIGABRT)[number % 2])
            load.seen["killed"] += 1
    await asyncio.gather(*clients)
    return load


async def differing(load: Load, url: str, count: int) -> int:
    """Return how many of `count` answers another server gives otherwise.

    It holds each conversation from its beginning: earlier answers count as the tokens that the
    model wrote, which it would not know from their texts.
    """
    cold, found = Load(url), 0
    async with httpx.AsyncClient(timeout=None) as client:
        for messages, answer in random.Random(2).sample(load.asked, min(count, len(load.asked))):
            said = ""
            for end in range(1, len(messages) + 1, 2):
                said = await cold.answer(client, messages[:end], is_stream=False)
            found += said != answer
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--quick", action="store_true", help="8 clients for 40 s, two kills")
    given = parser.parse_args()
    if given.quick:
        given.clients, given.seconds, given.kills = 8, 40, 2
    with TemporaryDirectory() as cache:
        with served(given.model, cache) as (parent, url):
            load = asyncio.run(run(given, parent, url))
        said = Path(cache, "log").read_text().splitlines()
        with served(given.model, cache, "--no-disk-cache") as (_, url):
            if different := asyncio.run(differing(load, url, 20)):
                load.seen["FAILED: another answer than without a crash"] = different
    for name, count in sorted(load.seen.items()):
        print(f"{name:45} {count:7}")
    load.waits.sort()
    print(f"median wait {load.waits[len(load.waits) // 2]:.1f} s, longest {load.waits[-1]:.1f} s")
    print(f"{load.evaluated:,} of {load.prompts:,} prompt tokens evaluated")
    delays = [float(line.split()[-6]) for line in said if "after a turn's end" in line]
    print(f"{len(delays)} saves, at most {max(delays, default=0.0)} s after a turn's end")
    print(*(line for line in said if "worker" in line or "again at" in line), sep="\n")
    sys.exit(any(name.startswith("FAILED") for name in load.seen))


if __name__ == "__main__":
    main()
