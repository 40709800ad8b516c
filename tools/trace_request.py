"""Count the files that one request to the server passes: `python tools/trace_request.py [time]`.

Serves the demo model on a free port and asks for three chat completions of one token, each the
next turn of one conversation. The third one, which finds a warm slot, is traced over all threads.
Prints what `trace_turn.py` prints. With `time` nothing is traced, and the processor time of a warm
request of server and client together is printed.
"""

from __future__ import annotations

import http.client
import json
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import mlxrunner
from mlxrunner.options import ServeSettings
from mlxrunner.profiling.metrics import RequestLog
from mlxrunner.server import server
from mlxrunner.server.manager import ModelManager, ModelNames
from mlxrunner.server.models import ModelLoader
from mlxrunner.server.supervisor import listen

PACKAGE = str(Path(mlxrunner.__file__).parent) + "/"
TURNS, TRACED = 3, 2
"""Requests of the conversation, and the index of the one that is traced."""
TIMED = 30
"""Requests whose processor time is taken afterwards."""


class ThreadsTrace:
    """The calls of one request, as the files that they enter, over all threads."""

    def __init__(self) -> None:
        self.is_on = False
        self.calls: Counter[str] = Counter()
        self.changes = 0
        self._last: dict[int, str] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note a call; `sys.setprofile` also reports a generator that continues as one."""
        file = frame.f_code.co_filename
        if self.is_on and event == "call" and file.startswith(PACKAGE):
            file = file[len(PACKAGE) :]
            self.calls[file] += 1
            self.changes += self._last.get(threading.get_ident()) != file
            self._last[threading.get_ident()] = file


class Client:
    """Asks for the next turn of one conversation."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._messages = [{"role": "user", "content": "My name is Bo."}]

    def ask(self) -> Any:
        """Send the conversation, and return its message of one token."""
        body = {"model": "demo", "messages": self._messages, "max_tokens": 1}
        headers = {"content-type": "application/json"}
        self._connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        return json.loads(self._connection.getresponse().read())["choices"][0]["message"]

    def go_on(self, answer: Any) -> None:
        """Append an answer and the next question."""
        self._messages += [answer, {"role": "user", "content": "What is my name?"}]


def run(port: int, trace: ThreadsTrace | None) -> None:
    """Trace a warm request, or take the time of many, print that, and stop the server."""
    try:
        client, seconds = Client(port), list[float]()
        for turn in range(TURNS if trace else TIMED + TRACED):
            if trace:
                trace.is_on = turn == TRACED
            began = time.process_time()
            answer = client.ask()
            if trace:
                trace.is_on = False
            if turn >= TRACED:
                seconds.append(time.process_time() - began)
            else:
                client.go_on(answer)
        if trace is None:
            print(f"{min(seconds) * 1000:.2f} ms of processor time, the least of {TIMED}")
            return
        total = sum(trace.calls.values())
        print(f"{len(trace.calls)} files, {trace.changes} changes of file, {total} calls")
        for file, calls in trace.calls.most_common():
            print(f"{calls:6} {file}")
    finally:
        signal.raise_signal(signal.SIGTERM)


def main() -> None:
    """Serve the demo model until the client has printed."""
    trace = None if sys.argv[1:] == ["time"] else ThreadsTrace()
    settings = ServeSettings(slots=2, disk_cache=False, port=0)
    loader, log = ModelLoader(settings=settings), RequestLog()
    manager = ModelManager(ModelNames("demo"), loader, log.watch, log.ended)
    if trace is not None:
        threading.setprofile(trace)
        sys.setprofile(trace)
    manager.load_first()
    listening = listen(settings)
    port = listening.getsockname()[1]
    client = threading.Thread(target=run, args=(port, trace), daemon=True)
    server.serve(manager, log, settings, listening, client.start)


if __name__ == "__main__":
    main()
