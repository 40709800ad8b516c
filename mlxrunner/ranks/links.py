"""The hosts and processes of a model over several ranks, and the lines of JSON between them.

An empty line is a sign of life.
"""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from mlxrunner.errors import OptionError
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
    """Return an address as it is usually written. Raise ValueError if it is none."""
    if not isinstance(given, str) or not given.isprintable():  # the zone of IPv6 is any text
        raise ValueError("not an address")
    return str(ipaddress.ip_address(given))


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all ranks."""
    from importlib.metadata import version

    return {name: version(name) for name in ("mlxrunner", "mlx", "mlx-lm")}


def differing(found: Any) -> str:
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


class RankLink:
    """The guard's side of a connection: nothing waits."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(PATIENCE_S)
        self._connection, self._rest = connection, b""
        self.seen, self.is_closed, self.patience = time.monotonic(), False, PATIENCE_S

    @staticmethod
    def line(message: Any) -> bytes:
        """Return `message` as a line."""
        return json.dumps(message, separators=(",", ":")).encode() + b"\n"

    def fileno(self) -> int:
        """Return the descriptor, to wait for messages."""
        return self._connection.fileno()

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
        line = RankLink.line(message)
        with self._lock:
            self._connection.sendall(line)
        self.messages, self.nbytes = self.messages + 1, self.nbytes + len(line)

    def beat(self) -> None:
        """Send signs of life until the guard is gone."""
        pause = threading.Event()
        with suppress(OSError):
            while not pause.wait(BEAT_S):
                with self._lock:
                    self._connection.sendall(b"\n")

    def received(self) -> Iterator[Any]:
        """Yield the messages until the guard is gone, or gives no sign of life."""
        rest, waits = b"", GUARD_PATIENCE_S
        pause = RankLink.line(PAUSE).strip()
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


PLAIN = b"\x1b[0m"
"""Ends bold, dim and coloured text."""


class Process:
    """A rank that the guard has started."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._code: int | None = None
        self.stopped: float | None = None
        """When the process was stopped, until it goes on."""

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

    def kill(self) -> None:
        """End the process, also if it is stopped."""
        self.send(signal.SIGKILL)

    def wait(self, until: float) -> None:
        """Wait for the end of the process, which comes at `until` at the latest."""
        while self.poll() is None:
            if time.monotonic() > until:
                self.kill()
            time.sleep(0.01)


def start(rank: int, command: list[str]) -> tuple[Process, RankLink]:
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


def has_the_terminal() -> bool:
    """Return True if Ctrl-C reaches rank 0 as it reaches this process."""
    for stream in range(3):
        with suppress(OSError):
            return os.tcgetpgrp(stream) == os.getpgrp()
    return False


def hurry() -> None:
    """Let the guard run before the ranks that it watches, if the system allows that."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)


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
