"""The one entry: the tokens that were evaluated and one cache per layer, and the session that a request holds on it.

Bookkeeping only: it never imports mlx. The invariant after every request, however it ended: each layer's offset equals
`len(entry.tokens)`, or the entry is empty. Tokens are recorded after the forward pass that evaluated them, so an interrupt at any
moment leaves layers that are at or ahead of the tokens, and settling rewinds them to the tokens or frees the entry.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from mlxrunner.cache.checkpoints import INTERVAL, Checkpoint, Checkpoints, Places
from mlxrunner.cache.layer import LayerCache, reach
from mlxrunner.cache.lookup import WINDOW, Early, Lookup, Loss, explained
from mlxrunner.cache.saved import Exported, SavedCheckpoint, SavedEntry
from mlxrunner.cache.tokens import TokenArray, TokenBuffer, as_tokens, common_prefix
from mlxrunner.errors import BusyError, PromptError

logger = logging.getLogger("mlxrunner")

Rotators = Callable[[Sequence[LayerCache], int], Sequence[Callable[[Any, int], Any]] | None]
"""How each layer's keys move by so many positions, or None where some can't (see `mlxrunner.cache.rotate`)."""


@dataclass
class CacheEntry:
    """Evaluated `tokens`, one cache per layer that holds exactly them, and checkpoints of what those can't rewind."""

    tokens: TokenBuffer = field(default_factory=TokenBuffer)
    caches: list[LayerCache] = field(default_factory=list)
    checkpoints: Checkpoints = field(default_factory=lambda: Checkpoints(0))
    is_shifted: bool = False
    """Whether tokens were moved in it: what it holds is then not what a cold run would store (see README, Limits)."""

    @property
    def offsets(self) -> list[int]:
        return [cache.offset for cache in self.caches]

    @property
    def is_true(self) -> bool:
        """The invariant."""
        return all(offset == len(self.tokens) for offset in self.offsets) and bool(
            self.caches or not self.tokens
        )

    @property
    def nbytes(self) -> int:
        """Bytes allocated by all layers and checkpoints."""
        return sum(cache.nbytes for cache in self.caches) + self.checkpoints.nbytes

    def reach(self, to: int) -> tuple[int, str | None]:
        """The largest offset <= `to` that the entry can be rewound to, with a checkpoint or without, and the kind that limits it."""
        direct, limited_by = reach(self.caches, to)
        for checkpoint in self.checkpoints.before(to):
            if checkpoint.offset <= direct:
                break
            if all(
                cache.needs_checkpoints or cache.can_rewind(checkpoint.offset)
                for cache in self.caches
            ):
                return checkpoint.offset, limited_by if checkpoint.offset < to else None
        return direct, limited_by

    def rewind(self, to: int) -> None:
        """Every layer to `to`, by itself or from the checkpoint there; safe to repeat after an interrupt."""
        checkpoint = self.checkpoints.at(to)
        for index, cache in enumerate(self.caches):
            if checkpoint is None or cache.can_rewind(to):
                cache.rewind(to)
            else:
                cache.restore(checkpoint.snapshots[index], to)
        self.checkpoints.truncate(to)

    @property
    def used_bytes(self) -> int:
        """Bytes that hold the entry's tokens."""
        return sum(cache.used_bytes for cache in self.caches)

    def export(self) -> Exported:
        """Everything the entry holds, as views of its buffers: to be copied before the next request."""
        checkpoints = [
            SavedCheckpoint(
                item.offset,
                item.role,
                [
                    None if kept is None else cache.export(kept)
                    for cache, kept in zip(self.caches, item.snapshots, strict=True)
                ],
            )
            for item in self.checkpoints
        ]
        return Exported(
            self.tokens.array.copy(),
            [cache.export() for cache in self.caches],
            checkpoints,
            not self.is_shifted,
        )

    def adopt(self, saved: SavedEntry) -> None:
        """Fill an empty entry, layer by layer. ValueError where what was saved does not belong together."""
        offset = len(saved.tokens)
        for cache, layer in zip(self.caches, saved.layers, strict=True):
            cache.adopt(layer, offset)
        for item in saved.checkpoints:
            if not 0 < item.offset <= offset:
                raise ValueError(f"a checkpoint is at {item.offset} of {offset} tokens")
            pairs = zip(self.caches, item.layers, strict=True)
            snapshots = [
                None if kept is None else cache.snapshot_of(kept, item.offset)
                for cache, kept in pairs
            ]
            if any(
                cache.needs_checkpoints and kept is None
                for cache, kept in zip(self.caches, snapshots, strict=True)
            ):
                raise ValueError(f"the checkpoint at {item.offset} lacks a layer")
            nbytes = sum(snapshot.nbytes for snapshot in snapshots if snapshot is not None)
            self.checkpoints.add(Checkpoint(item.offset, nbytes, snapshots, item.role))
        self.tokens.extend(saved.tokens)
        self.is_shifted = not saved.is_exact
        if not self.is_true:
            raise ValueError(
                f"its layers are at {sorted(set(self.offsets))}, and it has {offset} tokens"
            )

    def shift(self, keep: int, discard: int, rotate: Rotators) -> bool:
        """Drop the tokens `keep .. keep + discard` and move the others up, in every layer; False, and nothing changed, if one can't.

        Until it is done the entry's tokens are the first `keep`: an interrupt leaves those, or nothing.
        """
        if discard <= 0 or not all(cache.can_shift(keep, discard) for cache in self.caches):
            return False
        ways = rotate(self.caches, -discard)
        if ways is None:
            return False
        tail = self.tokens[keep + discard :]
        self.is_shifted = True
        self.tokens.truncate(keep)
        self.checkpoints.truncate(keep)
        for cache, way in zip(self.caches, ways, strict=True):
            cache.shift(keep, discard, way)
        self.tokens.extend(tail)
        return True


class PrefixCache:
    """Keeps one entry and lends it to one request at a time."""

    def __init__(
        self,
        make_caches: Callable[[], list[LayerCache]],
        checkpoint_budget: int = 0,
        checkpoint_interval: int = INTERVAL,
    ) -> None:
        """`make_caches`: empty caches for the model; `checkpoint_budget`: bytes that checkpoints may take, `checkpoint_interval`: tokens
        between them where that is enough."""
        self._make_caches, self.checkpoint_budget = make_caches, checkpoint_budget
        self.checkpoint_interval = checkpoint_interval
        self._caches: list[LayerCache] | None = None  # made once; freed ones are used again
        self.entry = CacheEntry()
        self._loss: Loss | None = None
        self._restored_from: str | None = None
        self._early: Early | None = None
        self._awaited: SavedEntry | None = None
        # Weak: a request whose end was itself interrupted must not keep the entry for ever.
        self._session: weakref.ref[Session] | None = None
        self._settled = True

    @property
    def freed_by(self) -> str | None:
        """What gave the entry up, if something did since the last request."""
        return None if self._loss is None else self._loss.by

    @property
    def is_busy(self) -> bool:
        return self._session is not None and self._session() is not None

    @property
    def current(self) -> CacheEntry:
        """The entry, settled first if the end of the last request was interrupted, and read if it was taken over."""
        if not self.is_busy:
            if not self._settled:
                self.settle()
            self._read_awaited()
        return self.entry

    def begin(self, prompt: Sequence[int] | TokenArray, *, ahead: bool = False) -> Session:
        """A session for `prompt`, to be used as a context manager. PromptError for an empty prompt, BusyError if one is open.

        `ahead`: nobody has asked for it yet, so that one that ends early is no interrupted request.
        """
        if self.is_busy:
            raise BusyError()
        tokens = as_tokens(prompt)
        if len(tokens) == 0:
            raise PromptError("the prompt is empty: at least one token is needed")
        return Session(self, tokens, ahead=ahead)

    def _fresh_entry(self) -> CacheEntry:
        checkpoints = Checkpoints(self.checkpoint_budget, self.checkpoint_interval)
        return CacheEntry(caches=self.empty_caches(), checkpoints=checkpoints)

    def empty_caches(self) -> list[LayerCache]:
        """The layer caches, freed: the same ones each time, so that what was allocated for the whole context stays."""
        if self._caches is None:
            self._caches = self._make_caches()
        for cache in self._caches:
            cache.free()  # again: an interrupt may have come between the entry's end and theirs
        return list(self._caches)

    def reset(self, why: str = "a reset", reason: str = "entry_freed") -> None:
        """Free the entry between requests. BusyError while one is running."""
        if self.is_busy:
            raise BusyError()
        awaited, self._awaited = self._awaited, None
        self.free(why, reason=reason)
        if awaited is not None:
            self.lose(reason, why, awaited.tokens)

    def keep(self, tokens: Sequence[int] | TokenArray) -> None:
        """Rewind the entry, between requests, to what it shares with `tokens`. BusyError while one is running."""
        if self.is_busy:
            raise BusyError()
        entry = self.current
        shared = common_prefix(entry.tokens.array, as_tokens(tokens))
        if shared < len(entry.tokens):
            self._settled = False
            entry.tokens.truncate(shared)
            self.settle("what came after the tokens that were to be kept")

    def adopt(self, saved: SavedEntry, source: str = "a file") -> None:
        """Take over a saved entry in place of the present one. It is read when somebody first needs it: the next request, or `current`.

        One that can't be read after all is dropped, and that request's lookup says so (`entry_freed`). BusyError while one is running.
        `source`: what the next lookup calls it.
        """
        self.reset()
        self._loss, self._early, self._restored_from, self._awaited = None, None, source, saved

    def _read_awaited(self) -> None:
        """Safe to repeat after an interrupt."""
        if self._awaited is None:
            return
        entry = self._fresh_entry()
        try:
            entry.adopt(self._awaited)
            self.entry = entry
        except Exception as error:
            self.free("", with_buffers=True)
            why = f"a saved entry that could not be read: {' '.join(str(error).split())[:200] or type(error).__name__}"
            self.lose("entry_freed", why, self._awaited.tokens)
            logger.warning("%s", why)
        self._awaited = None

    def free(self, why: str, *, reason: str = "entry_freed", with_buffers: bool = False) -> None:
        """Drop the entry; the next request starts cold and says why. `with_buffers`: also what is allocated for the whole context."""
        entry, self.entry = self.entry, CacheEntry()
        if entry.tokens:
            self.lose(reason, why, entry.tokens.array)
        if with_buffers:
            self._caches = None
        for cache in entry.caches:
            cache.free()

    def lose(self, reason: str, by: str | None, tokens: TokenArray) -> None:
        """Have the next lookup say that `tokens` were there once, and why they are not any more."""
        early, self._early = self._early, None
        self._loss, self._restored_from = (
            Loss(reason, by, early.tokens if early is not None else tokens),
            None,
        )

    def settle(self, undone: str = "an interrupted forward pass that could not be undone") -> None:
        """Make the entry true: every layer to the tokens, or as far back as is needed, or free it. Safe to repeat after an interrupt."""
        entry = self.entry
        length = entry.reach(len(entry.tokens))[0]
        if length == 0:
            self.free(undone)
        else:
            entry.tokens.truncate(length)
            entry.rewind(length)
            if not entry.is_true:
                self.free("layers that disagreed after a rewind")
        self._settled = True

    def _open(self, session: Session) -> Lookup:
        if self.is_busy:
            raise BusyError()
        self._session = weakref.ref(session)
        if not self._settled:
            self.settle()
        self._read_awaited()
        self._settled = False
        return self._rewind_for(session.prompt, session.is_ahead)

    def _close(self, session: Session) -> None:
        if self._session is None or self._session() is not session:
            return
        self._session, prompt = None, session.prompt
        self.settle()
        if session.is_ahead:
            return
        there = self.entry.tokens.array
        is_shorter = len(there) < len(prompt) and self._loss is None and not self.entry.is_shifted
        if is_shorter and common_prefix(there, prompt) == len(there):
            self._loss = Loss("interrupted", None, prompt)

    def _rewind_for(self, prompt: TokenArray, is_ahead: bool) -> Lookup:
        entry, loss, source, early = self.entry, self._loss, self._restored_from, self._early
        before = len(entry.tokens)
        if is_ahead and early is None:
            early = Early(entry.tokens.array.copy(), before)
        matched = common_prefix(entry.tokens.array, prompt)
        cached, limited_by = entry.reach(min(matched, len(prompt) - 1))
        checkpoint = None if reach(entry.caches, cached)[0] == cached else cached
        dropped = tuple(entry.tokens[matched : matched + WINDOW])
        began = time.perf_counter()
        freed: Loss | None = None
        if cached == 0:
            self.free("nothing in common")
        elif cached < before or not entry.is_true:
            entry.tokens.truncate(cached)
            self.settle()
            self._settled = False
            if self.entry is not entry:
                freed, cached, checkpoint = self._loss, 0, None
        rewind_s = time.perf_counter() - began if cached < before else 0.0
        self._loss = self._restored_from = self._early = None
        if not self.entry.caches:
            self.entry = self._fresh_entry()
        found = Lookup(
            len(prompt), before, matched, cached, limited_by=limited_by, checkpoint=checkpoint, dropped=dropped, rewind_s=rewind_s,
            is_restored=source is not None,
        )  # fmt: skip
        if freed is not None:
            found = replace(found, reason=freed.reason, freed_by=freed.by)
        if is_ahead and early is not None:  # the explanation is left to the request
            self._loss, self._restored_from, self._early = loss, source, early.after(found)
        elif early is not None:
            found = early.described(found, prompt)
        return explained(found, loss, prompt, source)

    def prepare(self, prompt: TokenArray, keep: int, discard: int, rotate: Rotators) -> bool:
        """For a prompt that is too long: move what the entry shares with it beyond `keep + discard` up to `keep`.

        Afterwards the entry is a prefix of the shortened prompt as far as it can be. Returns whether anything was moved.
        """
        if self.is_busy:
            raise BusyError()
        matched = self.current.reach(common_prefix(self.entry.tokens.array, prompt))[0]
        if matched <= keep + discard:
            return False
        self._settled = False
        self.entry.tokens.truncate(matched)
        self.settle()
        if len(self.entry.tokens) != matched:
            return False
        self._settled = False
        moved = self.entry.shift(keep, discard, rotate)
        if moved and self._early is not None:
            kept = self._early.kept
            kept = max(keep, kept - discard) if kept > keep else kept
            self._early = Early(self.entry.tokens.array[:kept].copy(), kept)
        self.settle()
        return moved


class Session:
    """One request's hold on the entry.

    `with prefix_cache.begin(prompt) as session:` finds the common prefix and rewinds; then each forward pass is bracketed by
    `begin_forward()` and `end_forward(n)`, and its tokens are `record`ed once they are known. However the block is left, the
    entry is made true.
    """

    def __init__(
        self, prefix_cache: PrefixCache, prompt: TokenArray, *, ahead: bool = False
    ) -> None:
        self._cache, self._thread = prefix_cache, threading.get_ident()
        self.prompt, self.is_ahead = prompt, ahead
        self.lookup = Lookup(len(prompt), 0, 0, 0)
        self.forwarded = 0

    def __enter__(self) -> Session:
        try:
            self.lookup = self._cache._open(self)
            self._adopt()
        except BaseException:  # no block was entered that would close it
            self.close()
            raise
        return self

    def _adopt(self) -> None:
        """Look at the entry's caches anew."""
        self._counting = [cache for cache in self.caches if cache.counts_forwards]
        self.model_caches: list[Any] = [cache.model_cache for cache in self.caches]
        self.forwarded = self.recorded

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the entry back; nothing to do if that was done. For a caller whose `with` may have been interrupted on its way in or out.

        In a thread that did not begin it (which has dropped the last reference to it) nothing is touched: it is settled before its next use.
        """
        if threading.get_ident() == self._thread:
            self._cache._close(self)

    @property
    def caches(self) -> list[LayerCache]:
        return self._cache.entry.caches

    @property
    def remaining(self) -> TokenArray:
        """The part of the prompt that has not been recorded yet."""
        return self.prompt[len(self._cache.entry.tokens) :]

    @property
    def tokens(self) -> list[int]:
        """The entry's tokens, copied."""
        return list(self._cache.entry.tokens)

    @property
    def recorded(self) -> int:
        return len(self._cache.entry.tokens)

    def begin_forward(self) -> None:
        for cache in self._counting:
            cache.begin_forward()

    def end_forward(self, tokens: int) -> None:
        for cache in self._counting:
            cache.end_forward(tokens)
        self.forwarded += tokens

    def record(self, tokens: Sequence[int] | TokenArray) -> None:
        """Tokens whose forward pass has ended become part of the entry."""
        self._cache.entry.tokens.extend(tokens)

    @property
    def needs_checkpoints(self) -> bool:
        """Whether checkpoints are worth taking: some layer can't be rewound by itself, and there is a budget."""
        return self._cache.entry.checkpoints.budget > 0 and any(
            cache.needs_checkpoints for cache in self.caches
        )

    def mark(self, places: Places) -> None:
        """Say where the prompt is likely to be left again: checkpoints there are kept longest."""
        self._cache.entry.checkpoints.mark(places)

    @property
    def next_stop(self) -> int:
        """Return the offset where the prefill pauses next for a checkpoint; the prompt's length if nowhere."""
        stop = self._cache.entry.checkpoints.next_stop(self.recorded)
        return len(self.prompt) if stop is None else stop

    @property
    def checkpoint_due(self) -> int:
        """The offset from which on a checkpoint is worth taking."""
        return self._cache.entry.checkpoints.due(self.recorded)

    def checkpoint(self) -> list[Any]:
        """Take one at the present offset, between two forward passes. Returns arrays that should be evaluated soon."""
        entry = self._cache.entry
        if not entry.is_true or entry.checkpoints.at(len(entry.tokens)) is not None:
            return []
        snapshots = [
            cache.snapshot() if cache.needs_checkpoints else None for cache in entry.caches
        ]
        taken = [snapshot for snapshot in snapshots if snapshot is not None]
        nbytes = sum(snapshot.nbytes for snapshot in taken)
        kept = entry.checkpoints.add(Checkpoint(len(entry.tokens), nbytes, snapshots))
        return [array for snapshot in taken for array in snapshot.arrays] if kept else []

    def shift(self, keep: int, discard: int, rotate: Rotators) -> bool:
        """Make room in a full context between two forward passes; False where some layer can't move its tokens."""
        moved = self._cache.entry.shift(keep, discard, rotate)
        self.forwarded = self.recorded
        return moved

    def restart(self, tokens: Sequence[int] | TokenArray) -> TokenArray:
        """Go back to what the entry shares with `tokens`; returns those that have to be evaluated again."""
        wanted = as_tokens(tokens)
        entry = self._cache.entry
        entry.tokens.truncate(common_prefix(entry.tokens.array, wanted))
        self._cache.settle()
        if self._cache.entry is not entry:
            self._cache.entry = self._cache._fresh_entry()
        self._cache._settled = False
        self._adopt()
        return wanted[self.recorded :]

    def free(self, why: str) -> None:
        """Give up the entry and its buffers, whatever they hold."""
        self._cache.free(why, with_buffers=True)
