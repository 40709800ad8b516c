"""The prefix cache: it finds what a prompt can reuse of the entry, and leases it to requests.

This module is bookkeeping and never imports mlx. Invariant after every request, however it ended:
each layer's offset equals `len(entry.tokens)`, or the entry is empty. Tokens are recorded after the
forward pass that evaluated them. An interrupt therefore leaves layers at or ahead of the tokens.
Settling rewinds the layers to the tokens, or frees the entry.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from mlxrunner.cache.account import WINDOW, Early, Lookup, LostTokens, explained
from mlxrunner.cache.entry import (
    INTERVAL,
    CacheEntry,
    Checkpoint,
    CheckpointPlaces,
    Checkpoints,
    Rotators,
    TokenArray,
    as_tokens,
    common_prefix,
)
from mlxrunner.cache.protocol import LayerCache, reach
from mlxrunner.cache.saved import SavedEntry
from mlxrunner.errors import BusyError, PromptError


class CopySource(NamedTuple):
    """Another prefix cache, whose entry a lease copies in place of its own."""

    cache: PrefixCache
    exact: int
    """Number of its first tokens that may be copied."""


class DraftPass(NamedTuple):
    """Forward passes of which only the first tokens may stay."""

    offset: int
    """The number of the entry's tokens when it began."""
    tokens: int


class EntryLease:
    """The hold of one request on the entry.

    `with prefix_cache.begin(prompt) as lease:` finds the common prefix and rewinds the entry to it.
    Call `begin_forward()` before and `end_forward(n)` after each forward pass, and `record` once
    its tokens are known. Leaving the block in any way restores the entry's invariant.

    A pass of tokens that may prove wrong (a draft) begins with `begin_draft` instead, and
    `accept` takes the place of `record`. Tokens that stay may then be `pending`.
    """

    def __init__(
        self,
        prefix_cache: PrefixCache,
        prompt: TokenArray,
        *,
        ahead: bool = False,
        source: CopySource | None = None,
        is_shifted: bool = False,
    ) -> None:
        self._cache, self._thread = prefix_cache, threading.get_ident()
        self.prompt, self.is_ahead, self.source = prompt, ahead, source
        self.is_shifted = is_shifted
        self.lookup = Lookup(len(prompt), 0, 0, 0)
        self.forwarded = 0
        self.earlier: TokenArray = prompt[:0]
        """Tokens that the entry held where it left the prompt, and a few before them.

        With a source they are those of its entry.
        """
        self._draft: DraftPass | None = None
        # An offset, and the tokens that follow it and are to be evaluated.
        self._left: tuple[int, list[int]] = (0, [])

    def __enter__(self) -> EntryLease:
        return self.take()

    def take(self) -> EntryLease:
        """Find the common prefix and rewind the entry to it. Leave the lease by `close`."""
        try:
            self.lookup = self._cache.open_lease(self)
            self._adopt()
        except BaseException:  # no block was entered that would close it
            self.close()
            raise
        return self

    def _adopt(self) -> None:
        """Read the entry's caches again after the entry was replaced."""
        self._counting = [cache for cache in self.caches if cache.counts_forwards]
        self.model_caches: list[Any] = [cache.model_cache for cache in self.caches]
        self.forwarded = self.recorded

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_here(self) -> bool:
        """True in the thread that began the lease."""
        return threading.get_ident() == self._thread

    def close(self) -> None:
        """Give the entry back. A second call does nothing.

        Call it if an interrupt may have hit the `with` statement on its way in or out. In a thread
        that did not begin the lease the call changes nothing: the entry is settled before its next
        use.
        """
        if self.is_here:
            self._cache.close_lease(self)

    @property
    def caches(self) -> list[LayerCache]:
        return self._cache.entry.caches

    @property
    def remaining(self) -> TokenArray:
        """The part of the prompt that is not recorded yet."""
        return self.prompt[len(self._cache.entry.tokens) :]

    @property
    def tokens(self) -> list[int]:
        """A copy of the entry's tokens."""
        return list(self._cache.entry.tokens)

    @property
    def array(self) -> TokenArray:
        """The entry's tokens, as a view that is valid until the next change."""
        return self._cache.entry.tokens.array

    @property
    def recorded(self) -> int:
        """Number of the entry's tokens."""
        return len(self._cache.entry.tokens)

    def begin_forward(self) -> None:
        """Note in each layer that a forward pass begins."""
        self._draft = self._cache.entry.held = None
        self.begin_next()

    def begin_draft(self, *passes: int) -> None:
        """Begin, in place of `begin_forward`, a pass of which only the first tokens may stay.

        `passes`: the tokens of each pass of the draft, of which the `pending` ones are the first.
        Usually there is one; further ones begin with `begin_next`. Raise ValueError if they are no
        more than those, or if tokens of the pass before were neither recorded nor accepted.

        An interrupt from here to `accept` leaves the entry with the tokens that it has now. Only
        layers that can't undo the passes take memory for that, until the next draft or
        `begin_forward`: at most a copy of each.
        """
        tokens, waiting = sum(passes), len(self.pending)
        if tokens <= waiting or self.forwarded != self.recorded:
            raise ValueError(
                f"a draft of {tokens} tokens, with {waiting} pending, at {self.recorded} of "
                f"{self.forwarded} evaluated tokens"
            )
        self._cache.entry.hold(passes)
        self._draft = DraftPass(self.recorded, tokens)
        self.begin_next()

    def hold(self, tokens: int) -> None:
        """Begin a draft in a pass of `tokens` tokens that the caller runs in the layers itself."""
        self._cache.entry.hold((tokens,))
        self._draft = DraftPass(self.recorded, tokens)
        self.forwarded = self.recorded + tokens

    def begin_next(self) -> None:
        """Note in each layer that the next forward pass of a draft begins."""
        for cache in self._counting:
            cache.begin_forward()

    def accept(self, tokens: Sequence[int] | TokenArray) -> None:
        """Keep `tokens`, the first ones of the draft, whose passes have ended.

        If every layer can drop the others, they are recorded. Otherwise all layers go back to
        where the pass began, and `tokens` are `pending`. Until the next pass begins, another call
        may keep fewer of them, and a call with none undoes the pass. Raise ValueError if no draft
        was begun, or for more tokens than it had.

        An interrupt leaves the entry with the tokens before the draft, and with all or none of
        those of `tokens` that are not pending.
        """
        if self._draft is None or len(tokens) > self._draft.tokens:
            raise ValueError(f"{len(tokens)} tokens to accept of {self._draft}")
        draft, entry = self._draft, self._cache.entry
        if len(tokens) == draft.tokens and self.recorded == draft.offset < self.forwarded:
            self.record(tokens)
            return
        before = entry.tokens.array[: draft.offset]
        self._left = (0, [])
        entry.tokens.truncate(draft.offset)
        entry.tokens.extend(tokens)
        self._settle()
        lost = before[self.recorded :].tolist()  # nothing, unless a cache broke
        kept = max(0, self.recorded - draft.offset)
        self._left = (self.recorded, [*lost, *map(int, tokens[kept:])])

    @property
    def pending(self) -> list[int]:
        """The accepted tokens that no layer has. They are the first ones of the next forward pass.

        Evaluate and record them before a shift, and before the end of an answer, whose entry lacks
        them otherwise.
        """
        offset, tokens = self._left
        return tokens[self.recorded - offset :] if self.recorded >= offset else []

    def end_forward(self, tokens: int) -> None:
        """Note in each layer that the forward pass of `tokens` tokens has ended."""
        for cache in self._counting:
            cache.end_forward(tokens)
        self.forwarded += tokens

    def record(self, tokens: Sequence[int] | TokenArray) -> None:
        """Append to the entry the `tokens` of a forward pass that has ended."""
        self._cache.entry.tokens.extend(tokens)

    @property
    def needs_checkpoints(self) -> bool:
        """True if a layer can't be rewound by itself and there is a budget for checkpoints."""
        return self._cache.entry.checkpoints.budget > 0 and any(
            cache.needs_checkpoints for cache in self.caches
        )

    def mark(self, places: CheckpointPlaces) -> None:
        """Set the places where later prompts are likely to leave this one.

        The checkpoints there are kept longest.
        """
        self._cache.entry.checkpoints.mark(places)

    @property
    def next_stop(self) -> int:
        """The offset of the next pause for a checkpoint; the prompt's length if there is none."""
        stop = self._cache.entry.checkpoints.next_stop(self.recorded)
        return len(self.prompt) if stop is None else stop

    @property
    def checkpoint_due(self) -> int:
        """The offset from which on a checkpoint is worth taking."""
        return self._cache.entry.checkpoints.due(self.recorded)

    @property
    def is_at_checkpoint(self) -> bool:
        """True if there is a checkpoint at the present offset."""
        return self._cache.entry.checkpoints.at(self.recorded) is not None

    def checkpoint(self) -> list[Any]:
        """Take a checkpoint at the present offset, between two forward passes.

        Return its arrays, to be evaluated soon, or an empty list if no checkpoint is kept.
        """
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
        """Drop `discard` tokens after the first `keep`, between two forward passes.

        This makes room in a full context. Return False if a layer can't move its tokens.
        """
        self._left = (0, [])
        moved = self._cache.entry.shift(keep, discard, rotate)
        self.forwarded = self.recorded
        return moved

    @property
    def exact(self) -> int:
        """Number of first tokens that a cold run would store."""
        return min(self._cache.entry.exact, self.recorded)

    def restart(self, tokens: Sequence[int] | TokenArray) -> TokenArray:
        """Rewind to the prefix that the entry shares with `tokens`; return the other tokens.

        The caller has to evaluate the returned tokens again.
        """
        wanted = as_tokens(tokens)
        entry = self._cache.entry
        self._left = (0, [])
        entry.tokens.truncate(common_prefix(entry.tokens.array, wanted))
        self._settle()
        if self.recorded <= self._cache.entry.exact:
            self._cache.entry.forget_shift()
        return wanted[self.recorded :]

    def _settle(self) -> None:
        """Bring the layers to the entry's tokens or before. The entry is then another, or empty."""
        entry = self._cache.entry
        self._cache.settle()
        if self._cache.entry is not entry:
            self._cache.entry = self._cache.fresh_entry()
        self._cache.is_settled = False
        self._adopt()

    def free(self, why: str) -> None:
        """Free the entry and its buffers. `why`: the cause to record."""
        self._cache.free(why, with_buffers=True)


logger = logging.getLogger("mlxrunner")
LEAVING = 32
"""Tokens of a common prefix that show where a text continues that was left after it."""


class PrefixCache:
    """The keeper of one entry, which it lends to one request at a time."""

    def __init__(
        self,
        make_caches: Callable[[], list[LayerCache]],
        checkpoint_budget: int = 0,
        checkpoint_interval: int = INTERVAL,
    ) -> None:
        """Make a cache with an empty entry.

        `make_caches` returns empty layer caches for the model. `checkpoint_budget`: bytes that
        checkpoints may take. `checkpoint_interval`: tokens between two checkpoints while the budget
        allows it.
        """
        self._make_caches, self.checkpoint_budget = make_caches, checkpoint_budget
        self.checkpoint_interval = checkpoint_interval
        self._caches: list[LayerCache] | None = None  # made once; freed ones are used again
        self.entry = CacheEntry()
        self._loss: LostTokens | None = None
        self._restored_from: str | None = None
        self._early: Early | None = None
        self._awaited: SavedEntry | None = None
        # Weak: a request whose end was itself interrupted must not keep the entry for ever.
        self._lease: weakref.ref[EntryLease] | None = None
        self.is_settled = True

    @property
    def is_busy(self) -> bool:
        """True while a lease is open."""
        return self._lease is not None and self._lease() is not None

    def is_held_by(self, lease: EntryLease) -> bool:
        """Return True if `lease` is open."""
        return self._lease is not None and self._lease() is lease

    @property
    def current(self) -> CacheEntry:
        """The entry, with its invariant restored.

        An entry whose last request ended in an interrupt is settled first. A saved entry that was
        taken over is read first.
        """
        if not self.is_busy:
            if not self.is_settled:
                self.settle()
            self._read_awaited()
        return self.entry

    def begin(
        self,
        prompt: Sequence[int] | TokenArray,
        *,
        ahead: bool = False,
        source: CopySource | None = None,
        is_shifted: bool = False,
    ) -> EntryLease:
        """Return a lease on the entry for `prompt`. Use it as a context manager.

        `ahead`: the prompt is evaluated before its answer is asked for. If such a lease ends early,
        it does not count as an interrupted request. `source`: another cache, whose prefix replaces
        the entry; its entry does not change, and may be in use. `is_shifted`: see
        `CacheEntry.shared`. Raise PromptError if the prompt is empty, and BusyError if another
        lease is open.
        """
        if self.is_busy:
            raise BusyError()
        tokens = as_tokens(prompt)
        if len(tokens) == 0:
            raise PromptError("the prompt is empty: at least one token is needed")
        return EntryLease(self, tokens, ahead=ahead, source=source, is_shifted=is_shifted)

    def fresh_entry(self) -> CacheEntry:
        checkpoints = Checkpoints(self.checkpoint_budget, self.checkpoint_interval)
        return CacheEntry(caches=self.empty_caches(), checkpoints=checkpoints)

    def empty_caches(self) -> list[LayerCache]:
        """Return the layer caches after freeing them.

        Every call returns the same objects, so that buffers for the whole context stay allocated.
        """
        if self._caches is None:
            self._caches = self._make_caches()
        for cache in self._caches:
            cache.free()  # again: an interrupt may have come between the entry's end and theirs
        return list(self._caches)

    def reset(self, why: str = "a reset", reason: str = "entry_freed") -> None:
        """Free the entry between requests.

        `why` and `reason` explain the loss in the next lookup. Raise BusyError while a request is
        running.
        """
        if self.is_busy:
            raise BusyError()
        awaited, self._awaited = self._awaited, None
        self.free(why, reason=reason)
        if awaited is not None:
            self.lose(reason, why, awaited.tokens)

    def keep(self, tokens: Sequence[int] | TokenArray) -> None:
        """Rewind the entry, between requests, to the prefix that it shares with `tokens`.

        Raise BusyError while a request is running.
        """
        if self.is_busy:
            raise BusyError()
        entry = self.current
        shared = common_prefix(entry.tokens.array, as_tokens(tokens))
        if shared < len(entry.tokens):
            self.is_settled = False
            entry.tokens.truncate(shared)
            self.settle("what came after the tokens that were to be kept")

    def adopt(self, saved: SavedEntry, source: str | None = "a file") -> None:
        """Replace the entry by a saved one.

        The saved entry is read when it is first needed: by the next request, or by `current`. If
        reading it fails, it is dropped, and the next lookup reports `entry_freed`. `source`: the
        name of its origin in the lookup; None if the lookup does not mention it. Raise BusyError
        while a request is running.
        """
        self.reset()
        self._loss, self._early, self._restored_from, self._awaited = None, None, source, saved

    def adopting(self, saved: SavedEntry) -> Generator[None, None, None]:
        """Replace the entry by a saved one, and yield after each piece of it.

        The entry is empty before the last piece, and stays so if the iterator is closed, or if
        reading fails: then the next lookup reports `entry_freed`. Raise BusyError while a request
        is running.
        """
        self.adopt(saved, None)
        self._awaited = None
        yield from self._reading(saved)

    def _read_awaited(self) -> None:
        """Read the saved entry that was taken over. A call may be repeated after an interrupt."""
        if self._awaited is not None:
            for _ in self._reading(self._awaited):
                pass
        self._awaited = None

    def _reading(self, saved: SavedEntry) -> Iterator[None]:
        """Read a saved entry in the place of the present one, which is empty."""
        entry = self.fresh_entry()
        try:
            yield from entry.adopting(saved)
            self.entry = entry
        except Exception as error:
            self.free("", with_buffers=True)
            said = " ".join(str(error).split())[:200] or type(error).__name__
            why = f"a saved cache that could not be read: {said}"
            self.lose("entry_freed", why, saved.tokens)
            logger.warning("%s", why)
        finally:
            if self.entry is not entry:
                for cache in entry.caches:
                    cache.free()

    def free(self, why: str, *, reason: str = "entry_freed", with_buffers: bool = False) -> None:
        """Drop the entry. The next request starts cold, and its lookup gives `reason` and `why`.

        `with_buffers`: also release the buffers that are allocated for the whole context.
        """
        entry, self.entry = self.entry, CacheEntry()
        if entry.tokens:
            self.lose(reason, why, entry.tokens.array)
        if with_buffers:
            self._caches = None
        for cache in self._caches or entry.caches:
            cache.free()

    def lose(self, reason: str, by: str | None, tokens: TokenArray) -> None:
        """Make the next lookup report the loss of `tokens`, for `reason` and caused by `by`."""
        early, self._early = self._early, None
        self._loss, self._restored_from = (
            LostTokens(reason, by, early.tokens if early is not None else tokens),
            None,
        )

    def settle(self, undone: str = "an interrupted forward pass that could not be undone") -> None:
        """Restore the invariant: rewind every layer to the tokens or before, or free the entry.

        `undone`: the cause to record if the entry has to be freed. A call may be repeated after an
        interrupt.
        """
        entry = self.entry
        length = entry.reach(len(entry.tokens))[0]
        if length == 0:
            self.free(undone)
        else:
            entry.tokens.truncate(length)
            entry.rewind(length)
            if not entry.is_true:
                self.free("layers that disagreed after a rewind")
        self.is_settled = True

    def open_lease(self, lease: EntryLease) -> Lookup:
        if self.is_busy:
            raise BusyError()
        self._lease = weakref.ref(lease)
        if not self.is_settled:
            self.settle()
        self._read_awaited()
        self.is_settled = False
        there = self if lease.source is None else lease.source.cache
        lease.earlier = there._leaving(lease.prompt)
        if lease.source is not None:
            return self._copy_for(lease.prompt, lease.source)
        return self._rewind_for(lease)

    def _leaving(self, prompt: TokenArray) -> TokenArray:
        """Return the tokens of the earlier text from where `prompt` leaves it, and some before."""
        there = self.entry.tokens.array if self._early is None else self._early.tokens
        return leaving(there, prompt).copy()

    def release(self) -> None:
        """Close the lease that is open, if there is one."""
        lease = None if self._lease is None else self._lease()
        if lease is not None:
            lease.close()

    def close_lease(self, lease: EntryLease) -> None:
        if not self.is_held_by(lease):
            return
        self._lease, prompt = None, lease.prompt
        self.settle()
        self.entry.held = None
        if lease.is_ahead:
            return
        there = self.entry.tokens.array
        is_shorter = len(there) < len(prompt) and self._loss is None and not self.entry.is_shifted
        if is_shorter and common_prefix(there, prompt) == len(there):
            self._loss = LostTokens("interrupted", None, prompt)

    def _rewind_for(self, lease: EntryLease) -> Lookup:
        prompt, is_ahead = lease.prompt, lease.is_ahead
        entry, loss, source, early = self.entry, self._loss, self._restored_from, self._early
        before = len(entry.tokens)
        if is_ahead and early is None:
            early = Early(entry.tokens.array.copy(), before)
        found = _looked_up(entry, prompt, entry.shared(prompt, is_shifted=lease.is_shifted))
        cached = found.cached
        began = time.perf_counter()
        freed: LostTokens | None = None
        if cached == 0:
            self.free("nothing in common")
        elif cached < before or not entry.is_true:
            entry.tokens.truncate(cached)
            self.settle()
            self.is_settled = False
            if self.entry is not entry:
                freed, cached = self._loss, 0
                found = replace(found, cached=0, checkpoint=None)
        if cached <= entry.exact:
            entry.forget_shift()
        rewind_s = time.perf_counter() - began if cached < before else 0.0
        self._loss = self._restored_from = self._early = None
        if not self.entry.caches:
            self.entry = self.fresh_entry()
        found = replace(found, rewind_s=rewind_s, is_restored=source is not None)
        if freed is not None:
            found = replace(found, reason=freed.reason, evicted_by=freed.by)
        if is_ahead and early is not None:  # the explanation is left to the request
            self._loss, self._restored_from, self._early = loss, source, early.after(found)
        elif early is not None:
            found = early.described(found, prompt)
        return explained(found, loss, prompt, source)

    def _copy_for(self, prompt: TokenArray, source: CopySource) -> Lookup:
        """Replace the entry by the prefix that `prompt` shares with that of `source`."""
        held, loss = source.cache.entry, self._loss
        shared = min(common_prefix(held.tokens.array, prompt), source.exact)
        found = _looked_up(held, prompt, shared)
        began = time.perf_counter()
        self.free("")
        self._loss = self._restored_from = self._early = None
        entry = self.fresh_entry()
        if found.cached:
            entry.copy(held, found.cached)
        self.entry = entry
        return explained(replace(found, rewind_s=time.perf_counter() - began), loss, prompt)

    def forget_loss(self) -> LostTokens | None:
        """Return the loss that the next lookup would report, and report it no more."""
        loss, self._loss = self._loss, None
        return loss

    def prepare(
        self,
        prompt: TokenArray,
        keep: int,
        discard: int,
        rotate: Rotators,
        *,
        is_shifted: bool = False,
    ) -> bool:
        """Shift the entry in the same way as a too long `prompt` is shortened.

        The tokens from offset `keep + discard` on move to offset `keep`. Afterwards the entry is a
        prefix of the shortened prompt, as far as possible. `is_shifted`: see `CacheEntry.shared`.
        Return True if tokens were moved. Raise BusyError while a request is running.
        """
        if self.is_busy:
            raise BusyError()
        entry = self.current
        matched = entry.reach(entry.shared(prompt, is_shifted=is_shifted))[0]
        if matched <= keep + discard:
            return False
        self.is_settled = False
        self.entry.tokens.truncate(matched)
        self.settle()
        if len(self.entry.tokens) != matched:
            return False
        self.is_settled = False
        moved = self.entry.shift(keep, discard, rotate)
        if moved and self._early is not None:
            kept = self._early.kept
            kept = max(keep, kept - discard) if kept > keep else kept
            self._early = Early(self.entry.tokens.array[:kept].copy(), kept)
        self.settle()
        return moved


def _looked_up(entry: CacheEntry, prompt: TokenArray, matched: int) -> Lookup:
    """Return what `entry`, which has the first `matched` tokens of `prompt`, can offer of them."""
    cached, limited_by = entry.reach(min(matched, len(prompt) - 1))
    return Lookup(
        len(prompt),
        len(entry.tokens),
        matched,
        cached,
        limited_by=limited_by,
        checkpoint=None if reach(entry.caches, cached)[0] == cached else cached,
        dropped=tuple(entry.tokens[matched : matched + WINDOW]),
    )


def leaving(there: TokenArray, prompt: TokenArray) -> TokenArray:
    """Return the tokens of `there` from where `prompt` leaves them, and some before, as a view."""
    return there[max(0, common_prefix(there, prompt) - LEAVING) :]
