"""Lines of JSON between a rank and the guard. An empty line is a sign of life."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

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
