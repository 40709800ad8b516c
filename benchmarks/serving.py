"""Measure the processor time that a server adds to the engine, for a request and for a token.

PYTHONPATH=tests python benchmarks/serving.py [--rounds N] [--kind llama] [--quick]

On Linux first put a fast BLAS in front (`mlxrunner doctor` names it). One process serves an
untrained model on this machine. A client in another process asks for short and long answers, as
streams and whole; and a thread of the server's process asks the engine for the same, with the
tokens of such prompts. The ways take turns. Counted is the processor time of the threads that read
the answers: the server's event loop and its workers, or that one thread. What the engine's own
thread and the model take is not in it. "a request" is an answer of one token, "a token" each
further one.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import re
import string
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx
from arguments import parser_of
from untrained import KINDS, write_untrained

SHORT = 1
LETTERS = 60
"""Letters of a message, each of them a token."""
PROTOCOLS: Mapping[str, tuple[str, str]] = {
    "OpenAI chat": ("/v1/chat/completions", "max_tokens"),
    "Anthropic": ("/v1/messages", "max_tokens"),
    "OpenAI responses": ("/v1/responses", "max_output_tokens"),
    "Ollama": ("/api/chat", ""),
}
"""The path of each protocol, and its name for the most tokens of an answer."""
GENERATED = re.compile(rb'"(?:completion_tokens|output_tokens|eval_count)":(\d+)')
"""The number of generated tokens, which the end of each answer names."""


@dataclass(frozen=True)
class Way:
    """A way to ask for an answer."""

    name: str
    ask: Callable[[str, int], float]
    """A function of a message and a number of tokens: seconds of the server's processor time."""


def serve(pipe: Connection, folder: Path) -> None:
    """Serve the model in `folder`, and do what the pipe says: this is a process of its own.

    A text and a number of tokens is asked of the engine; None asks only for the time.
    """
    from mlxrunner.options import ServeSettings
    from mlxrunner.profiling.metrics import RequestLog
    from mlxrunner.server.events import ServerRequest
    from mlxrunner.server.manager import ModelManager, ModelNames
    from mlxrunner.server.models import ModelLoader
    from mlxrunner.server.server import UvicornServer, application
    from mlxrunner.server.supervisor import listen

    settings = ServeSettings(port=0, disk_cache=False)
    opening = ModelLoader(settings=settings, runner={"context": 4096})
    record = RequestLog(None, log_text=False)
    manager = ModelManager(ModelNames(str(folder)), opening, record.watch)
    opened = manager.load_first()
    with listen(settings) as listening:
        app = application(manager, record, settings)
        server = UvicornServer(app, manager, 0, lambda: pipe.send(listening.getsockname()[1]))
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        served = threading.Thread(target=lambda: _run(server, listening))
        served.start()
        while (told := pipe.recv()) != "stop":
            if told is not None:
                text, count = told
                messages = [{"role": "user", "content": text}]
                prompt = opened.maker.make(
                    ServerRequest(protocol="chat", model="", messages=messages)
                ).prompt
                began = time.thread_time()
                handle = opened.runner.submit(prompt, max_tokens=count, temperature=0.0)
                found = sum(1 for chunk in handle if chunk.token is not None)
                pipe.send((time.thread_time() - began, found))
            else:
                pipe.send(_used_by_server(served))
        server.should_exit = True
        served.join()


def _used_by_server(loop: threading.Thread) -> float:
    """Return the seconds of processor time of the event loop's thread and of its workers."""
    workers = [one for one in threading.enumerate() if one.name.startswith("asyncio_")]
    clocks = [time.pthread_getcpuclockid(one.ident) for one in (loop, *workers) if one.ident]
    return sum(map(time.clock_gettime, clocks))


def _run(server: Any, listening: Any) -> None:
    import uvloop

    uvloop.run(server._serve([listening]))


def ways(pipe: Connection, client: httpx.Client, model: str) -> Iterator[Way]:
    """Yield the ways to ask: the engine first."""

    def engine(text: str, count: int) -> float:
        pipe.send((text, count))
        used, found = pipe.recv()
        _check(found, count)
        return float(used)

    yield Way("engine", engine)
    for name, (path, limit) in PROTOCOLS.items():
        for is_stream in (False, True):
            how = "stream" if is_stream else "whole"
            yield Way(f"{name}, {how}", _asking(pipe, client, model, path, limit, is_stream))


def _asking(
    pipe: Connection, client: httpx.Client, model: str, path: str, limit: str, is_stream: bool
) -> Callable[[str, int], float]:
    def ask(text: str, count: int) -> float:
        body: dict[str, Any] = {"model": model, "stream": is_stream, "temperature": 0}
        body["messages" if path != "/v1/responses" else "input"] = [
            {"role": "user", "content": text}
        ]
        body |= {limit: count} if limit else {"options": {"num_predict": count, "temperature": 0}}
        if is_stream and path == "/v1/chat/completions":
            body["stream_options"] = {"include_usage": True}
        content = json.dumps(body).encode()
        before = _used(pipe)
        with client.stream(
            "POST", path, content=content, headers={"content-type": "application/json"}
        ) as answer:
            said = answer.read()
        used = _used(pipe) - before
        answer.raise_for_status()
        _check(int(GENERATED.findall(said)[-1]), count, said)
        return used

    return ask


def _check(found: int, count: int, said: bytes = b"") -> None:
    if found != count:
        raise SystemExit(f"{found} tokens, not {count}: {said[-500:]!r}")


def _used(pipe: Connection) -> float:
    pipe.send(None)
    return float(pipe.recv())


def measure(ways: list[Way], rounds: int, long: int) -> dict[str, tuple[list[float], list[float]]]:
    """Return the milliseconds of requests and the microseconds of tokens."""
    order = random.Random(1)
    found: dict[str, tuple[list[float], list[float]]] = {way.name: ([], []) for way in ways}
    for turn in range(rounds + 1):
        used: dict[tuple[str, int], float] = {}
        for way in order.sample(ways, len(ways)):
            for count in (SHORT, long):
                text = "".join(order.choice(string.ascii_letters) for _ in range(LETTERS))
                used[way.name, count] = way.ask(text, count)
        if turn == 0:
            continue  # it warms up
        for way in ways:
            request, whole = used[way.name, SHORT], used[way.name, long]
            found[way.name][0].append(request * 1e3)
            found[way.name][1].append((whole - request) / (long - SHORT) * 1e6)
    return found


def main() -> None:
    parser = parser_of(__doc__, rounds=30, quick="few rounds")
    parser.add_argument("--kind", default="llama", choices=[*KINDS])
    given = parser.parse_args()
    rounds, long = (3, 65) if given.quick else (given.rounds, 129)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / given.kind
        write_untrained(folder, given.kind)
        process = context.Process(target=serve, args=(there, folder), daemon=True)
        process.start()
        there.close()  # so that its end is seen here
        url = f"http://127.0.0.1:{here.recv()}"
        with httpx.Client(base_url=url, timeout=None) as client:
            found = measure([*ways(here, client, folder.name)], rounds, long)
        here.send("stop")
        process.join()
    print(f"{given.kind}: processor time, medians of {rounds} rounds (quarters)\n")
    print("| way | a request, ms | a token, us |\n|---|---|---|")
    for name, (requests, tokens) in found.items():
        print(f"| {name} | {_shown(requests, 2)} | {_shown(tokens, 0)} |")


def _shown(values: list[float], digits: int) -> str:
    low, _, high = quantiles(values, n=4)
    return f"{median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


if __name__ == "__main__":
    main()
