"""Lines of JSON between the first rank and another one. An empty line is a sign of life."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

BEAT_S = 0.5
"""Seconds between two signs of life of a follower."""
PATIENCE_S = 7.0
"""Seconds without a sign of life after which a follower counts as frozen."""


class Wire:
    """One connection. Any thread may send; one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._lock = connection, threading.Lock()
        self.messages = self.nbytes = 0
        """The messages and bytes sent so far, without signs of life."""

    def send(self, message: Any) -> None:
        """Send `message`. Raise OSError if the other side is gone."""
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            self._connection.sendall(line)
        self.messages, self.nbytes = self.messages + 1, self.nbytes + len(line)

    def beat(self) -> None:
        """Send signs of life until the other side is gone."""
        pause = threading.Event()
        with suppress(OSError):
            while not pause.wait(BEAT_S):
                with self._lock:
                    self._connection.sendall(b"\n")

    def received(self, patience: float | None = None) -> Iterator[Any]:
        """Yield the messages until the other side is gone.

        Raise TimeoutError after `patience` seconds without a message or a sign of life.
        """
        self._connection.settimeout(patience)
        rest = b""
        while True:
            try:
                data = self._connection.recv(65536)
            except TimeoutError:
                raise
            except OSError:
                return
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line:
                    yield json.loads(line)

    def close(self) -> None:
        """Close the connection, also for a thread that receives."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
