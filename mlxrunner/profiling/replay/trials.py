"""Replay token logs with every variant: other slots, entries, orders, thinking and checkpoints."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from mlxrunner.batch.order import order_of, sort_key
from mlxrunner.cache.account import Lookup, PromptAccount, TokenAccounting
from mlxrunner.cache.entry import TokenArray, as_tokens, common_prefix
from mlxrunner.cache.prefix import leaving
from mlxrunner.engine.drafting import Drafting, Experience, SourceCounts
from mlxrunner.errors import ReadError
from mlxrunner.profiling.replay.sidebyside import as_run, can_be_replayed, has_room, packed
from mlxrunner.profiling.replay.simulate import (
    Replay,
    ReplayedRequest,
    is_usable,
)
from mlxrunner.profiling.report.report import skipped_words
from mlxrunner.profiling.tokenlog import LoggedRequest, read_token_log

ENTRIES = (2, 4, 8)
SLOTS = (1, 2, 4, 8, 16)
Order = Literal["input", "prefix"]
Thinking = Literal["logged", "kept", "stripped"]


@dataclass(frozen=True)
class Variant:
    """One way to replay a token log."""

    name: str
    entries: int = 1
    interval: int | None = None
    """The tokens between checkpoints; None for that of the runner."""
    slack: int | None = None
    """The rewind slack of windows in tokens; None for that of the runner."""
    order: Order = "input"
    """The order of the requests: "input" (as logged) or "prefix" (that of a batch)."""
    thinking: Thinking = "logged"
    """The thinking of earlier answers in prompts: as logged, kept or stripped."""
    slots: int | None = None
    """The slots of a runner with requests side by side; None for those that it had."""

    def acts_on(self, process: Mapping[str, Any]) -> bool:
        """Return True if the variant can change anything for the requests of a process."""
        layers = list(_every(process["layers"]))
        has_checkpoints = any(layer["needs_checkpoints"] for layer in layers)
        has_window = any(layer["slack"] is not None for layer in layers)
        return (
            (self.thinking == "logged" or bool(process["thinking"]))
            and (self.interval is None or has_checkpoints)
            and (self.slack is None or has_window)
            and (self.slots is None or is_side_by_side(process))
        )


AS_IT_WAS = Variant("as it was run")
ONE_AT_A_TIME = Variant("one at a time")
"""The variant that replays side-by-side requests on one entry, in the order of their begin."""


Replayed = tuple[Lookup, PromptAccount]
"""The lookup of a replayed request, and the account of its prompt."""


@dataclass
class VariantResult:
    """The result of a variant."""

    what: Variant
    requests: int = 0
    hits: int = 0
    """The number of requests that reused all they could."""
    prompt: int = 0
    cached: int = 0
    missed: int = 0
    displaced: int = 0
    has_counts: bool = True
    """False if only the cached ones of some tokens are known."""

    def add(self, found: Lookup, account: PromptAccount) -> None:
        """Add the lookup of a request, and the account of its prompt."""
        self.requests += 1
        self.hits += found.outcome(account.missed) == "hit"
        self.prompt += found.prompt_tokens
        self.cached += found.cached
        self.missed += account.missed
        self.displaced += account.displaced

    def add_logged(self, logged: LoggedRequest) -> None:
        """Add the result that the log gives for a request: it does not say why not more."""
        facts, prompt = logged.facts, len(logged.prompt)
        cached = min(facts["cached"], max(prompt - 1, 0))
        self.requests += 1
        self.hits += 0 < cached == min(prompt - 1, facts["entry_before"])
        self.prompt += prompt
        self.cached += cached
        self.has_counts = False

    @property
    def evaluated(self) -> int:
        """The tokens of prompts that were not reused."""
        return self.prompt - self.cached

    @property
    def counts(self) -> dict[str, int | None]:
        """The four counts of the prompt tokens by name; None: the log does not say it."""
        new = self.evaluated - self.missed - self.displaced  # nothing could have spared them
        more = {"missed": self.missed, "displaced": self.displaced, "new": new}
        return {"cached": self.cached, **(more if self.has_counts else dict.fromkeys(more))}

    @property
    def hit_rate(self) -> float:
        """The share of the prompt tokens that were reused, from 0 to 1."""
        return self.cached / self.prompt if self.prompt else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the settings of the variant, the counts and the hit rate by name."""
        names = "requests hits prompt evaluated hit_rate".split()
        return asdict(self.what) | {name: getattr(self, name) for name in names} | self.counts


@dataclass
class Simulation:
    """The results of all variants."""

    rows: list[VariantResult] = field(default_factory=list)
    """The result of each variant; the first one is the log as it was run."""
    agreed: int = 0
    """The number of requests for which the replay found exactly what the runner had found."""
    side_by_side: int = 0
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
        return self.rows[0].requests

    def as_dict(self) -> dict[str, Any]:
        """Return the counts and the rows by name."""
        rows = [row.as_dict() for row in self.rows]
        counts = {"requests": self.requests, "agreed": self.agreed}
        beside = {"side_by_side": self.side_by_side, "only_logged": self.only_logged}
        guesses = {} if self.guesses is None else {"guesses": self.guesses.as_dict()}
        return {**counts, **beside, "skipped": dict(self.skipped), "rows": rows, **guesses}


def is_side_by_side(process: Mapping[str, Any]) -> bool:
    """Return True if the runner of a process has slots instead of one entry."""
    return type(process.get("max_sequences")) is int


def _every(layers: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the layers and their parts."""
    for layer in layers:
        yield layer
        yield from _every(layer.get("parts", ()))


REMEMBERED = 64
"""The number of earlier requests that a prompt may continue."""
HEADER = 16
"""The most tokens from the beginning of a thinking block that the template opens to the answer."""
BLANKS = 8
"""The most tokens around a thinking block (line ends) that are left out with it."""
PROOF = 4
"""The number of tokens after a block that have to be the same to prove that it was left out."""


@dataclass(frozen=True)
class EarlierRequest:
    """An earlier request."""

    logged: TokenArray
    """The tokens of prompt and answer as logged."""
    prompt_tokens: int
    """The number of these tokens that are the prompt."""
    kept: TokenArray
    """The tokens of the prompt with its thinking put back."""


class Rewriter:
    """A rewriter of the requests of one process; `changed` counts those that it has changed."""

    def __init__(self, process: Mapping[str, Any], way: Literal["kept", "stripped"]) -> None:
        """Rewrite prompts so that their thinking is "kept" or "stripped"."""
        self._marks = [
            (tuple(mark["begin"]), tuple(mark["end"]))
            for mark in process["thinking"]
            if mark["begin"] and mark["end"]
        ]
        self._message_ends = np.array(process["message_ends"], np.int32)
        self._way = way
        self._turns: deque[EarlierRequest] = deque(maxlen=REMEMBERED)
        self.changed = 0

    def rewrite(self, request: ReplayedRequest) -> ReplayedRequest:
        """Return the request with its prompt rewritten, or itself if that stays the same."""
        prompt = self._stripped(request.prompt) if self._way == "stripped" else self._kept(request)
        if len(prompt) == len(request.prompt):
            return request
        self.changed += 1
        was_whole = request.evaluated >= len(request.prompt)
        return replace(
            request,
            prompt=prompt,
            evaluated=len(prompt) if was_whole else request.evaluated,
            entry=None,
        )

    def _stripped(self, prompt: TokenArray) -> TokenArray:
        """Return the prompt without the thinking blocks of earlier messages."""
        ends = np.flatnonzero(np.isin(prompt, self._message_ends))
        last = int(ends[-1]) if len(ends) else 0
        gone = np.zeros(len(prompt), np.bool_)
        for begin, end in self._blocks(prompt):
            gone[begin:end] = begin < last
        return prompt[~gone]

    def _kept(self, request: ReplayedRequest) -> TokenArray:
        """Return the prompt with the thinking of the request that it continues."""
        prompt = request.prompt
        pairs = ((common_prefix(turn.logged, prompt), turn) for turn in self._turns)
        goes_on = [pair for pair in pairs if pair[0] >= pair[1].prompt_tokens - HEADER]
        if goes_on:
            common, turn = max(goes_on, key=lambda one: one[0])
            logged = turn.logged
            resumed = self._resumed(logged, prompt, common)
            before = np.concatenate([turn.kept, logged[turn.prompt_tokens :]])
            moved = len(turn.kept) - turn.prompt_tokens
            prompt = np.concatenate([before[: resumed + moved], prompt[common:]])
        logged = np.concatenate([request.prompt, request.answer])
        self._turns.append(EarlierRequest(logged, len(request.prompt), prompt))
        return prompt

    def _resumed(self, logged: TokenArray, prompt: TokenArray, common: int) -> int:
        """Return where `logged`, after a thinking block, continues like `prompt`; or `common`."""
        blocks = self._blocks(logged)
        for end in sorted({end for begin, end in blocks if begin - BLANKS <= common < end}):
            for place in range(end, min(end + BLANKS, len(logged))):
                same = common_prefix(logged[place:], prompt[common:])
                if same >= min(PROOF, len(logged) - place):
                    return place
        return common

    def _blocks(self, tokens: TokenArray) -> list[tuple[int, int]]:
        """Return begin and end of each thinking block, with its marks."""
        blocks: list[tuple[int, int]] = []
        for begin, end in self._marks:
            ends, begins = _places(tokens, end), _places(tokens, begin)
            after = np.searchsorted(ends, begins + len(begin))
            ended = after < len(ends)
            behind = (ends[after[ended]] + len(end)).tolist()
            blocks += zip(begins[ended].tolist(), behind, strict=True)
        return blocks


def _places(tokens: TokenArray, wanted: Sequence[int]) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Return the places where `wanted` begins in `tokens`."""
    if len(tokens) < len(wanted):
        return np.empty(0, np.intp)
    return np.flatnonzero((sliding_window_view(tokens, len(wanted)) == wanted).all(axis=1))


REPORT_EVERY = 50


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
    """Replay token logs with every variant.

    `entries`, `intervals` (tokens), `slacks` (tokens) and `slots` are values to try in place of the
    usual ones. `progress` is called now and then with the number of requests so far. Every prompt
    is kept in memory, four bytes a token. If a variant changes nothing for a process, its requests
    count as they were run. `with_guesses`: also guess the answers. Raise ReadError if a file can't
    be read or holds no request.
    """
    log, result, runs = read_token_log(files), Simulation(), list[LoggedRun]()
    result.guesses = Guesses() if with_guesses else None
    for number, logged in enumerate(log, 1):
        is_possible = is_usable(logged)
        if not logged.process["layers"] or not is_possible:
            result.skipped["invalid" if logged.process["layers"] else "parallel"] += 1
        else:
            _add(runs, logged)
        if result.guesses is not None and is_possible:
            result.guesses.add(logged, is_beside=is_side_by_side(logged.process))
        if number % REPORT_EVERY == 0:
            progress(number)
    result.skipped += log.skipped
    if not runs:
        names = ", ".join(map(str, files))
        skipped = f": {skipped_words(result.skipped)}" if result.skipped.total() else ""
        raise ReadError(f"no requests in {names}{skipped}; it takes a file that --log-tokens wrote")
    given = entries, intervals, slacks, slots
    for what in dict.fromkeys(what for run in runs for what in run.variants(*given)):
        row = VariantResult(what)
        have_changed = [run.add_to(row) for run in runs]
        if what.thinking == "logged" or any(have_changed):
            result.rows.append(row)
    for run in runs:
        result.agreed += run.agreed
        if run.is_side_by_side:
            result.side_by_side += len(run.requests)
            result.only_logged += len(run.only_logged)
    result.idle = _idle(result, intervals, slacks, slots)
    return result


def _idle(
    result: Simulation, intervals: Sequence[int], slacks: Sequence[int], slots: Sequence[int]
) -> list[str]:
    """Return remarks on given options that change nothing."""
    tried, idle = [row.what for row in result.rows], []
    if intervals and all(what.interval is None for what in tried):
        idle.append(
            "--checkpoint-interval has nothing to act on: no layer in the log takes checkpoints"
        )
    if slacks and all(what.slack is None for what in tried):
        idle.append("--rewind-slack has nothing to act on: no layer in the log has a window")
    if slots and all(what.slots is None for what in tried):
        idle.append("--slots has nothing to act on: no requests in the log ran side by side")
    return idle


def _add(runs: list[LoggedRun], logged: LoggedRequest) -> None:
    """Add a request to the run of its process, or to a new run after a change of options."""
    name = logged.process["process"]
    last = next((run for run in reversed(runs) if run.process["process"] == name), None)
    if last is None or last.process != logged.process:
        runs.append(last := LoggedRun(logged.process))
    last.requests.append(logged)


class LoggedRun:
    """The requests of a process to one model with one set of options, one at a time or in slots."""

    def __init__(self, process: Mapping[str, Any]) -> None:
        """Begin without requests. `process` is its line of the token log."""
        self.process = process
        self.is_side_by_side = is_side_by_side(process)
        self.requests: list[LoggedRequest] = []

    @cached_property
    def in_slots(self) -> list[LoggedRequest]:
        """The requests whose log says how they ran beside others."""
        return [one for one in self.requests if can_be_replayed(one)]

    @cached_property
    def only_logged(self) -> list[LoggedRequest]:
        """The requests that ran in slots, and whose log does not say how."""
        if not self.is_side_by_side:
            return []
        return [one for one in self.requests if not can_be_replayed(one)]

    @cached_property
    def as_run(self) -> list[Replayed]:
        """The lookups of the requests, replayed as they ran; without those of `only_logged`."""
        if not self.is_side_by_side:
            return self._one_at_a_time(AS_IT_WAS, self.requests)[0]
        if not self.in_slots:
            return []
        made = as_run(self.process, self.in_slots)
        return [(request.lookup, request.account) for request in made]

    @property
    def agreed(self) -> int:
        """The number of requests that, run as they were, find exactly what the log says."""
        logged = self.in_slots if self.is_side_by_side else self.requests
        return sum(
            (found.matched, found.cached) == (one.facts["matched"], one.facts["cached"])
            for (found, _), one in zip(self.as_run, logged, strict=True)
        )

    def variants(
        self,
        entries: Sequence[int],
        intervals: Sequence[int],
        slacks: Sequence[int],
        slots: Sequence[int],
    ) -> list[Variant]:
        """Return the variants that are worth trying for these requests, one change at a time.

        Given values replace the usual ones; `intervals` and `slacks` are in tokens.
        """
        process = self.process
        every, slack = process["checkpoint_interval"], process["rewind_slack"]
        intervals = intervals or sorted({max(every // 4, 1), every * 4} - {every})
        slacks = slacks or sorted({0, slack * 4 or 512} - {slack})
        if not self.in_slots:
            slots = []
        elif not slots:
            own = process["max_sequences"]
            slots = [count for count in SLOTS if count != own and has_room(process, count)]
        made = [
            AS_IT_WAS,
            *(Variant(f"{n} slot{'' if n == 1 else 's'}", slots=n) for n in slots),
            *([ONE_AT_A_TIME] if self.is_side_by_side else []),
            *(Variant(f"{n} entries", entries=n) for n in entries or ENTRIES),
            Variant("sorted by prefix", order="prefix"),
            Variant("thinking kept", thinking="kept"),
            Variant("thinking stripped", thinking="stripped"),
            *(Variant(f"interval {n}", interval=n) for n in intervals),
            *(Variant(f"slack {n}", slack=n) for n in slacks),
        ]
        return [what for what in made if what.acts_on(process)]

    def add_to(self, row: VariantResult) -> bool:
        """Add the lookups of all requests. Return True if the variant has changed a prompt."""
        what, found, alone = row.what, self.as_run, list[LoggedRequest]()
        can_act = what != AS_IT_WAS and what.acts_on(self.process)
        if not self.is_side_by_side:
            if can_act and what != ONE_AT_A_TIME:
                found, alone = [], self.requests
        elif what == AS_IT_WAS or what.slots is not None:
            for logged in self.only_logged:
                row.add_logged(logged)
        else:
            alone = self.only_logged
        beside, by_prefix = self.in_slots, what.order == "prefix"
        if can_act and found and beside and has_room(self.process, what.slots or 1):
            if what.slots is not None or by_prefix:
                made = packed(self.process, beside, what.slots, by_prefix=by_prefix)
                found = [(request.lookup, request.account) for request in made]
            else:
                found, alone = [], [*alone, *beside]
        replayed, has_changed = self._one_at_a_time(what, alone)
        for lookup, account in (*found, *replayed):
            row.add(lookup, account)
        return has_changed

    def _one_at_a_time(
        self, what: Variant, requests: Sequence[LoggedRequest]
    ) -> tuple[list[Replayed], bool]:
        """Return lookups and accounts, in order of the begins, and True if a prompt was changed."""
        settings = {name: getattr(what, name) for name in ("entries", "interval", "slack")}
        replay, has_changed = Replay(self.process, **settings), False
        made = [ReplayedRequest.of(logged) for logged in requests]
        if what.thinking != "logged":
            rewriter = Rewriter(self.process, what.thinking)
            made = [rewriter.rewrite(request) for request in made]
            has_changed = rewriter.changed > 0
        if self.is_side_by_side or what.order == "prefix":
            began = [logged.facts.get("began_s", 0) for logged in requests]
            order = sorted(range(len(made)), key=began.__getitem__)
            made = [replace(made[i], freed=False, shortened=False) for i in order]
        if what.order == "prefix":
            made = [made[i] for i in order_of([sort_key(one.prompt) for one in made])]
        accounting, found = TokenAccounting(), list[Replayed]()
        for one in made:
            opened = accounting.begin(one.prompt, name=one.conversation)
            lookup = replay.run(one)
            reached = max(one.evaluated, lookup.cached)
            cached, known = lookup.cached, lookup.known
            found.append((lookup, accounting.end(opened, cached, known, reached, one.answer)))
        return found, has_changed


class Guesses:
    """The guesses in all answers of a log, and the forward passes that they leave."""

    def __init__(self) -> None:
        self.tokens = 0
        """The tokens of answers that were run: so many passes there are without guesses."""
        self.passes = 0
        """The forward passes with guesses."""
        self.by_source: defaultdict[str, SourceCounts] = defaultdict(SourceCounts)
        self._before: dict[str, TokenArray] = {}

    def add(self, logged: LoggedRequest, *, is_beside: bool) -> None:
        """Guess the answer of the next request.

        `is_beside`: it ran beside others, and what its slot held before is not looked up.
        """
        before = as_tokens([]) if is_beside else self._before.get(logged.process["process"])
        earlier = logged.prompt[:0] if before is None else leaving(before, logged.prompt)
        self._guess(logged.prompt, earlier, logged.answer.tolist())
        if not is_beside:
            self._before[logged.process["process"]] = np.concatenate([logged.prompt, logged.answer])

    def _guess(self, prompt: TokenArray, earlier: TokenArray, answer: list[int]) -> None:
        drafting = Drafting(Experience(), prompt, earlier, always=True)
        place = 0
        while place < len(answer):
            # The next pass begins before the token is read, unless a guess is likely.
            may_draft = not place or drafting.is_worth_waiting
            drafting.add(answer[place])
            draft = drafting.draft(len(answer) - 1 - place) if may_draft else []
            right = common_prefix(as_tokens(draft), as_tokens(answer[place + 1 :][: len(draft)]))
            if draft:
                drafting.judge(len(draft), right)
            for token in draft[:right]:
                drafting.add(token)
            place += 1 + right
            self.passes += 1
        self.tokens += len(answer)
        for source, counts in drafting.by_source.items():
            self.by_source[source].drafted += counts.drafted
            self.by_source[source].accepted += counts.accepted

    def as_dict(self) -> dict[str, Any]:
        """Return the counts, with those of each source."""
        sources = [
            {"source": source, "drafted": counts.drafted, "accepted": counts.accepted}
            for source, counts in sorted(self.by_source.items())
        ]
        return {"tokens": self.tokens, "passes": self.passes, "drafts": sources}

    @property
    def drafted(self) -> int:
        """The tokens that were guessed."""
        return sum(counts.drafted for counts in self.by_source.values())

    @property
    def accepted(self) -> int:
        """The tokens that were guessed and right."""
        return sum(counts.accepted for counts in self.by_source.values())
