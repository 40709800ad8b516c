"""Record what requests did: events in a file, the last ones in memory, and counts.

The models' threads add events, and the routes read them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from pathlib import Path

from mlxrunner.engine.observation import Observation
from mlxrunner.profiling.logs import LineWriter
from mlxrunner.profiling.metrics import Counts
from mlxrunner.profiling.profile import Profile, as_line
from mlxrunner.profiling.schema import Event
from mlxrunner.serve.answering.opened import Opened
from mlxrunner.serve.events import Note
from mlxrunner.tokenizer.prompt import Caller

REMEMBERED = 1000
"""The most requests whose events are remembered."""


class Record:
    """The events of a server's requests."""

    def __init__(
        self, events: str | Path | None = None, *, tokens: str | None = None, log_text: bool = False
    ) -> None:
        """Record nothing yet.

        `events`, `tokens` and `log_text` are those of a Profile. Raise OptionError if a
        file can't be written, or if prometheus_client is missing.
        """
        self._events = None if events is None else LineWriter(events)
        self._tokens, self._log_text = tokens, log_text
        self._lock = threading.Lock()
        self._by_request: OrderedDict[str, Event] = OrderedDict()
        self._callers: dict[str, dict[int, Caller | None]] = defaultdict(dict)
        self._profiles: dict[str, Profile] = {}
        """The profiles of the models that are loaded, or were until now, by their names."""
        self._waiting: dict[str, Event] = {}
        """Events of requests of which it is not known yet how the answer ended."""
        self._ended: OrderedDict[str, Note | None] = OrderedDict()
        """The remarks on answers, by request."""
        self.counts = Counts()

    def watch(self, opened: Opened) -> None:
        """Record the requests of a model. Raise OptionError if a file can't be written.

        If it was loaded before, it has been unloaded since.
        """
        if (before := self._profiles.pop(opened.name, None)) is not None:
            before.finish()
        profile = Profile(
            "serve",
            tokens=self._tokens,
            log_text=self._log_text,
            sinks=[self._add],
        )
        profile.watch(opened.runner)
        self._profiles[opened.name] = profile
        opened.runner.observers.append(self._see)
        self._callers[opened.name].clear()

    def close(self) -> None:
        """Stop watching and close the files."""
        for profile in self._profiles.values():
            profile.finish()
        with self._lock:
            for event in self._waiting.values():
                self._write(event)
            self._waiting.clear()
        if self._events is not None:
            self._events.close()

    def ended(self, request: str, note: Note | None) -> None:
        """Note how the answer to a request ended, and write its event.

        The model's thread may add that later. A second call for a request changes nothing.
        """
        with self._lock:
            if request in self._ended:
                return
            self._ended[request] = note
            while len(self._ended) > REMEMBERED:
                self._ended.popitem(last=False)
            if (event := self._waiting.pop(request, None)) is not None:
                self._finish(event, note)

    def event(self, request: str) -> Event | None:
        """Return the event of a request by its id; None: it is not known, or not any more."""
        with self._lock:
            return self._by_request.get(request)

    def last(self, count: int) -> list[Event]:
        """Return the last events, the youngest first."""
        with self._lock:
            return list(self._by_request.values())[: -count - 1 : -1]

    def caller(self, model: str, slot: int) -> Caller | None:
        """Return the client whose request was the last to end in a slot."""
        return self._callers[model].get(slot)

    def metrics(self) -> str:
        """Return the counts in Prometheus text format."""
        from prometheus_client import generate_latest

        with self._lock:
            return generate_latest(self.counts.registry).decode()

    def _add(self, event: Event) -> None:
        with self._lock:
            self.counts(event)
            key = event.caller.request if event.caller is not None else event.id
            self._by_request[key] = event
            while len(self._by_request) > REMEMBERED:
                self._by_request.popitem(last=False)
            if event.caller is None or not key or key in self._ended:
                self._finish(event, self._ended.get(key))
            else:
                self._waiting[key] = event

    def _finish(self, event: Event, note: Note | None) -> None:
        """Write an event with the remark on its answer."""
        if note is not None and event.caller is not None:
            event.caller.note = note.kind
        self._write(event)

    def _write(self, event: Event) -> None:
        if self._events is not None:
            self._events.write(as_line(event))

    def _see(self, runner: object, observed: Observation) -> None:
        if observed.beside is not None:
            name = getattr(runner, "name", "")
            self._callers[name][observed.beside.slot] = observed.prepared.caller
