"""Send the requests of many clients to OpenAI endpoints, and compare wall time and first tokens.

PYTHONPATH=tests python benchmarks/clients.py [--clients 8 16] [--prompt 160] [--answer 64] ...
python benchmarks/clients.py --url http://127.0.0.1:8080/v1 --model NAME --clients 8

Without --url the script writes an untrained model (--kind, --layers, --width) and serves it with
`mlxrunner serve` and `mlx_lm.server`, each with its default settings. On Linux put a fast BLAS
in front (`mlxrunner doctor` names it). The servers take turns at the same requests, another one
begins each round, and figures are medians of the rounds; the first `--warm` rounds fill the caches
and are not counted. Prompts have random words, so that nothing is reused but `--shared` words at
their beginning and the template's header. --rate R sends requests at random moments, R in a second
on average, instead of all at once.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx
from arguments import parser_of
from contenders import CONTENDERS, Served, answer_of
from untrained import KINDS, write_untrained

TRIES = 100
"""Most connections of a request: mlx_lm.server refuses some of many that come at once."""


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI endpoint and the name of its model."""

    name: str
    url: str
    model: str


@dataclass(frozen=True)
class Load:
    """The requests of one round."""

    clients: int
    prompt: int
    """Tokens of each prompt, about."""
    answer: int
    """Tokens of each answer."""
    shared: int = 0
    """Tokens that all prompts have in common at their beginning."""
    rate: float | None = None
    """Requests in a second; None: all at once."""

    def bodies(self, seed: int, model: str) -> list[tuple[float, dict[str, Any]]]:
        """Return the moments of the requests, and their bodies."""
        choose, begins = random.Random(seed), 0.0
        header = _letters(random.Random(0), self.shared)
        requests = []
        for _ in range(self.clients):
            text = header + _letters(choose, self.prompt - self.shared)
            body = {
                "model": model,
                "messages": [{"role": "user", "content": text}],
                "max_tokens": self.answer,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            requests.append((begins, body))
            begins += choose.expovariate(self.rate) if self.rate else 0.0
        return requests


@dataclass(frozen=True)
class Round:
    """One round's times, in seconds."""

    wall: float
    """From the first request to the last answer's end."""
    firsts: list[float]
    """Until the first token, of each request."""
    gaps: list[float]
    """The largest pause of each answer."""
    tokens: int
    """Tokens of all answers."""

    @property
    def half(self) -> float:
        """The median time to the first token."""
        return median(self.firsts)

    @property
    def most(self) -> float:
        """The 90th percentile of the times to the first token."""
        return quantiles(self.firsts, n=10)[-1] if len(self.firsts) > 1 else self.firsts[0]


def _letters(choose: random.Random, count: int) -> str:
    return "".join(choose.choices("abcdefghijklmnopqrstuvwxyz", k=max(count, 0)))


async def _ask(client: httpx.AsyncClient, after: float, body: dict[str, Any]) -> Round:
    """Return what a request took. One whose connection is refused is sent again, on the clock."""
    await asyncio.sleep(after)
    began = time.perf_counter()
    for _ in range(TRIES):
        with suppress(httpx.ConnectError, httpx.ReadError):
            return await _answer(client, began, body)
        await asyncio.sleep(0.02)
    raise SystemExit(f"{client.base_url}: refused {TRIES} times")


async def _answer(client: httpx.AsyncClient, began: float, body: dict[str, Any]) -> Round:
    first, gap, tokens = 0.0, 0.0, 0
    last = began
    async for text, usage in answer_of(client, "/chat/completions", body):
        tokens = usage.get("completion_tokens", tokens)
        if text:
            now = time.perf_counter()
            first, gap = (first, max(gap, now - last)) if first else (now - began, 0.0)
            last = now
    return Round(time.perf_counter() - began, [first], [gap], tokens)


async def _play(endpoint: Endpoint, load: Load, seed: int) -> Round:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=endpoint.url, timeout=None, verify=False, limits=limits
    ) as client:
        began = time.perf_counter()
        ended = await asyncio.gather(
            *(_ask(client, *one) for one in load.bodies(seed, endpoint.model))
        )
        wall = time.perf_counter() - began
    firsts, gaps = [one.firsts[0] for one in ended], [one.gaps[0] for one in ended]
    return Round(wall, firsts, gaps, sum(one.tokens for one in ended))


def compare(endpoints: Sequence[Endpoint], load: Load, rounds: int, warm: int) -> list[list[Round]]:
    """Return the rounds of each endpoint, which take turns."""
    found: list[list[Round]] = [[] for _ in endpoints]
    for number in range(warm + rounds):
        order = list(range(len(endpoints)))
        for which in order if number % 2 else reversed(order):
            one = asyncio.run(_play(endpoints[which], load, number))
            if number >= warm:
                found[which].append(one)
    return found


def show(load: Load, endpoints: Sequence[Endpoint], found: Sequence[Sequence[Round]]) -> None:
    """Print a line for each endpoint, and the ratios to the last one."""
    print(f"\n{load}")
    for endpoint, rounds in zip(endpoints, found, strict=True):
        gap = max(median(one.gaps) for one in rounds)
        print(
            f"{endpoint.name:>10}: wall {median(one.wall for one in rounds):6.2f} s, first token "
            f"{median(one.half for one in rounds):6.3f} s, 90 % "
            f"{median(one.most for one in rounds):6.3f} s, gap {gap:5.3f} s, "
            f"{rounds[0].tokens} tokens"
        )
    if len(found) > 1:
        pairs = list(zip(found[0], found[-1], strict=True))
        ratios = [
            median(getattr(ours, name) / getattr(theirs, name) for ours, theirs in pairs)
            for name in ("wall", "half", "most")
        ]
        print(
            "     ratio: wall {:.2f}, first token {:.2f}, 90 % {:.2f}".format(*ratios), flush=True
        )


def parse() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = parser_of(__doc__, rounds=5, quick="1 round of 4 clients with a tiny model")
    parser.add_argument("--url", help="base URL of any OpenAI endpoint, with /v1")
    parser.add_argument("--model", default="default", help="model name for --url")
    parser.add_argument("--against", nargs="*", default=["mlxrunner", "mlx_lm"], choices=CONTENDERS)
    parser.add_argument("--kind", default="llama", choices=KINDS)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    for name, default in (("clients", 8), ("prompt", 160), ("answer", 64), ("shared", 0)):
        parser.add_argument(f"--{name}", type=int, nargs="+", default=[default])
    parser.add_argument("--rate", type=float)
    parser.add_argument("--warm", type=int, default=2)
    given = parser.parse_args()
    if given.quick:
        given.rounds, given.warm, given.layers, given.width = 1, 1, 2, 64
        given.clients = [4]
    return given


def main() -> None:
    """Serve, play each load, print."""
    given = parse()
    loads = [
        Load(clients, prompt, answer, shared, given.rate)
        for clients in given.clients
        for prompt in given.prompt
        for answer in given.answer
        for shared in given.shared
    ]
    if given.url:
        endpoints = [Endpoint("endpoint", given.url.rstrip("/"), given.model)]
        for load in loads:
            show(load, endpoints, compare(endpoints, load, given.rounds, given.warm))
        return
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / given.kind
        write_untrained(folder, given.kind, layers=given.layers, width=given.width)
        servers = list[Served]()
        try:
            for name in given.against:
                servers.append(Served(CONTENDERS[name], folder, Path(place) / "kept"))
            endpoints = [
                Endpoint(one.name, f"{one.url}/v1", CONTENDERS[one.name].model(folder))
                for one in servers
            ]
            for load in loads:
                show(load, endpoints, compare(endpoints, load, given.rounds, given.warm))
        finally:
            for server in servers:
                server.stop()


if __name__ == "__main__":
    main()
