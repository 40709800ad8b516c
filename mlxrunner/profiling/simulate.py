"""Replay a token log without a model: what would have been reused with other settings.

The decisions are those of `mlxrunner.cache.entry` and `mlxrunner.cache.checkpoints` themselves, on layers that exist on paper only; here is
just the order in which a request asks for them, which is that of `mlxrunner.pipeline`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxrunner.cache.checkpoints import places_of
from mlxrunner.cache.entry import CacheEntry, PrefixCache, Session
from mlxrunner.cache.layer import LayerCache
from mlxrunner.cache.lookup import Lookup
from mlxrunner.cache.tokens import TokenArray, TokenBuffer, as_tokens, common_prefix
from mlxrunner.overflow import Shift
from mlxrunner.profiling.paper import is_layer, paper_layer
from mlxrunner.profiling.tokenlog import LoggedRequest, are_ids

MOST_MARKS = 32
"""Kinds of thinking blocks that a model may have."""
SEED_TOKENS = 16
"""As in `mlxrunner.pipeline`: a rest of so many tokens is evaluated in one pass."""


@dataclass(frozen=True)
class Settings:
    """What to replay with; None: as the runner did. `entries`: of several, the least recently used one makes room."""

    entries: int = 1
    interval: int | None = None
    slack: int | None = None


AS_RUN = Settings()


@dataclass(frozen=True)
class Request:
    """One request as it is replayed.

    `evaluated`: offset in the prompt up to which it was evaluated. `entry`: what the entry held afterwards, where the context was full and
    that is not the beginning of prompt and answer. `shortened`: the prompt had been too long, and something was left out of it;
    `matched`: tokens that it found then. `entry_before`: tokens that the entry had; `freed`:
    something had given it up.
    """

    prompt: TokenArray
    answer: TokenArray
    evaluated: int
    entry: TokenArray | None = None
    shortened: bool = False
    matched: int = 0
    entry_before: int = 0
    freed: bool = False

    @classmethod
    def of(cls, logged: LoggedRequest) -> Request:
        facts = logged.facts
        answer, entry = logged.answer, None
        if facts.get("entry") is not None:
            entry = as_tokens(facts["entry"])
            count = min(len(entry) + facts["shifted"] - len(logged.prompt), len(entry))
            answer = entry[len(entry) - max(count, 0) :]
        elif facts["shifted"]:
            answer = answer[: max(logged.process["context"] - len(logged.prompt), 0)]
        return cls(
            logged.prompt, answer, facts["evaluated"], entry, entry is None and facts["shifted"] > 0, facts["matched"],
            facts["entry_before"], facts.get("freed_by") is not None,
        )  # fmt: skip


class Replay:
    """The entries of one process."""

    def __init__(self, process: Mapping[str, Any], settings: Settings = AS_RUN) -> None:
        """`process`: its line of the token log."""
        self._process, self._settings = process, settings
        self._message_ends = np.array(process["message_ends"], np.int32)
        self._entries = [_Entry(process, settings) for _ in range(settings.entries)]

    def run(self, request: Request) -> Lookup:
        """What the request finds; afterwards the entry is as it leaves it."""
        if self._process.get("never_reused") or (request.freed and request.entry_before == 0):
            self.reset()
        entry = self._choose(request.prompt)
        self._entries.remove(entry)
        self._entries.append(entry)
        if request.shortened:
            _follow(entry.cache, request)
        with entry.cache.begin(request.prompt) as session:
            self._prefill(session, request.evaluated)
            if session.recorded == len(request.prompt) <= request.evaluated:
                self._decode(entry, session, request)
            return session.lookup

    def reset(self) -> None:
        for entry in self._entries:
            entry.cache.reset()

    @property
    def checkpoints(self) -> list[int]:
        """Offsets of those that the entry used last has."""
        return self._entries[-1].cache.current.checkpoints.offsets

    @property
    def tokens(self) -> TokenArray:
        """Of the entry used last."""
        return self._entries[-1].cache.current.tokens.array

    def _choose(self, prompt: TokenArray) -> _Entry:
        """The entry that has most of the prompt. If half of it or more would be dropped for that, a copy of it in the place of the least
        recently used one, and it stays as it is."""
        best = max(self._entries, key=lambda entry: entry.matched(prompt))
        matched = best.matched(prompt)
        oldest = next((entry for entry in self._entries if entry is not best or not matched), best)
        if oldest is not best and 2 * matched < len(best.cache.current.tokens):
            oldest.become(best)
            return oldest
        return best

    def _prefill(self, session: Session, evaluated: int) -> None:
        """Chunk by chunk, as `Pipeline` does it, up to `evaluated`; what was interrupted there is a pass that was not recorded."""
        prompt, step = session.prompt, self._process["prefill_step"]
        if session.needs_checkpoints:
            ends = (np.flatnonzero(np.isin(prompt, self._message_ends)) + 1).tolist()
            session.mark(places_of(len(prompt), ends))
            self._checkpoint_if_due(session)
        while session.recorded < len(prompt):
            stop = self._next_stop(session)
            while session.recorded < stop:
                chunk = session.remaining[: stop - session.recorded]
                if stop < len(prompt):
                    chunk = chunk[:step]
                session.begin_forward()
                session.end_forward(len(chunk))
                if session.recorded + len(chunk) > evaluated:
                    return
                session.record(chunk)
            if session.needs_checkpoints and stop < len(prompt):
                session.checkpoint()
            else:
                self._checkpoint_if_due(session)

    def _next_stop(self, session: Session) -> int:
        if session.needs_checkpoints:
            return session.next_stop
        return len(session.prompt) - (len(session.remaining) > SEED_TOKENS)

    def _checkpoint_if_due(self, session: Session) -> None:
        if session.needs_checkpoints and session.recorded >= session.checkpoint_due:
            session.checkpoint()

    def _decode(self, entry: _Entry, session: Session, request: Request) -> None:
        """The answer's tokens, one pass each, and a checkpoint at every interval; in a full context, the shift that the log shows."""
        shift = None if request.entry is None else _shift(request, self._process["context"])
        rest = request.answer
        while len(rest):
            count = len(rest)
            if shift is not None:
                if session.recorded >= shift.context:
                    self._make_room(session, shift)
                count = min(count, max(shift.context - session.recorded, 1))
            if session.needs_checkpoints:
                count = min(count, max(session.checkpoint_due - session.recorded, 1))
            for layer in entry.layers:
                layer.decode(count)
            session.record(rest[:count])
            rest = rest[count:]
            self._checkpoint_if_due(session)
        if request.entry is not None and not np.array_equal(
            entry.cache.entry.tokens.array, request.entry
        ):
            self._evaluate(session, session.restart(request.entry))

    def _make_room(self, session: Session, shift: Shift) -> None:
        tokens = session.tokens
        discard = shift.discard(len(tokens))
        if not session.shift(shift.keep, discard, _on_paper):
            self._evaluate(
                session, session.restart(tokens[: shift.keep] + tokens[shift.keep + discard :])
            )

    def _evaluate(self, session: Session, tokens: TokenArray) -> None:
        step = self._process["prefill_step"]
        for begin in range(0, len(tokens), step):
            chunk = tokens[begin : begin + step]
            session.begin_forward()
            session.end_forward(len(chunk))
            session.record(chunk)


def is_usable(logged: LoggedRequest) -> bool:
    """Whether a log's lines say what a replay needs, and sensibly: they may have been written by anybody."""
    process, facts = logged.process, logged.facts
    least = {
        "context": 2,
        "prefill_step": 1,
        "checkpoint_interval": 1,
        "checkpoint_budget": 0,
        "rewind_slack": 0,
    }
    try:
        marks = [mark[side] for mark in process["thinking"] for side in ("begin", "end")]
        held = [] if facts["entry"] is None else facts["entry"]
        if not all(map(are_ids, [*marks, held])) or len(process["thinking"]) > MOST_MARKS:
            return False
        began = facts.get("began_s", 0)
        if isinstance(began, bool) or not -(2**53) <= began <= 2**53:
            return False
        return all(process[name] >= low for name, low in least.items()) and all(
            map(is_layer, process["layers"])
        )
    except (KeyError, TypeError, ValueError):
        return False


class _Entry:
    """A prefix cache and its layers."""

    def __init__(self, process: Mapping[str, Any], settings: Settings) -> None:
        self.layers = [
            paper_layer(line, process["context"], settings.slack) for line in process["layers"]
        ]
        self._interval = settings.interval or process["checkpoint_interval"]
        self.cache = PrefixCache(self._caches, process["checkpoint_budget"], self._interval)

    def _caches(self) -> list[LayerCache]:
        return list(self.layers)

    def become(self, other: _Entry) -> None:
        """Hold what `other` holds."""
        held = other.cache.current
        self.layers, checkpoints = deepcopy((other.layers, held.checkpoints))
        self.cache = PrefixCache(self._caches, checkpoints.budget, self._interval)
        self.cache.entry = CacheEntry(TokenBuffer(held.tokens[:]), self._caches(), checkpoints)

    def matched(self, prompt: TokenArray) -> int:
        return common_prefix(self.cache.current.tokens.array, prompt)


def _follow(cache: PrefixCache, request: Request) -> None:
    """Move the entry as the runner did, for a prompt of which something in the middle was left out.

    What that was is seen in the entry: after the common prefix it goes on as the prompt does, some tokens later.
    """
    held, prompt = cache.current.tokens.array, request.prompt
    keep = common_prefix(held, prompt)
    if keep == min(len(held), len(prompt)) or len(held) <= request.entry_before:
        return
    gaps = np.flatnonzero(held[keep + 1 :] == prompt[keep]) + 1
    longest = max(
        ((common_prefix(held[keep + gap :], prompt[keep:]), int(gap)) for gap in gaps), default=None
    )
    if longest is not None:
        whole = np.concatenate([held[: keep + longest[1]], prompt[keep:]])
        cache.prepare(whole, keep, longest[1], _on_paper if request.matched > keep else _immovable)


def _shift(request: Request, context: int) -> Shift:
    """How the runner made room: the tokens kept are those that the entry afterwards has from the beginning."""
    assert request.entry is not None
    keep = common_prefix(request.entry, np.concatenate([request.prompt, request.answer]))
    return Shift(context, min(keep, context - 2))


def _on_paper(layers: Sequence[LayerCache], by: int) -> Sequence[Callable[[Any, int], Any]]:
    return [lambda keys, by: keys for _ in layers]


def _immovable(layers: Sequence[LayerCache], by: int) -> None:
    return None
