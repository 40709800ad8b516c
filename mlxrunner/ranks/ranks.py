"""The other ranks as the first one sees them, through the guard that has started it."""

from __future__ import annotations

import os
import queue
import threading
import time
from contextlib import suppress
from socket import socket
from typing import Any

from mlxrunner.models.fingerprint import fingerprint
from mlxrunner.ranks.group import checked_folder, load_share
from mlxrunner.ranks.hosts import Hosts
from mlxrunner.ranks.leading import LeadingModel
from mlxrunner.ranks.wire import END, PATIENCE_S, Wire
from mlxrunner.results import logger
from mlxrunner.runner import Runner
from mlxrunner.terminal.text import size


class Ranks:
    """All ranks but the first. Use it as a context manager: it lets the others end."""

    def __init__(self, hosts: Hosts, connection: socket) -> None:
        """`connection` is the one to the guard."""
        self.hosts, self.wire = hosts, Wire(connection)
        self._replies: dict[int, queue.SimpleQueue[Any]] = {
            rank: queue.SimpleQueue() for rank in range(1, len(hosts.addresses))
        }
        self._all_here = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.tell(END)

    def load(self, model: str, settings: dict[str, Any], **more: Any) -> Runner:
        """Load `model` on all ranks, and return the runner of the first one."""
        folder = checked_folder(model, len(self.hosts.addresses))
        self._all_here.wait()
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
        """Send `message` to all other ranks."""
        with suppress(OSError):
            self.wire.send(message)

    def wait_for_the_guard(self) -> None:
        """Give the guard time to end this process, after an error that a lost rank causes."""
        time.sleep(PATIENCE_S)

    def _listen(self) -> None:
        """Take the replies of the other ranks. End this process when the guard has gone."""
        for message in self.wire.received():
            if isinstance(message, list):
                rank, reply = message
                self._replies[rank].put(reply)
            else:
                self._all_here.set()
        os._exit(1)

    def _answers(self) -> dict[int, Any]:
        """Wait for one reply of each rank. The guard ends this process if one is lost."""
        return {rank: replies.get() for rank, replies in self._replies.items()}
