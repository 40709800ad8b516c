"""Send the requests of many clients to servers: times, reuse, answers beside prompts, faults.

PYTHONPATH=tests python benchmarks/clients.py [--clients 8 16] [--prompt 160] [--answer 64] ...
PYTHONPATH=tests python benchmarks/clients.py --drawn 24
PYTHONPATH=tests python benchmarks/clients.py --conversations [--kind llama lfm2] [--quick]
PYTHONPATH=tests python benchmarks/clients.py --beside [--prompt 2000] [--parked]
PYTHONPATH=tests python benchmarks/clients.py --faults 600 [--clients 64] [--slots 8]
python benchmarks/clients.py --url http://127.0.0.1:8080/v1 --model NAME --clients 8
python benchmarks/clients.py --url http://127.0.0.1:8080/v1 --model NAME --trace FILE

Without --url the script writes an untrained model (--kind, --layers, --width) and serves it with
each program of --against, with its default settings: `mlxrunner serve`, `mlx_lm.server`, llama.cpp,
or the engine in this process. On Linux put a fast BLAS in front (`mlxrunner doctor` names it). The
servers take turns, so that whatever else the machine does concerns all alike.

Without another mode, figures are medians of the rounds; the first `--warm` rounds fill the caches
and are not counted. Prompts have random words, so that nothing is reused but `--shared` words at
their beginning and the template's header. A step is the usual pause between two tokens of an
answer, a gap is the longest one; "processor" is what the server used of it. All requests come at
once, or with --rate R at random moments, R in a second on average, or with --busy S at S times the
rate that the faster server can serve. --trace FILE plays requests from JSON lines: {"at": SECONDS,
"prompt": TOKENS, "answer": TOKENS, "shared": TOKENS}, or with "messages" in place of "prompt".
--drawn N draws N mixtures of clients, prompts, answers, arrivals, models and sizes, and ends with
the median and the largest of the ratios. --age N compares a server that has answered N other
conversations with a new one.

--conversations plays those of `traces.py`, and shows the prompt tokens that were evaluated, by the
usage of the answers, beside those of `floors.py`.

--beside lets one answer decode alone, and then while prompts are evaluated: one, three at once, and
a flood of short ones (of priority "batch" where the engine is asked). It shows the largest gap of
the answer as a multiple of the usual one, its speed as a share of its speed alone, and the time of
the prompts as a multiple of their time alone. --step-ms: limits of the engine's steps to compare;
0 is none, "chosen" the engine's own. --parked: a conversation of --prompt tokens is parked beside
the answer for the first time, and comes back.

--faults SECONDS lets clients speak all protocols to our server, as streams and not; some leave,
stall, or send half bodies and nonsense (`tests/support/load.py`). The exit code is 1 if anything
was wrong, or if memory grew.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import httpx
from arguments import parser_of
from contenders import (
    CONTENDERS,
    ENGINE,
    Answer,
    Body,
    Endpoint,
    EndpointError,
    Round,
    Served,
    body_of,
    ours,
    play,
    served,
)
from untrained import KINDS, write_untrained

if TYPE_CHECKING:
    from floors import Floor
    from support.load import Tally
    from traces import Ask as TraceAsk
    from traces import Trace

Size = tuple[int, int]
"""Layers and width of a model."""
LARGE, SMALL = (8, 512), (2, 64)


def letters(choose: random.Random, count: int) -> str:
    """Return random letters, each of which is a token of an untrained model."""
    return "".join(choose.choices("abcdefghijklmnopqrstuvwxyz", k=max(count, 0)))


def said(text: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": text}


def percentiles(values: Sequence[float], digits: int = 4) -> dict[str, float]:
    """Return some percentiles, and the largest value."""
    ordered = sorted(values) or [0.0]
    shares = {"p50": 0.5, "p75": 0.75, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {
        name: round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], digits)
        for name, share in shares.items()
    }


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

    def bodies(self, seed: int, model: str) -> list[tuple[float, Body]]:
        """Return the moments of the requests, and their bodies."""
        choose, header = random.Random(seed), random.Random(0)
        most = max((one.get("shared", 0) for one in self._traced), default=self.shared)
        beginning, requests, begins = letters(header, most), [], 0.0
        for one in self._traced or [{}] * self.clients:
            shared = beginning[: one.get("shared", self.shared)]
            text = shared + letters(choose, one.get("prompt", self.prompt) - len(shared))
            messages = one.get("messages", [said(text)])
            body = body_of(model, messages, one.get("answer", self.answer))
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
    size: Size
    load: Load


WORK = 1700
"""Most work of a drawn mixture: tokens of answers, and a sixth of those of prompts."""
EASY = 0.2
"""Work of a token of the small model."""


def drawn(count: int, seed: int) -> list[Mixture]:
    """Return mixtures that a round plays in half a minute at most, those of a model together."""
    choose, found = random.Random(seed), list[Mixture]()
    while len(found) < count:
        kind, size = choose.choice([*KINDS]), choose.choice([SMALL, LARGE])
        clients, prompt = choose.choice([1, 2, 4, 8, 16, 32]), choose.choice([20, 160, 800])
        answer, busy = choose.choice([16, 64, 512]), choose.choice([None, None, 0.5, 0.9])
        each = 1.0 if size == LARGE else EASY
        if clients * (answer + prompt / 6) * each <= WORK:
            found.append(Mixture(kind, size, Load(clients, prompt, answer, busy=busy)))
    return sorted(found, key=lambda one: (one.kind, one.size))


def _play(endpoint: Endpoint, load: Load, seed: int) -> Round:
    return asyncio.run(play(endpoint, load.bodies(seed, endpoint.model)))


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
            one = _play(endpoints[which], load, number)
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


AGED = 1_000_000
"""The first seed of the conversations that age a server."""


def age(endpoint: Endpoint, load: Load, count: int) -> None:
    """Let a server answer `count` conversations."""
    for number in range(0, count, load.clients):
        _play(endpoint, load, AGED + number)
    endpoint.name = f"{endpoint.name}, {count} before"


@contextmanager
def endpoints_of(
    given: argparse.Namespace, kind: str, size: Size, names: Sequence[str], **more: Any
) -> Iterator[list[Endpoint]]:
    """Yield the endpoint of --url, or serve an untrained model with the named contenders.

    `more`: see `served`.
    """
    if given.url:
        yield [Endpoint("endpoint", given.url.rstrip("/"), given.model)]
        return
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / kind
        write_untrained(folder, kind, layers=size[0], width=size[1])
        print(f"\n{kind}, {size[0]} layers of {size[1]}", flush=True)
        with served(folder, names, context=given.context, **more) as endpoints:
            yield endpoints


def play_mixtures(given: argparse.Namespace) -> None:
    """Serve, play each mixture, print."""
    ratios = list[dict[str, float]]()
    names = ["mlxrunner", "mlxrunner"] if given.age else given.against
    servers_of = (lambda one: one) if given.age else (lambda one: (one.kind, one.size))
    for _, group in groupby(mixtures_of(given), key=servers_of):
        some = list(group)
        with endpoints_of(given, some[0].kind, some[0].size, names) as endpoints:
            for one in some:
                if given.age:
                    age(endpoints[0], one.load, given.age)
                found = compare(endpoints, one.load, given.rounds, given.warm)
                ratios.append(show(one.load, endpoints, found))
    if len(ratios) > 1 and not given.url:
        show_all(ratios)


@dataclass
class Played:
    """All answers of a server to the requests of a trace."""

    answers: list[Answer] = field(default_factory=list)
    total: float = 0.0
    """Seconds from the first request to the last answer, without those of the other servers."""
    used: float = 0.0
    """Seconds of the processor that the server used meanwhile."""
    floor: int = 0
    """Tokens that no server could avoid that evaluates the prompts as they are sent."""

    @property
    def prompt(self) -> int:
        return sum(one.prompt for one in self.answers)

    @property
    def evaluated(self) -> int:
        return sum(one.prompt - one.cached for one in self.answers)

    @property
    def firsts(self) -> dict[str, float]:
        """Percentiles of the milliseconds to the first token."""
        return percentiles([1000 * one.first for one in self.answers], 1)

    def add(self, other: Played) -> None:
        self.answers += other.answers
        self.total += other.total
        self.used += other.used
        self.floor += other.floor


def play_trace(
    servers: Sequence[Endpoint], trace: Trace, seed: int, size: int, floor: Floor | None
) -> list[Played]:
    """Play a trace to all servers, which take turns at each wave.

    `floor` gets the requests of the first one.
    """
    scripts = [trace.script(seed, size) for _ in servers]
    played = [Played() for _ in servers]
    waves = [next(script) for script in scripts]
    turn = 0
    while True:
        turn += 1
        order = range(len(servers)) if turn % 2 else reversed(range(len(servers)))
        texts: dict[int, list[str]] = {}
        for number in order:
            texts[number] = _play_wave(servers[number], waves[number], played[number])
        if floor is not None:
            played[0].floor += sum(map(floor.ask, waves[0], texts[0]))
        try:
            waves = [script.send(texts[number]) for number, script in enumerate(scripts)]
        except StopIteration:
            return played


TALKED = 8
"""Tokens of each answer of a conversation."""


def _play_wave(server: Endpoint, wave: Sequence[TraceAsk], played: Played) -> list[str]:
    if not wave:
        server.restart()
        return []
    bodies = []
    for one in wave:
        tools = {"tools": list(one.tools)} if one.tools else {}
        more = {"chat_template_kwargs": {"enable_thinking": one.thinks}, **tools}
        bodies.append((0.0, body_of(server.model, one.messages, TALKED, **more)))
    found = asyncio.run(play(server, bodies))
    played.used += found.used
    played.total += found.wall
    played.answers += found.answers
    return [answer.text for answer in found.answers]


def play_conversations(given: argparse.Namespace) -> None:
    """Play the conversations of `traces.py` to each server, and print a table for each model."""
    from floors import Floor
    from traces import TRACES

    size = 600 if given.quick else 1500
    for kind in given.kind:
        found: dict[str, list[Played]] = {}
        for turn in range(given.rounds):
            with endpoints_of(given, kind, given.size, given.against) as servers:
                names = [server.name for server in servers]
                first = servers[0]
                floor = Floor(first.folder) if isinstance(first, Served) else None
                for number, trace in enumerate(TRACES):
                    played = play_trace(servers, trace, 100 * turn + number, size, floor)
                    before = found.setdefault(trace.name, [Played() for _ in names])
                    for one, new in zip(before, played, strict=True):
                        one.add(new)
        with_faults = {trace.name for trace in TRACES if trace.has_fault}
        show_conversations(kind, names, found, with_faults)


def show_conversations(
    kind: str, names: Sequence[str], found: dict[str, list[Played]], with_faults: set[str]
) -> None:
    """Print the table of a model, and the sums over its traces with and without faults."""
    both = " / ".join(names)
    print(
        f"\n{kind}: {both}\n\n| trace | prompt tokens | floor | evaluated "
        "| first token, median ms | 90 % ms | total s | processor s |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    for name, played in found.items():
        print(_row(name, played))
    for title, has_fault in (("all without faults", False), ("all with faults", True)):
        some = [played for name, played in found.items() if (name in with_faults) is has_fault]
        print(_row(title, [_joined(one) for one in zip(*some, strict=True)]))
    everything = [_joined(one) for one in zip(*found.values(), strict=True)]
    firsts = {name: one.firsts for name, one in zip(names, everything, strict=True)}
    print(json.dumps({"kind": kind, "first_ms": firsts}), flush=True)


def _joined(some: Sequence[Played]) -> Played:
    whole = Played()
    for one in some:
        whole.add(one)
    return whole


def _row(name: str, played: Sequence[Played]) -> str:
    cells = [
        f"{played[0].prompt:,}",
        f"{played[0].floor:,}",
        " / ".join(f"{one.evaluated:,}" for one in played),
        " / ".join(f"{one.firsts['p50']:.0f}" for one in played),
        " / ".join(f"{one.firsts['p90']:.0f}" for one in played),
        " / ".join(f"{one.total:.1f}" for one in played),
        " / ".join(f"{one.used:.1f}" for one in played),
    ]
    return f"| {name} | {' | '.join(cells)} |"


ALONE = 100
"""Letters of the answer, each a token of an untrained model, that come alone before the prompts."""
LONGEST = 4000
"""Most tokens of the answer beside which prompts arrive."""


@dataclass(frozen=True)
class Arrival:
    """Prompts that arrive together."""

    name: str
    count: int
    share: float = 1.0
    """Length of each, as a share of --prompt."""
    answer: int = 1
    priority: str = "interactive"

    def bodies(self, model: str, prompt: int, seed: int) -> list[tuple[float, Body]]:
        """Return the requests, which come at once; the prompts of each seed are others."""
        choose, length = random.Random(seed), int(prompt * self.share)
        texts = [letters(choose, length) for _ in range(self.count)]
        return [
            (0.0, body_of(model, [said(text)], self.answer, priority=self.priority))
            for text in texts
        ]


ARRIVALS = (
    Arrival("one prompt", 1),
    Arrival("three prompts", 3, 0.5),
    Arrival("a flood of short requests", 6, 0.125, 16, "batch"),
)


async def beside(endpoint: Endpoint, phases: Sequence[list[tuple[float, Body]]]) -> list[Any]:
    """Play each of `phases` beside one answer; return the figures of the answer in each."""
    figures: list[Any] = []
    async with endpoint.session() as ask:
        answer, body = Answer(), body_of(endpoint.model, [said("Go on.")], LONGEST)
        reading = asyncio.create_task(answer.read(ask, body))

        async def wait_for(tokens: int) -> None:
            while len(answer.text) < tokens and not reading.done():
                await asyncio.sleep(0.005)

        await wait_for(ALONE)
        usual = (answer.moments[-1] - answer.moments[0]) / len(answer.text)
        for requests in phases:
            first, before = len(answer.moments), len(answer.text)
            found = await play(endpoint, requests)
            if reading.done():
                raise SystemExit(f"{endpoint.name}: the answer ended before: smaller --prompt")
            moments = answer.moments[first - 1 :]
            gap = max((b - a for a, b in pairwise(moments)), default=found.wall)
            speed = (len(answer.text) - before) * usual / found.wall
            times = {"usual_ms": 1e3 * usual, "gap_ms": 1e3 * gap, "wall_s": found.wall}
            figures.append({**times, "gap": gap / usual, "speed": speed})
            await wait_for(len(answer.text) + ALONE)
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading
    return figures


def play_beside(given: argparse.Namespace) -> None:
    """Print what arriving prompts do to an answer, and what it does to them."""
    slots, (prompt,) = 2 if given.parked else None, given.prompt
    limits = [None if limit == "chosen" else float(limit) for limit in given.step_ms]
    more: dict[str, Any] = {"slots": slots, "step_ms": limits}
    with endpoints_of(given, given.kind[0], given.size, given.against, **more) as endpoints:
        if given.parked:
            for endpoint in endpoints:
                found = asyncio.run(_parked(endpoint, prompt))
                print(json.dumps({"server": endpoint.name, **found}), flush=True)
            return
        titles = f"{'server':18}{'arriving':28}{'gap':>8}{'':>9}{'speed':>7}{'prefill':>9}"
        print(titles, flush=True)
        for arrival in ARRIVALS:
            for endpoint in endpoints:
                model = endpoint.model
                alone = asyncio.run(play(endpoint, arrival.bodies(model, prompt, 0))).wall
                (found,) = asyncio.run(beside(endpoint, [arrival.bodies(model, prompt, 1)]))
                print(
                    f"{endpoint.name:18}{arrival.name:28}{found['gap']:7.1f}x"
                    f"{found['gap_ms']:6.0f} ms{found['speed']:7.0%}"
                    f"{found['wall_s'] / alone:8.2f}x",
                    flush=True,
                )


async def _parked(endpoint: Endpoint, prompt: int) -> dict[str, Any]:
    """Return the figures of an answer while a conversation is parked, and while it returns."""
    choose = random.Random(0)
    talk = [said(letters(choose, prompt))]
    found = await play(endpoint, [(0.0, body_of(endpoint.model, talk, 1))])
    talk += [said(found.answers[0].text, "assistant"), said("go")]
    phases = [[(0.0, body_of(endpoint.model, messages, 1))] for messages in ([said("other")], talk)]
    parked, returned = await beside(endpoint, phases)
    return {"parked": parked, "returned": returned}


STALL_S = 20
"""Seconds for which clients with faults do not read, now and then."""
SETTLED = 3
"""Memory is compared from this minute on, or from a third of the time: before, it fills."""
GROWTH = 0.05
"""The share by which memory may still grow."""
MEMORY, DISK = 400_000_000, 200_000_000
"""Bytes that our server may store while clients with faults ask it."""


@dataclass
class Samples:
    """A record of what a server had in use, second by second."""

    resident: list[float] = field(default_factory=list)
    """Resident megabytes of the process."""
    stored: list[float] = field(default_factory=list)
    """Megabytes of keys, values and checkpoints in use."""
    parked: list[float] = field(default_factory=list)
    """Megabytes on disk."""
    waiting: list[int] = field(default_factory=list)


def resident(server: Served) -> float:
    """Return the resident megabytes of a server's processes."""
    words = ["ps", "-o", "rss=", "-p", ",".join(map(str, server.processes()))]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return sum(map(int, text.split())) / 1024


def connections(server: Served) -> int:
    """Return the number of sockets of a server's processes; 0 where the system does not say it."""
    files = [file for one in server.processes() for file in Path(f"/proc/{one}/fd").glob("*")]
    count = 0
    for file in files:
        with suppress(OSError):  # it was closed
            count += os.readlink(file).startswith("socket:")
    return count


async def watch(server: Served, samples: Samples) -> None:
    """Sample what the server has in use, until this is cancelled."""
    async with httpx.AsyncClient(base_url=server.root, timeout=None, verify=False) as client:
        while True:
            model = (await client.get("/slots")).json()["models"][0]
            samples.resident.append(resident(server))
            samples.stored.append(model["bytes"] / 1e6)
            samples.parked.append(model["parked_bytes"] / 1e6)
            samples.waiting.append(model["waiting"])
            await asyncio.sleep(1)


async def load_with_faults(server: Served, clients: int, seconds: float) -> tuple[Tally, Samples]:
    """Let clients with faults ask the server for some time."""
    from support.load import load

    samples, end = Samples(), time.monotonic() + seconds
    watching = asyncio.create_task(watch(server, samples))
    tally = await load(
        server.root,
        clients,
        lambda tally: time.monotonic() > end or len(tally.wrong) > 20,
        stall=STALL_S,
        size=900,
    )
    watching.cancel()
    return tally, samples


def idle(server: Served, sockets: int) -> dict[str, Any]:
    """Wait until nothing runs and all connections are closed; return what is left."""
    for _ in range(60):
        model = httpx.get(f"{server.root}/slots").json()["models"][0]
        left = {name: model[name] for name in ("busy", "waiting")}
        left["connections"] = connections(server) - sockets
        if not any(left.values()):
            break
        time.sleep(1)
    return left


def figures(tally: Tally, samples: Samples) -> dict[str, Any]:
    """Return what the run has shown, with what must not be."""
    settled = min(SETTLED * 60, len(samples.resident) // 3)
    early = median(samples.resident[settled : 2 * settled])
    late = median(samples.resident[-settled:])
    return {
        "answers": tally.answers,
        "told to come later": tally.later,
        "done": dict(sorted(tally.done.items())),
        "wrong": tally.wrong,
        "first token s": percentiles(tally.firsts),
        "gap s": percentiles(tally.gaps),
        "resident MB": {"first": samples.resident[0], "settled": early, "end": late},
        "most resident MB": max(samples.resident),
        "most stored MB": max(samples.stored),
        "most parked MB": max(samples.parked),
        "most waiting": max(samples.waiting),
    }


def failures(found: dict[str, Any]) -> list[str]:
    """Return what must not be, in words."""
    resident, wrong = found["resident MB"], list[str]()
    if found["wrong"]:
        wrong.append(f"{len(found['wrong'])} answers were wrong")
    if resident["end"] > resident["settled"] * (1 + GROWTH):
        wrong.append("memory grew")
    if found["most stored MB"] > MEMORY / 1e6:
        wrong.append("more was stored than --memory")
    if found["most parked MB"] > DISK / 1e6:
        wrong.append("more was parked than --disk-cache-bytes")
    if any(found["left"].values()):
        wrong.append(f"not idle at the end: {found['left']}")
    return wrong


def play_faults(given: argparse.Namespace) -> None:
    """Let clients with faults ask our server, print figures, and end with what was wrong."""
    limits = {"memory": MEMORY, "disk_cache_bytes": DISK, "set": f"max_queue={given.max_queue}"}
    (clients,) = given.clients
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        write_untrained(folder, given.kind[0], layers=given.size[0], width=given.size[1])
        server = Served(
            ours(context=given.context, slots=given.slots, **limits), folder, Path(place) / "kept"
        )
        try:
            sockets = connections(server)
            tally, samples = asyncio.run(load_with_faults(server, clients, given.faults))
            found = figures(tally, samples)
            found["left"] = idle(server, sockets)
        finally:
            server.stop()
    asked = {"seconds": given.faults, "clients": clients, "slots": given.slots}
    print(json.dumps(asked | found, indent=1))
    raise SystemExit("; ".join(failures(found)) or 0)


def parse() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = parser_of(__doc__, rounds=5, quick="a small model, few and short requests")
    parser.set_defaults(rounds=None)
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--drawn", type=int, default=0, help="number of mixtures to draw")
    modes.add_argument("--conversations", action="store_true", help="tokens that are reused")
    modes.add_argument("--beside", action="store_true", help="prompts beside an answer")
    modes.add_argument("--faults", type=float, metavar="SECONDS", help="clients with faults")
    modes.add_argument("--trace", type=Path, help="JSON lines with the requests")
    modes.add_argument("--age", type=int, default=0, help="conversations before")
    parser.add_argument("--url", help="base URL of any OpenAI endpoint, with /v1")
    parser.add_argument("--model", default="default", help="model name for --url")
    known = [*CONTENDERS, ENGINE]
    parser.add_argument("--against", nargs="+", default=["mlxrunner", "mlx_lm"], choices=known)
    parser.add_argument("--kind", nargs="+", default=["llama"], choices=[*KINDS])
    parser.add_argument("--layers", type=int, help="of the model")
    parser.add_argument("--width", type=int, help="of its states")
    for name, default in (("answer", 64), ("shared", 0)):
        parser.add_argument(f"--{name}", type=int, nargs="+", default=[default])
    parser.add_argument("--clients", type=int, nargs="+")
    parser.add_argument("--prompt", type=int, nargs="+")
    parser.add_argument("--rate", type=float, help="requests in a second")
    parser.add_argument("--busy", type=float, help="the rate as a share of what is possible")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn mixtures")
    parser.add_argument("--warm", type=int, default=2, help="rounds before")
    parser.add_argument("--step-ms", nargs="+", default=["chosen"], help="of the engine, beside")
    parser.add_argument("--parked", action="store_true", help="beside: a conversation on disk")
    parser.add_argument("--context", type=int, default=4096, help="of a slot of our server")
    parser.add_argument("--slots", type=int, default=8, help="of our server, with faults")
    parser.add_argument("--max-queue", type=int, default=48, help="of our server, with faults")
    given = parser.parse_args()
    given.clients = given.clients or [64 if given.faults else 4 if given.quick else 8]
    usual = 200 if given.quick else 3000
    given.prompt = given.prompt or [usual if given.beside else 160]
    is_small = given.quick or given.conversations or given.faults
    layers, width = SMALL if is_small else LARGE
    given.size = (given.layers or layers, given.width or width)
    given.rounds = given.rounds or (1 if given.quick or given.conversations else 5)
    given.warm = min(given.warm, given.rounds)
    if given.conversations and ENGINE in given.against:
        parser.error("--conversations have tools, which a server takes: not --against engine")
    return given


def mixtures_of(given: argparse.Namespace) -> list[Mixture]:
    """Return what is to be played."""
    if given.drawn:
        return drawn(given.drawn, given.seed)
    return [
        Mixture(
            kind,
            given.size,
            Load(clients, prompt, answer, shared, given.rate, given.busy, given.trace),
        )
        for kind in given.kind
        for clients in given.clients
        for prompt in given.prompt
        for answer in given.answer
        for shared in given.shared
    ]


def main() -> None:
    """Play what is asked for."""
    given = parse()
    try:
        if given.conversations:
            play_conversations(given)
        elif given.beside:
            play_beside(given)
        elif given.faults:
            play_faults(given)
        else:
            play_mixtures(given)
    except (EndpointError, httpx.HTTPError, OSError) as error:
        raise SystemExit(f"{given.url or 'a server'}: {error}") from None


if __name__ == "__main__":
    main()
