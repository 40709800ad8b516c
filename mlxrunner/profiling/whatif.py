"""What is tried when a token log is replayed, one setting after the other changed, and what each comes to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from mlxrunner.cache.lookup import Lookup
from mlxrunner.profiling.simulate import AS_RUN, Settings
from mlxrunner.profiling.tokenlog import LoggedRequest

ENTRIES = (2, 4, 8)
SLOTS = (2, 4, 8, 16)
Order = Literal["input", "prefix"]
Thinking = Literal["logged", "kept", "stripped"]


@dataclass(frozen=True)
class WhatIf:
    """`order`: that of the log, or that of the prompts' tokens, as one would sort a batch. `slots`: of requests side by side, so many."""

    name: str
    settings: Settings = AS_RUN
    order: Order = "input"
    thinking: Thinking = "logged"
    slots: int | None = None

    @property
    def is_in_slots(self) -> bool:
        """Whether requests that ran side by side do so again; all else is tried one at a time."""
        return self.slots is not None or self.order == "prefix"

    def acts_on(self, process: Mapping[str, Any]) -> bool:
        """Whether it can change anything for the requests of a process."""
        layers = list(_every(process["layers"]))
        has_checkpoints = any(layer["needs_checkpoints"] for layer in layers)
        has_window = any(layer["slack"] is not None for layer in layers)
        return (
            (self.thinking == "logged" or bool(process["thinking"]))
            and (self.settings.interval is None or has_checkpoints)
            and (self.settings.slack is None or has_window)
            and (self.slots is None or is_side_by_side(process))
        )


AS_IT_WAS = WhatIf("as it was run")
ONE_AT_A_TIME = WhatIf("one at a time")
"""Replay requests that ran side by side on one entry, in the order in which they began."""


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
        what = self.what
        chosen = {
            **asdict(what.settings),
            "order": what.order,
            "thinking": what.thinking,
            "slots": what.slots,
        }
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
    a runner of several at a time. `only_logged`: of these, those of logs that lack what the replay needs; of them the first row is what
    the log says, and the others replay them one at a time. `idle`: what is to be said of options that have nothing to act on."""

    rows: list[Row] = field(default_factory=list)
    agreed: int = 0
    side_by_side: int = 0
    only_logged: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    idle: list[str] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return self.rows[0].requests if self.rows else 0

    def as_dict(self) -> dict[str, Any]:
        rows = [row.as_dict() for row in self.rows]
        counts = {"requests": self.requests, "agreed": self.agreed}
        beside = {"side_by_side": self.side_by_side, "only_logged": self.only_logged}
        return {**counts, **beside, "skipped": dict(self.skipped), "rows": rows}


def what_ifs(
    process: Mapping[str, Any],
    entries: Sequence[int] = (),
    intervals: Sequence[int] = (),
    slacks: Sequence[int] = (),
    slots: Sequence[int] = (),
) -> list[WhatIf]:
    """What is worth trying for a process: one change at a time. Given ones take the place of the usual ones; `slots` there are just these."""
    every, slack = process["checkpoint_interval"], process["rewind_slack"]
    intervals = intervals or sorted({max(every // 4, 1), every * 4} - {every})
    slacks = slacks or sorted({0, slack * 4 or 512} - {slack})
    made = [
        AS_IT_WAS,
        *(WhatIf(f"{count} slots", slots=count) for count in slots),
        *([ONE_AT_A_TIME] if is_side_by_side(process) else []),
        *(WhatIf(f"{count} entries", Settings(entries=count)) for count in entries or ENTRIES),
        WhatIf("sorted by prefix", order="prefix"),
        WhatIf("thinking kept", thinking="kept"),
        WhatIf("thinking stripped", thinking="stripped"),
        *(WhatIf(f"interval {n}", Settings(interval=n)) for n in intervals),
        *(WhatIf(f"slack {n}", Settings(slack=n)) for n in slacks),
    ]
    return [what for what in made if what.acts_on(process)]


def is_side_by_side(process: Mapping[str, Any]) -> bool:
    """Whether its runner has slots instead of one entry."""
    slots = process.get("max_sequences", 1)
    return type(slots) is int and slots > 1


def _every(layers: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The layers, and those that are parts of them."""
    for layer in layers:
        yield layer
        yield from _every(layer.get("parts", ()))
