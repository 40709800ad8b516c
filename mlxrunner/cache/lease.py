"""The hold of one request on the entry of a prefix cache, from its lookup to its end.

Bookkeeping that never imports mlx. The prefix cache keeps the entry true; see its module.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mlxrunner.cache.checkpoints import Checkpoint, Places
from mlxrunner.cache.entry import Rotators
from mlxrunner.cache.layers.protocol import LayerCache
from mlxrunner.cache.lookup import Lookup
from mlxrunner.cache.tokens import TokenArray, as_tokens, common_prefix

if TYPE_CHECKING:
    from mlxrunner.cache.prefix import PrefixCache


class Source(NamedTuple):
    """Another prefix cache, whose entry a lease copies in place of its own."""

    cache: PrefixCache
    exact: int
    """Number of its first tokens that may be copied."""


class Draft(NamedTuple):
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
        source: Source | None = None,
    ) -> None:
        self._cache, self._thread = prefix_cache, threading.get_ident()
        self.prompt, self.is_ahead, self.source = prompt, ahead, source
        self.lookup = Lookup(len(prompt), 0, 0, 0)
        self.forwarded = 0
        self.earlier: TokenArray = prompt[:0]
        """Tokens that the entry held where it left the prompt, and a few before them.

        With a source they are those of its entry.
        """
        self._draft: Draft | None = None
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

    @property
    def is_open(self) -> bool:
        """True until the entry is given back."""
        return self._cache.is_held_by(self)

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
        self._draft = Draft(self.recorded, tokens)
        self.begin_next()

    def hold(self, tokens: int) -> None:
        """Begin a draft in a pass of `tokens` tokens that the caller runs in the layers itself."""
        self._cache.entry.hold((tokens,))
        self._draft = Draft(self.recorded, tokens)
        self.forwarded = self.recorded + tokens

    def begin_next(self) -> None:
        """Note in each layer that the next forward pass of a draft begins."""
        for cache in self._counting:
            cache.begin_forward()

    def accept(self, tokens: Sequence[int] | TokenArray) -> None:
        """Keep `tokens`, the first ones of the draft, whose passes have ended.

        If every layer can go back behind them, they are recorded. Otherwise all layers go back to
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

    def mark(self, places: Places) -> None:
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
        """Drop `discard` tokens behind the first `keep`, between two forward passes.

        This makes room in a full context. Return False if a layer can't move its tokens.
        """
        self._left = (0, [])
        moved = self._cache.entry.shift(keep, discard, rotate)
        self.forwarded = self.recorded
        return moved

    def restart(self, tokens: Sequence[int] | TokenArray) -> TokenArray:
        """Rewind to the prefix that the entry shares with `tokens`; return the other tokens.

        The caller has to evaluate the returned tokens again.
        """
        wanted = as_tokens(tokens)
        entry = self._cache.entry
        self._left = (0, [])
        entry.tokens.truncate(common_prefix(entry.tokens.array, wanted))
        self._settle()
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
