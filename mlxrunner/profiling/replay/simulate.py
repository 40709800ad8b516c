"""Replay a token log of one slot without a model, to find what would be reused with other settings.

`mlxrunner.cache.entry` and `mlxrunner.cache.prefix` themselves make the decisions, on layers that
have an extent and store nothing. This module has only the order in which a request asks for them,
which is that of `mlxrunner.engine.scheduling`. The scheduler itself replays requests that ran side
by side (`sidebyside`). It takes a step for each token of an answer, 94 µs in a log of 6,300; here
an answer is one jump from checkpoint to checkpoint, 2 µs a token. `simulate` replays a log up to
14 times. Logs of one slot have no record of scheduling, and variants rewrite their prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Annotated, Any, NotRequired, TypedDict

import msgspec
import numpy as np
from msgspec import Meta

from mlxrunner.cache.account import ConversationName, Lookup
from mlxrunner.cache.entry import (
    CacheEntry,
    Shift,
    TokenArray,
    TokenBuffer,
    as_tokens,
    common_prefix,
    places_of,
)
from mlxrunner.cache.layers.extents import is_layer, read_extent
from mlxrunner.cache.prefix import EntryLease, PrefixCache
from mlxrunner.cache.protocol import Extent, LayerCache, Snapshot
from mlxrunner.profiling.schema import MOST, Ordinal
from mlxrunner.profiling.tokenlog import LoggedRequest, TokenIds

MOST_MARKS = 32
"""The most kinds of thinking blocks that a token log may name."""
SEED_TOKENS = 16
"""The most tokens of a rest that is evaluated in one pass, as by a scheduler."""


@dataclass(frozen=True)
class ReplayedRequest:
    """One request as it is replayed."""

    prompt: TokenArray
    answer: TokenArray
    """The tokens of the answer that were run through the model."""
    evaluated: int
    """The offset in the prompt up to which it was evaluated."""
    entry: TokenArray | None = None
    """The tokens of the entry afterwards, if they are not the beginning of prompt and answer.

    That is the case after a shift in a full context; else None.
    """
    shortened: bool = False
    """True if the prompt was too long and a part of it was left out."""
    matched: int = 0
    """The number of tokens that the prompt found in the entry."""
    entry_before: int = 0
    freed: bool = False
    conversation: ConversationName | None = ConversationName()  # noqa: RUF009  # immutable

    @classmethod
    def of(cls, logged: LoggedRequest) -> ReplayedRequest:
        """Return the request that a line of the log describes."""
        facts = logged.facts
        answer, entry = logged.answer, None
        if facts.get("entry") is not None:
            entry = as_tokens(facts["entry"])
            count = min(len(entry) + facts["shifted"] - len(logged.prompt), len(entry))
            answer = entry[len(entry) - max(count, 0) :]
        elif facts["shifted"]:
            answer = answer[: max(logged.process["context"] - len(logged.prompt), 0)]
        return cls(
            logged.prompt,
            answer,
            facts["evaluated"],
            entry,
            shortened=entry is None and facts["shifted"] > 0,
            matched=facts["matched"],
            entry_before=facts["entry_before"],
            freed=facts.get("evicted_by") is not None,
            conversation=logged.conversation,
        )


class Replay:
    """The entries of one process."""

    def __init__(
        self,
        process: Mapping[str, Any],
        *,
        entries: int = 1,
        interval: int | None = None,
        slack: int | None = None,
    ) -> None:
        """Begin with empty entries, of which the least recently used one makes room.

        `process` is its line of the token log. `interval` is the tokens between checkpoints and
        `slack` the rewind slack of windows in tokens; None for those of the runner.
        """
        self._process = process
        self._message_ends = np.array(process["message_ends"], np.int32)
        self._entries = [_Entry(process, interval, slack) for _ in range(entries)]

    def run(self, request: ReplayedRequest) -> Lookup:
        """Return the lookup of a request, and leave the entry as the request leaves it."""
        if self._process.get("never_reused") or (request.freed and request.entry_before == 0):
            self.reset()
        entry = self._choose(request.prompt)
        self._entries.remove(entry)
        self._entries.append(entry)
        if request.shortened:
            _follow(entry.cache, request)
        with entry.cache.begin(request.prompt) as lease:
            self._prefill(lease, request.evaluated)
            if lease.recorded == len(request.prompt) <= request.evaluated:
                self._decode(entry, lease, request)
            return lease.lookup

    def reset(self) -> None:
        """Empty all entries."""
        for entry in self._entries:
            entry.cache.reset()

    @property
    def checkpoints(self) -> list[int]:
        """The offsets of the checkpoints of the entry used last."""
        return self._entries[-1].cache.current.checkpoints.offsets

    @property
    def tokens(self) -> TokenArray:
        """The tokens of the entry used last."""
        return self._entries[-1].cache.current.tokens.array

    def _choose(self, prompt: TokenArray) -> _Entry:
        """Return the entry that shares most with the prompt.

        It is copied over the least recently used one if the prompt drops more than half of it.
        """
        best = max(self._entries, key=lambda entry: entry.matched(prompt))
        matched = best.matched(prompt)
        oldest = next((entry for entry in self._entries if entry is not best or not matched), best)
        if oldest is not best and 2 * matched < len(best.cache.current.tokens):
            oldest.become(best)
            return oldest
        return best

    def _prefill(self, lease: EntryLease, evaluated: int) -> None:
        """Evaluate the prompt up to `evaluated`, chunk by chunk. A pass is recorded whole."""
        prompt, step = lease.prompt, self._process["prefill_step"]
        if lease.needs_checkpoints:
            ends = (np.flatnonzero(np.isin(prompt, self._message_ends)) + 1).tolist()
            lease.mark(places_of(len(prompt), ends))
            self._checkpoint_if_due(lease)
        while lease.recorded < len(prompt):
            stop = lease.next_stop
            if not lease.needs_checkpoints:
                stop = len(prompt) - (len(lease.remaining) > SEED_TOKENS)
            while lease.recorded < stop:
                chunk = lease.remaining[: stop - lease.recorded]
                if stop < len(prompt):
                    chunk = chunk[:step]
                if lease.recorded + len(chunk) > evaluated:
                    return
                lease.begin_forward()
                lease.end_forward(len(chunk))
                lease.record(chunk)
            if lease.needs_checkpoints and stop < len(prompt):
                lease.checkpoint()
            else:
                self._checkpoint_if_due(lease)

    def _checkpoint_if_due(self, lease: EntryLease) -> None:
        if lease.needs_checkpoints and lease.recorded >= lease.checkpoint_due:
            lease.checkpoint()

    def _decode(self, entry: _Entry, lease: EntryLease, request: ReplayedRequest) -> None:
        """Evaluate the answer, a token a pass. In a full context, make room as the log shows."""
        rest, shift, context = request.answer, None, self._process["context"]
        if request.entry is not None:  # it kept the tokens with which the entry begins afterwards
            keep = common_prefix(request.entry, np.concatenate([request.prompt, rest]))
            shift = Shift(context, min(keep, context - 2))
        while len(rest):
            count = len(rest)
            if shift is not None:
                if lease.recorded >= shift.context:
                    self._make_room(lease, shift)
                count = min(count, max(shift.context - lease.recorded, 1))
            if lease.needs_checkpoints:
                count = min(count, max(lease.checkpoint_due - lease.recorded, 1))
            for layer in entry.layers:
                layer.decode(count)
            lease.record(rest[:count])
            rest = rest[count:]
            self._checkpoint_if_due(lease)
        if request.entry is not None and not np.array_equal(
            entry.cache.entry.tokens.array, request.entry
        ):
            self._evaluate(lease, lease.restart(request.entry))

    def _make_room(self, lease: EntryLease, shift: Shift) -> None:
        """Shift the entry, or evaluate what it keeps again if it can't be shifted."""
        tokens = lease.tokens
        discard = shift.discard(len(tokens))
        if not lease.shift(shift.keep, discard, as_they_are):
            self._evaluate(
                lease, lease.restart(tokens[: shift.keep] + tokens[shift.keep + discard :])
            )

    def _evaluate(self, lease: EntryLease, tokens: TokenArray) -> None:
        """Evaluate these tokens, chunk by chunk, without checkpoints."""
        step = self._process["prefill_step"]
        for begin in range(0, len(tokens), step):
            chunk = tokens[begin : begin + step]
            lease.begin_forward()
            lease.end_forward(len(chunk))
            lease.record(chunk)


class _Mark(TypedDict):
    begin: TokenIds
    end: TokenIds


class _Process(TypedDict):
    """The fields of a process that a replay needs, with their bounds."""

    context: Annotated[int, Meta(ge=2)]
    prefill_step: Ordinal
    checkpoint_interval: Ordinal
    thinking: Annotated[list[_Mark], Meta(max_length=MOST_MARKS)]


class _Request(TypedDict):
    """The fields of a request that a replay needs, with their bounds."""

    entry: TokenIds | None
    began_s: NotRequired[Annotated[float, Meta(ge=-MOST, le=MOST)]]


def is_usable(logged: LoggedRequest) -> bool:
    """Return True if a log, which anybody may have written, says what a replay needs."""
    try:
        msgspec.convert(logged.process, _Process)
        msgspec.convert(logged.facts, _Request)
        return all(map(is_layer, logged.process["layers"]))
    except (KeyError, TypeError, ValueError):
        return False


class ExtentLayer(LayerCache):
    """A layer that is reduced to its extent: it holds no data."""

    def __init__(self, kind: str, extent: Extent) -> None:
        self.kind, self._extent = kind, extent

    @property
    def extent(self) -> Extent:
        return self._extent

    def go_back(self, to: int) -> None:
        self._extent = self._extent.rewound(to)

    def free(self) -> None:
        self._extent = self._extent.empty()

    def snapshot(self) -> Snapshot:
        return Snapshot(self._extent.checkpoint(), 0)

    def restore(self, snapshot: Snapshot, offset: int) -> None:
        self._extent = snapshot.content


class ReplayedLayer(ExtentLayer):
    """Layers that store in the same way, as `line` of a token log describes them."""

    def __init__(self, line: Mapping[str, Any], extent: Extent) -> None:
        """Stand for the layers of `line`. `extent` is that of such a layer when it is empty."""
        super().__init__(line["kind"], extent)
        self._line = line

    def end_forward(self, tokens: int) -> None:
        self._extent = self._extent.after(tokens)

    def decode(self, tokens: int) -> None:
        """Store `tokens` tokens in as many forward passes."""
        self._extent = self._extent.decoded(tokens)

    def shift(self, keep: int, discard: int, rotate: Callable[[Any, int], Any]) -> None:
        self._extent = self._extent.shifted(keep, discard)

    def snapshot(self) -> Snapshot:
        nbytes = self._line["count"] * self._extent.checkpoint_bytes(self._line)
        return Snapshot(self._extent.checkpoint(), nbytes)


class _Entry:
    """A prefix cache and its layers."""

    def __init__(self, process: Mapping[str, Any], interval: int | None, slack: int | None) -> None:
        self.layers = [
            ReplayedLayer(line, read_extent(line, process["context"], slack))
            for line in process["layers"]
        ]
        self._interval = interval or process["checkpoint_interval"]
        self.cache = PrefixCache(self._caches, process["checkpoint_budget"], self._interval)

    def _caches(self) -> list[LayerCache]:
        return list(self.layers)

    def become(self, other: _Entry) -> None:
        """Become a copy of `other`."""
        held = other.cache.current
        self.layers, checkpoints = deepcopy((other.layers, held.checkpoints))
        self.cache = PrefixCache(self._caches, checkpoints.budget, self._interval)
        self.cache.entry = CacheEntry(TokenBuffer(held.tokens[:]), self._caches(), checkpoints)

    def matched(self, prompt: TokenArray) -> int:
        """Return the number of tokens that the entry shares with the prompt."""
        return common_prefix(self.cache.current.tokens.array, prompt)


def _follow(cache: PrefixCache, request: ReplayedRequest) -> None:
    """Move the entry as the runner did for a prompt that was shortened in the middle.

    Behind the common prefix, the entry continues like the prompt, some tokens later.
    """
    held, prompt = cache.current.tokens.array, request.prompt
    keep = common_prefix(held, prompt)
    if keep == min(len(held), len(prompt)) or len(held) <= request.entry_before:
        return
    gaps = np.flatnonzero(held[keep + 1 :] == prompt[keep]) + 1
    found = [(common_prefix(held[keep + gap :], prompt[keep:]), int(gap)) for gap in gaps]
    if found:
        _, gap = max(found)
        whole = np.concatenate([held[: keep + gap], prompt[keep:]])
        move = as_they_are if request.matched > keep else lambda layers, by: None
        cache.prepare(whole, keep, gap, move)


def as_they_are(layers: Sequence[LayerCache], by: int) -> Sequence[Callable[[Any, int], Any]]:
    """Return a function for each layer that leaves its keys as they are."""
    return [lambda keys, by: keys for _ in layers]
