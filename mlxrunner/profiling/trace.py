"""Events as a trace for chrome://tracing and ui.perfetto.dev (JSON trace event format): a process per model process, its spans nested.

Written as it is read, so that a large file takes no memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

Event = Mapping[str, Any]
ARGS = ("id", "command", "reason", "finish", "prompt_tokens", "matched_tokens", "cached_tokens", "evaluated_tokens", "lost_tokens",
        "completion_tokens")  # fmt: skip


class Trace:
    """Writes events to `stream`; `close` ends the document. Times are whole microseconds since 1970, so that the order of the file does not
    matter; a request of which nobody knows when it was lies with the one before it.

    Requests of one process that overlap, as parallel ones do, get threads of their own: spans of a thread have to be nested.
    """

    def __init__(self, stream: SupportsWrite[str]) -> None:
        self._stream = stream
        self._begin = 0
        self._processes: dict[str, int] = {}
        self._lanes: dict[int, list[int]] = {}
        self._is_first = True
        stream.write('{"displayTimeUnit":"ms","traceEvents":[')

    def add(self, event: Event) -> None:
        begin = self._begin = _epoch_us(event["time"], self._begin)
        end = begin + _us(event["total_s"])
        pid = self._process(event)
        tid = self._lane(pid, begin, end)
        place = {"ph": "X", "pid": pid, "tid": tid}
        args = {name: event[name] for name in ARGS}
        self._write(
            {
                "name": event["outcome"],
                "cat": "request",
                "ts": begin,
                "dur": end - begin,
                **place,
                "args": args,
            }
        )
        for span in event["spans"]:
            first, last = _us(span["start_s"]), _us(span["start_s"] + span["duration_s"])
            self._write(
                {
                    "name": span["name"], "cat": "span", "ts": begin + first, "dur": last - first, **place,
                    "args": {"tokens": span["tokens"]},
                }
            )  # fmt: skip
        counted = {"used": event["used_bytes"], "allocated": event["cache_bytes"]}
        self._write(
            {"name": "bytes", "ph": "C", "pid": pid, "tid": tid, "ts": end, "args": counted}
        )

    def close(self) -> None:
        self._stream.write("\n]}\n")

    def _process(self, event: Event) -> int:
        pid = self._processes.get(event["process"])
        if pid is None:
            pid = self._processes[event["process"]] = len(self._processes) + 1
            name = f"{event['model']} ({event['process']})"
            self._write(
                {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": name}}
            )
        return pid

    def _lane(self, pid: int, begin: int, end: int) -> int:
        """The first thread of the process that has nothing at `begin`."""
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
    """`otherwise` for what is no time."""
    try:
        moment = datetime.fromisoformat(time)
        return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1e6)
    except (ValueError, OverflowError):
        return otherwise


def _us(seconds: float) -> int:
    """Rounded down, so that what lies in something else still does."""
    return int(seconds * 1e6)
