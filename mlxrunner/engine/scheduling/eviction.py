"""Keep conversations in idle slots, offload them to disk or evict them, and end requests.

An idle slot keeps its conversation until its cells, its bytes or the slot itself are needed. Then
the one of least value goes: see `GreedyDual` in `mlxrunner.cache.disk.index`.

`WriteBehind` writes conversations to the disk cache while they stay in memory, so that a crash
loses little. A turn is written once its slot has been idle for a moment, or soon while others keep
the engine at work. The slot may continue meanwhile: the first tokens stay as they were.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, permutations
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, runtime_checkable

from mlxrunner.cache.account import Evicted, LostTokens, TokenAccounting, are_few
from mlxrunner.cache.entry import (
    CacheEntry,
    GreedyDual,
    TokenArray,
    common_prefix,
    eviction_score,
    goes_on,
)
from mlxrunner.cache.pool.causal import CellsLayer
from mlxrunner.cache.prefix import PrefixCache
from mlxrunner.cache.protocol import END
from mlxrunner.cache.saved import SavedEntry
from mlxrunner.engine.backends.backend import Backend
from mlxrunner.engine.request import ActiveRequest
from mlxrunner.errors import CacheFullError, MlxrunnerError, StepFailedError, TimeLimitError
from mlxrunner.results import Chunk, FinishReason, Usage

if TYPE_CHECKING:
    from mlxrunner.engine.scheduling.allocation import Slot

T = TypeVar("T")
LOSSES = 4
"""Losses of tokens to remember for each slot, so that a later lookup can explain them."""
IN_ONE_PIECE = 512
"""Most tokens that are written without a pause."""


class OffloadTarget(Protocol):
    """The disk cache, as the scheduler uses it: see `mlxrunner.cache.disk.disk_cache.DiskCache`."""

    def tell(self, on_evicted: Callable[[Any, str], None]) -> None: ...

    def offload(self, entry: CacheEntry) -> Any | None: ...

    def find(self, prompt: TokenArray) -> tuple[Any, int] | None: ...

    def restore(self, parked: Any, upto: int | None = None) -> SavedEntry: ...


@runtime_checkable
class PiecewiseOffloadTarget(OffloadTarget, Protocol):
    """A place that can park a conversation in pieces."""

    def offloading(self, entry: CacheEntry) -> Generator[bool, None, Any]: ...

    def lacks(self, tokens: TokenArray) -> int: ...

    def drop(self, parked: Any) -> None: ...


class EvictionPolicy:
    """The conversations in the slots, within a budget of bytes."""

    def __init__(
        self,
        engine: Backend,
        slots: Sequence[Slot],
        *,
        memory: int | None = None,
        parking: OffloadTarget | None = None,
    ) -> None:
        """Manage what idle `slots` hold.

        `memory`: the most bytes of cells, layer caches and checkpoints; None: no limit. `parking`:
        where conversations go that find no place; None: they are lost.
        """
        self._engine, self._slots = engine, slots
        self.is_single = engine.is_single
        """True for a runner of one request at a time: its cache itself remembers what it lost."""
        self.memory, self.parking = memory, parking
        self._dual: GreedyDual[int] = GreedyDual()
        self._losses: deque[LostTokens] = deque(maxlen=LOSSES * len(slots))
        self.behind = WriteBehind(slots, parking)
        if parking is not None:
            parking.tell(lambda parked, by: self._lose(by, parked.tokens))

    @property
    def used_bytes(self) -> int:
        """Bytes that hold tokens, each shared one counted once."""
        cells = sum(group.used_bytes for group in self._engine.groups)
        apart = self._of_each_slot("used_bytes")
        return cells + apart

    @property
    def allocated_bytes(self) -> int:
        """Bytes that cells, the layers apart and checkpoints have allocated."""
        checkpoints = {
            id(item.snapshots): item.nbytes
            for slot in self._slots
            for item in slot.cache.entry.checkpoints
        }
        cells = sum(group.nbytes for group in self._engine.groups)
        return cells + self._of_each_slot("nbytes") + sum(checkpoints.values())

    def _of_each_slot(self, name: str) -> int:
        return sum(
            getattr(cache, name)
            for slot in self._slots
            for cache in slot.cache.entry.caches
            if not isinstance(cache, CellsLayer)
        )

    def use(self, slot: Slot) -> None:
        """Note that a request has just used `slot`."""
        self._dual.use(slot.number)

    def least(self, slots: Sequence[Slot]) -> Slot:
        """Return the slot that is given up first: an empty one, or the one of least worth."""
        empty = next((slot for slot in slots if not slot.tokens), None)
        if empty is not None or len(slots) == 1:
            return empty or slots[0]
        by_number = {slot.number: slot for slot in slots}
        shared = most_shared([slot for slot in self._slots if slot.tokens])
        worths = {number: _worth(slot, shared[number]) for number, slot in by_number.items()}
        return by_number[self._dual.least(worths)]

    def clear(self, slot: Slot, why: str) -> None:
        """Forget the tokens of a slot, which are not whole, because of `why`."""
        slot.exact = END
        if slot.cache.is_busy:
            slot.cache.free(why)
        else:
            slot.cache.reset(why)
        self._remember_losses()

    def distrust(self, request: ActiveRequest) -> None:
        """Drop the conversation on disk of which `request` was restored: it may hold NaN."""
        if isinstance(self.parking, PiecewiseOffloadTarget) and request.lookup.restored:
            found = self.parking.find(request.tokens)
            if found is not None:
                self.parking.drop(found[0])

    def give_up(
        self, slot: Slot, request: ActiveRequest | None, cause: Literal["slot", "memory"]
    ) -> None:
        """Empty an idle slot for `request`, and park its conversation if that is possible."""
        tokens = slot.tokens
        slot.exact = END
        if not tokens:
            return
        others = (other for other in self._slots if other is not slot and other.tokens)
        shared = max((other.shared_with(tokens.array) for other in others), default=0)
        is_kept = shared == len(tokens)
        parked = not is_kept and self._park(slot)
        if not is_kept and request is not None:
            request.evicted.append(Evicted(len(tokens), slot.number, cause, parked))
        self._dual.evict(slot.number, _worth(slot, shared))
        by = "the budget" if request is None else f"request {request.submitted}"
        slot.cache.reset(by, reason="evicted")
        if is_kept or parked:
            slot.cache.forget_loss()
        self._remember_losses()

    def rest(self, slot: Slot) -> None:
        """Keep the conversation of a slot whose request waits, until its cells are needed."""
        slot.rests = True
        self._dual.use(slot.number)

    def set_aside(self, slot: Slot, keep: int, request: ActiveRequest) -> None:
        """Park an idle slot of which `request` will keep only the first `keep` tokens.

        With several slots, the loss is remembered: a later prompt that misses the conversation, and
        for which it is not worth restoring, learns the cause. With one slot, it learns what the
        prompt of a `Runner` would.
        """
        if not goes_on(keep, len(slot.tokens)):
            self._park(slot)
            if len(self._slots) > 1:
                self._lose(f"request {request.submitted}", slot.tokens.array.copy())

    def park_all(self) -> None:
        """Park all idle conversations, before the slots are closed."""
        for slot in self.idle():
            self._park(slot)

    def find(self, prompt: TokenArray, ready: int) -> tuple[Any, int] | None:
        """Return the parked conversation to restore for `prompt`, and its tokens to restore.

        Return None unless it has many more of its tokens than the `ready` ones.
        """
        found = None if self.parking is None else self.parking.find(prompt)
        if found is None:
            return None
        parked, count = found
        return None if are_few(count - ready, ready) else (parked, count)

    def read(self, parked: Any, count: int) -> SavedEntry:
        """Return the first `count` tokens of `parked`, which stay on disk until they are read."""
        assert self.parking is not None
        return self.parking.restore(parked, count)

    def restoring(self, slot: Slot, saved: SavedEntry) -> Iterator[None]:
        """Give an empty slot the tokens of `saved`, and yield after each piece.

        The slot stays empty until the last one, also if the iterator is closed. Raise
        CacheFullError if there is no room for them.
        """
        work, count = slot.cache.adopting(saved), len(saved.tokens)
        with closing(work):
            self.make_room(partial(self._check_free, count))
            for _ in work:
                yield
                there = [group.stored(slot.number)[1] for group in self._engine.groups]
                self.make_room(partial(self._check_free, count - max(there, default=0)))

    def _check_free(self, count: int) -> None:
        """Raise CacheFullError unless `count` more tokens of a conversation find cells."""
        for group in self._engine.groups:
            needed = min(count, group.memory or count)
            if needed > group.num_free:
                raise CacheFullError("a conversation", needed, group.num_free, group.num_cells)

    def lacks_files(self, slot: Slot) -> bool:
        """Return True if parking the conversation of a slot takes long enough to do it in pieces.

        Return False if it can't be parked, or if nearly all of it is on disk already.
        """
        tokens, place = slot.tokens.array, self.parking
        if not isinstance(place, PiecewiseOffloadTarget) or slot.cache.entry.is_shifted:
            return False
        return len(tokens) > IN_ONE_PIECE and place.lacks(tokens) > IN_ONE_PIECE

    def parking_ahead(self, slot: Slot) -> Generator[None, None, None]:
        """Park the conversation of a slot, which stays there, and yield after each piece.

        It ends without parking it if the slot changes meanwhile.
        """
        assert isinstance(self.parking, PiecewiseOffloadTarget)
        entry, tokens = slot.cache.current, slot.tokens.array.copy()
        with closing(self.parking.offloading(entry)) as work:
            for _ in work:
                yield
                is_as_it_was = len(slot.tokens) == len(tokens) == slot.shared_with(tokens)
                if slot.cache.entry is not entry or not is_as_it_was:
                    return

    def make_room(self, act: Callable[[], T], request: ActiveRequest | None = None) -> T:
        """Call `act` and return its result, after giving up idle slots if it lacks cells.

        Raise CacheFullError if no slot is left to give up.
        """
        while True:
            try:
                return act()
            except CacheFullError:
                idle = self.idle()
                if not idle:
                    raise
                self.give_up(self.least(idle), request, "memory")

    def fit(self, request: ActiveRequest | None = None) -> None:
        """Give up idle slots until all are within the budget, as far as that helps."""
        if self.memory is None:
            return
        while self.allocated_bytes > self.memory:
            idle = [slot for slot in self.idle() if _frees(slot)]
            if not idle:
                return
            self.give_up(self.least(idle), request, "memory")

    def explain(self, cache: PrefixCache, prompt: TokenArray) -> None:
        """Let the next lookup of `cache` report the loss that `prompt` misses most."""
        if self.is_single:
            return
        self._remember_losses()
        shared = [common_prefix(loss.tokens, prompt) for loss in self._losses]
        if any(shared):
            index = shared.index(max(shared))
            loss = self._losses[index]
            if goes_on(shared[index], len(loss.tokens)):  # else its own conversation may come
                del self._losses[index]
            cache.lose(loss.reason, loss.by, loss.tokens)

    def idle(self) -> list[Slot]:
        """Return the slots whose conversations can be given up."""
        return [slot for slot in self._slots if slot.tokens and (slot.rests or not slot.is_busy)]

    def _park(self, slot: Slot) -> bool:
        """Write the conversation of an idle slot to disk; return False if that is not possible."""
        if self.parking is None:
            return False
        return self.parking.offload(slot.cache.current) is not None

    def _lose(self, by: str, tokens: TokenArray) -> None:
        self._losses.append(LostTokens("evicted", by, tokens))

    def _remember_losses(self) -> None:
        """Take over what the slots have lost: any later prompt may miss it."""
        for slot in () if self.is_single else self._slots:
            if not slot.cache.is_busy and (loss := slot.cache.forget_loss()) is not None:
                self._losses.append(loss)


def most_shared(slots: Sequence[Slot]) -> dict[int, int]:
    """Return how many first tokens of each slot another one holds exactly, by its number."""
    pairs: Iterable[tuple[Slot, Slot]] = permutations(slots, 2)
    if all(slot.exact >= len(slot.tokens) for slot in slots):  # else some are shifted
        # In this order, the one that shares most is a neighbour.
        ordered = sorted(slots, key=lambda slot: slot.tokens.array.tobytes())
        pairs = [*pairwise(ordered), *pairwise(ordered[::-1])]
    shared = dict.fromkeys((slot.number for slot in slots), 0)
    for one, other in pairs:
        found = other.shared_with(one.tokens.array)
        shared[one.number] = max(shared[one.number], found)
    return shared


def _worth(slot: Slot, shared: int) -> float:
    """Return what it costs to evaluate the conversation of a slot again, per byte.

    `shared`: its first tokens that another slot has, too.
    """
    entry = slot.cache.entry
    nbytes = entry.used_bytes + entry.checkpoints.nbytes
    return eviction_score(len(slot.tokens), nbytes, shared)


def _frees(slot: Slot) -> bool:
    """Return True if giving up an idle slot frees bytes: its cells stay allocated."""
    entry = slot.cache.entry
    apart = (cache.nbytes for cache in entry.caches if not isinstance(cache, CellsLayer))
    return bool(sum(apart) or entry.checkpoints.nbytes)


Ended = Callable[[ActiveRequest, FinishReason | None, str | None], Usage]
"""A function of an ended request, its finish reason, and the name of its error."""


class RequestFinalizer:
    """The ends of the requests of a scheduler."""

    def __init__(
        self,
        requests: list[ActiveRequest],
        residents: EvictionPolicy,
        accounting: TokenAccounting,
        moment: Callable[[], tuple[int, int]],
        tell: Ended,
    ) -> None:
        """End some of `requests`, the running ones.

        `accounting` counts their tokens. `moment` returns that of `Scheduler.moment`. `tell` is
        called for each request at its end.
        """
        self._requests, self._residents = requests, residents
        self._accounting, self._moment, self._tell = accounting, moment, tell

    def end_overdue(self) -> None:
        """End the requests whose deadline has come."""
        now = time.perf_counter()
        for request in list(self._requests):
            if request.due is not None and request.due <= now:
                request.ending = "cancelled"
                self.fail(request, TimeLimitError(request.deadline or 0))

    def fail_alone(self, request: ActiveRequest, error: Exception) -> None:
        """End one request with a StepFailedError about `error`."""
        request.ending = "failed"
        why = StepFailedError(f"this request made a step fail: {_named(error)}")
        why.__cause__ = error
        self.fail(request, why, type(error).__name__)

    def fail(self, request: ActiveRequest, error: MlxrunnerError, name: str | None = "") -> None:
        """End a request with `error`. `name`: the recorded name of the error.

        None stands for an interrupt, and "" for the name of the error's class.
        """
        request.error = error
        self.retire(request, error=type(error).__name__ if name == "" else name)

    def retire(
        self,
        request: ActiveRequest,
        reason: FinishReason | None = None,
        error: str | None = None,
        last: Chunk | None = None,
    ) -> None:
        """End a request and free its slot, whose tokens stay for others to share.

        A sampled token that was not read yet is dropped.
        """
        request.stop_offload_task()
        if request.drafting is not None:
            request.drafting.close()
        slot = request.slot
        if request.is_placed:
            if not self._residents.is_single:
                slot.tokens.truncate(slot.exact)
            request.lease.close()
        self._residents.fit(request)
        request.ended = moment = self._moment()
        request.close_account(self._accounting)
        usage = self._tell(request, reason, error)
        if last is not None:
            request.chunks.append(replace(last, usage=usage))
        request.finished = True
        self._requests.remove(request)
        slot.is_busy, slot.rests = False, False
        slot.last_used, slot.asked = (
            moment[0],
            min(len(request.tokens), len(slot.tokens)),
        )
        slot.planned, slot.exact = slot.planned[:0], END
        if not self._residents.is_single:
            slot.cache.entry.forget_shift()
        self._residents.use(slot)
        self._residents.behind.note(slot)
        self._residents.fit()


def step_failed(error: BaseException) -> StepFailedError:
    return StepFailedError(
        f"a step that carried this request, and others, was ended by {_named(error)}: "
        "submit it again"
    )


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


QUIET_S = 0.5
"""Seconds after the end of a conversation's last turn until it is written, if nothing runs.

A tool's result often comes within this time, and then one save has both turns.
"""
BUSY_S = 3.0
"""Seconds after its end until a turn is written between the steps of others."""
LATE_S = 5.0
"""Seconds after its end from which on a turn is written although answers have fallen behind."""
POLL_S = 0.01
"""Seconds between two looks at a file that a thread writes."""
IDLE_S = 0.02
"""Seconds of work, if nothing runs, until new requests are looked for."""
DAY_S = 86_400.0
SAVES = 2
"""The last saves of a conversation that stay on disk.

A prompt that leaves the last one, as a regenerated answer does, may continue from the one before.
"""

logger = logging.getLogger("mlxrunner")


@runtime_checkable
class SaveTarget(Protocol):
    """The disk cache, as it saves what stays in memory: see `DiskCache`."""

    daily_bytes: int
    written: int

    def saving(
        self, entry: CacheEntry, upto: int, replaces: Any = None
    ) -> Generator[bool, None, Any]: ...


@dataclass(frozen=True)
class UnsavedTurns:
    """The turns of a slot that have ended since it was saved."""

    first: float
    """The moment at which the first of them ended."""
    last: float
    tokens: int
    """Tokens in the slot at the end of the last one."""

    def due(self, *, is_idle: bool) -> float:
        """Return the moment from which on they are written. `is_idle`: nothing runs."""
        return self.last + QUIET_S if is_idle else self.first + BUSY_S


class WriteBehind:
    """The turns that are not on disk yet, and the save under way."""

    def __init__(self, slots: Sequence[Slot], place: object) -> None:
        """Save what `slots` hold in `place`, if it is a SaveTarget that takes some bytes a day."""
        self._slots = slots
        is_on = isinstance(place, SaveTarget) and place.daily_bytes > 0
        self._place = place if is_on and isinstance(place, SaveTarget) else None
        self._ended: dict[int, UnsavedTurns] = {}
        """The turns of each slot that are not on disk."""
        self._saved: dict[int, list[Any]] = {}
        """The last saves of each slot."""
        self._work: Generator[bool, None, None] | None = None
        self._of = 0.0
        """The end of the turn that is being saved."""
        self._again = 0.0
        """The moment before which a save that waits for the disk is not looked at."""
        self._left = 0.0 if self._place is None else float(self._place.daily_bytes)
        """Bytes that may be written now; as many come back in a day as are written in one."""
        self._counted, self._looked, self._is_told = 0, time.monotonic(), False

    def note(self, slot: Slot) -> None:
        """Note that a turn has ended in `slot`."""
        if self._place is not None and slot.tokens:
            now, before = time.monotonic(), self._ended.get(slot.number)
            first = now if before is None else before.first
            self._ended[slot.number] = UnsavedTurns(first, now, len(slot.tokens))

    def wait_s(self, *, is_idle: bool) -> float | None:
        """Return the seconds until there is something to do; None: nothing before the next turn."""
        now = time.monotonic()
        if self._work is not None:
            return max(0.0, self._again - now)
        if not self._ended:
            return None
        due = min(one.due(is_idle=is_idle) for one in self._ended.values())
        return max(0.0, due - now, self._pause_s(now))

    @property
    def is_late(self) -> bool:
        """True if a turn is overdue: its save then takes time from running answers."""
        now = time.monotonic()
        if self._work is not None:
            return self._of + LATE_S < now and self._again <= now
        return any(one.first + LATE_S < now for one in self._ended.values())

    def go_on(self, seconds: float, *, is_idle: bool) -> None:
        """Save for about some seconds. Stop earlier where a thread waits for the disk.

        A turn that is late is waited for.
        """
        until = time.monotonic() + seconds
        while (work := self._work or self._next(is_idle=is_idle)) is not None:
            waits, now = next(work, None), time.monotonic()
            self._work = None if waits is None else work
            if waits:
                self._again = now + POLL_S
            if now >= until or (waits and now < self._of + LATE_S):
                return
            if waits:
                time.sleep(POLL_S)

    def stop(self) -> None:
        """Leave a save undone."""
        work, self._work = self._work, None
        if work is not None:
            work.close()

    def _next(self, *, is_idle: bool) -> Generator[bool, None, None] | None:
        """Return the save of the turns that are due first; None if none are due."""
        if self.wait_s(is_idle=is_idle) != 0:
            return None
        number = min(self._ended, key=lambda number: self._ended[number].due(is_idle=is_idle))
        turns, slot = self._ended.pop(number), self._slots[number]
        self._of = turns.first
        return self._saving(slot, min(turns.tokens, len(slot.tokens)))

    def _saving(self, slot: Slot, upto: int) -> Generator[bool, None, None]:
        """Save the first `upto` tokens of a slot. End without it if the slot drops some of them."""
        assert self._place is not None
        entry = slot.cache.entry if slot.is_busy else slot.cache.current
        tokens, saved = slot.tokens.array[:upto].copy(), self._saved.get(slot.number, [])
        if not len(tokens) or slot.shared_with(tokens) < len(tokens):
            return
        replaces = saved[0] if len(saved) == SAVES else None
        with closing(self._place.saving(entry, len(tokens), replaces)) as work:
            while True:
                try:
                    waits = next(work)
                except StopIteration as done:
                    found = done.value
                    break
                yield waits
                if slot.cache.entry is not entry or slot.shared_with(tokens) < len(tokens):
                    return
        if found is not None and found not in saved:
            seconds = time.monotonic() - self._of
            logger.debug("%d tokens are on disk, %.2f s after a turn's end", len(tokens), seconds)
            self._saved[slot.number] = [*saved, found][-SAVES:]

    def _pause_s(self, now: float) -> float:
        """Return the seconds until something may be written; say so once if it has to wait."""
        assert self._place is not None
        each = self._place.daily_bytes / DAY_S
        self._left = min(self._left + (now - self._looked) * each, self._place.daily_bytes)
        self._left -= self._place.written - self._counted
        self._looked, self._counted = now, self._place.written
        if self._left > 0:
            self._is_told = False
            return 0.0
        if not self._is_told:
            self._is_told = True
            logger.warning(
                "idle conversations are not written to disk for %d s: %d bytes a day are the most "
                "(disk_write_bytes); a crash would lose their last turns",
                -self._left // each + 1,
                self._place.daily_bytes,
            )
        return -self._left / each + POLL_S
