"""Send the requests of many clients to OpenAI endpoints, and compare wall time and first tokens.

PYTHONPATH=tests python benchmarks/clients.py [--clients 8 16] [--prompt 160] [--answer 64] ...
PYTHONPATH=tests python benchmarks/clients.py --drawn 24
python benchmarks/clients.py --url http://127.0.0.1:8080/v1 --model NAME --clients 8
python benchmarks/clients.py --url http://127.0.0.1:8080/v1 --model NAME --trace FILE

Without --url the script writes an untrained model (--kind, --layers, --width) and serves it with
`mlxrunner serve` and `mlx_lm.server`, each with its default settings. On Linux put a fast BLAS
in front (`mlxrunner doctor` names it). The servers take turns at the same requests, another one
begins each round, and figures are medians of the rounds; the first `--warm` rounds fill the caches
and are not counted. Prompts have random words, so that nothing is reused but `--shared` words at
their beginning and the template's header. A step is the usual pause between two tokens of an
answer, a gap is the longest one; "processor" is what the server used of it.

All requests come at once, or with --rate R at random moments, R in a second on average, or with
--busy S at S times the rate that the faster server can serve. --trace FILE plays requests from
JSON lines: {"at": SECONDS, "prompt": TOKENS, "answer": TOKENS, "shared": TOKENS}, or with
"messages" in place of "prompt".

--drawn N draws N mixtures of clients, prompts, answers, arrivals, models and sizes, and ends with
the median and the largest of the ratios. --age N compares a server that has answered N other
conversations with a new one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise
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
    used: Callable[[], float] = lambda: 0.0
    """A function that returns the seconds of the processor that the server has used."""


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
    busy: float | None = None
    """Requests in a second as a share of what the faster server can do."""

    trace: Path | None = None
    """A file with the requests, in place of all this."""

    def bodies(self, seed: int, model: str) -> list[tuple[float, dict[str, Any]]]:
        """Return the moments of the requests, and their bodies."""
        choose, header = random.Random(seed), random.Random(0)
        letters = _letters(header, max((one.get("shared", 0) for one in self._traced), default=0))
        letters = letters or _letters(header, self.shared)
        requests, begins = [], 0.0
        for one in self._traced or [{}] * self.clients:
            shared = letters[: one.get("shared", self.shared)]
            text = shared + _letters(choose, one.get("prompt", self.prompt) - len(shared))
            body = {
                "model": model,
                "messages": one.get("messages", [{"role": "user", "content": text}]),
                "max_tokens": one.get("answer", self.answer),
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            requests.append((one.get("at", begins), body))
            begins += choose.expovariate(self.rate) if self.rate else 0.0
        return requests

    @cached_property
    def _traced(self) -> list[dict[str, Any]]:
        if self.trace is None:
            return []
        return [json.loads(line) for line in self.trace.read_text().splitlines() if line.strip()]

    def __str__(self) -> str:
        if self.trace is not None:
            return f"requests of {self.trace}"
        arrivals = "at once"
        if self.busy is not None or self.rate is not None:
            share = f"{self.busy:.0%} of what is possible" if self.busy else f"{self.rate:.2f}/s"
            arrivals = f"at random moments, {share}"
        shared = f" ({self.shared} shared)" if self.shared else ""
        return f"{self.clients} x {self.prompt}{shared} + {self.answer} tokens, {arrivals}"


@dataclass(frozen=True)
class Mixture:
    """A load for a model."""

    kind: str
    size: tuple[int, int]
    """Layers and width of the model."""
    load: Load


WORK = 1700
"""Most work of a drawn mixture: tokens of answers, and a sixth of those of prompts."""
SMALL = 0.2
"""Work of a token of the small model."""


def drawn(count: int, seed: int) -> list[Mixture]:
    """Return mixtures that a round plays in half a minute at most, those of a model together."""
    choose, found = random.Random(seed), list[Mixture]()
    while len(found) < count:
        kind, size = choose.choice([*KINDS]), choose.choice([(2, 64), (8, 512)])
        clients, prompt = choose.choice([1, 2, 4, 8, 16, 32]), choose.choice([20, 160, 800])
        answer, busy = choose.choice([16, 64, 512]), choose.choice([None, None, 0.5, 0.9])
        each = 1.0 if size == (8, 512) else SMALL
        if clients * (answer + prompt / 6) * each <= WORK:
            found.append(Mixture(kind, size, Load(clients, prompt, answer, busy=busy)))
    return sorted(found, key=lambda one: (one.kind, one.size))


@dataclass(frozen=True)
class Round:
    """One round's times, in seconds."""

    wall: float
    """From the first request to the last answer's end."""
    firsts: list[float]
    """Until the first token, of each request."""
    pauses: list[float]
    """All pauses between the pieces of answers."""
    tokens: int
    """Tokens of all answers."""
    used: float = 0.0
    """Seconds of the server's processor."""

    @property
    def step(self) -> float:
        """The usual pause between two pieces."""
        return median(self.pauses or [0.0])

    @property
    def gap(self) -> float:
        """The longest pause."""
        return max(self.pauses, default=0.0)

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
    moments, tokens = list[float](), 0
    async for text, usage in answer_of(client, "/chat/completions", body):
        tokens = usage.get("completion_tokens", tokens)
        if text:
            moments.append(time.perf_counter())
    ended = time.perf_counter()
    first = (moments[0] if moments else ended) - began
    return Round(ended - began, [first], [b - a for a, b in pairwise(moments)], tokens)


async def _play(endpoint: Endpoint, load: Load, seed: int) -> Round:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=endpoint.url, timeout=None, verify=False, limits=limits
    ) as client:
        used, began = endpoint.used(), time.perf_counter()
        ended = await asyncio.gather(
            *(_ask(client, *one) for one in load.bodies(seed, endpoint.model))
        )
        wall = time.perf_counter() - began
    pauses = [pause for one in ended for pause in one.pauses]
    firsts, tokens = [one.firsts[0] for one in ended], sum(one.tokens for one in ended)
    return Round(wall, firsts, pauses, tokens, endpoint.used() - used)


def compare(endpoints: Sequence[Endpoint], load: Load, rounds: int, warm: int) -> list[list[Round]]:
    """Return the rounds of each endpoint, which take turns."""
    found: list[list[Round]] = [[] for _ in endpoints]
    if load.busy is not None:
        crowd = replace(load, busy=None)
        walls = [median(r.wall for r in one) for one in compare(endpoints, crowd, 1, warm)]
        load = replace(load, rate=load.busy * load.clients / min(walls))
    for number in range(warm + rounds):
        order = list(range(len(endpoints)))
        for which in order if number % 2 else reversed(order):
            one = asyncio.run(_play(endpoints[which], load, number))
            if number >= warm:
                found[which].append(one)
    return found


RATIOS = {"wall": "wall", "half": "first token", "most": "90 %", "used": "processor"}
"""The figures of a round whose ratios are shown, and their titles."""


def show(
    load: Load, endpoints: Sequence[Endpoint], found: Sequence[Sequence[Round]]
) -> dict[str, float]:
    """Print a line for each endpoint. Return and print the ratios of the first to the last one."""
    print(f"\n{load}")
    for endpoint, rounds in zip(endpoints, found, strict=True):
        gap = median(one.gap for one in rounds)
        print(
            f"{endpoint.name:>10}: wall {median(one.wall for one in rounds):6.2f} s, first token "
            f"{median(one.half for one in rounds):6.3f} s, 90 % "
            f"{median(one.most for one in rounds):6.3f} s, step "
            f"{1000 * median(one.step for one in rounds):5.1f} ms, gap {1000 * gap:4.0f} ms, "
            f"processor {median(one.used for one in rounds):.2f} s, {rounds[0].tokens} tokens"
        )
    pairs = list(zip(found[0], found[-1], strict=True))
    ratios = {
        name: median(getattr(a, name) / (getattr(b, name) or 1.0) for a, b in pairs)
        for name in RATIOS
    }
    if len(found) > 1:
        said = ", ".join(f"{RATIOS[name]} {ratio:.2f}" for name, ratio in ratios.items())
        print(f"     ratio: {said}", flush=True)
    return ratios


def show_all(all_ratios: Sequence[dict[str, float]]) -> None:
    """Print the median and the largest of the ratios of many mixtures."""
    print(f"\n{len(all_ratios)} mixtures, median and the four largest:")
    for name, title in RATIOS.items():
        ratios = sorted((one[name] for one in all_ratios), reverse=True)
        largest = ", ".join(f"{ratio:.2f}" for ratio in ratios[:4])
        print(f"{title:>12}: {median(ratios):.2f}; {largest}", flush=True)


@contextmanager
def served(kind: str, size: tuple[int, int], names: Sequence[str]) -> Iterator[list[Endpoint]]:
    """Serve an untrained model with each of the named servers."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / kind
        write_untrained(folder, kind, layers=size[0], width=size[1])
        servers = list[Served]()
        try:
            for number, name in enumerate(names):
                servers.append(Served(CONTENDERS[name], folder, Path(place) / f"kept{number}"))
            yield [
                Endpoint(one.name, f"{one.url}/v1", CONTENDERS[one.name].model(folder), one.used)
                for one in servers
            ]
        finally:
            for server in servers:
                server.stop()


def age(endpoint: Endpoint, load: Load, count: int) -> Endpoint:
    """Let a server answer `count` conversations."""
    for number in range(0, count, load.clients):
        asyncio.run(_play(endpoint, load, AGED + number))
    return replace(endpoint, name=f"{endpoint.name}, {count} before")


AGED = 1_000_000
"""The first seed of the conversations that age a server."""


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
    parser.add_argument("--rate", type=float, help="requests in a second")
    parser.add_argument("--busy", type=float, help="the rate as a share of what is possible")
    parser.add_argument("--trace", type=Path, help="JSON lines with the requests")
    parser.add_argument("--drawn", type=int, default=0, help="number of mixtures to draw")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn mixtures")
    parser.add_argument("--age", type=int, default=0, help="conversations before")
    parser.add_argument("--warm", type=int, default=2)
    given = parser.parse_args()
    if given.quick:
        given.rounds, given.warm, given.layers, given.width = 1, 1, 2, 64
        given.clients = [4]
    return given


def mixtures_of(given: argparse.Namespace) -> list[Mixture]:
    """Return what is to be played."""
    if given.drawn:
        return drawn(given.drawn, given.seed)
    return [
        Mixture(
            given.kind,
            (given.layers, given.width),
            Load(clients, prompt, answer, shared, given.rate, given.busy, given.trace),
        )
        for clients in given.clients
        for prompt in given.prompt
        for answer in given.answer
        for shared in given.shared
    ]


def main() -> None:
    """Serve, play each mixture, print."""
    given, ratios = parse(), list[dict[str, float]]()
    mixtures = mixtures_of(given)
    if given.url:
        endpoints = [Endpoint("endpoint", given.url.rstrip("/"), given.model)]
        for one in mixtures:
            show(one.load, endpoints, compare(endpoints, one.load, given.rounds, given.warm))
        return
    names = ["mlxrunner", "mlxrunner"] if given.age else given.against
    servers_of = (lambda one: one) if given.age else (lambda one: (one.kind, one.size))
    for _, group in groupby(mixtures, key=servers_of):
        some = list(group)
        kind, size = some[0].kind, some[0].size
        print(f"\n{kind}, {size[0]} layers of {size[1]}", flush=True)
        with served(kind, size, names) as endpoints:
            for one in some:
                if given.age:
                    endpoints[0] = age(endpoints[0], one.load, given.age)
                found = compare(endpoints, one.load, given.rounds, given.warm)
                ratios.append(show(one.load, endpoints, found))
    if len(ratios) > 1:
        show_all(ratios)


if __name__ == "__main__":
    main()
