"""Keep in a file which requests a worker of the server runs, for the one that comes after it.

A worker that dies takes its clients' answers with it, and they ask again. A request that ran in two
workers when they died is a suspect: it runs alone from then on. The one that is alone when a worker
dies is refused. Knows no model and no HTTP.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import IO

from mlxrunner.system.writing import open_temporary

SUSPICIOUS = 2
"""Deaths at which a request ran, from which on it runs alone."""
_CURRENT = ContextVar("request", default="")
"""The id of the request of a task."""
LONG = 2**16
"""Bytes of the file from which on it is written again without the requests that have ended."""


@dataclass(frozen=True)
class RunningRequest:
    """A request that a worker has begun and not ended."""

    digest: str
    """The digest of its path and body: its client asks again with the same."""
    nbytes: int
    """Bytes of its body."""
    tokens: int = 0
    """Tokens of its prompt; 0 if it was not tokenized yet."""


@dataclass
class JournalContent:
    """The content that a worker has written, as its parent reads it."""

    ready_s: float | None = None
    """The moment at which its model was loaded, by `time.monotonic`; None: it was not."""
    running: dict[str, RunningRequest] = field(default_factory=dict)
    """The requests that have not ended, by id, in the order in which they began."""
    ended: set[str] = field(default_factory=set)
    """The digests of requests that have ended, whatever their answer was."""
    cleared: set[str] = field(default_factory=set)
    """The digests of suspects that were answered."""

    @property
    def is_ready(self) -> bool:
        return self.ready_s is not None


@dataclass
class Suspicions:
    """The requests that ran when workers died, as the parent remembers them."""

    deaths: Counter[str] = field(default_factory=Counter)
    """The deaths at which each request ran, by digest."""
    refused: dict[str, str] = field(default_factory=dict)
    """The requests that are not tried again, by digest, and the cause of the last death."""
    restarts: int = 0

    def learn(self, left: JournalContent, cause: str) -> None:
        """Note that a worker has died, of `cause`, and left a journal."""
        self.restarts += 1
        harmless = {digest for digest in left.ended if self.deaths[digest] < SUSPICIOUS}
        for digest in left.cleared | harmless:
            self.deaths.pop(digest, None)
        digests = {one.digest for one in left.running.values()}
        alone = next(iter(digests), "") if len(digests) == 1 else ""
        if self.deaths[alone] >= SUSPICIOUS:
            self.refused[alone] = cause
        self.deaths.update(digests)


def open_journal() -> IO[bytes]:
    """Open a journal: a file without a name, to whose end all processes write."""
    file = open_temporary()
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
    return file


def read_journal(descriptor: int, began: float) -> JournalContent:
    """Return what a worker that does not run any more has written. Wrong lines are skipped.

    Nothing at all was written if the disk is full: then its model counts as loaded when it `began`.
    """
    found = JournalContent(None if os.fstat(descriptor).st_size else began)
    for line in _lines(descriptor):
        match line:
            case {"ready": float(moment)}:
                found.ready_s = moment
            case {"begin": str(name), "digest": str(digest), "bytes": int(nbytes)}:
                found.running[name] = RunningRequest(digest, nbytes)
            case {"prompt": str(name), "tokens": int(tokens)} if name in found.running:
                found.running[name] = replace(found.running[name], tokens=tokens)
            case {"end": str(name)}:
                if (one := found.running.pop(name, None)) is not None:
                    found.ended.add(one.digest)
            case {"cleared": str(digest)}:
                found.cleared.add(digest)
    return found


def begin_journal(descriptor: int, known: Suspicions) -> None:
    """Write what the next worker has to know, in place of what the last one wrote."""
    os.ftruncate(descriptor, 0)
    suspects = [digest for digest, deaths in known.deaths.items() if deaths >= SUSPICIOUS]
    _append(descriptor, _line(restarts=known.restarts, suspects=suspects, refused=known.refused))


class RequestJournal:
    """The journal of a worker. Any thread may call it; each line is one write."""

    def __init__(self, descriptor: int) -> None:
        """Read what the parent knows. `descriptor`: a file to which all writes are appended."""
        self._descriptor = descriptor
        self._lasting: list[bytes] = []
        """The lines that are of no request that runs."""
        self._running: dict[str, list[bytes]] = {}
        """The lines of each request that runs, by its id."""
        told = next(iter(_lines(descriptor)), {})
        self.restarts = int(str(told.get("restarts", 0)))
        """The workers that have died before."""
        suspects, refused = told.get("suspects"), told.get("refused")
        self.suspects = set(map(str, suspects)) if isinstance(suspects, list) else set()
        self.refused: Mapping[str, str] = refused if isinstance(refused, dict) else {}

    def ready(self) -> None:
        """Note that the model is loaded."""
        self._add(self._lasting, ready=time.monotonic())

    def begin(self, name: str, digest: str, nbytes: int) -> None:
        """Note that the request with the id `name` begins."""
        _CURRENT.set(name)
        self._running[name] = []
        self._add(self._running[name], begin=name, digest=digest, bytes=nbytes)

    def prompt(self, tokens: int) -> None:
        """Note that the prompt of the request that this task has begun has `tokens` tokens.

        A thread that `asyncio.to_thread` started for the task may call it, too.
        """
        name = _CURRENT.get()
        self._add(self._running.get(name, []), prompt=name, tokens=tokens)

    def end(self, name: str) -> None:
        """Note that a request has ended."""
        del self._running[name]
        if os.fstat(self._descriptor).st_size <= LONG:
            _append(self._descriptor, _line(end=name))
            return
        os.ftruncate(self._descriptor, 0)
        kept = [*self._lasting, *(line for lines in self._running.values() for line in lines)]
        _append(self._descriptor, b"".join(kept))

    def clear(self, digest: str) -> None:
        """Note that a suspect was answered."""
        self.suspects.discard(digest)
        self._add(self._lasting, cleared=digest)

    def _add(self, lines: list[bytes], **line: object) -> None:
        lines.append(_line(**line))
        _append(self._descriptor, lines[-1])


def _line(**line: object) -> bytes:
    return json.dumps(line).encode() + b"\n"


def _append(descriptor: int, text: bytes) -> None:
    with suppress(OSError):  # a full disk costs what the file would tell
        os.write(descriptor, text)


def _lines(descriptor: int) -> Iterator[dict[str, object]]:
    size = os.fstat(descriptor).st_size
    for text in os.pread(descriptor, size, 0).splitlines():
        with suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict):
                yield line


def digest_of(path: str, body: bytes) -> str:
    """Return a digest of a request, the same when its client asks again."""
    found = blake2b(path.encode(errors="surrogatepass"), digest_size=16)
    found.update(b"\0")
    found.update(body)
    return found.hexdigest()
