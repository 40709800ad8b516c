"""Replay a token log with every variant side by side, in one pass over the log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxrunner.batch.order import order_of
from mlxrunner.batch.records import sort_key
from mlxrunner.cache.lookup import Lookup
from mlxrunner.errors import ReadError
from mlxrunner.profiling.record.tokenlog import LoggedRequest, read_token_log
from mlxrunner.profiling.replay.guesses import Guesses
from mlxrunner.profiling.replay.sidebyside import SideBySide, can_be_replayed, has_room
from mlxrunner.profiling.replay.simulate import Replay, ReplayedRequest, is_usable
from mlxrunner.profiling.replay.thinking import Rewriter
from mlxrunner.profiling.replay.variants import (
    AS_IT_WAS,
    ONE_AT_A_TIME,
    SLOTS,
    Simulation,
    Variant,
    VariantResult,
    is_side_by_side,
    variants,
)
from mlxrunner.profiling.report.report import skipped_words

REPORT_EVERY = 50
"""The number of requests between two calls of `progress`."""


def simulate(
    files: Sequence[Path],
    entries: Sequence[int] = (),
    intervals: Sequence[int] = (),
    slacks: Sequence[int] = (),
    slots: Sequence[int] = (),
    progress: Callable[[int], None] = lambda requests: None,
    *,
    with_guesses: bool = False,
) -> Simulation:
    """Replay token logs with every variant, in one pass over the files.

    `entries`, `intervals` (tokens), `slacks` (tokens) and `slots` are values to try in place of the
    usual ones. `progress` is called now and then with the number of requests so far. Requests that
    ran side by side, and sorting by prefix, keep every prompt in memory, four bytes a token. If a
    variant changes nothing for a process, its requests count as they were run. `with_guesses`:
    also guess the answers. Raise ReadError if a file can't be read or holds no request.
    """
    log, trials = read_token_log(files), _Trials(entries, intervals, slacks, slots)
    guesses = Guesses() if with_guesses else None
    for number, logged in enumerate(log, 1):
        trials.replay(logged)
        if guesses is not None and is_usable(logged):
            guesses.add(logged, is_beside=is_side_by_side(logged.process))
        if number % REPORT_EVERY == 0:
            progress(number)
    result = trials.finish(log.skipped)
    if trials.process is None:
        names = ", ".join(map(str, files))
        skipped = f": {skipped_words(result.skipped)}" if result.skipped.total() else ""
        raise ReadError(f"no requests in {names}{skipped}; it takes a file that --log-tokens wrote")
    result.idle, result.guesses = _idle(result, intervals, slacks, slots), guesses
    return result


def _idle(
    result: Simulation, intervals: Sequence[int], slacks: Sequence[int], slots: Sequence[int]
) -> list[str]:
    """Return remarks on given options that change nothing."""
    tried = [row.what.settings for row in result.rows]
    idle = []
    if intervals and not any(settings.interval for settings in tried):
        idle.append(
            "--checkpoint-interval has nothing to act on: no layer in the log takes checkpoints"
        )
    if slacks and all(settings.slack is None for settings in tried):
        idle.append("--rewind-slack has nothing to act on: no layer in the log has a window")
    if slots and all(row.what.slots is None for row in result.rows):
        idle.append("--slots has nothing to act on: no requests in the log ran side by side")
    return idle


class _Trials:
    """All variants, side by side over the requests of a log."""

    def __init__(
        self,
        entries: Sequence[int],
        intervals: Sequence[int],
        slacks: Sequence[int],
        slots: Sequence[int],
    ) -> None:
        self._entries, self._intervals, self._slacks = entries, intervals, slacks
        self._slots = slots
        self.process: Mapping[str, Any] | None = None
        """The line of the process whose request came last; None before the first one."""
        self._as_run = _Try(AS_IT_WAS)
        self._tries = {AS_IT_WAS: self._as_run}
        self._beside: list[SideBySide] = []
        self._left_out: Counter[str] = Counter()
        self._result = Simulation()

    def replay(self, logged: LoggedRequest) -> None:
        """Replay the next request of the log with every variant."""
        if not logged.process["layers"] or not is_usable(logged):
            self._left_out["invalid" if logged.process["layers"] else "parallel"] += 1
            return
        if logged.process is not self.process:
            self.process = logged.process
            self._add_variants(logged)
        self._result.side_by_side += is_side_by_side(logged.process)
        if can_be_replayed(logged):
            _add(self._beside, logged)
        else:
            self._replay_alone(logged)

    def _add_variants(self, logged: LoggedRequest) -> None:
        """Add the variants that can first change anything for the process of this request."""
        slots = _slots_for(logged, self._slots)
        made = variants(logged.process, self._entries, self._intervals, self._slacks, slots)
        for what in made:
            if what not in self._tries:
                self._tries[what] = _Try(what, self._as_run.row)

    def _replay_alone(self, logged: LoggedRequest) -> None:
        """Replay a request that ran alone, or whose log does not say how it ran beside others."""
        found = None if is_side_by_side(logged.process) else self._as_run.replay(logged)
        if found is None:
            self._as_run.row.add_logged(logged)
            self._result.only_logged += 1
        else:
            self._result.agreed += _agrees(found, logged)
        for one in self._tries.values():
            what = one.row.what
            if one is self._as_run:
                continue
            if found is None and what.slots is not None:
                one.row.add_logged(logged)
            elif found is None or (what.acts_on(logged.process) and what is not ONE_AT_A_TIME):
                one.replay(logged)
            else:
                one.row.add(found)

    def finish(self, skipped: Counter[str]) -> Simulation:
        """Replay the requests that wait for the end, and return the results.

        `skipped` counts the lines that could not be read.
        """
        tries, result = list(self._tries.values()), self._result
        for group in self._beside:
            result.agreed += _replay_beside(group, tries)
        result.skipped = skipped + self._left_out
        if self.process is not None:
            result.rows = [row for row in (one.finish() for one in tries) if row is not None]
        return result


def _agrees(found: Lookup, logged: LoggedRequest) -> bool:
    """Return True if a replay found exactly what the runner had found."""
    return (found.matched, found.cached) == (logged.facts["matched"], logged.facts["cached"])


def _slots_for(logged: LoggedRequest, slots: Sequence[int]) -> list[int]:
    """Return the numbers of slots to try: none if the requests did not run in slots."""
    if not can_be_replayed(logged):
        return []
    own = logged.process["max_sequences"]
    return list(slots) or [
        count for count in SLOTS if count != own and has_room(logged.process, count)
    ]


def _add(beside: list[SideBySide], logged: LoggedRequest) -> None:
    """Add a request to the group of its process, or to a new group after a change of options."""
    name = logged.process["process"]
    last = next((group for group in reversed(beside) if group.process["process"] == name), None)
    if last is None or last.process != logged.process:
        beside.append(last := SideBySide(logged.process))
    last.requests.append(logged)


def _replay_beside(group: SideBySide, tries: Sequence[_Try]) -> int:
    """Add the lookups of requests that ran side by side to each result.

    Return the number of requests that, run as they were, find what the log says.
    """
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
    return sum(map(_agrees, as_run, group.requests))


class _Try:
    """One variant over all processes of the log."""

    def __init__(self, what: Variant, before: VariantResult | None = None) -> None:
        """Begin with `before`, the result of the requests for which the variant changes nothing."""
        self.row = replace(before, what=what) if before is not None else VariantResult(what)
        self._changed = what.thinking == "logged"
        self._runs: dict[str, _Run] = {}

    def replay(self, logged: LoggedRequest) -> Lookup | None:
        """Return the lookup of the request; None if it waits for its turn."""
        name, request = logged.process["process"], ReplayedRequest.of(logged)
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

    def finish(self) -> VariantResult | None:
        """Return the result; None if the variant changes nothing, since no prompt has thinking."""
        for run in self._runs.values():
            self._end(run)
        return self.row if self._changed else None

    def _end(self, run: _Run | None) -> None:
        """Replay the requests of a run that wait for its end."""
        if run is None:
            return
        waiting = [request for _, request in sorted(run.waiting, key=lambda one: one[0])]
        for request in by_prefix(waiting) if self.row.what.order == "prefix" else waiting:
            self.row.add(run.replay.run(request))
        self._changed = self._changed or (run.rewriter is not None and run.rewriter.changed > 0)


class _Run:
    """The requests of a process to one model with one set of options.

    Each such run has its own entry.
    """

    def __init__(self, process: Mapping[str, Any], what: Variant) -> None:
        self.process, self.replay = process, Replay(process, what.settings)
        self.rewriter = Rewriter(process, what.thinking) if what.thinking != "logged" else None
        self.is_side_by_side = is_side_by_side(process)
        self.waiting: list[tuple[float, ReplayedRequest]] = []
        """Requests that are replayed at the end, in another order, and when they began."""


def by_prefix(requests: Sequence[ReplayedRequest]) -> list[ReplayedRequest]:
    """Return the requests in the order in which a batch runs them.

    Like beginnings come together, and a prompt comes after those that it continues.
    """
    return [requests[i] for i in order_of([sort_key(request.prompt) for request in requests])]
