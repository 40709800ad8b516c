"""The connections to the guard that have not said yet which rank they are.

Anyone who reaches the port may connect, say anything, or nothing. It ends no rank.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from typing import Any

from mlxrunner.errors import LaunchError
from mlxrunner.ranks.wire import PATIENCE_S, RankLink

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
            if link.is_closed or now - began > PATIENCE_S:
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
