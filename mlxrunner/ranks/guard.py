"""The process that starts the ranks of this machine, joins all of them, and ends them together.

It has no model and no MLX. A rank may wait within MLX for another one that will never come, with
Python's lock held: no thread of its own could end it then. This process can.

Guard and ranks send each other lines of JSON. An empty line is a sign of life.
"""

from __future__ import annotations

import ipaddress
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from mlxrunner.errors import LaunchError, OptionError
from mlxrunner.system.reading import read_text
from mlxrunner.terminal.control import SHOW_CURSOR, UNMARK_PASTES
from mlxrunner.terminal.output import count_of, one_line

MOST_BYTES = 2**16
"""Most bytes of a file of hosts."""
LONGEST = 40
"""Most characters to show of another rank's version."""


@dataclass(frozen=True)
class Hosts:
    """The address of each rank, in order. `port` is the first of their ports."""

    addresses: tuple[str, ...]
    port: int

    @property
    def ring(self) -> str:
        """The hosts as the ring backend of MLX reads them: one port for each rank."""
        return json.dumps(
            [[f"{one}:{self.port + 1 + rank}"] for rank, one in enumerate(self.addresses)]
        )

    def is_local(self, rank: int) -> bool:
        """Return True if `rank` has a loopback address."""
        return ipaddress.ip_address(self.addresses[rank]).is_loopback


def read_hosts(file: str, port: int) -> Hosts:
    """Read the hosts of `mlx.launch`'s format: a list of objects, each with `ips`.

    Raise OptionError if the file is another one.
    """
    wanted = (
        'it has to be a list such as [{"ips": ["192.168.2.1"]}, {"ips": ["192.168.2.2"]}], with '
        "numbers as addresses, not names"
    )
    try:
        found: Any = json.loads(read_text(file, MOST_BYTES, given=True))
        addresses = tuple(_address(one["ips"][0]) for one in found)
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        raise OptionError(f"{file}: {wanted}") from error
    if len(addresses) < 2:
        named = count_of(len(addresses), "host")
        raise OptionError(f"{file}: it names {named}, and a ring has 2 or more")
    if port + len(addresses) > 65535:
        raise OptionError(
            f"--rank-port {port}: {len(addresses)} hosts need the {1 + len(addresses)} "
            "ports from there on, and the last port is 65535"
        )
    return Hosts(addresses, port)


def _address(given: Any) -> str:
    if not isinstance(given, str) or not given.isprintable():  # the zone of IPv6 is any text
        raise ValueError("not an address")
    return str(ipaddress.ip_address(given))


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all ranks."""
    from importlib.metadata import version

    return {name: version(name) for name in ("mlxrunner", "mlx", "mlx-lm")}


def _differing(found: Any) -> str:
    """Return which versions `found` are not those of rank 0, or nothing."""
    theirs = found if isinstance(found, dict) else {}
    return ", ".join(
        f"{name} {one_line(str(theirs.get(name)), LONGEST)} (rank 0: {ours})"
        for name, ours in versions().items()
        if theirs.get(name) != ours
    )


BEAT_S = 0.5
"""Seconds between two signs of life."""
PATIENCE_S = 8.0
"""Seconds without a sign of life after which a rank on another host counts as frozen."""
GUARD_PATIENCE_S = 20.0
"""Seconds without one after which the guard does: on a busy machine it may get no turn for some."""
JOIN_S = 60
"""Seconds that joining the ring may take, in which MLX holds Python's lock: no sign of life."""
MOST_LINE = 2**20
"""Most bytes of a message."""
END, PAUSE = "end", "pause"
"""Rank 0 needs the others no more; the guard is silent from here on until its next message."""
JOINS, JOINED = "joins", "joined"
"""Another rank is silent for JOIN_S at most from here on; it is not any more."""


def _line(message: Any) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class RankLink:
    """The guard's side of a connection: nothing waits. `select` takes it as it is."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(PATIENCE_S)
        self.fileno = connection.fileno
        self._connection, self._rest = connection, b""
        self.seen, self.is_closed, self.patience = time.monotonic(), False, PATIENCE_S

    def read(self) -> list[Any]:
        """Return the messages that are here. Close the connection if they are none."""
        try:
            data = self._connection.recv(65536)
        except OSError:
            data = b""
        if not data:
            self.close()
        self.seen = time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            if len(self._rest) > MOST_LINE:
                raise ValueError("a message without an end")
            return [json.loads(line) for line in lines if line]
        except (ValueError, RecursionError):  # not from a rank
            self.close()
            return []

    def send(self, line: bytes) -> None:
        """Send a line; a rank that is gone is found by reading."""
        with suppress(OSError):
            if not self.is_closed:
                self._connection.sendall(line)

    def close(self) -> None:
        """Close the connection."""
        self.is_closed = True
        self._connection.close()


class Wire:
    """A rank's side of a connection. Any thread may send; one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._lock = connection, threading.Lock()
        self.messages = self.nbytes = 0
        """The messages and bytes sent so far, without signs of life."""

    def send(self, message: Any) -> None:
        """Send `message`. Raise OSError if the guard is gone."""
        line = _line(message)
        with self._lock:
            self._connection.sendall(line)
        self.messages, self.nbytes = self.messages + 1, self.nbytes + len(line)

    def beat(self) -> None:
        """Send signs of life until the guard is gone."""
        with suppress(OSError):
            while True:
                time.sleep(BEAT_S)
                with self._lock:
                    self._connection.sendall(b"\n")

    def received(self) -> Iterator[Any]:
        """Yield the messages until the guard is gone, or gives no sign of life."""
        rest, waits, pause = b"", GUARD_PATIENCE_S, _line(PAUSE).strip()
        while True:
            self._connection.settimeout(waits or None)
            try:
                data = self._connection.recv(65536)
            except OSError:
                return
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            waits = 0 if lines and lines[-1] == pause else GUARD_PATIENCE_S
            for line in lines:
                if line and line != pause:
                    yield json.loads(line)


class Process:
    """A rank that the guard has started."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._code: int | None = None
        self.stopped: float | None = None
        """When the process was stopped, until it continues."""

    def poll(self) -> int | None:
        """Return the exit code, or None while the process is there."""
        while self._code is None:
            flags = os.WNOHANG | os.WUNTRACED | os.WCONTINUED
            found, status = os.waitpid(self._pid, flags)
            if not found:
                break
            if os.WIFSTOPPED(status):
                self.stopped = time.monotonic()
            elif os.WIFCONTINUED(status):
                self.stopped = None
            else:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def send(self, number: int) -> None:
        """Send a signal, if the process is there."""
        if self.poll() is None:
            os.kill(self._pid, number)

    def wait(self, until: float) -> None:
        """Wait for the end of the process, which comes at `until` at the latest."""
        while self.poll() is None:
            if time.monotonic() > until:
                self.send(signal.SIGKILL)
            time.sleep(0.01)


def _start(rank: int, command: list[str]) -> tuple[Process, RankLink]:
    """Start `rank` with a connection that it inherits."""
    ours, theirs = socket.socketpair()
    with theirs:
        # Rank 0 has the terminal. Ctrl-C reaches no other rank: rank 0 decides.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL if rank else None,
            start_new_session=rank > 0,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "MLXRUNNER_RANK": f"{rank}:{theirs.fileno()}:{os.getpid()}"},
        )
    process.returncode = 0  # the guard itself waits for it
    return Process(process.pid), RankLink(ours)


def inherited() -> socket.socket | None:
    """Return the connection to the guard that has started this process, or None without one.

    This process ends with its guard at once where the system can do that.
    """
    told = os.environ.pop("MLXRUNNER_RANK", None)
    if told is None:
        return None
    _, number, guard = told.split(":")
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != int(guard):
        os._exit(1)
    return socket.socket(fileno=int(number))


PLAIN = b"\x1b[0m"
"""Ends bold, dim and coloured text."""


@contextmanager
def terminal_kept() -> Iterator[None]:
    """Restore the terminal's settings afterwards: a rank that is killed can't.

    If there are others then, the rank may also have left pastes marked, text dim or the cursor
    hidden.
    """
    import termios

    try:
        before = termios.tcgetattr(0)
    except (termios.error, OSError):
        yield
        return
    try:
        yield
    finally:
        told = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        with suppress(termios.error, OSError):
            if os.tcgetpgrp(0) == os.getpgrp() and termios.tcgetattr(0) != before:
                termios.tcsetattr(0, termios.TCSANOW, before)
                if os.isatty(1):
                    os.write(1, PLAIN + UNMARK_PASTES + SHOW_CURSOR)
        signal.signal(signal.SIGTTOU, told)


def _has_the_terminal() -> bool:
    """Return True if Ctrl-C reaches rank 0 as it reaches this process."""
    for stream in range(3):
        with suppress(OSError):
            return os.tcgetpgrp(stream) == os.getpgrp()
    return False


START_S = 120
"""Seconds that the guard waits for all ranks to start."""
LEAVE_S = 5
"""Seconds that a rank has to end by itself."""
STOPPED_S = 5
"""Seconds that a rank of this machine may be stopped."""
SETTLE_S = 0.3
"""Seconds in which the end of the rank that is the cause is seen, too."""
GREETING_S = PATIENCE_S
"""Seconds that a connection has to say which rank it is."""
MOST_WAITING = 64
"""Most connections that have not said yet which rank they are. More wait to be accepted."""
_HEEDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP)
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
        self._ranks = range(len(hosts.addresses))
        self._links: dict[int, RankLink] = {}
        self._server: socket.socket | None = None
        """The port at which ranks of other hosts arrive; None if all are on this machine."""
        self._arrived: dict[RankLink, float] = {}
        """The connections that have not said which rank they are, and since when."""
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
        with suppress(OSError):  # to run before the ranks, if the system allows that
            os.setpriority(os.PRIO_PROCESS, 0, -10)
        limit, beat = time.monotonic() + START_S, 0.0
        while True:
            self._read(0.1)
            now = time.monotonic()
            if now > beat:
                beat = now + BEAT_S
                self._send(b"\n", self._ranks)
            if (code := self._processes[0].poll()) is not None:
                return self._code(code)
            if self._over is None:
                self._check(now, limit)
            elif now > self._over:
                self._processes[0].send(signal.SIGKILL)
            while self._told:
                self._processes[0].send(self._told.pop(0))

    def end(self) -> None:
        """Close all connections, and wait until the ranks of this machine have ended."""
        for link in (*self._links.values(), *self._arrived):
            link.close()
        if self._server is not None:
            self._server.close()
        limit = time.monotonic() + LEAVE_S
        for process in self._processes.values():
            process.wait(limit)

    def kill(self) -> None:
        """End the ranks of this machine at once, also those that are stopped."""
        for process in self._processes.values():
            process.send(signal.SIGKILL)

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Pass Ctrl-C and `kill` on to rank 0, and tell the ranks of Ctrl-Z."""
        before = {one: signal.getsignal(one) for one in _HEEDED}
        for one, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(one, self._heed)
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    def _heed(self, number: int, _: object) -> None:
        if number == signal.SIGTSTP:
            self._send(_line(PAUSE), self._ranks)
            os.kill(os.getpid(), signal.SIGSTOP)
            for link in self._links.values():
                link.seen = time.monotonic()
            return
        self._is_asked = number
        if number != signal.SIGINT or not _has_the_terminal():  # else rank 0 has got it, too
            self._told.append(number)

    def _start(self, command: Callable[[int], list[str]]) -> None:
        far = [rank for rank in self._ranks[1:] if not self.hosts.is_local(rank)]
        if far:
            self._server = self._listening()
        for rank, address in enumerate(self.hosts.addresses):
            if rank not in far:
                self._processes[rank], self._links[rank] = _start(rank, command(rank))
                continue
            with suppress(OSError):
                line = f"mlxrunner: rank {rank}: waiting for it to start on {address}\n"
                os.write(2, line.encode())

    def _listening(self) -> socket.socket:
        address, port = self.hosts.addresses[0], self.hosts.port
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            return socket.create_server((address, port), family=family)
        except OSError as error:
            raise LaunchError(f"rank 0 can't listen at {address}:{port}: {error}") from error

    def _read(self, wait: float) -> None:
        """Take what the ranks say within `wait` seconds."""
        now = time.monotonic()
        for link, began in list(self._arrived.items()):
            if link.is_closed or now - began > GREETING_S:
                del self._arrived[link]
                link.close()
        known = {link: rank for rank, link in self._links.items() if not link.is_closed}
        awaited: list[RankLink | socket.socket] = [*known, *self._arrived]
        if self._server is not None and len(self._arrived) < MOST_WAITING:
            awaited.append(self._server)
        for one in select.select(awaited, [], [], wait)[0]:
            if isinstance(one, socket.socket):
                with suppress(OSError):
                    self._arrived[RankLink(one.accept()[0])] = now
            elif one in known:
                for message in one.read():
                    self._take(known[one], one, message)
            elif messages := one.read():
                self._greet(one, messages)

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
            self._send(_line([rank, message]), [0])

    def _greet(self, link: RankLink, messages: list[Any]) -> None:
        """Take the first messages of a rank that has connected from another host."""
        del self._arrived[link]
        rank = messages[0].get("rank") if isinstance(messages[0], dict) else None
        if type(rank) is int and rank in self._ranks[1:] and rank not in self._links:
            self._links[rank] = link
            for message in messages:
                self._take(rank, link, message)
        else:
            link.close()

    def _compare(self, rank: int, hello: Any) -> None:
        if said := _differing(hello.get("versions") if isinstance(hello, dict) else None):
            raise LaunchError(f"rank {rank} has other versions: {said}")
        self._greeted.add(rank)
        if len(self._greeted) == len(self._ranks) - 1:
            self._send(_line("all"), [0])

    def _from_first(self, message: Any) -> None:
        if message != END:
            self._send(_line(message), self._ranks[1:])
            return
        self._over = time.monotonic() + LEAVE_S
        for rank, link in self._links.items():
            if rank:
                link.close()

    def _check(self, now: float, limit: float) -> None:
        for rank, link in self._links.items():
            process = self._processes.get(rank)
            code = None if process is None else process.poll()
            if code is not None and rank not in self._greeted:
                raise LaunchError(f"rank {rank} has not started: exit code {code}")
            if code is not None or (link.is_closed and rank):
                self._lose(rank, _ENDED)
            # Of a rank on this host, the system says whether it is stopped.
            is_far = rank in self._greeted and process is None
            if is_far and now - link.seen > link.patience:
                self._lose(rank, _SILENT)
        for rank, process in self._processes.items():
            process.poll()
            if process.stopped is not None and now - process.stopped > STOPPED_S:
                self._lose(rank, _STOPPED)
        missing = {*self._ranks[1:]} - self._greeted
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

    def _code(self, code: int) -> int:
        if code >= 0:
            return code
        if self._is_asked:
            return 128 + self._is_asked
        if self._over is None:
            self._lose(0, _ENDED)
        raise LaunchError(f"rank 0 ({self.hosts.addresses[0]}): has not ended in {LEAVE_S} s")

    def _send(self, line: bytes, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank in self._links:
                self._links[rank].send(line)
