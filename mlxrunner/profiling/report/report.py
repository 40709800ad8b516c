"""Read events once; add them up and write the page, the rows and the trace on the way.

Input files are checked before the work begins. An output file is replaced only when the work has
ended well.
"""

from __future__ import annotations

import csv
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from mlxrunner.errors import OptionError, OutputError, ReadError
from mlxrunner.profiling.logs import read_events, with_rotated
from mlxrunner.profiling.report.summary import Summary
from mlxrunner.profiling.schema import Event
from mlxrunner.system.reading import open_given
from mlxrunner.system.writing import is_stream, open_stream, written
from mlxrunner.terminal.output import count_of

if TYPE_CHECKING:
    from _typeshed import SupportsWrite


NESTED = ("line", "divergence", "spans", "verify", "evicted")
"""The fields that are objects or lists; a row has a few of their own fields instead."""
FLAT = [field.name for field in fields(Event) if field.name not in NESTED]
COLUMNS = [
    *FLAT,
    *"line_number divergence_index divergence_role divergence_part prefill_chunks".split(),
    *"verified_equal evicted_tokens evicted_parked".split(),
]
FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n")
"""The beginnings of a cell that spreadsheets run or misread (OWASP, CSV injection)."""


class CsvWriter:
    """A writer of a header and a row per event."""

    def __init__(self, stream: SupportsWrite[str]) -> None:
        """Write the header to `stream`, which was opened with newline=""."""
        self._writer = csv.writer(stream)
        self._writer.writerow(COLUMNS)

    def add(self, event: Event) -> None:
        """Write the row of an event."""
        parted, verify = event.divergence, event.verify
        row = [
            *(getattr(event, name) for name in FLAT),
            event.line.number if event.line else None,
            *((parted.index, parted.role, parted.part) if parted else (None, None, None)),
            sum(span.name == "prefill" for span in event.spans),
            verify.equal if verify else None,
            sum(one.tokens for one in event.evicted),
            sum(one.tokens for one in event.evicted if one.parked),
        ]
        self._writer.writerow(map(_cell, row))


def _cell(value: Any) -> Any:
    """Return a value for a cell. What a spreadsheet would take for a formula is marked as text."""
    if not isinstance(value, str):
        return value
    text = value.replace("\x00", "")
    return "'" + text if text.startswith(FORMULAS) else text


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
        with suppress(ValueError, OverflowError):
            moment = datetime.fromisoformat(event.time)
            moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
            self._begin = round(moment.timestamp() * 1e6)
        begin = self._begin
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
        self._write({"name": "bytes", **place, "ph": "C", "ts": end, "args": counted})

    def close(self) -> None:
        """End the document. The stream stays open."""
        self._stream.write("\n]}\n")

    def _process(self, event: Event) -> int:
        """Return the number of the event's process, which is named when it first appears."""
        pid = self._processes.get(event.process)
        if pid is None:
            pid = self._processes[event.process] = len(self._processes) + 1
            args = {"name": f"{event.model} ({event.process})"}
            self._write({"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": args})
        return pid

    def _lane(self, pid: int, begin: int, end: int) -> int:
        """Return the first thread of the process that is free at `begin` (microseconds)."""
        ends = self._lanes.setdefault(pid, [])
        lane = next((i for i, busy_until in enumerate(ends) if busy_until <= begin), len(ends))
        ends[lane : lane + 1] = [end]
        return lane + 1

    def _write(self, entry: dict[str, Any]) -> None:
        before, self._is_first = "\n" if self._is_first else ",\n", False
        self._stream.write(before + json.dumps(entry, separators=(",", ":")))


def _us(seconds: float) -> int:
    """Return whole microseconds, rounded down so that a span still lies inside its request."""
    return int(seconds * 1e6)


SKIPPED = {
    "unreadable": "broken or cut off",
    "foreign": "of something else",
    "version": "of another version",
    "invalid": "with missing or wrong fields",
    "lost": "that continue a lost one",
    "parallel": "of parallel requests, which have no cache of their own",
}
"""The kinds of skipped lines, in words."""
REPORT_EVERY = 2000
ENCODING_ERRORS = "backslashreplace"
"""The way to write lone surrogates, which JSON can name and no file can hold."""


@dataclass
class Report:
    """The figures of some files of events."""

    files: Sequence[Path]
    summary: Summary = field(default_factory=Summary)
    skipped: Counter[str] = field(default_factory=Counter)
    """The number of lines that could not be used, by kind."""
    bounded: int = 0
    """The number of events whose missed and displaced tokens are upper bounds."""

    @property
    def notes(self) -> list[str]:
        """Remarks about the figures, in words."""
        notes = [skipped_words(self.skipped)] if self.skipped.total() else []
        if self.bounded:
            notes.append(
                f"{count_of(self.bounded, 'event')} of version 0.2 counted missed and displaced "
                "tokens as an upper bound: new ones are among them"
            )
        return notes

    def as_dict(self) -> dict[str, Any]:
        """Return the figures that `--json` prints."""
        return {
            "files": [str(file) for file in self.files],
            "skipped": dict(self.skipped),
            "bounded": self.bounded,
            **self.summary.as_dict(),
        }


def make_report(
    files: Sequence[Path],
    *,
    html: str | None = None,
    csv: str | None = None,
    trace: str | None = None,
    progress: Callable[[int], None] = lambda events: None,
) -> Report:
    """Read `files` once and write the page, the rows and the trace that were asked for.

    `html`, `csv` and `trace` are the files of the results; None for no such result. `progress` is
    called with the number of events read so far. Raise ReadError if a file can't be read or none
    has an event, OutputError if a result can't be written, and OptionError if two of the results
    are one file.
    """
    must_differ({"--html": html, "--csv": csv, "--trace": trace})
    report = Report(files)
    events = read_events(files)
    with ExitStack() as stack:
        sinks: list[Callable[[Event], None]] = [report.summary.add]
        if csv is not None:
            sinks.append(CsvWriter(stack.enter_context(replaced(csv, files, newline=""))).add)
        if trace is not None:
            spans = TraceWriter(stack.enter_context(replaced(trace, files)))
            stack.callback(spans.close)
            sinks.append(spans.add)
        for number, event in enumerate(events, 1):
            for sink in sinks:
                sink(event)
            if number % REPORT_EVERY == 0:
                progress(number)
        report.skipped, report.bounded = events.skipped, events.bounded
        must_have(report.summary.requests, files, events.skipped, "events")
        if html is not None:
            from mlxrunner.profiling.report.page import page

            shown = page(report.summary, [str(file) for file in files], report.notes)
            stack.enter_context(replaced(html, files)).write(shown)
    return report


def source_files(files: Iterable[str]) -> list[Path]:
    """List each file once, after those it was rotated to. Raise ReadError if one can't be read."""
    found: dict[tuple[int, int], Path] = {}
    for file in files:
        for path in with_rotated(file):
            try:
                with open_given(path) as stream:
                    if path.is_file() and stream.read(2) == b"\x1f\x8b":
                        raise ReadError(f"{path} is compressed: unpack it first, gzip -dk {path}")
                    status = os.fstat(stream.fileno())
            except OSError as error:
                raise ReadError(f"{path}: can't be read: {error.strerror or error}") from error
            found.setdefault((status.st_dev, status.st_ino), path)
    return list(found.values())


def must_differ(files: Mapping[str, str | None]) -> None:
    """Raise OptionError if two of the options write to the same file."""
    seen: dict[str, str] = {}
    for option, file in files.items():
        if file is None or is_stream(file):
            continue  # a stream can take several results
        other = seen.setdefault(os.path.realpath(file), option)
        if other != option:
            raise OptionError(f"{other} and {option} are the same file, {file}: give each its own")


def must_have(count: int, files: Sequence[Path], skipped: Counter[str], what: str) -> None:
    """Raise ReadError if `count` is 0, so that none of `files` holds any of `what`."""
    if count:
        return
    why = "nothing has been logged yet"
    if skipped.total():
        why = f"{skipped_words(skipped)}; give a file that --{what} wrote"
    raise ReadError(f"no {what} in {', '.join(map(str, files))}: {why}")


def skipped_words(skipped: Counter[str]) -> str:
    """Say what was skipped: "3 lines were skipped: 2 broken or cut off, 1 of another version"."""
    kinds = ", ".join(
        f"{count} {SKIPPED.get(kind, kind)}" for kind, count in skipped.most_common() if count
    )
    total = skipped.total()
    return f"{total} {'line was' if total == 1 else 'lines were'} skipped: {kinds}"


class ReportStream:
    """A text stream whose errors name its file."""

    def __init__(self, file: str, stream: IO[str]) -> None:
        self._file, self._stream = file, stream

    def write(self, text: str) -> int:
        """Write a text. Raise OutputError if that fails."""
        try:
            return self._stream.write(text)
        except OSError as error:
            raise OutputError.of(self._file, error) from error


@contextmanager
def replaced(
    file: str, inputs: Iterable[Path] = (), *, newline: str | None = None
) -> Iterator[ReportStream]:
    """Open a stream whose text replaces `file` (mode 0600) when the block has ended well.

    A stream such as /dev/stdout is written to directly. Raise OutputError if the file can't be
    written or is one of `inputs`.
    """
    path = Path(file)
    try:
        if path.exists() and any(path.samefile(one) for one in inputs):
            raise OutputError(f"{file} is an input: give the result another name")
        if is_stream(path):
            with os.fdopen(
                open_stream(path), "w", encoding="utf-8", errors=ENCODING_ERRORS, newline=newline
            ) as stream:
                yield ReportStream(file, stream)
            return
        with written(path, newline=newline) as stream:
            yield ReportStream(file, stream)
    except OSError as error:
        raise OutputError.of(file, error) from error
