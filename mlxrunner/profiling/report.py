"""Read events once; make of them a summary and, on the way, whatever files are wanted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxrunner.profiling.files import must_differ, replaced
from mlxrunner.profiling.reading import event_schema, read_events
from mlxrunner.profiling.summary import Summary
from mlxrunner.reading import ReadError

SKIPPED = {
    "unreadable": "broken or cut off",
    "foreign": "of something else",
    "version": "of another version",
    "invalid": "with missing or wrong fields",
    "lost": "that go on from a lost one",
    "parallel": "of parallel requests, which have no entry of their own",
}
REPORT_EVERY = 2000


@dataclass
class Report:
    """`skipped`: lines that could not be used, by kind."""

    files: Sequence[Path]
    summary: Summary = field(default_factory=Summary)
    skipped: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
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
    """One pass over `files`; the page, the rows and the trace are written beside it. `progress`: called with the events read so far.

    ReadError where a file can't be read or no event is in any of them, WriteError for a result, OptionError where two are one file.
    """
    must_differ({"--html": html, "--csv": csv, "--trace": trace})
    report = Report(files)
    events = read_events(files)
    with ExitStack() as stack:
        sinks: list[Callable[[dict[str, Any]], None]] = [report.summary.add]
        if csv is not None:
            from mlxrunner.profiling.rows import Rows

            sinks.append(
                Rows(
                    stack.enter_context(replaced(csv, files, newline="")),
                    list(event_schema()["properties"]),
                ).add
            )
        if trace is not None:
            from mlxrunner.profiling.trace import Trace

            spans = Trace(stack.enter_context(replaced(trace, files)))
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
            from mlxrunner.profiling.html import page

            stack.enter_context(replaced(html, files)).write(
                page(report.summary, [str(file) for file in files], sum(report.skipped.values()))
            )
    return report


def must_have(count: int, files: Sequence[Path], skipped: Counter[str], what: str) -> None:
    """ReadError if there was nothing to read."""
    if not count:
        names = ", ".join(str(file) for file in files)
        raise ReadError(
            f"no {what} in {names}"
            + (
                f": {skipped_words(skipped)}"
                if skipped.total()
                else ": nothing has been logged yet"
            )
        )


def skipped_words(skipped: Counter[str]) -> str:
    """ "3 lines were skipped: 2 broken or cut off, 1 of another version"."""
    kinds = ", ".join(
        f"{count} {SKIPPED.get(kind, kind)}" for kind, count in skipped.most_common() if count
    )
    total = skipped.total()
    return f"{total} {'line was' if total == 1 else 'lines were'} skipped: {kinds}"
