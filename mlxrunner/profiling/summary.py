"""Events in, figures out: what was reused, what was lost, to what and at what cost. One pass, in memory that does not grow with the file.

Only what is ordered by size is kept per event: eight bytes for its time to the first token. Everything else is a sum, one of at most
BINS bins, one of SAMPLES requests drawn by chance (from a seed), or one of the ten costliest.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from mlxrunner.profiling.reasons import BATCH
from mlxrunner.profiling.tally import Bin, Loss, Miss, Sample, Timeline, Times, by_tokens

Event = Mapping[str, Any]
COUNTED = ("prompt", "matched", "cached", "ahead", "saved", "evaluated", "lost", "completion")
OUTCOMES = ("hit", "partial", "miss")
SAMPLES = 1500
COSTLIEST = 10
NOWHERE = "(not in the entry)"
"""Where tokens were lost though prompt and entry did not part: what the entry had lacked, or there was none."""
OTHER_LINES = "(evaluated for other lines)"
"""Where tokens were lost that other lines of a batch had evaluated."""
LONGEST_ROLE = 40
MOST_PLACES = 200
"""Roles come from whoever wrote the messages: there may be any number of them."""


class Summary:
    """All that a report says. `add` each event, in the order of the file."""

    def __init__(self) -> None:
        self.requests = 0
        self.first_time = self.last_time = ""
        self.tokens: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.outcomes: Counter[str] = Counter()
        self.finishes: Counter[str] = Counter()
        self.models: Counter[str] = Counter()
        self.runs: Counter[str] = Counter()
        self.ttft: dict[str, Times] = {outcome: Times() for outcome in OUTCOMES}
        self.reasons: dict[str, Loss] = {}
        self.places: dict[str, Loss] = {}
        self.timeline = Timeline()
        self.samples: list[Sample] = []
        self.verified = self.unequal = self.untested = 0
        self.estimated = self.side_by_side = 0
        self._sampled = 0
        self._misses: list[tuple[tuple[float, int, str], int, Miss]] = []
        self._random = random.Random(0)

    def add(self, event: Event) -> None:
        self.requests += 1
        time = event["time"]
        self.first_time, self.last_time = (
            min(self.first_time or time, time),
            max(self.last_time, time),
        )
        self._add_counts(event)
        self._add_times(event)
        self._add_loss(event)
        self._add_bin(event)
        if event["verify"] is not None:
            self.verified += event["verify"]["equal"] is not None
            self.untested += event["verify"]["equal"] is None
            self.unequal += event["verify"]["equal"] is False

    @property
    def hit_rate(self) -> float:
        """Share of all prompt tokens that were reused; what was evaluated in advance was not."""
        return self.tokens["saved"] / self.tokens["prompt"] if self.tokens["prompt"] else 0.0

    @property
    def request_hit_rate(self) -> float:
        """Share of all requests that reused all they could."""
        return self.outcomes["hit"] / self.requests if self.requests else 0.0

    @property
    def saved_s(self) -> float | None:
        """Seconds that were saved in the `estimated` requests; None where there is none."""
        return self.seconds["saved"] if self.estimated else None

    @property
    def prefill_rate(self) -> float | None:
        """Tokens per second over the prompt tokens that were evaluated, of requests that had a first token."""
        return (
            self.tokens["prefilled"] / self.seconds["prefill"] if self.seconds["prefill"] else None
        )

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second after each answer's first one."""
        return self.tokens["decoded"] / self.seconds["decode"] if self.seconds["decode"] else None

    @property
    def costliest(self) -> list[Miss]:
        return [miss for _, _, miss in sorted(self._misses, reverse=True)]

    def as_dict(self) -> dict[str, Any]:
        """For --json: figures only, no model text."""
        return {
            "requests": self.requests,
            "first_time": self.first_time or None,
            "last_time": self.last_time or None,
            "hit_rate": self.hit_rate,
            "request_hit_rate": self.request_hit_rate,
            "tokens": {name: self.tokens[name] for name in COUNTED},
            "saved_s": self.saved_s,
            "estimated": self.estimated,
            "side_by_side": self.side_by_side,
            "prefill_rate": self.prefill_rate,
            "decode_rate": self.decode_rate,
            "profile_s": self.seconds["profile"],
            "total_s": self.seconds["total"],
            "outcomes": {outcome: self.outcomes[outcome] for outcome in OUTCOMES},
            "finishes": dict(self.finishes),
            "models": dict(self.models),
            "runs": dict(self.runs),
            "ttft_s": {outcome: self.ttft[outcome].as_dict() for outcome in OUTCOMES},
            "reasons": {reason: asdict(loss) for reason, loss in by_tokens(self.reasons)},
            "places": {place: asdict(loss) for place, loss in by_tokens(self.places)},
            "costliest": [asdict(miss) for miss in self.costliest],
            "verified": self.verified,
            "unequal": self.unequal,
            "untested": self.untested,
        }

    def _add_counts(self, event: Event) -> None:
        for name in COUNTED:
            self.tokens[name] += event[f"{name}_tokens"]
        self.outcomes[event["outcome"]] += 1
        self.finishes[event["finish"]] += 1
        _count(self.models, event["model"])
        self.runs[event["run"]] += 1

    def _add_times(self, event: Event) -> None:
        self.estimated += event["saved_s"] is not None
        self.side_by_side += event["max_sequences"] > 1
        self.seconds["saved"] += event["saved_s"] or 0.0
        self.seconds["profile"] += event["profile_s"]
        self.seconds["total"] += event["total_s"]
        if event["ttft_s"] is None:
            return
        self.ttft[event["outcome"]].values.append(event["ttft_s"])
        self.tokens["prefilled"] += event["evaluated_tokens"]
        self.seconds["prefill"] += event["prefill_s"] or 0.0
        self.tokens["decoded"] += max(event["completion_tokens"] - 1, 0)
        self.seconds["decode"] += event["decode_s"] or 0.0
        self._sampled += 1
        sample = Sample(event["evaluated_tokens"], event["ttft_s"], event["outcome"])
        if len(self.samples) < SAMPLES:
            self.samples.append(sample)
        elif (place := self._random.randrange(self._sampled)) < SAMPLES:
            self.samples[place] = sample

    def _add_loss(self, event: Event) -> None:
        tokens, reason = event["lost_tokens"], event["reason"]
        if reason is None:
            return
        rate = event["prefill_rate"]
        took = tokens / rate if rate else 0.0
        self.reasons.setdefault(reason, Loss()).add(tokens, took)
        if not tokens:
            return
        place = place_of(event)
        if place not in self.places and len(self.places) >= MOST_PLACES:
            place = "elsewhere"
        self.places.setdefault(place, Loss()).add(tokens, took)
        miss = Miss(
            took,
            tokens,
            event["id"],
            event["time"],
            event["model"],
            event["outcome"],
            reason,
            place,
        )
        push = heapq.heappush if len(self._misses) < COSTLIEST else heapq.heappushpop
        push(self._misses, (miss.order, self.requests, miss))

    def _add_bin(self, event: Event) -> None:
        lost, evaluated = event["lost_tokens"], event["evaluated_tokens"] + event["ahead_tokens"]
        self.timeline.add(
            Bin(
                event["time"], 1, event["matched_tokens"], event["saved_tokens"], lost, evaluated - lost,
                event["used_bytes"], event["cache_bytes"], event["peak_bytes"],
            )
        )  # fmt: skip


def place_of(event: Event) -> str:
    """Where prompt and entry part, in words: "assistant: thinking", or NOWHERE, or OTHER_LINES where that is not what cost tokens."""
    divergence = event["divergence"]
    if event["reason"] in BATCH:
        return OTHER_LINES
    if divergence is None:
        return NOWHERE
    part = (divergence["part"] or "somewhere").replace("_", " ")
    return f"{divergence['role'][:LONGEST_ROLE]}: {part}" if divergence["role"] else part


def _count(counter: Counter[str], name: str) -> None:
    """Another of `name`; those that come when there are very many names already are counted together."""
    counter[name if name in counter or len(counter) < MOST_PLACES else "other"] += 1
