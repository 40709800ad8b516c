"""Write events as a trace for chrome://tracing and ui.perfetto.dev (JSON trace event format).

The trace has a process per model process, with nested spans. Each event is written when it is read,
so a large file takes no memory.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

    from mlxrunner.profiling.schema import Event

ARGS = """
id command reason finish prompt_tokens matched_tokens cached_tokens evaluated_tokens lost_tokens
completion_tokens
""".split()
"""The fields that a viewer shows for a request that is clicked."""


class TraceWriter:
    """A writer of events as one JSON document.

    Times are whole microseconds since 1970, so the order of the file does not matter. A request
    without a readable time begins with the one before it. Requests of one process that overlap get
    a thread each, since the spans of a thread have to be nested.
    """

    def __init__(self, stream: SupportsWrite[str]) -> None:
        """Begin the document on `stream`."""
        self._stream = stream
        self._begin = 0
        self._processes: dict[str, int] = {}
        self._lanes: dict[int, list[int]] = {}
        self._is_first = True
        stream.write('{"displayTimeUnit":"ms","traceEvents":[')

    def add(self, event: Event) -> None:
        """Write the spans of a request."""
        begin = self._begin = _epoch_us(event.time, self._begin)
        end = begin + _us(event.total_s)
        pid = self._process(event)
        tid = self._lane(pid, begin, end)
        place = {"ph": "X", "pid": pid, "tid": tid}
        args = {name: getattr(event, name) for name in ARGS}
        when = {"ts": begin, "dur": end - begin}
        self._write({"name": event.outcome, "cat": "request", **when, **place, "args": args})
        for span in event.spans:
            first, last = _us(span.start_s), _us(span.start_s + span.duration_s)
            when = {"ts": begin + first, "dur": last - first}
            args = {"tokens": span.tokens}
            self._write({"name": span.name, "cat": "span", **when, **place, "args": args})
        counted = {"used": event.used_bytes, "allocated": event.cache_bytes}
        self._write(
            {"name": "bytes", "ph": "C", "pid": pid, "tid": tid, "ts": end, "args": counted}
        )

    def close(self) -> None:
        """End the document. The stream stays open."""
        self._stream.write("\n]}\n")

    def _process(self, event: Event) -> int:
        """Return the number of the event's process, which is named when it first appears."""
        pid = self._processes.get(event.process)
        if pid is None:
            pid = self._processes[event.process] = len(self._processes) + 1
            name = f"{event.model} ({event.process})"
            self._write(
                {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": name}}
            )
        return pid

    def _lane(self, pid: int, begin: int, end: int) -> int:
        """Return the first thread of the process that is free at `begin` (microseconds)."""
        ends = self._lanes.setdefault(pid, [])
        lane = next((i for i, busy_until in enumerate(ends) if busy_until <= begin), len(ends))
        ends[lane : lane + 1] = [end]
        return lane + 1

    def _write(self, entry: dict[str, Any]) -> None:
        self._stream.write(
            ("\n" if self._is_first else ",\n") + json.dumps(entry, separators=(",", ":"))
        )
        self._is_first = False


def _epoch_us(time: str, otherwise: int) -> int:
    """Return microseconds since 1970, or `otherwise` if `time` can't be parsed."""
    try:
        moment = datetime.fromisoformat(time)
        return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1e6)
    except (ValueError, OverflowError):
        return otherwise


def _us(seconds: float) -> int:
    """Return whole microseconds, rounded down so that a span still lies inside its request."""
    return int(seconds * 1e6)
