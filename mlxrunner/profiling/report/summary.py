"""Add up events: what was reused, what was lost, to what and at what cost.

One pass over the events needs memory that hardly grows with the file. Each event keeps only eight
bytes, for its time to the first token, because these times have to be sorted. Everything else is a
sum, one of at most BINS bins, one of SAMPLES requests drawn by chance (from a fixed seed), or one
of the costliest requests.
"""

from __future__ import annotations

import heapq
import math
import random
from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from mlxrunner.cache.account import are_few
from mlxrunner.profiling.schema import (
    BATCH,
    HABITS,
    LAST_MESSAGE_REMEDY,
    NOTHING,
    REASONS,
    Event,
    place_remedy,
    remedy,
)
from mlxrunner.results import CAUSED_BY_CLIENT, Rate
from mlxrunner.system.speed import PrefillCurve
from mlxrunner.terminal.output import number
from mlxrunner.terminal.output import seconds as in_words

COUNTED = """
prompt matched cached prefetched saved missed displaced new evaluated lost completion
""".split()
OUTCOMES = ("hit", "partial", "miss")
BINS = 240
LONGEST_STEP = 2048
"""Prompt tokens of a step in estimates of time: the fixed cost of a step hardly counts."""
SAMPLES = 1500
"""The most requests in the plot of first tokens."""
COSTLIEST = 10
NOWHERE = "(no longer cached)"
"""The place of tokens that were lost although the prompt did not change."""
OTHER_LINES = "(evaluated for other lines)"
"""The place of tokens that other lines of a batch had evaluated."""
LONGEST_ROLE = 40
"""The most characters of a role in the name of a place."""
MOST_PLACES = 200
"""The most names that are counted apart: roles and models come from files, in any number."""


@dataclass
class Times:
    """A collection of times."""

    values: array[float] = field(default_factory=lambda: array("d"))
    """The seconds, in the order in which they were added."""

    def as_dict(self) -> dict[str, float | int | None]:
        """Return the number of times, and three percentiles in seconds; None without times.

        A percentile is the least time that this share of all times does not exceed.
        """
        ordered, count = sorted(self.values), len(self.values)
        shares = {f"p{share}": math.ceil(share * count / 100) - 1 for share in (50, 90, 99)}
        found = {name: ordered[max(0, place)] if count else None for name, place in shares.items()}
        return {"requests": count, **found}


@dataclass
class LossSum:
    """The sum over the requests that lost tokens to one reason, or at one place."""

    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0
    """The seconds to evaluate them, as the prefills so far say for their places."""

    avoidable: int = 0
    """The lost tokens against whose loss something can be done."""

    def add(self, tokens: int, seconds: float, avoidable: int, requests: int = 1) -> None:
        """Add the loss of a request, or of several."""
        self.requests += requests
        self.tokens += tokens
        self.avoidable += avoidable
        self.seconds += seconds


Kind = Literal["missed", "displaced"]
KINDS: tuple[Kind, Kind] = ("missed", "displaced")
"""Missed tokens are up to the program's settings, displaced ones to the client."""


@dataclass
class LossFinding(LossSum):
    """The tokens that the requests of one client evaluated again for one cause."""

    client: str = ""
    """The client's program, or the command."""
    cause: str = ""
    """The client's cause, the place, or the reason."""
    kind: Kind = "missed"
    remedy: str = ""
    id: str = ""
    """The costliest request, as `explain` finds it."""
    headline: str = ""
    """The words that say what happens."""
    most: int = 0
    """The lost tokens of that request."""

    @property
    def sentence(self) -> str:
        """The finding in one sentence: who does what, and what it costs."""
        took = f", {in_words(self.seconds)}" if self.seconds else ""
        said = f" {self.headline}" if self.kind == "displaced" else f": {self.headline}"
        said = said if self.headline else f": {self.cause}"
        count = in_requests(self.requests)
        return f"{self.client}{said} ({number(self.tokens)} tokens{took} in {count})"

    def as_dict(self) -> dict[str, Any]:
        """Return the figures that `--json` prints."""
        names = "client cause kind requests tokens seconds remedy id headline".split()
        return {name: getattr(self, name) for name in names}


@dataclass
class Bin:
    """The sums and peaks of consecutive requests."""

    time: str = ""
    """The time at which the first of them began."""
    requests: int = 0
    matched: int = 0
    """The tokens that prompts found in the entry."""
    cached: int = 0
    missed: int = 0
    displaced: int = 0
    new: int = 0
    """The new tokens, and those that were evaluated in advance."""
    avoidable: int = 0
    """The missed and displaced tokens against which something can be done."""
    used_bytes: int = 0
    """The most bytes of caches that hold tokens."""
    cache_bytes: int = 0
    peak_bytes: int = 0

    def merge(self, other: Bin) -> None:
        """Add the requests of another bin."""
        self.time = self.time or other.time
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("used_bytes", "cache_bytes", "peak_bytes"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))

    @property
    def prompt(self) -> int:
        """The tokens of the prompts."""
        return self.cached + self.missed + self.displaced + self.new


COUNTS = ("requests", "matched", "cached", "missed", "displaced", "new", "avoidable")
"""The fields of a bin that are sums."""


class Timeline:
    """The requests in their order, in at most BINS bins of `width` requests each."""

    def __init__(self) -> None:
        self.bins: list[Bin] = []
        self.width = 1

    def add(self, one: Bin) -> None:
        """Add a bin of one request."""
        if self.bins and self.bins[-1].requests < self.width:
            self.bins[-1].merge(one)
            return
        if len(self.bins) == BINS:
            for left, right in zip(self.bins[::2], self.bins[1::2], strict=True):
                left.merge(right)
            self.bins = self.bins[::2]
            self.width *= 2
        self.bins.append(one)


@dataclass(frozen=True)
class Sample:
    """A request in the plot of first tokens."""

    evaluated: int
    ttft_s: float
    outcome: str
    is_avoidable: bool = False
    """True if it lost tokens, and something can be done against that."""


@dataclass(frozen=True)
class Miss:
    """A request that lost tokens."""

    seconds: float
    """The seconds to evaluate the lost tokens; 0 if unknown."""
    tokens: int
    id: str
    time: str
    model: str
    outcome: str
    reason: str
    place: str
    client: str
    cause: str
    """The client's cause, the place or the reason."""
    event: Event = field(repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures that `--json` prints."""
        return {name: value for name, value in vars(self).items() if name != "event"}


class Summary:
    """All figures of a report. Call `add` with each event, in the order of the file."""

    def __init__(self) -> None:
        self.requests = 0
        self.first_time = self.last_time = ""
        self.tokens: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._prefill, self._decode = Rate(), Rate()
        self.outcomes: Counter[str] = Counter()
        self.finishes: Counter[str] = Counter()
        self.models: Counter[str] = Counter()
        self.runs: Counter[str] = Counter()
        self.ttft: dict[str, Times] = {outcome: Times() for outcome in OUTCOMES}
        self.findings: dict[tuple[str, str, str], LossFinding] = {}
        """Losses against which something can be done, by kind, client and cause."""
        self.unavoidable = LossSum()
        """Losses against which nothing is to be done."""
        self._curves: dict[str, PrefillCurve] = {}
        self.reasons: dict[str, LossSum] = {}
        self.places: dict[str, LossSum] = {}
        self.timeline = Timeline()
        self.batches = Batches()
        self.samples: list[Sample] = []
        self.verified = self.unequal = self.untested = 0
        self.drafted: Counter[str] = Counter()
        """Guessed tokens of answers, by their source."""
        self.accepted: Counter[str] = Counter()
        """Guessed tokens that were right, by their source."""
        self.estimated = 0
        """Requests whose saved time is known."""
        self.side_by_side = 0
        """Requests of runners that run several at once."""
        self._sampled = 0
        self._misses: list[tuple[tuple[float, int, str], int, Miss]] = []
        self._random = random.Random(0)

    def add(self, event: Event) -> None:
        """Add an event."""
        self.requests += 1
        self.first_time = min(self.first_time or event.time, event.time)
        self.last_time = max(self.last_time, event.time)
        self._add_counts(event)
        self._learn_speed(event)
        avoidable = sum(
            getattr(event, f"{kind}_tokens") for kind in KINDS if blame_of(event, kind)[2]
        )
        self._add_times(event, avoidable)
        self._add_loss(event, avoidable)
        one = Bin(
            time=event.time,
            requests=1,
            matched=event.matched_tokens,
            cached=event.saved_tokens,
            missed=event.missed_tokens,
            displaced=event.displaced_tokens,
            new=event.new_tokens + event.prefetched_tokens,
            avoidable=avoidable,
            used_bytes=event.used_bytes,
            cache_bytes=event.cache_bytes,
            peak_bytes=event.peak_bytes,
        )
        self.timeline.add(one)
        self.batches.add(event, avoidable)
        if event.verify is not None:
            self.verified += event.verify.equal is not None
            self.untested += event.verify.equal is None
            self.unequal += event.verify.equal is False

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that were reused, 0 to 1, and not evaluated in advance."""
        return self.tokens["saved"] / self.tokens["prompt"] if self.tokens["prompt"] else 0.0

    @property
    def request_hit_rate(self) -> float:
        """The share of all requests that reused all they could, from 0 to 1."""
        return self.outcomes["hit"] / self.requests if self.requests else 0.0

    @property
    def saved_s(self) -> float | None:
        """The seconds saved in the `estimated` requests; None if there are none."""
        return self.seconds["saved"] if self.estimated else None

    @property
    def prefill_rate(self) -> float | None:
        """The evaluated prompt tokens per second, over the requests that had a first token."""
        return self._prefill.per_second

    @property
    def decode_rate(self) -> float | None:
        """The tokens per second after the first token of each answer."""
        return self._decode.per_second

    @property
    def diagnosis(self) -> list[LossFinding]:
        """The findings, the costliest first."""
        return sorted(
            self.findings.values(), key=lambda one: (-one.seconds, -one.tokens, one.cause)
        )

    @property
    def headline(self) -> LossFinding | None:
        """The finding that costs most; what the program missed for one cause counts together."""
        whole: dict[tuple[str, str, str], LossFinding] = {}
        clients: Counter[tuple[str, str, str]] = Counter()
        for one in self.diagnosis:
            key = one.kind, one.client if one.kind == "displaced" else "", one.cause
            found = whole.setdefault(key, replace(one, requests=0, tokens=0, seconds=0.0))
            found.add(one.tokens, one.seconds, 0, one.requests)
            clients[key] += 1
            if clients[key] > 1:
                found.client = f"{clients[key]} clients"
        return max(whole.values(), key=lambda one: (one.seconds, one.tokens), default=None)

    @property
    def costliest(self) -> list[Miss]:
        """The costliest misses, the costliest first."""
        return [miss for _, _, miss in sorted(self._misses, reverse=True)]

    def as_dict(self) -> dict[str, Any]:
        """Return the figures that `--json` prints, without any text of a model."""
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
            "drafted": dict(self.drafted),
            "accepted": dict(self.accepted),
            "profile_s": self.seconds["profile"],
            "total_s": self.seconds["total"],
            "outcomes": {outcome: self.outcomes[outcome] for outcome in OUTCOMES},
            "finishes": dict(self.finishes),
            "models": dict(self.models),
            "runs": dict(self.runs),
            "ttft_s": {outcome: self.ttft[outcome].as_dict() for outcome in OUTCOMES},
            "findings": [one.as_dict() for one in self.diagnosis],
            "unavoidable": asdict(self.unavoidable),
            "reasons": {reason: asdict(loss) for reason, loss in by_tokens(self.reasons)},
            "places": {place: asdict(loss) for place, loss in by_tokens(self.places)},
            "batches": [run.as_dict() for run in self.batches.runs],
            "costliest": [miss.as_dict() for miss in self.costliest],
            "verified": self.verified,
            "unequal": self.unequal,
            "untested": self.untested,
        }

    def _add_counts(self, event: Event) -> None:
        for name in COUNTED:
            self.tokens[name] += getattr(event, f"{name}_tokens")
        self.outcomes[event.outcome] += 1
        self.finishes[event.finish] += 1
        for draft in event.drafts:
            self.drafted[draft.source] += draft.drafted
            self.accepted[draft.source] += draft.accepted
        _count(self.models, event.model)
        self.runs[event.run] += 1

    def _add_times(self, event: Event, avoidable: int) -> None:
        saved = event.saved_s
        if saved is None and event.max_sequences > 1:
            saved = self._seconds(event, event.saved_tokens, 0)
        self.estimated += saved is not None
        self.side_by_side += event.max_sequences > 1
        self.seconds["saved"] += saved or 0.0
        self.seconds["profile"] += event.profile_s
        self.seconds["total"] += event.total_s
        if event.ttft_s is None:
            return
        self.ttft[event.outcome].values.append(event.ttft_s)
        self._prefill.add(event.evaluated_tokens, event.prefill_s or 0.0)
        self._decode.add(max(event.completion_tokens - 1, 0), event.decode_s or 0.0)
        self._sampled += 1
        sample = Sample(event.evaluated_tokens, event.ttft_s, event.outcome, avoidable > 0)
        if len(self.samples) < SAMPLES:
            self.samples.append(sample)
        elif (place := self._random.randrange(self._sampled)) < SAMPLES:
            self.samples[place] = sample

    def _add_loss(self, event: Event, avoidable: int) -> None:
        """Add the missed tokens by their reason, and the displaced ones by the client's cause."""
        begin, took, most = event.cached_tokens, 0.0, 0
        cause = ""
        for kind in KINDS:
            tokens = getattr(event, f"{kind}_tokens")
            if tokens:
                rate = event.prefill_rate
                estimate = self._seconds(event, tokens, begin)
                seconds = (tokens / rate if rate else 0.0) if estimate is None else estimate
                found = self._add_finding(event, kind, tokens, seconds)
                cause, most = (found, tokens) if tokens > most else (cause, most)
                begin, took = begin + tokens, took + seconds
        tokens = event.lost_tokens
        if event.reason is not None:
            self.reasons.setdefault(event.reason, LossSum()).add(tokens, took, avoidable)
        if not tokens:
            return
        place = place_of(event)
        if place not in self.places and len(self.places) >= MOST_PLACES:
            place = "elsewhere"
        self.places.setdefault(place, LossSum()).add(tokens, took, avoidable)
        whose = event.model, event.outcome, event.reason or "", place, client_of(event)
        miss = Miss(took, tokens, event.id, event.time, *whose, cause, event)
        push = heapq.heappush if len(self._misses) < COSTLIEST else heapq.heappushpop
        push(self._misses, ((took, tokens, event.id), self.requests, miss))

    def _add_finding(self, event: Event, kind: Kind, tokens: int, seconds: float) -> str:
        """Add a loss to those of its client and cause, and return the cause."""
        cause, headline, mend = blame_of(event, kind)
        if not mend:
            self.unavoidable.add(tokens, seconds, 0)
            return cause
        client, name = client_of(event), cause
        key = kind, client, name
        if key not in self.findings and len(self.findings) >= MOST_PLACES:
            key, client, name = (kind, "", "other"), "", "other"
        found = self.findings.setdefault(
            key, LossFinding(client=client, cause=name, kind=kind, remedy=mend, headline=headline)
        )
        found.add(tokens, seconds, tokens)
        if tokens > found.most:
            found.most, found.id = tokens, id_of(event)
        return cause

    def _learn_speed(self, event: Event) -> None:
        """Add the prefill of an event to those of the same model and machine."""
        curve = self._curves.get(event.fingerprint)
        if curve is None and len(self._curves) < MOST_PLACES:
            curve = self._curves[event.fingerprint] = PrefillCurve()
        if curve is not None and event.prefill_s and event.evaluated_tokens:
            end = event.cached_tokens + event.evaluated_tokens
            curve.add(event.cached_tokens, end, event.prefill_s)

    def _seconds(self, event: Event, tokens: int, begin: int) -> float | None:
        """Estimate the time of some prompt tokens from the prefills so far; None: it is unknown."""
        curve = self._curves.get(event.fingerprint)
        return None if curve is None else curve.seconds(tokens, LONGEST_STEP, begin)


def in_requests(count: int) -> str:
    """Return a number of requests in words: "1 request", "2,000 requests"."""
    return "1 request" if count == 1 else f"{number(count)} requests"


def by_tokens(losses: Mapping[str, LossSum]) -> list[tuple[str, LossSum]]:
    """Return the losses with their names, the largest first."""
    return sorted(losses.items(), key=lambda item: (-item[1].tokens, -item[1].requests, item[0]))


def place_of(event: Event) -> str:
    """Return where prompt and entry part: "assistant: thinking", NOWHERE or OTHER_LINES."""
    parted = event.divergence
    if event.reason in BATCH:
        return OTHER_LINES
    if parted is None:
        return NOWHERE
    part = (parted.part or "somewhere").replace("_", " ")
    return f"{parted.role[:LONGEST_ROLE]}: {part}" if parted.role else part


def client_of(event: Event) -> str:
    """Return the name of the client's program, or the command."""
    if event.caller is None:
        return event.command
    return event.caller.client[:LONGEST_ROLE] or "unknown client"


def id_of(event: Event) -> str:
    return event.id if event.caller is None else event.caller.request


def blame_of(event: Event, kind: Kind) -> tuple[str, str, str]:
    """Return the cause of a loss, what happens in words, and the remedy; empty if none is."""
    if kind == "missed":
        reason = event.reason or "unknown"
        sentence = REASONS[reason].sentence if reason in REASONS else ""
        is_few = reason == "evicted" and are_few(event.missed_tokens, event.cached_tokens)
        is_own = not is_few and reason not in CAUSED_BY_CLIENT
        has_one = event.max_sequences == 1
        return reason, sentence, remedy(event.reason, has_one_entry=has_one) if is_own else ""
    caller = event.caller
    if caller is not None and caller.cause and caller.cause.replace("-", "_") not in REASONS:
        mend = caller.remedy or ""
        habit = HABITS.get(caller.cause, "")
        message = "a message" if caller.message is None else f"message {caller.message}"
        return (
            caller.cause,
            habit.format(message=message),
            "" if mend.startswith(NOTHING) else mend.removesuffix("."),
        )
    place, parted = place_of(event), event.divergence
    role, _, part = place.rpartition(": ")
    if not role or parted is None:
        reason = event.reason if event.reason in CAUSED_BY_CLIENT else "diverged"
        return place, "changes its prompt", remedy(reason)
    if part == "text" and parted.message == (event.messages or 0) - 1:
        return place, "changes the beginning of its last message", LAST_MESSAGE_REMEDY
    said = f"changes the {part} of the {role} message"
    return place, said, place_remedy(place) or remedy("diverged")


def _count(counter: Counter[str], name: str) -> None:
    """Count another `name`. Beyond MOST_PLACES names, count new ones together."""
    counter[name if name in counter or len(counter) < MOST_PLACES else "other"] += 1


MOST_RUNS = 50
MOST_FAILED = 100_000
"""The most failed lines of a run that are remembered, to tell a line from another try of it."""


@dataclass
class BatchRun:
    """The requests of one process that ran the lines of a batch."""

    process: str
    time: str
    """The time at which its first line began."""
    at_a_time: int
    """The number of lines that could run at a time."""
    order: str | None
    """The order of the lines; None in events that do not say it."""
    lines: int | None
    """The number of lines of the input; None in events that do not say it."""
    refused: int
    """The lines that could not be run, and made no request."""
    answered: int = 0
    cut: int = 0
    """The answers that ended at the most tokens that they may have."""
    tries: int = 0
    """The requests: more than the lines that ran, if some were tried again."""
    prompt: int = 0
    reused: int = 0
    lost: int = 0
    """The prompt tokens that were evaluated beyond the tree of all prefixes."""
    avoidable: int = 0
    """The lost tokens against whose loss something can be done."""
    _failed: dict[int, str] = field(default_factory=dict)

    @property
    def failed(self) -> Counter[str]:
        """The lines that ran and have no answer, by the name of what ended them."""
        return Counter(self._failed.values())

    @property
    def left(self) -> int | None:
        """The lines that this run did not come to, or that an earlier one had answered."""
        if self.lines is None:
            return None
        return max(0, self.lines - self.refused - self.answered - len(self._failed))

    @property
    def reuse(self) -> float:
        """The share of the prompt tokens that were reused, from 0 to 1."""
        return self.reused / self.prompt if self.prompt else 0.0

    @property
    def best(self) -> float:
        """The share that a cache of any size could have reused: all but the tree of prefixes."""
        return (self.reused + self.lost) / self.prompt if self.prompt else 0.0

    def add(self, event: Event, avoidable: int) -> None:
        """Add a request, which lost `avoidable` tokens that it need not have lost."""
        self.tries += 1
        self.prompt += event.prompt_tokens
        self.reused += event.saved_tokens
        self.lost += event.lost_tokens
        self.avoidable += avoidable
        number = event.line.number if event.line else event.number
        if event.finish in ("stop", "length"):
            self.answered += 1
            self.cut += event.finish == "length"
            self._failed.pop(number, None)
        elif number in self._failed or len(self._failed) < MOST_FAILED:
            self._failed[number] = event.error or event.finish

    def as_dict(self) -> dict[str, Any]:
        """Return the figures that `--json` prints."""
        names = "process time order lines refused answered cut tries prompt reused lost".split()
        return {
            **{name: getattr(self, name) for name in names},
            "at_a_time": self.at_a_time,
            "failed": dict(self.failed),
            "left": self.left,
        }


class Batches:
    """The runs of all batches, in the order in which they began."""

    def __init__(self) -> None:
        self._runs: dict[str, BatchRun] = {}

    @property
    def runs(self) -> list[BatchRun]:
        return list(self._runs.values())

    def add(self, event: Event, avoidable: int) -> None:
        """Add an event if it is of a batch; see `BatchRun.add`."""
        line = event.line
        if line is None and event.command != "batch":
            return
        run = self._runs.get(event.process)
        if run is None:
            if len(self._runs) == MOST_RUNS:
                return
            order, lines, refused = (line.order, line.lines, line.refused) if line else (None,) * 3
            run = BatchRun(
                event.process, event.time, event.max_sequences, order, lines, refused or 0
            )
            self._runs[event.process] = run
        run.add(event, avoidable)


def words(run: BatchRun) -> str:
    """Say in a few sentences how the lines of a run ended."""
    failed = run.failed
    parts = [
        (run.refused, "could not be run (see the output)"),
        *((count, ENDINGS.get(name, f"failed: {name}")) for name, count in failed.most_common(8)),
        (run.left or 0, "not in this run"),
    ]
    total = run.answered + failed.total() if run.lines is None else run.lines
    answered = f"{_lines(total)}, {run.answered:,} answered"
    cut = f", {run.cut:,} of them cut at their most tokens" if run.cut else ""
    said = "".join(f". {_lines(count).capitalize()} {what}" for count, what in parts if count)
    again = run.tries - run.answered - failed.total()
    tried = f". {again:,} further tries of lines that had failed" if again > 0 else ""
    return f"{answered}{cut}{said}{tried}."


ENDINGS = {
    "interrupted": "ended early, by a time limit or Ctrl-C",
    "TimeLimitError": "ended by a time limit before an answer began",
}
"""The ends of lines that have words of their own."""


def _lines(count: int) -> str:
    return "1 line" if count == 1 else f"{count:,} lines"


def name_of(run: BatchRun) -> str:
    """Name a run by its order: "prefix order, 8 at a time"."""
    order = f"{run.order} order" if run.order else "a batch"
    return f"{order}, {run.at_a_time} at a time" if run.at_a_time > 1 else f"{order}, one at a time"
