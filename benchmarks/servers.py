"""Compare `mlxrunner serve` with other servers: the same requests, tokens evaluated, times.

PYTHONPATH=tests python benchmarks/servers.py [--kinds llama ...] [--layers N] [--width N] [--quick]

On Linux first put a fast BLAS in front (`mlxrunner doctor` names it). All servers run at once, each
with its default settings, and serve the same untrained model (2 layers of 64); each wave of
requests goes to one after the other, in turns, so that whatever else the machine does concerns all
alike. The requests are those of `benchmarks/traces.py`. Tokens are those that the usage of the
answers names, beside those of `benchmarks/floors.py`; the time to the first token is that of the
client.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from arguments import parser_of
from contenders import CONTENDERS, Measured, Served
from floors import Floor
from traces import TRACES, Ask, Trace
from untrained import KINDS, write_untrained

US = "mlxrunner"


@dataclass
class Played:
    """All answers of a server to the requests of a trace."""

    answers: list[Measured] = field(default_factory=list)
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

    def first(self, share: float) -> float:
        """Return the milliseconds to the first token that a share of the answers keeps."""
        firsts = sorted(one.first for one in self.answers)
        return 1000 * firsts[min(len(firsts) - 1, int(share * len(firsts)))]

    def add(self, other: Played) -> None:
        self.answers += other.answers
        self.total += other.total
        self.used += other.used
        self.floor += other.floor


def play(
    servers: Sequence[Served], trace: Trace, seed: int, size: int, floor: Floor
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
        played[0].floor += sum(map(floor.ask, waves[0], texts[0]))
        try:
            waves = [script.send(texts[number]) for number, script in enumerate(scripts)]
        except StopIteration:
            return played


def _play_wave(server: Served, wave: Sequence[Ask], played: Played) -> list[str]:
    if not wave:
        server.restart()
        return []
    began, used = time.perf_counter(), server.used()
    answers = asyncio.run(_ask_all(server, wave))
    played.used += server.used() - used
    played.total += time.perf_counter() - began
    played.answers += answers
    return [answer.text for answer in answers]


async def _ask_all(server: Served, wave: Sequence[Ask]) -> list[Measured]:
    async with server.client() as client:
        return await asyncio.gather(*(server.ask(client, ask) for ask in wave))


def measure(
    kind: str, names: Sequence[str], rounds: int, size: int, **model: int
) -> dict[str, list[Played]]:
    """Return what each server did with each trace, by the name of the trace.

    `model`: the layers and the width of the model.
    """
    found: dict[str, list[Played]] = {}
    for turn in range(rounds):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / kind
            write_untrained(folder, kind, **model)
            servers = list[Served]()
            try:
                for name in names:
                    servers.append(Served(CONTENDERS[name], folder, Path(place) / "kept"))
                floor = Floor(folder)
                for number, trace in enumerate(TRACES):
                    played = play(servers, trace, 100 * turn + number, size, floor)
                    before = found.setdefault(trace.name, [Played() for _ in names])
                    for one, new in zip(before, played, strict=True):
                        one.add(new)
            finally:
                for server in servers:
                    server.stop()
    return found


def show(kind: str, names: Sequence[str], found: dict[str, list[Played]]) -> None:
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
        some = [found[trace.name] for trace in TRACES if trace.has_fault is has_fault]
        print(_row(title, [_joined(one) for one in zip(*some, strict=True)]))
    everything = [_joined(one) for one in zip(*found.values(), strict=True)]
    shares = {"p50": 0.5, "p75": 0.75, "p90": 0.9, "p99": 0.99}
    firsts = {
        name: {label: round(one.first(share), 1) for label, share in shares.items()}
        for name, one in zip(names, everything, strict=True)
    }
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
        " / ".join(f"{one.first(0.5):.0f}" for one in played),
        " / ".join(f"{one.first(0.9):.0f}" for one in played),
        " / ".join(f"{one.total:.1f}" for one in played),
        " / ".join(f"{one.used:.1f}" for one in played),
    ]
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = parser_of(__doc__, rounds=1, quick="short prompts")
    parser.add_argument("--kinds", nargs="+", default=[*KINDS], choices=[*KINDS])
    parser.add_argument("--against", nargs="+", default=["mlx_lm"], choices=[*CONTENDERS])
    parser.add_argument("--layers", type=int, default=2, help="of the model")
    parser.add_argument("--width", type=int, default=64, help="of the states")
    given = parser.parse_args()
    model = {"layers": given.layers, "width": given.width}
    names = [US, *given.against]
    for kind in given.kinds:
        found = measure(kind, names, given.rounds, 600 if given.quick else 1500, **model)
        show(kind, names, found)


if __name__ == "__main__":
    main()
