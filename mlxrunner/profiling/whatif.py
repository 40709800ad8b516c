"""A token log replayed with one setting after the other changed, and how much each would have reused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from mlxrunner.cache.lookup import Lookup
from mlxrunner.profiling.reading import ReadError
from mlxrunner.profiling.report import skipped_words
from mlxrunner.profiling.simulate import AS_RUN, Replay, Request, Settings, is_usable
from mlxrunner.profiling.thinking import Rewriter
from mlxrunner.profiling.tokenlog import LoggedRequest, read_token_log

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
    """`rows`: the first one is what was run. `agreed`: requests for which it found exactly what the runner had found."""

    rows: list[Row] = field(default_factory=list)
    agreed: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def requests(self) -> int:
        return self.rows[0].requests if self.rows else 0

    def as_dict(self) -> dict[str, Any]:
        rows = [row.as_dict() for row in self.rows]
        return {"requests": self.requests, "agreed": self.agreed, "skipped": dict(self.skipped), "rows": rows}


def what_ifs(
    process: Mapping[str, Any], entries: Sequence[int] = (), intervals: Sequence[int] = (), slacks: Sequence[int] = ()
) -> list[WhatIf]:
    """What is worth trying for a process: one change at a time. Given ones take the place of the usual ones."""
    made = [WhatIf("as it was run")]
    made += [WhatIf(f"{count} entries", Settings(entries=count)) for count in entries or ENTRIES]
    made.append(WhatIf("sorted by prefix", order="prefix"))
    if process["thinking"]:
        made += [WhatIf("thinking kept", thinking="kept"), WhatIf("thinking stripped", thinking="stripped")]
    if any(layer["needs_checkpoints"] for layer in process["layers"]):
        every, slack = process["checkpoint_interval"], process["rewind_slack"]
        usual = sorted({max(every // 4, 1), every * 4} - {every})
        made += [WhatIf(f"interval {n}", Settings(interval=n)) for n in intervals or usual]
        has_window = any(layer["slack"] is not None for layer in process["layers"])
        usual = sorted({0, slack * 4 or 512} - {slack}) if has_window else []
        made += [WhatIf(f"slack {n}", Settings(slack=n)) for n in slacks or usual]
    return made


def simulate(
    files: Sequence[Path],
    entries: Sequence[int] = (),
    intervals: Sequence[int] = (),
    slacks: Sequence[int] = (),
    progress: Callable[[int], None] = lambda requests: None,
) -> Simulation:
    """One pass over the token logs; all settings side by side. Sorting by prefix keeps every prompt, four bytes a token.

    ReadError where a file can't be read or holds no request.
    """
    result, log = Simulation(), read_token_log(files)
    tries: list[_Try] = []
    left_out: Counter[str] = Counter()
    for number, logged in enumerate(log, 1):
        if not logged.process["layers"] or not is_usable(logged):
            left_out["invalid" if logged.process["layers"] else "parallel"] += 1
            continue
        if not tries:
            tries = [_Try(what) for what in what_ifs(logged.process, entries, intervals, slacks)]
        as_run, *_ = [one.run(logged) for one in tries]
        if as_run is not None:
            result.agreed += (as_run.matched, as_run.cached) == (logged.facts["matched"], logged.facts["cached"])
        if number % REPORT_EVERY == 0:
            progress(number)
    result.skipped = log.skipped + left_out
    if not tries:
        names = ", ".join(map(str, files))
        skipped = f": {skipped_words(result.skipped)}" if result.skipped.total() else ""
        raise ReadError(f"no requests in {names}{skipped}; it takes a file that --log-tokens wrote")
    result.rows = [row for row in (one.finish() for one in tries) if row is not None]
    return result


class _Try:
    """One of the settings over all processes of the log."""

    def __init__(self, what: WhatIf) -> None:
        self._what, self._row = what, Row(what)
        self._replays: dict[str, Replay] = {}
        self._rewriters: dict[str, Rewriter] = {}
        self._waiting: dict[str, list[Request]] = {}

    def run(self, logged: LoggedRequest) -> Lookup | None:
        """What the request finds; None if it has to wait for its turn."""
        name, request = logged.process["process"], Request.of(logged)
        if name not in self._replays:
            self._replays[name] = Replay(logged.process, self._what.settings)
        if self._what.thinking != "logged":
            if name not in self._rewriters:
                self._rewriters[name] = Rewriter(logged.process, self._what.thinking)
            request = self._rewriters[name].rewrite(request)
        if self._what.order == "prefix":
            self._waiting.setdefault(name, []).append(replace(request, freed=False, shortened=False))
            return None
        found = self._replays[name].run(request)
        self._row.add(found)
        return found

    def finish(self) -> Row | None:
        """None if it would have changed nothing: no prompt had any thinking."""
        for name, waiting in self._waiting.items():
            for request in by_prefix(waiting):
                self._row.add(self._replays[name].run(request))
        if self._rewriters and not any(rewriter.changed for rewriter in self._rewriters.values()):
            return None
        return self._row


def by_prefix(requests: Iterable[Request]) -> list[Request]:
    """In the order of their tokens: what begins alike comes together, a prompt after those that it goes on from."""
    return sorted(requests, key=lambda request: request.prompt.astype(">i4").tobytes())
