"""Define the variants that a replay of a token log tries, and their results.

Each variant has one change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from mlxrunner.cache.lookup import Lookup
from mlxrunner.profiling.record.tokenlog import LoggedRequest
from mlxrunner.profiling.replay.guesses import Guesses
from mlxrunner.profiling.replay.simulate import AS_RUN, ReplaySettings

ENTRIES = (2, 4, 8)
"""The usual numbers of entries to try."""
SLOTS = (1, 2, 4, 8, 16)
"""The usual numbers of slots to try."""
Order = Literal["input", "prefix"]
Thinking = Literal["logged", "kept", "stripped"]


@dataclass(frozen=True)
class Variant:
    """One way to replay a token log."""

    name: str
    settings: ReplaySettings = AS_RUN
    order: Order = "input"
    """The order of the requests: "input" (as logged) or "prefix" (that of a batch)."""
    thinking: Thinking = "logged"
    """The thinking of earlier answers in prompts: as logged, kept or stripped."""
    slots: int | None = None
    """The slots of a runner with requests side by side; None for those that it had."""

    @property
    def is_in_slots(self) -> bool:
        """True if requests that ran side by side do so again; else they run one at a time."""
        return self.slots is not None or self.order == "prefix"

    def acts_on(self, process: Mapping[str, Any]) -> bool:
        """Return True if the variant can change anything for the requests of a process."""
        layers = list(_every(process["layers"]))
        has_checkpoints = any(layer["needs_checkpoints"] for layer in layers)
        has_window = any(layer["slack"] is not None for layer in layers)
        return (
            (self.thinking == "logged" or bool(process["thinking"]))
            and (self.settings.interval is None or has_checkpoints)
            and (self.settings.slack is None or has_window)
            and (self.slots is None or is_side_by_side(process))
        )


AS_IT_WAS = Variant("as it was run")
ONE_AT_A_TIME = Variant("one at a time")
"""The variant that replays side-by-side requests on one entry, in the order of their begin."""


@dataclass
class VariantResult:
    """The result of a variant."""

    what: Variant
    requests: int = 0
    """The number of requests."""
    hits: int = 0
    """The number of requests that reused all they could."""
    prompt: int = 0
    """The tokens of all prompts."""
    cached: int = 0
    """The tokens of prompts that were reused."""

    def add(self, found: Lookup) -> None:
        """Add the lookup of a request."""
        self.requests += 1
        self.hits += found.outcome == "hit"
        self.prompt += found.prompt_tokens
        self.cached += found.cached

    def add_logged(self, logged: LoggedRequest) -> None:
        """Add the result that the log gives for a request."""
        facts, prompt = logged.facts, len(logged.prompt)
        cached = min(facts["cached"], max(prompt - 1, 0))
        self.requests += 1
        self.hits += 0 < cached == min(prompt - 1, facts["entry_before"])
        self.prompt += prompt
        self.cached += cached

    @property
    def evaluated(self) -> int:
        """The tokens of prompts that were not reused."""
        return self.prompt - self.cached

    @property
    def hit_rate(self) -> float:
        """The share of the prompt tokens that were reused, from 0 to 1."""
        return self.cached / self.prompt if self.prompt else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the settings of the variant, the counts and the hit rate by name."""
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
    """The results of all variants."""

    rows: list[VariantResult] = field(default_factory=list)
    """The result of each variant; the first one is the log as it was run."""
    agreed: int = 0
    """The number of requests for which the replay found exactly what the runner had found."""
    side_by_side: int = 0
    """The number of requests to runners of several at a time."""
    only_logged: int = 0
    """The number of those requests whose log lacks what the replay needs.

    For them the first row has what the log says, and the others replay them one at a time.
    """
    skipped: Counter[str] = field(default_factory=Counter)
    """The number of lines and requests left out, by reason."""
    idle: list[str] = field(default_factory=list)
    """Remarks on given options that change nothing."""
    guesses: Guesses | None = None
    """The passes that guesses would have saved; None if that was not asked for."""

    @property
    def requests(self) -> int:
        """The number of requests that were replayed."""
        return self.rows[0].requests if self.rows else 0

    def as_dict(self) -> dict[str, Any]:
        """Return the counts and the rows by name."""
        rows = [row.as_dict() for row in self.rows]
        counts = {"requests": self.requests, "agreed": self.agreed}
        beside = {"side_by_side": self.side_by_side, "only_logged": self.only_logged}
        guesses = {} if self.guesses is None else {"guesses": self.guesses.as_dict()}
        return {**counts, **beside, "skipped": dict(self.skipped), "rows": rows, **guesses}


def variants(
    process: Mapping[str, Any],
    entries: Sequence[int] = (),
    intervals: Sequence[int] = (),
    slacks: Sequence[int] = (),
    slots: Sequence[int] = (),
) -> list[Variant]:
    """Return the variants that are worth trying for a process, one change at a time.

    Given values replace the usual ones; `intervals` and `slacks` are in tokens. Slots are tried
    only if they are given.
    """
    every, slack = process["checkpoint_interval"], process["rewind_slack"]
    intervals = intervals or sorted({max(every // 4, 1), every * 4} - {every})
    slacks = slacks or sorted({0, slack * 4 or 512} - {slack})
    made = [
        AS_IT_WAS,
        *(Variant(_counted(count, "slot"), slots=count) for count in slots),
        *([ONE_AT_A_TIME] if is_side_by_side(process) else []),
        *(
            Variant(f"{count} entries", ReplaySettings(entries=count))
            for count in entries or ENTRIES
        ),
        Variant("sorted by prefix", order="prefix"),
        Variant("thinking kept", thinking="kept"),
        Variant("thinking stripped", thinking="stripped"),
        *(Variant(f"interval {n}", ReplaySettings(interval=n)) for n in intervals),
        *(Variant(f"slack {n}", ReplaySettings(slack=n)) for n in slacks),
    ]
    return [what for what in made if what.acts_on(process)]


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def is_side_by_side(process: Mapping[str, Any]) -> bool:
    """Return True if the runner of a process has slots instead of one entry."""
    return type(process.get("max_sequences")) is int


def _every(layers: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the layers and their parts."""
    for layer in layers:
        yield layer
        yield from _every(layer.get("parts", ()))
