"""Account for every prompt token: cached, missed, displaced or new. No tensors.

`TokenAccounting` remembers what was evaluated (`mlxrunner.cache.prefix_index`) and the latest
requests. Missed tokens are on a prefix that was evaluated before. Displaced ones are in the earlier
request of the same conversation, too, behind the place where the prompt leaves it: short runs of
tokens are looked up there, so an insertion, a removal and a moved block all count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlxrunner.cache.prefix_index import Fingerprints, PrefixIndex, common_fingerprints, mixed
from mlxrunner.cache.tokens import SHORT_TAIL, TokenArray

RUN = 16
"""Fewest tokens that count as moved text."""
MOST_REQUESTS = 32
"""Most earlier requests that a prompt is compared with."""
MOST_TOKENS = 4_000_000
"""Most tokens of these."""
_ONE_IN = np.uint64(4)
"""A long text is first compared by one in so many of its runs."""
_SHORT = 8192
"""A text of fewer tokens is compared by all of them."""
_ROUNDS = 3
"""Most searches for text that a longer run has left over."""
_USED, _TOLD = -1, -2
"""Tokens of the two texts that are matched. They are like no other."""
_TRIED = 16
"""Most places in the earlier text that are tried for one run."""


class ConversationName(NamedTuple):
    """The names by which a client tells its conversations apart."""

    client: str = ""
    """The client's program; empty: unknown."""
    session: str | None = None
    """The client's name of the conversation; None: it gives none."""
    is_title: bool = False
    """True for a request for its title, which has a prompt of its own."""


class MovedRun(NamedTuple):
    """A run of tokens of a prompt that its earlier request has at another place."""

    begin: int
    end: int
    earlier: int
    """The place of its first token in the earlier request."""


def run_hashes(tokens: TokenArray) -> NDArray[np.uint64]:
    """Return a hash of each `RUN` consecutive tokens, `[n - RUN + 1]`."""
    if len(tokens) < RUN:
        return np.empty(0, np.uint64)
    hashes, width = mixed(tokens.astype(np.uint64) + np.uint64(1)), 1
    while width < RUN:
        hashes = hashes[:-width] * np.uint64(2 * width + 0x9E3779B97F4A7C15) + hashes[width:]
        width *= 2
    return mixed(hashes)


def _common(a: TokenArray, b: TokenArray) -> int:
    """Return the length of the longest common prefix, which is short in most cases."""
    at, step, most = 0, 64, min(len(a), len(b))
    while at < most:
        different = a[at : min(at + step, most)] != b[at : min(at + step, most)]
        first = int(different.argmax())
        if different[first]:
            return at + first
        at, step = at + len(different), 4 * step
    return most


def moved_runs(old: TokenArray, new: TokenArray) -> list[MovedRun]:
    """Return the runs of at least `RUN` tokens of `new` that `old` has, each token used once.

    The longest ones come first: a block that was copied counts where more of the text is its own.
    """
    if min(len(old), len(new)) < RUN:
        return []
    found, left = list[MovedRun](), True
    old, new = old.copy(), new.copy()
    for _ in range(_ROUNDS):
        if not left:
            break
        left = False
        for run in sorted(_matches(old, new), key=lambda run: run.begin - run.end):
            length = run.end - run.begin
            free = old[run.earlier : run.earlier + length] >= 0
            left = left or not free.all()
            edges = np.flatnonzero(np.diff(free, prepend=False, append=False))
            for begin, end in edges.reshape(-1, 2).tolist():
                if end - begin >= RUN:
                    found.append(MovedRun(run.begin + begin, run.begin + end, run.earlier + begin))
                    old[run.earlier + begin : run.earlier + end] = _USED
                    new[run.begin + begin : run.begin + end] = _TOLD
    return sorted(found)


def _matches(old: TokenArray, new: TokenArray) -> Iterator[MovedRun]:
    """Yield the longest runs of `new` from left to right that are somewhere in `old`."""
    theirs, ours = run_hashes(old), run_hashes(new)
    order = np.argsort(theirs, kind="stable")
    ranked = theirs[order]
    first = np.searchsorted(ranked, ours)
    places = np.flatnonzero(ranked[np.minimum(first, len(ranked) - 1)] == ours)
    at, behind = 0, 0
    while at < len(places):
        begin = int(places[at])
        rank = int(first[begin])
        same = order[rank : rank + _TRIED]
        same = same[theirs[same] == ours[begin]]
        starts = [*same[same >= behind].tolist(), *same[same < behind].tolist()]
        length, place = max(
            ((_common(old[start:], new[begin:]), start) for start in starts),
            key=lambda match: match[0],
        )
        if length >= RUN:  # else it was another text with the same hash
            yield MovedRun(begin, begin + length, place)
            behind = place + length
        at = int(np.searchsorted(places, begin + max(length, 1)))


@dataclass(eq=False)
class PriorRequest:
    """A request with which later ones are compared."""

    tokens: TokenArray = field(repr=False)
    """The prompt, and behind it the answer as far as it was evaluated."""
    fingerprints: Fingerprints = field(repr=False)
    """Those of the prompt."""
    total: int
    """The total behind them: see `Fingerprinter`."""
    conversation: ConversationName
    source: Any = field(repr=False)
    """The prompt in the form of the caller."""

    def begins(self, tokens: TokenArray) -> bool:
        """Return True if a prompt begins with this one."""
        count = len(self.fingerprints)
        return count <= len(tokens) and _common(self.tokens[:count], tokens) == count

    @cached_property
    def samples(self) -> tuple[NDArray[np.uint64], NDArray[np.intp]]:
        """Hashes of the runs of all tokens, in ascending order, and their places.

        Of a long text they are one in some.
        """
        hashes = run_hashes(self.tokens)
        places = np.arange(len(hashes))
        if len(self.tokens) >= _SHORT:
            places = np.flatnonzero(hashes % _ONE_IN == 0)
        order = places[np.argsort(hashes[places], kind="stable")]
        return hashes[order], order

    def hashes(self, begin: int, end: int) -> tuple[NDArray[np.uint64], bool]:
        """Return hashes of the runs of its tokens `begin .. end - 1`, in ascending order.

        The second value is True if they are samples.
        """
        if end - begin < _SHORT <= len(self.tokens):
            return np.sort(run_hashes(self.tokens[begin:end])), False
        hashes, places = self.samples
        if begin or end < len(self.tokens):
            hashes = hashes[(places >= begin) & (places <= end - RUN)]
        return hashes, len(self.tokens) >= _SHORT


@dataclass(eq=False)
class OpenAccount:
    """The account of a request that runs."""

    request: PriorRequest
    known: int
    """First tokens of the prompt that were evaluated before the request began."""
    running: Sequence[tuple[OpenAccount, int]]
    """Requests that ran when it began, each with the tokens that their prompts share."""
    earlier: Sequence[tuple[PriorRequest, int]]
    """The requests before it, each with its tokens at that time."""
    is_restarted: bool
    """True if the process that evaluated these tokens has ended."""
    is_compared: bool
    """True if it and later prompts are compared."""
    reached: int = 0
    """Tokens of the prompt that are evaluated or reused so far."""


@dataclass(frozen=True)
class PromptAccount:
    """The tokens of a prompt that were evaluated although they need not be new."""

    missed: int = 0
    displaced: int = 0
    earlier: PriorRequest | None = None
    """The request that the prompt was compared with; None if there is none like it."""
    shared: int = 0
    """First tokens that both have."""
    moved: Sequence[MovedRun] = ()
    """The displaced tokens, by their places in the prompt and in all tokens of `earlier`."""
    is_restarted: bool = False
    """True if the process that evaluated the missed tokens has ended."""
    is_bounded: bool = False
    """True if the prefix index has reached its bound, so that more may be new than is."""


class TokenAccounting:
    """Keeps the accounts of all requests of a runner, which all its requests begin and end."""

    def __init__(self, index: PrefixIndex | None = None) -> None:
        """Measure against `index`; None: an empty one, which goes with this process."""
        self.index = PrefixIndex() if index is None else index
        self._history: deque[PriorRequest] = deque(maxlen=MOST_REQUESTS)
        self._running: list[OpenAccount] = []

    def begin(
        self,
        tokens: TokenArray,
        source: Any = None,
        name: ConversationName | None = ConversationName(),  # noqa: B008  # immutable
    ) -> OpenAccount:
        """Begin the account of a prompt, before anything of it is evaluated.

        `source`: the prompt in the form of the caller. `name`: that of its conversation; None if it
        is compared with no other prompt.
        """
        marks, total = self._fingerprints(tokens)
        request = PriorRequest(tokens, marks, total, name or ConversationName(), source)
        running = [
            (one, common_fingerprints(one.request.fingerprints, marks)) for one in self._running
        ]
        earlier = [(one, len(one.tokens)) for one in self._history]
        known, is_restarted = self.index.shared(marks)
        is_compared = name is not None
        account = OpenAccount(request, known, running, earlier, is_restarted, is_compared)
        self._running.append(account)
        if is_compared:
            self._history.append(request)
            held = sum(len(one.tokens) for one in self._history)
            while held > MOST_TOKENS and len(self._history) > 1:
                held -= len(self._history.popleft().tokens)
        return account

    def _fingerprints(self, tokens: TokenArray) -> tuple[Fingerprints, int]:
        """Return the fingerprints of a prompt, and the total behind them.

        Those of an earlier prompt with which it begins are not computed again.
        """
        begins = [one for one in self._history if one.begins(tokens)]
        longest = max(begins, key=lambda one: len(one.fingerprints), default=None)
        if longest is None:
            return self.index.fingerprints(tokens)
        known = longest.fingerprints
        more, total = self.index.fingerprints(tokens[len(known) :], len(known), longest.total)
        return np.concatenate([known, more]), total

    def reach(self, account: OpenAccount, tokens: int) -> None:
        """Note that the first `tokens` of a prompt are evaluated: a killed process has them."""
        account.reached = tokens
        self.index.add(account.request.fingerprints[:tokens])

    def end(
        self, account: OpenAccount, cached: int, known: int, reached: int, answer: TokenArray
    ) -> PromptAccount:
        """End an account, once, and return it.

        `cached`: tokens of the prompt that were reused. `known`: first tokens that the caller knows
        to have been evaluated before. `reached`: first tokens that are evaluated or reused now.
        `answer`: the evaluated tokens that follow the prompt.
        """
        if account in self._running:
            self._running.remove(account)
        request, account.reached = account.request, reached
        prompt = request.tokens
        others = (min(shared, one.reached) for one, shared in account.running)
        known = max(account.known, known, max(others, default=0))
        known = max(cached, min(known, len(prompt) - 1))
        earlier, shared, moved = (
            self._compared(account, known) if account.is_compared else (None, 0, [])
        )
        marks = request.fingerprints[:reached]
        if reached == len(prompt) and len(answer):
            more, _ = self.index.fingerprints(answer, reached, request.total)
            marks = np.concatenate([marks, more])
            request.tokens = np.concatenate([prompt, answer])
            request.__dict__.pop("samples", None)  # those of the prompt alone
        self.index.add(marks)
        return PromptAccount(
            known - cached,
            sum(run.end - run.begin for run in moved),
            earlier,
            shared,
            moved,
            account.is_restarted,
            self.index.has_forgotten,
        )

    def _compared(
        self, account: OpenAccount, known: int
    ) -> tuple[PriorRequest | None, int, list[MovedRun]]:
        """Return the earlier request, the first tokens that both have, and the displaced ones.

        These are behind the first `known` tokens of the prompt.
        """
        request, best, most, at = account.request, None, (0, 0), 0
        prompt = request.tokens
        for one, count in reversed(_of_conversation(account.earlier, request.conversation)):
            shared = common_fingerprints(one.fingerprints, request.fingerprints)
            if shared == len(one.fingerprints):
                shared += _common(one.tokens[shared:count], prompt[shared:])
            begin, both = max(shared, known), 0
            room = min(count - shared, len(prompt) - begin)
            if (shared + room, room) <= most:
                continue
            if room >= RUN:
                both = _estimated(one.hashes(shared, count), request.hashes(begin, len(prompt)))
            if (shared + both, both) > most:
                best, most, at = (one, count), (shared + both, both), shared
        if best is None:
            return None, 0, []
        old, count = best
        begin = max(at, known)
        moved = [
            MovedRun(run.begin + begin, run.end + begin, run.earlier + at)
            for run in moved_runs(old.tokens[at:count], prompt[begin:])
        ]
        if at >= len(old.fingerprints) - SHORT_TAIL:
            self._forget(old)
        return old, at, moved

    def _forget(self, old: PriorRequest) -> None:
        """Forget a request of which a later one has the whole prompt."""
        if old in self._history and len(self._history) > 1:
            self._history.remove(old)


Candidates = Sequence[tuple[PriorRequest, int]]


def _of_conversation(earlier: Candidates, conversation: ConversationName) -> Candidates:
    """Return the requests that may be of a conversation, oldest first.

    They are those of its session, or if it has none, all of its client.
    """
    client, session, is_title = conversation
    own = [pair for pair in earlier if pair[0].conversation == conversation]
    if session is not None and own:
        return own
    like = (client, is_title)
    return [(one, count) for one, count in earlier if one.conversation[::2] == like]


def _estimated(
    theirs: tuple[NDArray[np.uint64], bool], ours: tuple[NDArray[np.uint64], bool]
) -> int:
    """Estimate how many runs two texts have in common, from what `PriorRequest.hashes` returns."""
    less, more = sorted((theirs[0], ours[0]), key=len)
    if not len(less):
        return 0
    at = np.minimum(np.searchsorted(more, less), len(more) - 1)
    return int((more[at] == less).sum()) * (int(_ONE_IN) if theirs[1] or ours[1] else 1)
