"""Open and keep the listening socket of a server, and start its worker again when it dies.

An abort of Metal, or the system when memory runs out, ends a process that can't prevent it. So the
model runs in a worker. Its parent loads no model and imports no mlx, holds the socket and waits:
clients that connect while no worker runs wait in the socket's queue. Between the two there are the
socket, the parent's process id, and a file without a name (`RequestJournal`).
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from os import environ
from types import FrameType
from typing import IO, Self

from mlxrunner.config.names import did_you_mean
from mlxrunner.errors import OptionError
from mlxrunner.options import ServeSettings
from mlxrunner.results import logger
from mlxrunner.server.prompts.rules import RULES
from mlxrunner.system.writing import open_temporary
from mlxrunner.terminal.output import count_of

PASSED = "MLXRUNNER_SERVE_WORKER"
"""The variable of a worker: the numbers of its socket and its journal, and of its parent."""
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that the parent passes on. Each stops both."""
KILLED_AT = 3
"""The signal to stop at which a worker is killed that has not heeded those before."""
EARLY_S = 10.0
"""Seconds from the moment at which a worker is ready. One that dies within them, while no request
runs, dies early, as does one that is not ready."""
MOST_EARLY = 5
"""Workers, one after another, that die early before the parent gives up."""
LONGEST_S = 5.0
"""Most seconds until a worker is started again. Only after early deaths there are any."""
ORPHAN_S = 0.5
"""Seconds between two looks of a worker for its parent."""
CAUSES: dict[int, str] = {
    signal.SIGKILL: "killed (SIGKILL), as the system does when memory runs out",
    signal.SIGABRT: "aborted (SIGABRT), as MLX does when a GPU command fails or memory runs out",
    signal.SIGSEGV: "a fault in native code (SIGSEGV)",
    signal.SIGBUS: "a fault in native code, or memory that could not be read (SIGBUS)",
}
"""Likely causes of a death by a signal."""


@dataclass(frozen=True)
class ServerWorker:
    """The process that loads models and answers, as it was started by its parent."""

    listening: socket.socket
    journal: RequestJournal
    parent: int

    @classmethod
    def started(cls) -> Self | None:
        """Return this process as a worker; None if no `Supervisor` has started it.

        Exit if the supervisor has died since, rather than serve in its place.
        """
        if (passed := environ.pop(PASSED, None)) is None:
            return None
        listening, journal, parent = map(int, passed.split())
        if parent != os.getppid():
            sys.exit(128 + signal.SIGTERM)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # it writes to a terminal from the background
        worker = cls(socket.socket(fileno=listening), RequestJournal(journal), parent)
        threading.Thread(target=worker._end_with_parent, daemon=True, name="parent").start()
        return worker

    def _end_with_parent(self) -> None:
        """Stop, as at a signal, once the parent has died."""
        while os.getppid() == self.parent:
            time.sleep(ORPHAN_S)
        os.kill(os.getpid(), signal.SIGTERM)


class Supervisor:
    """The parent of the worker that runs at the moment."""

    def __init__(self, listening: socket.socket, command: Sequence[str]) -> None:
        """Let `command` answer what connects to `listening`, as a `ServerWorker`."""
        self._listening, self._command = listening, command
        self._worker: subprocess.Popen[bytes] | None = None
        self._stops: list[int] = []
        """The signals to stop that have come."""
        self._known, self._early = Suspicions(), 0
        self._has_served = False
        """True if a worker was ready."""

    def run(self) -> int:
        """Start workers until one ends by itself, or can't start. Return its exit code."""
        before = {number: signal.getsignal(number) for number in (*STOPS, signal.SIGTSTP)}
        for number in STOPS:
            if before[number] is not signal.SIG_IGN:
                signal.signal(number, self._stop)
        signal.signal(signal.SIGTSTP, self._pause)
        try:
            with open_journal() as journal:
                code = self._run_worker(journal.fileno())
                while code is None:
                    self._rest()
                    code = self._run_worker(journal.fileno())
                return code
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run_worker(self, journal: int) -> int | None:
        """Run a worker to its end. Return the exit code of this process, or None to continue."""
        if self._stops:
            return 128 + self._stops[0]
        begin_journal(journal, self._known)
        descriptors = self._listening.fileno(), journal
        passed = " ".join(map(str, (*descriptors, os.getpid())))
        began = time.monotonic()
        # In a group of its own: a terminal would send Ctrl-C to both, and it would come twice.
        self._worker = worker = subprocess.Popen(
            self._command,
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            env={**environ, PASSED: passed},
            process_group=0,
        )
        for number in self._stops[:]:  # those that came before there was a worker to pass them to
            worker.send_signal(number)
        code = worker.wait()
        left = read_journal(journal, began)
        if code == 0 or self._stops or not self._goes_on(code, left):
            return code if code >= 0 else 128 - code
        return None

    def _goes_on(self, code: int, left: JournalContent) -> bool:
        """Say why a worker has died, and note what ran. Return False to give up."""
        cause = _cause(code)
        if left.ready_s is None and not self._has_served:
            if code < 0:  # else it has said itself why it can't start
                logger.error("the server can't start, its worker has died: %s", cause)
            return False
        self._has_served = True
        self._known.learn(left, cause)
        is_early = left.ready_s is None or time.monotonic() < left.ready_s + EARLY_S
        self._early = self._early + 1 if is_early and not left.running else 0
        if self._early >= MOST_EARLY:
            logger.error("the server's worker has died %d times in a row: %s", self._early, cause)
            return False
        logger.warning("the server's worker has died: %s; %s; it starts again", cause, _size(left))
        return True

    def _rest(self) -> None:
        """Wait for a moment if workers die early."""
        until = time.monotonic() + min(LONGEST_S, 2.0**self._early / 8) * bool(self._early)
        while time.monotonic() < until and not self._stops:
            time.sleep(0.05)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on. New clients are refused from now on."""
        self._stops.append(number)
        if len(self._stops) == 1:
            self._listening.close()
        if self._worker is not None:
            self._worker.send_signal(signal.SIGKILL if len(self._stops) >= KILLED_AT else number)

    def _pause(self, number: int, frame: FrameType | None) -> None:
        """Stop both at Ctrl-Z, until the shell continues this process."""
        worker = self._worker
        if worker is not None:
            worker.send_signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        if worker is not None:
            worker.send_signal(signal.SIGCONT)


def supervise(listening: socket.socket) -> int:
    """Run the command of this process as a worker, again whenever it dies. Return the exit code."""
    return Supervisor(listening, [sys.executable, *sys.orig_argv[1:]]).run()


def _cause(code: int) -> str:
    if code > 0:
        return f"an internal error (exit code {code})"
    names = {int(one): one.name for one in signal.Signals} | CAUSES
    return names.get(-code, f"signal {-code}")


def _size(left: JournalContent) -> str:
    """Return how many requests ran, and the size of the last one."""
    if left.ready_s is None:
        return "it was not ready yet"
    if not left.running:
        return "no request was running"
    count, last = len(left.running), list(left.running.values())[-1]
    size = f"{last.tokens:,} tokens of prompt" if last.tokens else f"{last.nbytes:,} bytes"
    ran = "was running," if count == 1 else "were running, the last"
    return f"{count_of(count, 'request')} {ran} with {size}"


WAITING = 128
"""Connections that may wait to be accepted."""


def check_settings(settings: ServeSettings) -> None:
    """Raise OptionError for settings with which no server starts.

    These are a host that others reach without a key, unless the user says so, a rule that there is
    not, and an origin that no browser has.
    """
    if settings.api_key is not None and settings.no_key:
        raise OptionError("--api-key and --no-key contradict each other: use one of them")
    if settings.api_key is not None and not settings.api_key.isascii():
        raise OptionError("--api-key: clients send it in a header: use letters, digits and signs")
    if not (is_loopback(settings.host) or settings.api_key or settings.no_key):
        raise OptionError(
            f"--host {settings.host} lets other machines ask: give --api-key KEY, or --no-key if "
            "anyone who can reach it may use it"
        )
    known = [rule.name for rule in RULES]
    for name in settings.disable_rewrite:
        if name not in known:
            raise OptionError(
                f"disable_rewrite: {name}: there is no such rule: {did_you_mean(name, known)}"
                f"there are {', '.join(known)}"
            )
    for origin in settings.allow_origin:
        # Browsers send null, and some programs file://, for pages that are files.
        if not re.fullmatch(r"null|file://|[a-z][a-z0-9+.-]*://[^/?#*\s]+", origin):
            raise OptionError(
                f"--allow-origin {origin}: has to be the beginning of a page's URL, as browsers "
                "send it, such as http://localhost:3000, without * and path; or null or file:// "
                "for files"
            )


def listen(settings: ServeSettings) -> socket.socket:
    """Return a socket that listens where the settings say. Raise OptionError if it can't."""
    host, port = settings.host, settings.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
    except OSError as error:
        raise OptionError(f"--host {host}: no such address: {error.strerror or error}") from error
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(WAITING)
    except OSError as error:
        found.close()
        raise OptionError(_why_not(error, host, port)) from error
    return found


def _why_not(error: OSError, host: str, port: int) -> str:
    known = {
        errno.EADDRINUSE: f"port {port} of {host} is in use, perhaps by another mlxrunner serve: "
        "stop that one, or choose another --port (0 = any free one)",
        errno.EACCES: f"port {port} needs an administrator: choose a --port from 1024 on",
    }
    other = f"can't listen on port {port} of {host}: {error.strerror or error}"
    return known.get(error.errno or 0, other)


def address_of(listening: socket.socket, host: str) -> str:
    """Return the URL under which a client on this machine reaches the server."""
    port = listening.getsockname()[1]
    name = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


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
        del self._running[name]
        if os.fstat(self._descriptor).st_size <= LONG:
            _append(self._descriptor, _line(end=name))
            return
        os.ftruncate(self._descriptor, 0)
        kept = [*self._lasting, *(line for lines in self._running.values() for line in lines)]
        _append(self._descriptor, b"".join(kept))

    def clear(self, digest: str) -> None:
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
    found = blake2b(path.encode(errors="surrogatepass") + b"\0", digest_size=16)
    found.update(body)
    return found.hexdigest()
