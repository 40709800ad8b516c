"""A token log replayed with one setting after the other changed: one pass over the log, all settings side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxrunner.cache.lookup import Lookup
from mlxrunner.profiling.report import skipped_words
from mlxrunner.profiling.sidebyside import SideBySide, can_be_replayed, has_room
from mlxrunner.profiling.simulate import Replay, Request, is_usable
from mlxrunner.profiling.thinking import Rewriter
from mlxrunner.profiling.tokenlog import LoggedRequest, read_token_log
from mlxrunner.profiling.whatif import (
    AS_IT_WAS,
    ONE_AT_A_TIME,
    SLOTS,
    Row,
    Simulation,
    WhatIf,
    is_side_by_side,
    what_ifs,
)
from mlxrunner.reading import ReadError

REPORT_EVERY = 50


def simulate(
    files: Sequence[Path],
    entries: Sequence[int] = (),
    intervals: Sequence[int] = (),
    slacks: Sequence[int] = (),
    slots: Sequence[int] = (),
    progress: Callable[[int], None] = lambda requests: None,
) -> Simulation:
    """One pass over the token logs. Requests that ran side by side, and sorting by prefix, keep every prompt, four bytes a token.

    A setting that has nothing to act on in a process leaves it as it was run. ReadError where a file can't be read or holds no request.
    """
    result, log = Simulation(), read_token_log(files)
    as_run = _Try(AS_IT_WAS)
    tries = {AS_IT_WAS: as_run}
    process: Mapping[str, Any] | None = None
    beside: list[SideBySide] = []
    left_out: Counter[str] = Counter()
    for number, logged in enumerate(log, 1):
        if not logged.process["layers"] or not is_usable(logged):
            left_out["invalid" if logged.process["layers"] else "parallel"] += 1
            continue
        if logged.process is not process:
            process = logged.process
            for what in what_ifs(process, entries, intervals, slacks, _slots_for(logged, slots)):
                if what not in tries:
                    tries[what] = _Try(what, as_run.row)
        result.side_by_side += is_side_by_side(process)
        if number % REPORT_EVERY == 0:
            progress(number)
        if can_be_replayed(logged):
            _add(beside, logged)
            continue
        found = None if is_side_by_side(process) else as_run.replay(logged)
        if found is None:
            as_run.row.add_logged(logged)
            result.only_logged += 1
        else:
            result.agreed += (found.matched, found.cached) == (
                logged.facts["matched"],
                logged.facts["cached"],
            )
        for one in tries.values():
            if one is as_run:
                continue
            if found is None and one.row.what.slots is not None:
                one.row.add_logged(logged)
            elif found is None or (
                one.row.what.acts_on(logged.process) and one.row.what is not ONE_AT_A_TIME
            ):
                one.replay(logged)
            else:
                one.row.add(found)
    for group in beside:
        result.agreed += _replay_beside(group, list(tries.values()))
    result.skipped = log.skipped + left_out
    if process is None:
        names = ", ".join(map(str, files))
        skipped = f": {skipped_words(result.skipped)}" if result.skipped.total() else ""
        raise ReadError(f"no requests in {names}{skipped}; it takes a file that --log-tokens wrote")
    result.rows = [row for row in (one.finish() for one in tries.values()) if row is not None]
    tried = [row.what.settings for row in result.rows]
    if intervals and not any(settings.interval for settings in tried):
        result.idle.append(
            "--checkpoint-interval has nothing to act on: no layer in the log takes checkpoints"
        )
    if slacks and all(settings.slack is None for settings in tried):
        result.idle.append("--rewind-slack has nothing to act on: no layer in the log has a window")
    return result


def _slots_for(logged: LoggedRequest, slots: Sequence[int]) -> list[int]:
    """Those worth trying, where there were slots."""
    if not can_be_replayed(logged):
        return []
    own = logged.process["max_sequences"]
    return list(slots) or [
        count for count in SLOTS if count != own and has_room(logged.process, count)
    ]


def _add(beside: list[SideBySide], logged: LoggedRequest) -> None:
    """To the others of its process, unless another model or other options have come in between."""
    name = logged.process["process"]
    last = next((group for group in reversed(beside) if group.process["process"] == name), None)
    if last is None or last.process != logged.process:
        beside.append(last := SideBySide(logged.process))
    last.requests.append(logged)


def _replay_beside(group: SideBySide, tries: Sequence[_Try]) -> int:
    """Of requests that ran side by side, add to each row what they would find; how many found what the log says they had found."""
    as_run = [request.lookup for request in group.as_run()]
    for one in tries:
        what = one.row.what
        can_act = what.acts_on(group.process) and has_room(group.process, what.slots or 1)
        if can_act and what.is_in_slots:
            found = [
                request.lookup
                for request in group.packed(what.slots, by_prefix=what.order == "prefix")
            ]
        elif can_act and what != AS_IT_WAS:
            for logged in group.requests:
                one.replay(logged)
            continue
        else:
            found = as_run
        for lookup in found:
            one.row.add(lookup)
    pairs = zip(as_run, group.requests, strict=True)
    return sum(
        (found.matched, found.cached) == (logged.facts["matched"], logged.facts["cached"])
        for found, logged in pairs
    )


class _Try:
    """One of the settings over all processes of the log; `before`: what the requests before came to."""

    def __init__(self, what: WhatIf, before: Row | None = None) -> None:
        self.row = replace(before, what=what) if before is not None else Row(what)
        self._changed = what.thinking == "logged"
        self._runs: dict[str, _Run] = {}

    def replay(self, logged: LoggedRequest) -> Lookup | None:
        """What the request finds; None if it has to wait for its turn."""
        name, request = logged.process["process"], Request.of(logged)
        run = self._runs.get(name)
        if run is None or run.process != logged.process:
            self._end(run)
            run = self._runs[name] = _Run(logged.process, self.row.what)
        if run.rewriter is not None:
            request = run.rewriter.rewrite(request)
        if self.row.what.order == "prefix" or run.is_side_by_side:
            run.waiting.append(
                (logged.facts.get("began_s", 0), replace(request, freed=False, shortened=False))
            )
            return None
        found = run.replay.run(request)
        self.row.add(found)
        return found

    def finish(self) -> Row | None:
        """None if it would have changed nothing: no prompt had any thinking."""
        for run in self._runs.values():
            self._end(run)
        return self.row if self._changed else None

    def _end(self, run: _Run | None) -> None:
        if run is None:
            return
        waiting = [request for _, request in sorted(run.waiting, key=lambda one: one[0])]
        for request in by_prefix(waiting) if self.row.what.order == "prefix" else waiting:
            self.row.add(run.replay.run(request))
        self._changed = self._changed or (run.rewriter is not None and run.rewriter.changed > 0)


class _Run:
    """What a process has asked one model, with one set of options: another has an entry of its own."""

    def __init__(self, process: Mapping[str, Any], what: WhatIf) -> None:
        self.process, self.replay = process, Replay(process, what.settings)
        self.rewriter = Rewriter(process, what.thinking) if what.thinking != "logged" else None
        self.is_side_by_side = is_side_by_side(process)
        self.waiting: list[tuple[float, Request]] = []
        """Those that are replayed at the end, in another order, and when they began."""


def by_prefix(requests: Iterable[Request]) -> list[Request]:
    """In the order of their tokens: what begins alike comes together, a prompt after those that it goes on from."""
    return sorted(requests, key=lambda request: request.prompt.astype(">i4").tobytes())
