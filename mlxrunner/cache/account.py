"""Account for every prompt token (cached, missed, displaced or new), and explain it. No tensors.

`TokenAccounting` remembers what was evaluated and the latest requests. Missed tokens are on a
prefix that was evaluated before. Displaced ones are in the earlier request of the same
conversation, too, after the place where the prompt leaves it: short runs of tokens are looked up
there, so an insertion, a removal and a moved block all count.

`PrefixIndex` remembers as fingerprints, within a bound of bytes, every prefix that was ever
evaluated. A prefix has one fingerprint, a keyed hash of all its tokens, so the fingerprints of a
text reveal no token and differ from those of any other text from the first different token on. The
index stores each once. It can be kept in a file, which a killed process leaves whole.

`Lookup` says how much of a prompt the entry held, and why not more.
"""

from __future__ import annotations

import logging
import os
import secrets
import struct
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlxrunner.cache.entry import SHORT_TAIL, TokenArray, common_prefix
from mlxrunner.errors import MissingFileError, MlxrunnerError, ReadError
from mlxrunner.system.reading import read_bytes
from mlxrunner.system.writing import open_own, write_all

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
    """The prompt, and after it the answer as far as it was evaluated."""
    fingerprints: Fingerprints = field(repr=False)
    """Those of the prompt."""
    total: int
    """The total after them: see `Fingerprinter`."""
    conversation: ConversationName
    source: Any = field(repr=False)
    """The prompt in the form of the caller."""

    def begins(self, tokens: TokenArray) -> bool:
        """Return True if a prompt begins with this one."""
        count = len(self.fingerprints)
        if not 0 < count <= len(tokens) or self.tokens[count - 1] != tokens[count - 1]:
            return False
        return _common(self.tokens[:count], tokens) == count

    def extend(self, answer: TokenArray) -> None:
        """Append the answer to its tokens."""
        self.tokens = np.concatenate([self.tokens, answer])
        self.__dict__.pop("samples", None)  # those of the prompt alone

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


class RunFilter:
    """Tells which of some short texts surely have no run in common with another, at little cost.

    Each text has a number, and a bit in each bucket that a hash of its runs falls into.
    """

    def __init__(self) -> None:
        """Begin with no text."""
        self._buckets = np.zeros(1 << 16, np.uint32)
        self._held: dict[PriorRequest, tuple[int, int]] = {}
        """The number of each text, and its tokens."""

    def update(self, requests: Collection[PriorRequest]) -> None:
        """Hold these requests, `MOST_REQUESTS` at most, as far as their texts are short."""
        for one in [one for one in self._held if one not in requests]:
            self._buckets &= ~np.uint32(1 << self._held.pop(one)[0])
        for one in requests:
            number, length = self._held.get(one, (-1, 0))
            if length < len(one.tokens) < _SHORT:
                if number < 0:
                    used = {number for number, _ in self._held.values()}
                    number = min(set(range(MOST_REQUESTS)) - used)
                self._held[one] = number, len(one.tokens)
                self._buckets[_bucket(one.samples[0])] |= np.uint32(1 << number)

    def may_share(
        self, request: PriorRequest, others: Iterable[tuple[PriorRequest, int, int]]
    ) -> Iterator[bool]:
        """Tell for each of the `others` if it may have a run in common with a request.

        With each: the first place in it, and the first one in the request, from which on they are
        compared.
        """
        is_known = request in self._held
        hashes, places = request.samples if is_known else _NONE
        owners = self._buckets[_bucket(hashes)]
        every = int(np.bitwise_or.reduce(owners))
        for one, theirs, ours in others:
            number, _ = self._held.get(one, (-1, 0))
            if not is_known or number < 0 or len(one.tokens) >= _SHORT:
                yield True
            elif not every >> number & 1:
                yield False
            else:
                same = hashes[(owners >> np.uint32(number) & 1 > 0) & (places >= ours)]
                found, at = one.samples
                last = np.searchsorted(found, same, "right") - 1
                yield bool(((found[last] == same) & (at[last] >= theirs)).any())


_NONE = np.empty(0, np.uint64), np.empty(0, np.intp)


def _bucket(hashes: NDArray[np.uint64]) -> NDArray[np.intp]:
    return (hashes & np.uint64(0xFFFF)).astype(np.intp)


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
    is_beside: bool = False
    """True if requests that ran at the same time evaluated most of the missed tokens."""
    is_bounded: bool = False
    """True if the prefix index has reached its bound, so that more may be new than is."""


class TokenAccounting:
    """Keeps the accounts of all requests of a runner, which all its requests begin and end."""

    def __init__(self, index: PrefixIndex | None = None) -> None:
        """Measure against `index`; None: an empty one, which goes with this process."""
        self.index = PrefixIndex() if index is None else index
        self._history: deque[PriorRequest] = deque(maxlen=MOST_REQUESTS)
        self._running: list[OpenAccount] = []
        self._runs = RunFilter()

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
        """Return the fingerprints of a prompt, and the total after them.

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
        before = max(account.known, known, cached)
        known = max(cached, min(max([before, *others]), len(prompt) - 1))
        marks = request.fingerprints[:reached]
        if reached == len(prompt) and len(answer):
            more, _ = self.index.fingerprints(answer, reached, request.total)
            marks = np.concatenate([marks, more])
            request.extend(answer)
        earlier, shared, moved = (
            self._compared(account, prompt, known) if account.is_compared else (None, 0, [])
        )
        self.index.add(marks)
        return PromptAccount(
            known - cached,
            sum(run.end - run.begin for run in moved),
            earlier,
            shared,
            moved,
            account.is_restarted,
            known - before > before - cached,
            self.index.has_forgotten,
        )

    def _compared(
        self, account: OpenAccount, prompt: TokenArray, known: int
    ) -> tuple[PriorRequest | None, int, list[MovedRun]]:
        """Return the earlier request, the first tokens that both have, and the displaced ones.

        These are after the first `known` tokens of the prompt.
        """
        request, best, most, at = account.request, None, (0, 0), 0
        likely = reversed(_of_conversation(account.earlier, request.conversation))
        candidates = [
            (one, count, _common_prefix(one, count, prompt, request)) for one, count in likely
        ]
        self._runs.update(self._history)
        may_share = self._runs.may_share(
            request, [(one, shared, max(shared, known)) for one, _, shared in candidates]
        )
        for (one, count, shared), has_runs in zip(candidates, may_share, strict=True):
            begin, both = max(shared, known), 0
            room = min(count - shared, len(prompt) - begin)
            if (shared + room, room) <= most:
                continue
            if room >= RUN and has_runs:
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


def _common_prefix(one: PriorRequest, count: int, prompt: TokenArray, request: PriorRequest) -> int:
    """Return how many first tokens a prompt has in common with the first `count` of another."""
    shared = common_fingerprints(one.fingerprints, request.fingerprints)
    if shared == len(one.fingerprints):
        shared += _common(one.tokens[shared:count], prompt[shared:])
    return shared


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


Fingerprints = NDArray[np.uint32]
"""The fingerprint of the prefix that ends with each token, `[n]`."""
LIMIT = 2**24
"""Most bytes of an index: 4 million tokens of distinct text."""
NAME = "prefixes"
"""The name of the file, beside the files of the disk cache."""
STRETCH_BYTES = 256
"""Bytes that a stretch of text takes in addition to its fingerprints."""
_MAGIC = b"mlxrpfx1"
_HEAD = struct.Struct("<III")  # fingerprint before it, fingerprints, checksum of both and these
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))

logger = logging.getLogger("mlxrunner")


def mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return hashes of 64-bit values, in place: the finalizer of SplitMix64."""
    values ^= values >> np.uint64(30)
    values *= _MIX[0]
    values ^= values >> np.uint64(27)
    values *= _MIX[1]
    values ^= values >> np.uint64(31)
    return values


class Fingerprinter:
    """Computes the fingerprints of texts, with a secret key."""

    def __init__(
        self, key: bytes, spelled: Callable[[TokenArray], NDArray[np.int32]] = lambda tokens: tokens
    ) -> None:
        """Use a `key` of 8 bytes. `spelled` returns tokens as every process spells them.

        That is a number for each token, or a row of numbers.
        """
        self._key, self._spelled = np.frombuffer(key, np.uint64), spelled

    def __call__(
        self, tokens: TokenArray, begin: int = 0, total: int = 0
    ) -> tuple[Fingerprints, int]:
        """Return the fingerprints of all prefixes of a text, and the total after it.

        To continue after the first `begin` tokens of a text, give the other `tokens`, and the
        `total` after the first ones.
        """
        if not len(tokens):
            return np.empty(0, np.uint32), total
        rows = self._spelled(tokens)
        values = rows.astype(np.uint64) if rows.ndim == 1 else self._folded(rows)
        values += np.arange(begin + 1, begin + len(tokens) + 1, dtype=np.uint64) * _GOLDEN
        values ^= self._key
        sums: NDArray[np.uint64] = np.cumsum(mixed(values), dtype=np.uint64)
        sums += np.uint64(total)
        total = int(sums[-1])
        return (mixed(sums) >> np.uint64(32)).astype(np.uint32), total

    def _folded(self, rows: NDArray[np.int32]) -> NDArray[np.uint64]:
        values = rows[:, 0].astype(np.uint64)
        for column in rows.T[1:]:
            values = mixed(values * _GOLDEN + column.astype(np.uint64))
        return values


def common_fingerprints(a: Fingerprints, b: Fingerprints) -> int:
    """Return how many first tokens two texts have in common."""
    low, high = 0, min(len(a), len(b))
    if not high or a[0] != b[0]:
        return 0
    while low < high:  # they differ from the first different token on
        middle = (low + high) // 2
        low, high = (middle + 1, high) if a[middle] == b[middle] else (low, middle)
    return low


class PrefixIndex:
    """The prefixes that were evaluated; the least recently used go if there are too many.

    A stretch is text after a place where two texts part, or after the beginning. Its first
    fingerprint finds it.
    """

    def __init__(
        self,
        file: Path | None = None,
        *,
        limit: int = LIMIT,
        spelled: Callable[[TokenArray], NDArray[np.int32]] = lambda tokens: tokens,
    ) -> None:
        """Begin with what `file` holds; None: the index goes with this process.

        `limit`: most bytes in memory; the file has at most twice as many. `spelled` is that of
        Fingerprinter. A damaged end of a file is left out. A file that can't be read or written
        costs a line of the log, and nothing else.
        """
        self._limit, self._file, self._file_bytes = limit, file, 0
        self._stretches: OrderedDict[int, Fingerprints] = OrderedDict()
        self._ends: dict[int, int] = {}
        self._here = set[int]()
        """The stretches that this process has evaluated, at least in part."""
        self._bytes, key = 0, secrets.token_bytes(8)
        self.has_forgotten = False
        """True if the bound was reached, so that something evaluated may look new."""
        found = self._read() if file is not None else None
        if found is not None:
            key = found[len(_MAGIC) : len(_MAGIC) + 8]
        self._key = key
        self.fingerprints = Fingerprinter(key, spelled)
        if found is not None:
            self._load(found)

    def __len__(self) -> int:
        return sum(map(len, self._stretches.values()))

    def shared(self, text: Fingerprints) -> tuple[int, bool]:
        """Return how many first tokens of a text were evaluated before.

        The second value is True if only a process that has ended has evaluated the last of them.
        """
        at, path = self._walk(text)
        return at, bool(path) and path[-1] not in self._here

    def add(self, text: Fingerprints, *, is_here: bool = True) -> None:
        """Add all prefixes of a text that was evaluated. `is_here`: by this process."""
        at, path = self._walk(text)
        if at < len(text):
            before = int(text[at - 1]) if at else 0
            path.append(self._insert(before, text[at:]))
            self._use(path)
            if self._file is not None:
                self._append(_record(before, text[at:]))
        if is_here:
            self._here.update(path)

    def _walk(self, text: Fingerprints) -> tuple[int, list[int]]:
        """Return how much of a text is there, and the stretches that have it."""
        at, path = 0, list[int]()
        while at < len(text):
            first = int(text[at])
            stretch = self._stretches.get(first)
            if stretch is None:
                break
            path.append(first)
            at += common_fingerprints(stretch, text[at:])
        self._use(path)
        return at, path

    def _use(self, path: list[int]) -> None:
        """Note that stretches were used. The first one is needed to find the others: it is last."""
        for first in reversed(path):
            if first in self._stretches:
                self._stretches.move_to_end(first)

    def _insert(self, before: int, rest: Fingerprints) -> int:
        """Insert text after the fingerprint `before`, and return the stretch that has it."""
        first = self._ends.pop(before, None) if before else None
        if first is None:
            first, stretch = int(rest[0]), rest.copy()
            self._bytes += STRETCH_BYTES
        else:
            stretch = np.concatenate([self._stretches[first], rest])
        self._stretches[first] = stretch
        self._stretches.move_to_end(first)
        self._ends[int(stretch[-1])] = first
        self._bytes += rest.nbytes
        while self._bytes > self._limit and len(self._stretches) > 1:
            first_of_oldest, oldest = self._stretches.popitem(last=False)
            self._ends.pop(int(oldest[-1]), None)
            self._here.discard(first_of_oldest)
            self._bytes -= oldest.nbytes + STRETCH_BYTES
            self.has_forgotten = True
        return first

    def _read(self) -> bytes | None:
        """Return the content of the file; None if there is none yet, or none that can be used."""
        assert self._file is not None
        try:
            found = read_bytes(self._file, 4 * self._limit + 2**20)
        except MissingFileError:
            return None
        except MlxrunnerError as error:
            self._stop(error)
            return None
        if found.startswith(_MAGIC) and len(found) >= len(_MAGIC) + 8:
            return found
        self._stop(ReadError(f"{self._file}: it is not a file of this program: remove it"))
        return None

    def _load(self, found: bytes) -> None:
        """Take over the records of a file; write it again if its end is damaged."""
        at = len(_MAGIC) + 8
        for before, rest, end in _records(found, at):
            self._insert(before, rest)
            at = end
        self._file_bytes = at
        if at < len(found):
            self._rewrite()

    def _append(self, record: bytes) -> None:
        if not self._file_bytes or self._file_bytes + len(record) > 2 * self._limit:
            self._rewrite()
            return
        self._write(record, append=True)

    def _rewrite(self) -> None:
        records = [_record(0, stretch) for stretch in self._stretches.values()]
        self._file_bytes = 0
        self._write(b"".join([_MAGIC, self._key, *records]), append=False)

    def _write(self, content: bytes, *, append: bool) -> None:
        if self._file is None:
            return
        place = self._file if append else self._file.with_name(f".{NAME}.new")
        try:
            descriptor = open_own(place, append=append)
            try:
                if not append:
                    os.ftruncate(descriptor, 0)
                write_all(descriptor, content)
            finally:
                os.close(descriptor)
            if not append:
                os.replace(place, self._file)
        except (OSError, MlxrunnerError) as error:
            self._stop(error)
        self._file_bytes += len(content)

    def _stop(self, error: Exception) -> None:
        logger.warning("evaluated prompts are not remembered beyond this process: %s", error)
        self._file = None


def _record(before: int, rest: Fingerprints) -> bytes:
    data = rest.astype("<u4").tobytes()
    crc = zlib.crc32(data, zlib.crc32(struct.pack("<II", before, len(rest))))
    return _HEAD.pack(before, len(rest), crc) + data


def _records(found: bytes, at: int) -> Iterator[tuple[int, Fingerprints, int]]:
    """Yield the whole records from offset `at` on, each with the offset of its end."""
    while at + _HEAD.size < len(found):
        before, count, _ = _HEAD.unpack_from(found, at)
        end = at + _HEAD.size + 4 * count
        if not count or end > len(found):
            return
        rest = np.frombuffer(found, "<u4", count, at + _HEAD.size).astype(np.uint32)
        if _record(before, rest) != found[at:end]:
            return
        yield before, rest, end
        at = end


Outcome = Literal["hit", "partial", "miss"]
WINDOW = 16
"""Number of dropped tokens to remember, to show where a prompt left the entry."""


@dataclass(frozen=True)
class Lookup:
    """The tokens of a prompt that the entry held, and the reason for the missing ones."""

    prompt_tokens: int
    entry_tokens: int
    """Tokens that the entry held."""
    matched: int
    """Tokens of the longest common prefix of the prompt and the entry."""
    cached: int
    """Tokens reused, at most `matched`."""
    reason: str | None = None
    """The reason for evaluating more than the prompt's new tokens; None if nothing was lost.

    "empty", "no_common_token", "diverged", "prompt_shorter"; "rewind_limited": by a layer of kind
    `limited_by`; "interrupted": the request before ended in its prefill; "restored": the entry came
    from the file `evicted_by`; "evicted": it was given up to make room for `evicted_by`; or
    the reason that freed the entry: "entry_freed", "model_changed", "options_changed",
    "verify_failed".
    """
    limited_by: str | None = None
    """Kind of the layer that could not be rewound further; None if no layer limited the rewind."""
    evicted_by: str | None = None
    checkpoint: int | None = None
    """Offset of the checkpoint that was used; None if none was."""
    known: int = 0
    """First tokens of the prompt that the entry, or one that was lost, had evaluated."""
    dropped: tuple[int, ...] = ()
    """The first tokens of the entry beyond the match."""
    rewind_s: float = 0.0
    """Seconds that the rewind took."""
    is_restored: bool = False
    """True if the entry was just read from a file."""
    restored: int = 0
    """Tokens of `cached` that came back from disk, where the conversation had been parked."""
    ahead: int = 0
    """Tokens of `cached` that were evaluated ahead, since the last request.

    All other fields describe the entry as the last request left it.
    """

    @property
    def reused(self) -> int:
        """Number of tokens reused from the entry of the last request."""
        return self.cached - self.ahead

    def outcome(self, missed: int = 0) -> Outcome:
        """Return "hit" if all that could be reused was, "miss" if no token was, else "partial".

        `missed`: tokens that were evaluated before, and could not be reused.
        """
        if self.reused == 0:
            return "miss"
        is_whole = self.reused == min(self.prompt_tokens - 1, self.entry_tokens)
        return "hit" if is_whole and not missed else "partial"

    def reason_for(self, account: PromptAccount, known_reason: str) -> str | None:
        """Return the reason for not reusing more, once it is known that missed tokens could be.

        `known_reason`: the caller's reason for that, or "".
        """
        if not account.missed or self.reason in _OWN_REASONS:
            return self.reason
        if known_reason:
            return known_reason
        if account.is_beside and account.missed > account.displaced:
            return "side_by_side"
        if are_few(account.missed, self.cached):
            return self.reason
        return "restarted" if account.is_restarted else "evicted"


def are_few(missed: int, cached: int) -> bool:
    """Return True if missed tokens are too few to be read from disk, beside the cached ones.

    What is read is the whole prefix, of which 32 tokens take as long as evaluating one, or less.
    """
    return missed < max(8, (cached + missed) // 32)


_OWN_REASONS = (
    "rewind_limited",
    "entry_freed",
    "verify_failed",
    "model_changed",
    "options_changed",
    "evicted",
)
"""The reasons of a lookup that tell why tokens are missed."""


@dataclass(frozen=True)
class Earlier:
    """The part of a prompt that earlier lines of a batch share."""

    tokens: int
    """Tokens from the beginning that an earlier line shares."""
    reason: str = ""
    """The reason why the entry lacks some of these tokens, unless the lookup gives its own."""


@dataclass(frozen=True)
class LostTokens:
    """A loss of tokens that the next lookup reports."""

    reason: str
    """See `Lookup.reason`."""
    by: str | None
    """See `Lookup.evicted_by`."""
    tokens: TokenArray


@dataclass(frozen=True)
class Evicted:
    """A conversation that was given up to make room for a request."""

    tokens: int
    slot: int
    cause: Literal["slot", "memory"]
    """The need of the request: a slot of its own, or memory."""
    parked: bool
    """True if the tokens are on disk, from where they come back."""


@dataclass(frozen=True)
class Early:
    """The entry as the last request left it, if tokens were evaluated ahead since then."""

    tokens: TokenArray
    kept: int
    """Tokens, from the beginning, that are still in the entry."""
    by: Lookup | None = None
    """The lookup that dropped the others; None if none was dropped."""

    def after(self, found: Lookup) -> Early:
        """Return the state after evaluating more tokens ahead, starting from the lookup `found`."""
        return self if found.cached >= self.kept else replace(self, kept=found.cached, by=found)

    def described(self, found: Lookup, prompt: TokenArray) -> Lookup:
        """Return the lookup `found`, described against the entry as the last request left it."""
        last = self.after(found)
        matched, reused, by = common_prefix(self.tokens, prompt), last.kept, last.by
        found = replace(
            found,
            entry_tokens=len(self.tokens),
            matched=matched,
            ahead=found.cached - reused,
            limited_by=None,
            dropped=tuple(self.tokens[matched : matched + WINDOW].tolist()),
        )
        if by is None or reused >= min(matched, found.prompt_tokens - 1):
            return found
        if by.limited_by:
            return replace(found, limited_by=by.limited_by, checkpoint=by.checkpoint)
        if matched < min(found.prompt_tokens, found.entry_tokens):
            return found  # the prompt leaves the entry in any case
        evicted_by = (
            by.evicted_by
            if by.reason == "entry_freed"
            else "tokens evaluated in advance that the prompt did not continue"
        )
        return replace(found, reason="entry_freed", evicted_by=evicted_by)


def explained(
    found: Lookup,
    loss: LostTokens | None = None,
    prompt: TokenArray | None = None,
    restored_from: str | None = None,
) -> Lookup:
    """Return `found` with its reason, if it has none yet, and the tokens known to be evaluated.

    `loss`: why the entry lost tokens that `prompt` may share. `restored_from`: the file that the
    entry came from.
    """
    was_lost = 0 if loss is None or prompt is None else common_prefix(loss.tokens, prompt)
    reason, by = found.reason, found.evicted_by
    if reason is None:
        reason, by = _reason_of(found, loss, was_lost, restored_from)
    # Tokens that an interrupted prefill did not reach had to be evaluated anyway.
    known = 0 if loss is not None and loss.reason == "interrupted" else was_lost
    return replace(found, reason=reason, evicted_by=by, known=max(found.matched, known))


def _reason_of(
    found: Lookup, loss: LostTokens | None, was_lost: int, restored_from: str | None
) -> tuple[str | None, str | None]:
    """Return the reason of a lookup that has none yet, and what evicted the tokens, if that is it.

    `was_lost`: first tokens of the prompt that are among those of `loss`.
    """
    before, matched, most = found.entry_tokens, found.matched, found.prompt_tokens - 1
    missing = min(was_lost, most) - found.reused
    lost_to = "" if loss is None else loss.reason
    by = None if loss is None else loss.by
    if lost_to == "evicted" and missing > min(matched, most) - found.reused:
        return lost_to, by  # what is left shares less
    if found.limited_by and matched:
        return "rewind_limited", None
    explains = missing > 0 if lost_to == "interrupted" else before == 0
    if lost_to and matched == before and explains:
        return lost_to, by
    if before == 0:
        return "empty", None
    if matched < min(found.prompt_tokens, before):
        return "diverged" if matched else "no_common_token", None
    if restored_from is not None:
        return "restored", restored_from
    return "prompt_shorter" if found.prompt_tokens < before else None, None
