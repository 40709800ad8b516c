"""The ranks as the first one sees them: started, compared, watched, and ended."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from mlxrunner.errors import LaunchError
from mlxrunner.models.fingerprint import fingerprint
from mlxrunner.ranks.group import checked_folder, load_share, versions
from mlxrunner.ranks.hosts import Hosts
from mlxrunner.ranks.leading import LeadingModel
from mlxrunner.ranks.wire import PATIENCE_S, Wire
from mlxrunner.results import logger
from mlxrunner.runner import Runner
from mlxrunner.terminal.text import one_line, size

START_S = 120
"""Seconds that the first rank waits for the others to start."""
LEAVE_S = 5
"""Seconds that a rank of this machine has to end by itself."""


class Ranks:
    """All ranks but the first. Use it as a context manager: none is left behind."""

    def __init__(self, hosts: Hosts, command: Callable[[int], list[str]]) -> None:
        """`command` returns the command line that starts a rank, for those of this machine."""
        self.hosts, self._command = hosts, command
        self._others = range(1, len(hosts.addresses))
        self.wires: dict[int, Wire] = {}
        self._replies: dict[int, queue.SimpleQueue[Any]] = {}
        self._started: list[subprocess.Popen[bytes]] = []
        self._is_over = threading.Event()

    def __enter__(self) -> Ranks:
        try:
            self._connect()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the other ranks, and wait for those of this machine."""
        self._is_over.set()
        for wire in self.wires.values():
            wire.close()
        for process in self._started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(LEAVE_S if self.wires else 0)
            self._kill(process)

    def load(self, model: str, settings: dict[str, Any], **more: Any) -> Runner:
        """Load `model` on all ranks, and return the runner of the first one."""
        folder = checked_folder(model, len(self.hosts.addresses))
        self.tell({"model": model, "settings": settings, "fingerprint": fingerprint(folder)})
        self._answers()
        self.tell("load")
        runner, group = load_share(self.hosts, 0, model, settings, **more)
        for rank, found in self._answers().items():
            logger.info("rank %d: weights of %s", rank, size(found["weights"]))
            runner.context = min(runner.context, found["context"])
        runner.model = LeadingModel(runner.model, lambda: runner.entry.caches, group, self.tell)
        return runner

    def tell(self, message: Any) -> None:
        """Send `message` to all other ranks. One that is gone is reported by its watch."""
        for wire in self.wires.values():
            with suppress(OSError):
                wire.send(message)

    def wait_for_the_cause(self) -> None:
        """Give the watches time to end this process, after an error that a lost rank causes."""
        self._is_over.wait(PATIENCE_S)

    def _connect(self) -> None:
        first, port = self.hosts.addresses[0], self.hosts.port
        try:
            server = socket.create_server((first, port), family=_family(first))
        except OSError as error:
            raise LaunchError(f"rank 0 can't listen at {first}:{port}: {error}") from error
        with server:
            for rank in self._others:
                if self.hosts.is_local(rank):
                    self._started.append(self._start(rank))
                else:
                    line = f"rank {rank}: waiting for it to start on {self.hosts.addresses[rank]}"
                    print(f"mlxrunner: {line}", file=sys.stderr)
            end = time.monotonic() + START_S
            while len(self.wires) < len(self._others):
                self._accept(server, end)

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        # A session of its own: Ctrl-C reaches the first rank only, which decides.
        return subprocess.Popen(
            self._command(rank), stdin=subprocess.DEVNULL, start_new_session=True
        )

    def _accept(self, server: socket.socket, end: float) -> None:
        server.settimeout(0.2)
        try:
            connection, _ = server.accept()
        except TimeoutError:
            gone = next((p for p in self._started if p.poll() is not None), None)
            if gone is not None or time.monotonic() > end:
                missing = sorted(set(self._others) - set(self.wires))
                why = f"exit code {gone.returncode}" if gone else f"not here within {START_S} s"
                raise LaunchError(f"rank {missing[0]} has not started: {why}") from None
            return
        wire = Wire(connection)
        hello: Any = next(wire.received(PATIENCE_S), None)
        rank = hello.get("rank") if isinstance(hello, dict) else None
        if not isinstance(rank, int) or rank not in self._others or rank in self.wires:
            wire.close()
            return
        if hello["versions"] != versions():
            self.wires[rank] = wire
            raise LaunchError(_differing(rank, hello["versions"]))
        self.wires[rank], self._replies[rank] = wire, queue.SimpleQueue()
        threading.Thread(target=self._watch, args=(rank, wire), daemon=True).start()

    def _watch(self, rank: int, wire: Wire) -> None:
        """Take the replies of `rank`. End this process if it is lost."""
        name, why = f"rank {rank} ({self.hosts.addresses[rank]})", "has ended"
        try:
            for message in wire.received(PATIENCE_S):
                if isinstance(message, dict) and "error" in message:
                    why = message["error"]
                    break
                self._replies[rank].put(message)
        except TimeoutError:
            why = f"has given no sign of life for {PATIENCE_S:.0f} s"
        if not self._is_over.is_set():
            self._give_up(f"{name}: {why}")

    def _give_up(self, line: str) -> NoReturn:
        """End this process with one line: its main thread may wait for ever."""
        with suppress(Exception):
            sys.stdout.flush()
        os.write(2, f"mlxrunner: {one_line(line)}\n".encode())
        os.close(2)  # the ring tells of each socket
        for process in self._started:
            self._kill(process)
        os._exit(LaunchError.exit_code)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()  # also ends one that is stopped
        process.wait()

    def _answers(self) -> dict[int, Any]:
        """Wait for one reply of each rank. A rank that is lost ends this process."""
        return {rank: replies.get() for rank, replies in self._replies.items()}


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _differing(rank: int, found: dict[str, str]) -> str:
    told = [
        f"{name} {found.get(name)} (rank 0: {ours})"
        for name, ours in versions().items()
        if found.get(name) != ours
    ]
    return f"rank {rank} has other versions: {', '.join(told)}"
