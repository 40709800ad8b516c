"""Replay requests that ran side by side, with the real scheduler. Nothing is computed.

`mlxrunner.parallel.scheduling` and `mlxrunner.cache.pool.cells` themselves decide who gets which
slot, who waits for whom, what a window still has, and who lacks room. This module has the order in
which requests come and end; those of `runner.py` repeat the answers of the log.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mlxrunner.batch.order import order_of
from mlxrunner.batch.records import sort_key
from mlxrunner.cache.tokens import TokenArray
from mlxrunner.parallel.scheduling.request import ActiveRequest
from mlxrunner.profiling.record.tokenlog import LoggedRequest
from mlxrunner.profiling.replay.runner import Interrupt, ReplayedRunner, most_of_step

MOST_CELLS = 2**28
"""The most slots times cells of a replay, which takes a byte for each."""
BLOCK = 16
"""Tokens that are compared at once to find the conversation of a request."""
FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""An odd number, for hashes of tokens."""
ENDINGS = ("own", "cancelled", "forgotten", "failed", "no room", "no token")
"""The ways in which a request may end."""


class SideBySide:
    """The requests of one process that ran in slots."""

    def __init__(self, process: Mapping[str, Any]) -> None:
        """Begin without requests. `process` is its line of the token log."""
        self.process = process
        self.requests: list[LoggedRequest] = []

    def as_run(self) -> list[ActiveRequest]:
        """Return the requests with their lookups, submitted and ended as the log says.

        They come in the log's order.
        """
        runner = self._runner(self.process["max_sequences"])
        made = [runner.request(logged) for logged in self.requests]
        for logged in self.requests:
            runner.failing.update(logged.facts["beside"].get("failures", ()))
        for moment, request, ending in sorted(
            self._events(made), key=lambda event: (event[0], event[2] == "begins")
        ):
            if request.finished:
                continue
            if ending == "forgotten" and not moment[1]:
                runner.interrupt(moment[0], list(zip(made, self.requests, strict=True)))
                continue
            runner.advance(*moment)
            if ending == "forgotten":
                runner.scheduler.forget_everything(Interrupt())
            elif ending == "cancelled":
                runner.scheduler.cancel(request)
            else:
                runner.begin(request)
        runner.finish()
        return made

    def packed(self, slots: int | None = None, *, by_prefix: bool = False) -> list[ActiveRequest]:
        """Return the requests with their lookups if each begins as soon as it can.

        `slots` is the number of slots; None for that of the runner. The requests begin in the order
        of the log's begins, or with `by_prefix` in that of a batch. One that continues a
        conversation waits for the answer before, and lets later ones pass. A request that was ended
        from outside ends with its last token.
        """
        runner = self._runner(slots or self.process["max_sequences"])
        logged = self.requests
        waits = [None] * len(logged) if by_prefix else continued(logged)
        made = [runner.request(one, ends_itself=True) for one in logged]
        order = sorted(range(len(logged)), key=lambda i: logged[i].facts["beside"]["began"])
        if by_prefix:
            keys = [sort_key(logged[i].prompt) for i in order]
            order = [order[place] for place in order_of(keys)]
        runner.begin_all(
            [(made[i], None if (before := waits[i]) is None else made[before]) for i in order]
        )
        return made

    def _events(
        self, made: Sequence[ActiveRequest]
    ) -> Iterator[tuple[list[int], ActiveRequest, str]]:
        """Yield the begin of each request, and its end if it was ended from outside."""
        for logged, request in zip(self.requests, made, strict=True):
            beside = logged.facts["beside"]
            yield beside["began"], request, "begins"
            if beside["ending"] in ("cancelled", "forgotten"):
                yield beside["ended"], request, beside["ending"]

    def _runner(self, slots: int) -> ReplayedRunner:
        is_movable = not any(logged.facts["beside"]["stuck"] for logged in self.requests)
        longest = max(
            (len(logged.prompt) + logged.facts["beside"]["sampled"] for logged in self.requests),
            default=1,
        )
        return ReplayedRunner(self.process, slots, longest, is_movable=is_movable)


def can_be_replayed(logged: LoggedRequest) -> bool:
    """Return True if a log says what the replay of a request beside others needs."""
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
    """Return True if a replay with `slots` slots is small enough."""
    cells: int = max(process["cells"], slots * process["context"])
    return slots * (cells + slots) <= MOST_CELLS


def _is_process(process: Mapping[str, Any]) -> bool:
    """Return True if the line of a process has possible values."""
    slots, context, cells = (process[name] for name in ("max_sequences", "context", "cells"))
    most = most_of_step(process)
    return (
        all(_is_count(size, 1) for size in (slots, context, cells, most))
        and _is_count(process.get("memory") or 1, 1)
        and _is_count(process.get("park_bytes", 0))
        and context > 1
        and slots <= most <= MOST_CELLS
        and has_room(process, slots)
    )


def _is_beside(logged: LoggedRequest) -> bool:
    """Return True if what the log says of a request beside others is possible."""
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
        and all(map(_is_count, beside.get("failures", ())))
    )


def _is_count(value: Any, least: int = 0) -> bool:
    """Return True if `value` is a whole number of at least `least`."""
    return type(value) is int and least <= value <= 2**53


def continued(requests: Sequence[LoggedRequest]) -> list[int | None]:
    """Return for each request the index of the one whose answer it waited for; None: none.

    A request goes on with a conversation if the whole prompt of another one, which had ended when
    it began, is its beginning. Of all that had ended it waited for the one with the longest common
    beginning, in blocks of tokens, and of several for the last.
    """
    besides = [logged.facts["beside"] for logged in requests]
    moments = [(tuple(beside["began"]), 1, index) for index, beside in enumerate(besides)]
    moments += [(tuple(beside["ended"]), 0, index) for index, beside in enumerate(besides)]
    found: list[int | None] = [None] * len(requests)
    whole: set[int] = set()
    last: dict[int, int] = {}
    for _, is_begin, index in sorted(moments):
        hashes = _hashes(requests[index].prompt)
        blocks = hashes[BLOCK - 1 :: BLOCK]
        if not is_begin:
            whole.add(hashes[-1])
            last.update(dict.fromkeys(blocks, index))
        elif not whole.isdisjoint(hashes[:-1]):
            found[index] = next((last[one] for one in reversed(blocks) if one in last), None)
    return found


def _hashes(tokens: TokenArray) -> list[int]:
    """Return a hash of each beginning of `tokens`."""
    factors = np.cumprod(np.full(len(tokens), FACTOR, np.uint64))
    hashes: list[int] = np.cumsum((tokens + np.uint64(1)) * factors).tolist()
    return hashes
