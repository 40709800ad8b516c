"""Remember as fingerprints, within a bound of bytes, every prefix that was ever evaluated.

A prefix has one fingerprint, a keyed hash of all its tokens, so the fingerprints of a text reveal
no token and differ from those of any other text from the first different token on. The index
stores each once. It can be kept in a file, which a killed process leaves whole. No tensors.
"""

from __future__ import annotations

import logging
import os
import secrets
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlxrunner.cache.tokens import TokenArray
from mlxrunner.errors import MissingFileError, MlxrunnerError, ReadError
from mlxrunner.system.reading import read_bytes
from mlxrunner.system.writing import open_own, write_all

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
        """Return the fingerprints of all prefixes of a text, and the total behind it.

        To go on behind the first `begin` tokens of a text, give the other `tokens`, and the
        `total` behind the first ones.
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
    while low < high:  # they differ from the first different token on
        middle = (low + high) // 2
        low, high = (middle + 1, high) if a[middle] == b[middle] else (low, middle)
    return low


class PrefixIndex:
    """The prefixes that were evaluated; the least recently used go if there are too many.

    A stretch is text behind a place where two texts part, or behind the beginning. Its first
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
        """Insert text behind the fingerprint `before`, and return the stretch that has it."""
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
        """Write the file anew, with what the index holds."""
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
