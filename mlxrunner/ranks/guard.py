"""The process that starts the ranks of this machine, joins all of them, and ends them together.

It has no model and no MLX. A rank may wait within MLX for another one that will never come, with
Python's lock held: no thread of its own could end it then. This process can.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from mlxrunner.errors import LaunchError
from mlxrunner.ranks.links import (
    BEAT_S,
    END,
    JOIN_S,
    JOINED,
    JOINS,
    PATIENCE_S,
    PAUSE,
    Hosts,
    Process,
    RankLink,
    differing,
    has_the_terminal,
    hurry,
    start,
    terminal_kept,
)
from mlxrunner.terminal.output import one_line

START_S = 120
"""Seconds that the guard waits for all ranks to start."""
LEAVE_S = 5
"""Seconds that a rank has to end by itself."""
STOPPED_S = 5
"""Seconds that a rank of this machine may be stopped."""
SETTLE_S = 0.3
"""Seconds in which the end of the rank that is the cause is seen, too."""
_ENDED = "has ended"
_STOPPED = f"has been stopped for {STOPPED_S} s"
_SILENT = f"has given no sign of life for {PATIENCE_S:.0f} s"


def guard(hosts: Hosts, command: Callable[[int], list[str]]) -> int:
    """Run the ranks of `hosts`, and return the exit code of rank 0. None is left behind.

    `command` returns the command line of a rank of this machine. Raise LaunchError if a rank is
    lost.
    """
    with terminal_kept():
        watch = Guard(hosts)
        try:
            with watch.signals():
                return watch.run(command)
        except BaseException:
            watch.kill()
            raise
        finally:
            watch.end()


class Guard:
    """The ranks as their guard sees them."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self._links: dict[int, RankLink] = {}
        self._arrivals = Arrivals()
        self._greeted: set[int] = set()
        self._processes: dict[int, Process] = {}
        self._told: list[int] = []
        """The signals of the user that rank 0 has to be told of."""
        self._is_asked = 0
        """The last signal of the user."""
        self._over: float | None = None

    def run(self, command: Callable[[int], list[str]]) -> int:
        """Start the ranks, and pass their messages on until rank 0 has ended."""
        self._start(command)
        hurry()
        limit, beat = time.monotonic() + START_S, 0.0
        while True:
            self._read(0.1)
            now = time.monotonic()
            if now > beat:
                beat = now + BEAT_S
                self._send(b"\n", range(len(self.hosts.addresses)))
            if (code := self._processes[0].poll()) is not None:
                return self._code(code)
            if self._over is not None:
                if now > self._over:
                    self._processes[0].kill()
            else:
                self._check(now, limit)
            while self._told:
                self._processes[0].send(self._told.pop(0))

    def end(self) -> None:
        """Close all connections, and wait until the ranks of this machine have ended."""
        for link in self._links.values():
            link.close()
        self._arrivals.close()
        limit = time.monotonic() + LEAVE_S
        for process in self._processes.values():
            process.wait(limit)

    def kill(self) -> None:
        """End the ranks of this machine at once, also those that are stopped."""
        for process in self._processes.values():
            process.kill()

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Pass Ctrl-C and `kill` on to rank 0, and tell the ranks of Ctrl-Z."""
        pause = signal.SIGTSTP
        handlers: dict[int, Callable[[int, Any], object]] = {
            signal.SIGINT: lambda one, _: self._ask(one, is_known=has_the_terminal()),
            signal.SIGTERM: lambda one, _: self._ask(one),
            signal.SIGHUP: lambda one, _: self._ask(one),
            pause: lambda *_: self._pause(),
        }
        before = {one: signal.getsignal(one) for one in handlers}
        handlers = {one: do for one, do in handlers.items() if before[one] is not signal.SIG_IGN}
        for one, do in handlers.items():
            signal.signal(one, do)
        try:
            yield
        finally:
            for one in handlers:
                signal.signal(one, before[one])

    def _ask(self, number: int, *, is_known: bool = False) -> None:
        """Pass a signal of the user on to rank 0, unless it has got the same one."""
        self._is_asked = number
        if not is_known:
            self._told.append(number)

    def _start(self, command: Callable[[int], list[str]]) -> None:
        first, port = self.hosts.addresses[0], self.hosts.port
        for rank, address in enumerate(self.hosts.addresses):
            if rank == 0 or self.hosts.is_local(rank):
                self._processes[rank], self._links[rank] = start(rank, command(rank))
            else:
                self._arrivals.listen(first, port)
            if rank not in self._links:  # on another host
                line = f"mlxrunner: rank {rank}: waiting for it to start on {address}\n"
                with suppress(OSError):
                    os.write(2, line.encode())

    def _read(self, wait: float) -> None:
        """Take what the ranks say within `wait` seconds."""
        links = self._links.items()
        known = {link.fileno(): (rank, link) for rank, link in links if not link.is_closed}
        unknown = self._arrivals.descriptors()
        ready, _, _ = select.select([*known, *unknown], [], [], wait)
        for number in ready:
            if number in known:
                rank, link = known[number]
                for message in link.read():
                    self._take(rank, link, message)
            elif (arrived := unknown[number]) is None:
                self._arrivals.accept()
            elif messages := arrived.read():
                self._greet(arrived, messages)

    def _take(self, rank: int, link: RankLink, message: Any) -> None:
        if rank == 0:
            self._from_first(message)
        elif isinstance(message, dict) and "error" in message:
            if self._over is None:
                self._lose(rank, str(message["error"]))
        elif rank not in self._greeted:
            self._compare(rank, message)
        elif message in (JOINS, JOINED):
            link.patience = JOIN_S if message == JOINS else PATIENCE_S
        else:
            self._say([rank, message], [0])

    def _greet(self, link: RankLink, messages: list[Any]) -> None:
        """Take the first messages of a rank that has connected from another host."""
        rank = self._arrivals.greeted(link, messages[0])
        others = range(1, len(self.hosts.addresses))
        if rank is not None and rank in others and rank not in self._links:
            self._links[rank] = link
            for message in messages:
                self._take(rank, link, message)
        else:
            link.close()

    def _compare(self, rank: int, hello: Any) -> None:
        if said := differing(hello.get("versions") if isinstance(hello, dict) else None):
            raise LaunchError(f"rank {rank} has other versions: {said}")
        self._greeted.add(rank)
        if len(self._greeted) == len(self.hosts.addresses) - 1:
            self._say("all", [0])

    def _from_first(self, message: Any) -> None:
        if message == END:
            self._over = time.monotonic() + LEAVE_S
            for rank, link in self._links.items():
                if rank:
                    link.close()
        else:
            self._say(message, range(1, len(self.hosts.addresses)))

    def _check(self, now: float, limit: float) -> None:
        """Raise LaunchError for a rank that is lost."""
        for rank, link in self._links.items():
            if (code := self._code_of(rank)) is not None and rank not in self._greeted:
                raise LaunchError(f"rank {rank} has not started: exit code {code}")
            if code is not None or (link.is_closed and rank):
                self._lose(rank, _ENDED)
            # Of a rank on this host, the system says whether it is stopped.
            is_far = rank in self._greeted and rank not in self._processes
            if is_far and now - link.seen > link.patience:
                self._lose(rank, _SILENT)
        for rank, process in self._processes.items():
            process.poll()
            if process.stopped is not None and now - process.stopped > STOPPED_S:
                self._lose(rank, _STOPPED)
        missing = set(range(1, len(self.hosts.addresses))) - self._greeted
        if missing and now > limit:
            raise LaunchError(f"rank {min(missing)} has not started: not here within {START_S} s")

    def _lose(self, rank: int, why: str) -> None:
        """Raise LaunchError for `rank`, or for another one that is the cause of its loss."""
        time.sleep(SETTLE_S)
        codes = {other: process.poll() or 0 for other, process in self._processes.items()}
        killed = [other for other, code in codes.items() if code < 0]
        stopped = [other for other, one in self._processes.items() if one.stopped is not None]
        if killed:
            rank, why = killed[0], _ENDED
        elif stopped and why == _SILENT:
            rank, why = stopped[0], _STOPPED
        if why == _ENDED and codes.get(rank):
            code = codes[rank]
            why += f" by signal {-code}" if code < 0 else f" with exit code {code}"
        raise LaunchError(one_line(f"rank {rank} ({self.hosts.addresses[rank]}): {why}"))

    def _code_of(self, rank: int) -> int | None:
        return self._processes[rank].poll() if rank in self._processes else None

    def _code(self, code: int) -> int:
        """Return the exit code for the one of rank 0."""
        if code >= 0:
            return code
        if self._is_asked:
            return 128 + self._is_asked
        if self._over is None:
            self._lose(0, _ENDED)
        raise LaunchError(f"rank 0 ({self.hosts.addresses[0]}): has not ended in {LEAVE_S} s")

    def _pause(self) -> None:
        self._say(PAUSE, range(len(self.hosts.addresses)))
        os.kill(os.getpid(), signal.SIGSTOP)
        for link in self._links.values():
            link.seen = time.monotonic()

    def _say(self, message: Any, ranks: Any) -> None:
        self._send(RankLink.line(message), ranks)

    def _send(self, line: bytes, ranks: Any) -> None:
        for rank in ranks:
            if rank in self._links:
                self._links[rank].send(line)


GREETING_S = PATIENCE_S
"""Seconds that a connection has to say which rank it is."""
MOST_WAITING = 64
"""Most connections that have not said yet which rank they are. More wait to be accepted."""


class Arrivals:
    """The port at which ranks of other hosts arrive."""

    def __init__(self) -> None:
        """Begin without a port: ranks of this machine need none."""
        self._server: socket.socket | None = None
        self._waiting: dict[RankLink, float] = {}

    def listen(self, address: str, port: int) -> None:
        """Open the port, unless it is open. Raise LaunchError if it can't be opened."""
        if self._server is not None:
            return
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            self._server = socket.create_server((address, port), family=family)
        except OSError as error:
            raise LaunchError(f"rank 0 can't listen at {address}:{port}: {error}") from error

    def descriptors(self) -> dict[int, RankLink | None]:
        """Return the descriptors to wait for, with their connections; None is the port.

        Connections that sent nothing for too long, or no message, are closed and left out.
        """
        now = time.monotonic()
        for link, began in list(self._waiting.items()):
            if link.is_closed or now - began > GREETING_S:
                self.refuse(link)
        found: dict[int, RankLink | None] = {link.fileno(): link for link in self._waiting}
        if self._server is not None and len(found) < MOST_WAITING:
            found[self._server.fileno()] = None
        return found

    def accept(self) -> None:
        """Take a connection, if it is still there."""
        with suppress(OSError):
            if self._server is not None:
                self._waiting[RankLink(self._server.accept()[0])] = time.monotonic()

    def greeted(self, link: RankLink, message: Any) -> int | None:
        """Return the rank that `link` names in its first message, and stop waiting for it."""
        self._waiting.pop(link, None)
        rank = message.get("rank") if isinstance(message, dict) else None
        return rank if type(rank) is int else None

    def refuse(self, link: RankLink) -> None:
        """Close a connection, and wait for it no more."""
        self._waiting.pop(link, None)
        link.close()

    def close(self) -> None:
        """Close the port, and all connections that wait."""
        for link in list(self._waiting):
            self.refuse(link)
        if self._server is not None:
            self._server.close()
