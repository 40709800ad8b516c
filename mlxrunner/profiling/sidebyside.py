"""Replay requests that ran side by side: the real scheduler, on paper. Nothing is computed, and no model is loaded.

Who gets which slot, who waits for whom, what a window still has and who lacks room is decided by
`mlxrunner.parallel.scheduler` and `mlxrunner.cache.cells` themselves. Here are just requests that
say again what the log says they said, and the order in which they are submitted and cancelled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrunner.answer import Answer, Clock
from mlxrunner.cache.causal import CausalCache
from mlxrunner.cache.lookup import Lookup
from mlxrunner.cache.sequences import Batch, CacheFullError
from mlxrunner.cache.tokens import TokenArray
from mlxrunner.config import GenerateOptions
from mlxrunner.errors import FormError, MlxrunnerError
from mlxrunner.events import Chunk, FinishReason, Usage
from mlxrunner.observation import usage_of
from mlxrunner.overflow import Shift
from mlxrunner.parallel.adapt import Engine
from mlxrunner.parallel.request import Request
from mlxrunner.parallel.scheduler import Scheduler
from mlxrunner.parallel.slots import NoFreeSlotError
from mlxrunner.profiling.tokenlog import LoggedRequest
from mlxrunner.sampling import Decoded, NextToken, Sampled
from mlxrunner.tokenizer.prompt import Prepared

MOST_CELLS = 2**28
"""Slots times cells that are looked at on paper, a byte each."""
ENDINGS = ("own", "cancelled", "forgotten", "no room", "no token")


class SideBySide:
    """The requests of one process that ran in slots."""

    def __init__(self, process: Mapping[str, Any]) -> None:
        """`process`: its line of the token log."""
        self.process = process
        self.requests: list[LoggedRequest] = []

    def as_run(self) -> list[Request]:
        """Each of them, submitted and ended when the log says so, with what it found; in the log's order."""
        paper = self._paper(self.process["max_sequences"])
        made = [paper.request(logged) for logged in self.requests]
        for moment, request, ending in sorted(
            self._events(made), key=lambda event: (event[0], event[2] == "begins")
        ):
            paper.advance(*moment)
            if ending == "forgotten":
                paper.scheduler.forget_everything(MlxrunnerError("as the log says"))
            elif ending == "cancelled":
                paper.scheduler.cancel(request)
            else:
                paper.begin(request)
        paper.finish()
        return made

    def packed(self, slots: int | None = None, *, by_prefix: bool = False) -> list[Request]:
        """The same, but each begins as soon as one of so many slots (None: as many as there were) is free.

        In the order in which they began, or in that of their tokens. One that was ended from outside ends with its last token.
        """
        paper = self._paper(slots or self.process["max_sequences"])
        made = [paper.request(logged, ends_itself=True) for logged in self.requests]
        pairs = list(zip(self.requests, made, strict=True))
        if by_prefix:
            pairs.sort(key=lambda pair: pair[0].prompt.astype(">i4").tobytes())
        else:
            pairs.sort(key=lambda pair: pair[0].facts["beside"]["began"])
        for _, request in pairs:
            paper.begin(request)
        paper.finish()
        return made

    def _events(self, made: Sequence[Request]) -> Iterator[tuple[list[int], Request, str]]:
        for logged, request in zip(self.requests, made, strict=True):
            beside = logged.facts["beside"]
            yield beside["began"], request, "begins"
            if beside["ending"] in ("cancelled", "forgotten"):
                yield beside["ended"], request, beside["ending"]

    def _paper(self, slots: int) -> _Paper:
        is_movable = not any(logged.facts["beside"]["stuck"] for logged in self.requests)
        longest = max(
            (len(logged.prompt) + logged.facts["beside"]["sampled"] for logged in self.requests),
            default=1,
        )
        return _Paper(self.process, slots, longest, is_movable=is_movable)


def can_be_replayed(logged: LoggedRequest) -> bool:
    """Return True if a log says of a request among others what a replay needs, and sensibly."""
    process = logged.process
    if "beside" not in logged.facts:
        return False
    try:
        return (
            _is_process(process) and len(logged.prompt) < process["context"] and _is_beside(logged)
        )
    except (KeyError, TypeError, ValueError):
        return False


def has_room(process: Mapping[str, Any], slots: int) -> bool:
    """Return True if so many slots are few enough to be replayed."""
    cells: int = max(process["cells"], slots * process["context"])
    return slots * (cells + slots) <= MOST_CELLS


def _is_process(process: Mapping[str, Any]) -> bool:
    slots, context, cells, most = (
        process[name] for name in ("max_sequences", "context", "cells", "max_batch")
    )
    return (
        all(_is_count(size, 1) for size in (slots, context, cells, most))
        and min(slots, context) > 1
        and slots <= most <= MOST_CELLS
        and has_room(process, slots)
        and all(
            layer["kind"] == "full" or (layer["kind"] == "sliding" and layer["window"])
            for layer in process["layers"]
        )
    )


def _is_beside(logged: LoggedRequest) -> bool:
    beside, answer = logged.facts["beside"], len(logged.answer)
    said, sampled, keep = beside["said"], beside["sampled"], beside["keep"]
    (began, call), (ended, last_call) = beside["began"], beside["ended"]
    counts = [said, sampled, began, call, ended, last_call, keep or 0, beside["slot"]]
    return (
        all(map(_is_count, counts))
        and _is_count(beside["limit"], 1)
        and answer == min(said, max(sampled - 1, 0))
        and said <= sampled <= answer + 2
        and (began, call) <= (ended, last_call)
        and (keep is None or keep <= logged.process["context"] - 2)
        and beside["ending"] in ENDINGS
        and isinstance(beside["stuck"], bool)
    )


def _is_count(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value <= 2**53


class _Paper:
    """A scheduler on paper, and the calls it gets."""

    def __init__(
        self, process: Mapping[str, Any], slots: int, longest: int, *, is_movable: bool
    ) -> None:
        """`longest`: tokens of a prompt and its answer at most."""
        self._capacity, cells = process["context"], process["cells"]
        share = -(-cells // slots)
        if (
            cells >= process["max_sequences"] * self._capacity
        ):  # enough for all: as many as are used do as well, and are faster
            cells, share = slots * self._capacity, min(self._capacity, longest)
        most = max(process["max_batch"], slots)
        windows = [
            layer["window"] or 0 if layer["kind"] == "sliding" else 0 for layer in process["layers"]
        ]
        engine = PaperEngine(windows, is_movable=is_movable)
        engine.cache.init(mx.float32, slots, share, most)
        self.scheduler = Scheduler(
            engine, slots, capacity=self._capacity, cells=cells, max_batch=most, ended=_usage
        )
        self._call = 0

    def request(self, logged: LoggedRequest, *, ends_itself: bool = False) -> Request:
        """One that says what `logged` said; `ends_itself`: also if it was ended by somebody else."""
        beside, prompt = logged.facts["beside"], logged.prompt
        own = ends_itself or beside["ending"] == "own"
        said = beside["said"] if own else 0
        shift = None if beside["keep"] is None else Shift(self._capacity, beside["keep"])
        return Request(
            prompt, GenerateOptions(), beside["limit"], _Answer(said), Clock(0.0, 0.0), _NextToken(logged.answer, beside["sampled"]),
            Prepared(prompt), Lookup(len(prompt), 0, 0, 0), shift=shift,
        )  # fmt: skip

    def advance(self, tick: int, call: int) -> None:
        """Go on to the call before this one. Calls that nobody logged were submissions in vain: they let those that wait look."""
        scheduler = self.scheduler
        while scheduler.ticks < tick and self._step():
            self._call = 0
        if scheduler.ticks < tick:
            scheduler.ticks, self._call = tick, 0
        if call > self._call + 1:
            scheduler.place_waiting()
        self._call = call

    def begin(self, request: Request) -> None:
        """As soon as there is room. What never fits finds nothing."""
        while True:
            try:
                self.scheduler.admit(request)
            except (NoFreeSlotError, CacheFullError):
                if not self._step():
                    return
            else:
                return

    def finish(self) -> None:
        """Let all end that still run."""
        while self._step():
            pass

    def _step(self) -> bool:
        """False if there was nothing to do: as many steps as one likes change nothing then."""
        was_idle = self.scheduler.is_idle
        if not self.scheduler.requests:
            return False
        self.scheduler.step()
        return not (was_idle and self.scheduler.is_idle)


class PaperEngine(Engine):
    """Cells without rows: each forward pass finds its place, and that is all."""

    def __init__(self, windows: Sequence[int], *, is_movable: bool) -> None:
        self._is_movable = is_movable
        super().__init__(windows)
        self._logits = mx.zeros((1, 1))

    def forward(self, tokens: mx.array, batch: Batch, rows: Sequence[int]) -> mx.array:
        self.cache.start_forward(batch)
        return self._logits

    def expect(self, sequence: int, count: int) -> None:
        """Where tokens lie makes no difference here."""

    def _make_group(self, window: int | None, memory: int | None) -> CausalCache:
        return _PaperCells(_stay if self._is_movable else None, window, memory)


class _PaperCells(CausalCache):
    """Nobody looks at the mask."""

    def start_forward(self, batch: Batch, reserve: bool = False) -> None:
        placed = self._place(batch)
        self._undo = placed.before, None
        self._cells = placed.after


class _Answer(Answer):
    """Ends with token number `said`; 0: it does not."""

    def __init__(self, said: int) -> None:
        self._said, self.count = said, 0

    def take(self, one: Decoded, clock: Clock) -> Chunk:
        self.count += 1
        reason: FinishReason | None = "stop" if self.count == self._said else None
        return Chunk("", one.token, finish_reason=reason)


class _NextToken(NextToken):
    """The tokens of an answer again, and as many others as were sampled without being run. FormError for one more."""

    def __init__(self, answer: TokenArray, sampled: int) -> None:
        self._tokens = np.append(answer, np.zeros(sampled - len(answer), np.int32))
        self._count = 0

    @property
    def is_plain(self) -> bool:
        return False

    def __call__(self, logits: mx.array, history: mx.array | None = None) -> Sampled:
        if self._count == len(self._tokens):
            raise FormError(self._count, "the log has no more tokens")
        self._count += 1
        return Sampled(mx.array(self._tokens[self._count - 1 : self._count]))


def _stay(layer: int, keys: mx.array, offsets: mx.array) -> mx.array:
    return keys


def _usage(request: Request, reason: FinishReason | None, error: str | None) -> Usage:
    nothing: dict[str, Any] = dict.fromkeys(
        ("trimmed_tokens", "shifted_tokens", "reevaluated_tokens", "cache_bytes", "peak_bytes"), 0
    )
    return usage_of(request.lookup, request.clock, 0, prefill_s=0.0, **nothing)
