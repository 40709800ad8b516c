"""Read events once; add them up and write the page, the rows and the trace on the way.

Input files are checked before the work begins. An output file is replaced only when the work has
ended well.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from mlxrunner.errors import OptionError, ReadError, WriteError
from mlxrunner.profiling.reading import read_events, with_rotated
from mlxrunner.profiling.report.aggregate import Summary
from mlxrunner.profiling.schema import Event
from mlxrunner.system.reading import open_given
from mlxrunner.system.writing import is_stream, open_stream, written

SKIPPED = {
    "unreadable": "broken or cut off",
    "foreign": "of something else",
    "version": "of another version",
    "invalid": "with missing or wrong fields",
    "lost": "that go on from a lost one",
    "parallel": "of parallel requests, which have no entry of their own",
}
"""The kinds of skipped lines, in words."""
REPORT_EVERY = 2000
"""The number of events between two calls of `progress`."""
ENCODING_ERRORS = "backslashreplace"
"""The way to write lone surrogates, which JSON can name and no file can hold."""


@dataclass
class Report:
    """The figures of some files of events."""

    files: Sequence[Path]
    """The files that were read."""
    summary: Summary = field(default_factory=Summary)
    skipped: Counter[str] = field(default_factory=Counter)
    """The number of lines that could not be used, by kind."""

    def as_dict(self) -> dict[str, Any]:
        """Return the figures that `--json` prints."""
        return {
            "files": [str(file) for file in self.files],
            "skipped": dict(self.skipped),
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
    has an event, WriteError if a result can't be written, and OptionError if two of the results are
    one file.
    """
    must_differ({"--html": html, "--csv": csv, "--trace": trace})
    report = Report(files)
    events = read_events(files)
    with ExitStack() as stack:
        sinks: list[Callable[[Event], None]] = [report.summary.add]
        if csv is not None:
            from mlxrunner.profiling.report.csv_rows import CsvWriter

            sinks.append(CsvWriter(stack.enter_context(replaced(csv, files, newline=""))).add)
        if trace is not None:
            from mlxrunner.profiling.report.trace import TraceWriter

            spans = TraceWriter(stack.enter_context(replaced(trace, files)))
            stack.callback(spans.close)
            sinks.append(spans.add)
        for number, event in enumerate(events, 1):
            for sink in sinks:
                sink(event)
            if number % REPORT_EVERY == 0:
                progress(number)
        report.skipped = events.skipped
        must_have(report.summary.requests, files, events.skipped, "events")
        if html is not None:
            from mlxrunner.profiling.report.html import page

            names = [str(file) for file in files]
            stack.enter_context(replaced(html, files)).write(
                page(report.summary, names, report.skipped.total())
            )
    return report


def source_files(files: Iterable[str]) -> list[Path]:
    """List the files to read, each after those it was rotated to, and none of them twice.

    Raise ReadError if a file can't be read.
    """
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
    why = skipped_words(skipped) if skipped.total() else "nothing has been logged yet"
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
        """Write a text. Raise WriteError if that fails."""
        try:
            return self._stream.write(text)
        except OSError as error:
            raise WriteError.of(self._file, error) from error


@contextmanager
def replaced(
    file: str, inputs: Iterable[Path] = (), *, newline: str | None = None
) -> Iterator[ReportStream]:
    """Open a stream whose text replaces `file` (mode 0600) when the block has ended well.

    A stream such as /dev/stdout is written to directly. Raise WriteError if the file can't be
    written or is one of `inputs`.
    """
    path = Path(file)
    try:
        if path.exists() and any(path.samefile(one) for one in inputs):
            raise WriteError(f"{file} is what is being read: give the result another name")
        if is_stream(path):
            with os.fdopen(
                open_stream(path), "w", encoding="utf-8", errors=ENCODING_ERRORS, newline=newline
            ) as stream:
                yield ReportStream(file, stream)
            return
        with written(path, newline=newline) as stream:
            yield ReportStream(file, stream)
    except OSError as error:
        raise WriteError.of(file, error) from error
