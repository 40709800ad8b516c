"""Measure a model on 2 ranks of this machine: our messages against mlx_lm's bare loop.

PYTHONPATH=tests python benchmarks/ranks.py [--rounds N] [--quick]

Both sides decode in turn, in one run, on the same shared weights. The bare loop is `generate_step`
of mlx_lm on every rank, each of which samples by itself: no rank tells another one anything. The
rate of a round is that of its median token, and the ratio is that of each round. On Linux the bytes
and packets are those that the kernel counts for the sockets of the ring on rank 0, both directions
together. On Linux first put a fast BLAS in front.
"""

from __future__ import annotations

import argparse
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from stat import S_ISSOCK
from statistics import median
from tempfile import TemporaryDirectory

from arguments import parser_of, print_json, print_table
from support.ranks import free_port, write_hosts
from untrained import write_untrained

from mlxrunner.bench.harness import Comparison, Tokens, spread
from mlxrunner.ranks.guard import guard, inherited, read_hosts
from mlxrunner.ranks.ranks import Ranks, lead

SIZES = {"768 x 12": (768, 12), "64 x 2": (64, 2)}
"""Names, and the width and the layers of the models."""
PROMPT, ANSWER = 64, 24
TARGET = 0.97
"""The least share of the bare loop's speed, for a model whose passes take 20 ms or more."""
BYTES_ACKED, SEGMENTS_OUT = 120, 136
"""Where Linux writes them in `struct tcp_info`. What came in follows each."""


@dataclass
class Traffic:
    """The traffic of rank 0."""

    messages: int
    message_bytes: int
    packets: int
    nbytes: int

    def since(self, before: Traffic, tokens: int) -> Traffic:
        """Return the traffic of each of `tokens` tokens."""
        pairs = zip(vars(self).values(), vars(before).values(), strict=True)
        return Traffic(*(round((now - then) / tokens) for now, then in pairs))


def main() -> None:
    parser = parser_of(__doc__, rounds=20, quick="one small model")
    parser.add_argument("--rank-0", nargs=2, metavar=("FOLDER", "PORT"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_0:
        lead_all(Path(given.rank_0[0]), int(given.rank_0[1]), given.rounds)
        return
    with TemporaryDirectory() as name:
        folder, sizes = Path(name), dict(list(SIZES.items())[1:] if given.quick else SIZES)
        for label, (width, layers) in sizes.items():
            write_untrained(folder / "models" / label, "llama", layers=layers, width=width)
        hosts, port = write_hosts(folder, 2), str(free_port(2))
        rounds = "2" if given.quick else str(given.rounds)
        ours = [sys.executable, __file__, "--rank-0", name, port, "--rounds", rounds]
        other = [sys.executable, "-m", "mlxrunner", "launch", "--hosts", str(hosts)]
        others = [*other, "--rank-port", port, "--rank", "1"]
        sys.exit(guard(read_hosts(str(hosts), int(port)), lambda rank: others if rank else ours))


def lead_all(folder: Path, port: int, rounds: int) -> None:
    """Measure all models as rank 0."""
    connection = inherited()
    assert connection is not None
    found: list[Comparison] = []
    lines: list[str] = []
    with Ranks(read_hosts(str(folder / "hosts-2.json"), port), connection) as ranks:
        for model in sorted((folder / "models").iterdir(), reverse=True):
            one, line = measure(ranks, model, rounds)
            found.append(one)
            lines.append(line)
    print_table(found)
    print(*lines, sep="\n")
    print_json(found, rounds=rounds, traffic=lines)


def measure(ranks: Ranks, model: Path, rounds: int) -> tuple[Comparison, str]:
    """Compare decode rates on `model`, and describe the traffic of a token of our side."""
    runner = ranks.load(str(model), {})
    bare, prompt = lead(runner.model.own_part, ranks.tell), list(range(PROMPT))

    def ours() -> Tokens:
        runner.reset()
        for chunk in runner.generate(prompt, max_tokens=ANSWER, stop_tokens=[], speculate="off"):
            assert chunk.token is not None
            yield chunk.token

    rates: dict[str, list[float]] = {"ours": [], "bare": []}
    sides: dict[str, Callable[[], Iterator[int]]] = {
        "ours": ours,
        "bare": lambda: bare(0, prompt, ANSWER),
    }
    answers = set[tuple[int, ...]]()
    for turn in range(rounds + 1):
        for side in sorted(sides, reverse=bool(turn % 2)):
            answer = sides[side]()
            tokens, before, read = [next(answer)], traffic(ranks), [time.perf_counter()]
            for token in answer:
                tokens.append(token)
                read.append(time.perf_counter())
            if side == "ours":
                sent = traffic(ranks).since(before, ANSWER - 1)
            rates[side].append(1 / median(then - now for now, then in pairwise(read)))
            answers.add(tuple(tokens))
    assert len(answers) == 1, "the sides gave different answers"
    gains = [a / b for a, b in zip(rates["ours"][1:], rates["bare"][1:], strict=True)]
    name = f"{model.name}: decode on 2 ranks, against a bare loop"
    target = None if model.name == "64 x 2" else TARGET
    compared = Comparison(name, "tok/s", rates["ours"][1:], rates["bare"][1:], gains, target=target)
    _, middle, _ = spread([1e3 / rate for rate in rates["bare"][1:]])
    line = (
        f"{model.name}: a pass of the bare loop takes {middle:g} ms; a token of ours: "
        f"{sent.messages} message of {sent.message_bytes} bytes, "
        f"and {sent.packets} packets of the ring with {sent.nbytes} bytes"
    )
    return compared, line


def traffic(ranks: Ranks) -> Traffic:
    """Return what rank 0 has sent so far, and what the ring has received, too."""
    ports = range(ranks.hosts.port + 1, ranks.hosts.port + 1 + len(ranks.hosts.addresses))
    told = [told for one in _sockets() if (told := _counted(one, ports))]
    packets, nbytes = (sum(each) for each in zip(*told, strict=True)) if told else (0, 0)
    return Traffic(ranks.wire.messages, ranks.wire.nbytes, packets, nbytes)


def _sockets() -> Iterator[socket.socket]:
    """Return copies of this process's sockets."""
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # that of the folder itself is gone
            if S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as found:
                    yield found


def _counted(one: socket.socket, ports: range) -> tuple[int, int] | None:
    """Return the packets and bytes of a socket of the ring."""
    with suppress(OSError, IndexError, TypeError):
        if {one.getsockname()[1], one.getpeername()[1]} & {*ports}:
            info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
            acked, received = struct.unpack_from("=QQ", info, BYTES_ACKED)
            out, come = struct.unpack_from("=II", info, SEGMENTS_OUT)
            return out + come, acked + received
    return None


if __name__ == "__main__":
    main()
