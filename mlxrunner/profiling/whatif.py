"""A token log replayed with one setting after the other changed, and how much each would have reused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from mlxrunner.cache.lookup import Lookup
from mlxrunner.profiling.report import skipped_words
from mlxrunner.profiling.simulate import AS_RUN, Replay, Request, Settings, is_usable
from mlxrunner.profiling.thinking import Rewriter
from mlxrunner.profiling.tokenlog import LoggedRequest, read_token_log
from mlxrunner.reading import ReadError

ENTRIES = (2, 4, 8)
REPORT_EVERY = 50
Order = Literal["input", "prefix"]
Thinking = Literal["logged", "kept", "stripped"]


@dataclass(frozen=True)
class WhatIf:
    """`order`: that of the log, or that of the prompts' tokens, as one would sort a batch."""

    name: str
    settings: Settings = AS_RUN
    order: Order = "input"
    thinking: Thinking = "logged"

    def acts_on(self, process: Mapping[str, Any]) -> bool:
        """Whether it can change anything for the requests of a process."""
        layers = list(_every(process["layers"]))
        has_checkpoints = any(layer["needs_checkpoints"] for layer in layers)
        has_window = any(layer["slack"] is not None for layer in layers)
        return (
            (self.thinking == "logged" or bool(process["thinking"]))
            and (self.settings.interval is None or has_checkpoints)
            and (self.settings.slack is None or has_window)
        )


AS_IT_WAS = WhatIf("as it was run")
ONE_AT_A_TIME = WhatIf("one at a time")
"""Of requests that ran side by side in slots: on one entry, in the order in which they began."""


@dataclass
class Row:
    """What one of them comes to. `prompt`, `cached`, `evaluated`: tokens."""

    what: WhatIf
    requests: int = 0
    hits: int = 0
    prompt: int = 0
    cached: int = 0

    def add(self, found: Lookup) -> None:
        self.requests += 1
        self.hits += found.outcome == "hit"
        self.prompt += found.prompt_tokens
        self.cached += found.cached

    def add_logged(self, logged: LoggedRequest) -> None:
        """As it was run, by the log itself."""
        facts, prompt = logged.facts, len(logged.prompt)
        cached = min(facts["cached"], max(prompt - 1, 0))
        self.requests += 1
        self.hits += 0 < cached == min(prompt - 1, facts["entry_before"])
        self.prompt += prompt
        self.cached += cached

    @property
    def evaluated(self) -> int:
        return self.prompt - self.cached

    @property
    def hit_rate(self) -> float:
        return self.cached / self.prompt if self.prompt else 0.0

    def as_dict(self) -> dict[str, Any]:
        chosen = {**asdict(self.what.settings), "order": self.what.order, "thinking": self.what.thinking}
        counts = {
            "requests": self.requests,
            "hits": self.hits,
            "prompt": self.prompt,
            "cached": self.cached,
            "evaluated": self.evaluated,
        }
        return {"name": self.what.name, **chosen, **counts, "hit_rate": self.hit_rate}


@dataclass
class Simulation:
    """`rows`: the first one is what was run. `agreed`: requests for which it found exactly what the runner had found; `side_by_side`: those of
    a runner of several at a time, of which the first row is what the log says, and the others replay them one at a time. `idle`: what is
    to be said of options that have nothing to act on."""

    rows: list[Row] = field(default_factory=list)
    agreed: int = 0
    side_by_side: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    idle: list[str] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return self.rows[0].requests if self.rows else 0

    def as_dict(self) -> dict[str, Any]:
        rows = [row.as_dict() for row in self.rows]
        counts = {"requests": self.requests, "agreed": self.agreed, "side_by_side": self.side_by_side}
        return {**counts, "skipped": dict(self.skipped), "rows": rows}


def what_ifs(
    process: Mapping[str, Any], entries: Sequence[int] = (), intervals: Sequence[int] = (), slacks: Sequence[int] = ()
) -> list[WhatIf]:
    """What is worth trying for a process: one change at a time. Given ones take the place of the usual ones."""
    every, slack = process["checkpoint_interval"], process["rewind_slack"]
    intervals = intervals or sorted({max(every // 4, 1), every * 4} - {every})
    slacks = slacks or sorted({0, slack * 4 or 512} - {slack})
    made = [
        AS_IT_WAS,
        *([ONE_AT_A_TIME] if is_side_by_side(process) else []),
        *(WhatIf(f"{count} entries", Settings(entries=count)) for count in entries or ENTRIES),
        WhatIf("sorted by prefix", order="prefix"),
        WhatIf("thinking kept", thinking="kept"),
        WhatIf("thinking stripped", thinking="stripped"),
        *(WhatIf(f"interval {n}", Settings(interval=n)) for n in intervals),
        *(WhatIf(f"slack {n}", Settings(slack=n)) for n in slacks),
    ]
    return [what for what in made if what.acts_on(process)]


def simulate(
    files: Sequence[Path],
    entries: Sequence[int] = (),
    intervals: Sequence[int] = (),
    slacks: Sequence[int] = (),
    progress: Callable[[int], None] = lambda requests: None,
) -> Simulation:
    """One pass over the token logs; all settings side by side. Sorting by prefix keeps every prompt, four bytes a token.

    A setting that has nothing to act on in a process leaves it as it was run. ReadError where a file can't be read or holds no request.
    """
    result, log = Simulation(), read_token_log(files)
    as_run = _Try(AS_IT_WAS)
    tries = {AS_IT_WAS: as_run}
    process: Mapping[str, Any] | None = None
    left_out: Counter[str] = Counter()
    for number, logged in enumerate(log, 1):
        if not logged.process["layers"] or not is_usable(logged):
            left_out["invalid" if logged.process["layers"] else "parallel"] += 1
            continue
        if logged.process is not process:
            process = logged.process
            for what in what_ifs(process, entries, intervals, slacks):
                if what not in tries:
                    tries[what] = _Try(what, as_run.row)
        found = None if is_side_by_side(process) else as_run.replay(logged)
        if found is None:
            as_run.row.add_logged(logged)
            result.side_by_side += 1
        else:
            result.agreed += (found.matched, found.cached) == (logged.facts["matched"], logged.facts["cached"])
        for one in tries.values():
            if one is as_run:
                continue
            if found is None or (one.row.what.acts_on(logged.process) and one.row.what is not ONE_AT_A_TIME):
                one.replay(logged)
            else:
                one.row.add(found)
        if number % REPORT_EVERY == 0:
            progress(number)
    result.skipped = log.skipped + left_out
    if process is None:
        names = ", ".join(map(str, files))
        skipped = f": {skipped_words(result.skipped)}" if result.skipped.total() else ""
        raise ReadError(f"no requests in {names}{skipped}; it takes a file that --log-tokens wrote")
    result.rows = [row for row in (one.finish() for one in tries.values()) if row is not None]
    tried = [row.what.settings for row in result.rows]
    if intervals and not any(settings.interval for settings in tried):
        result.idle.append("--checkpoint-interval has nothing to act on: no layer in the log takes checkpoints")
    if slacks and all(settings.slack is None for settings in tried):
        result.idle.append("--rewind-slack has nothing to act on: no layer in the log has a window")
    return result


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
            run.waiting.append((logged.facts.get("began_s", 0), replace(request, freed=False, shortened=False)))
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


def is_side_by_side(process: Mapping[str, Any]) -> bool:
    """Whether its runner has slots instead of one entry."""
    slots = process.get("max_sequences", 1)
    return type(slots) is int and slots > 1


def by_prefix(requests: Iterable[Request]) -> list[Request]:
    """In the order of their tokens: what begins alike comes together, a prompt after those that it goes on from."""
    return sorted(requests, key=lambda request: request.prompt.astype(">i4").tobytes())


def _every(layers: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The layers, and those that are parts of them."""
    for layer in layers:
        yield layer
        yield from _every(layer.get("parts", ()))
