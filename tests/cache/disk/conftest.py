"""A parking in a scratch folder, and a runner that leaves conversations there and finds them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxrunner import Runner
from mlxrunner.cache.disk.disk_cache import DiskCache
from mlxrunner.cache.disk.index import StoredConversation
from mlxrunner.cache.entry import CacheEntry, TokenArray, common_prefix
from mlxrunner.results import Usage

PARTS = {"weights": "", "settings": ""}
PLENTY = 10**9
Make = Callable[..., DiskCache]
Answer = list[tuple[int | None, float | None]]


@pytest.fixture
def make_parking(tmp_path: Path) -> Make:
    """Open the parking that is kept in one folder of the test, and close the one before."""
    opened: list[DiskCache] = []

    def make(**options: Any) -> DiskCache:
        while opened:
            opened.pop().close()
        opened.append(DiskCache(tmp_path / "kept", PARTS, **{"limit": PLENTY, **options}))
        return opened[-1]

    return make


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make every threshold a few tokens, and keep private folders within the test."""
    monkeypatch.setattr("mlxrunner.cache.disk.index.SEGMENT", 16)
    monkeypatch.setattr("mlxrunner.cache.disk.index.SHORT", 4)
    monkeypatch.setattr("mlxrunner.cache.layers.extents.STEP", 4)
    monkeypatch.setattr("mlxrunner.cache.layers.attention.STEP", 8)
    monkeypatch.setattr("mlxrunner.cache.entry.SPACING", 3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def answer(runner: Runner, prompt: list[int], tokens: int = 6) -> tuple[Answer, Usage]:
    """Return the tokens of an answer with their log-probabilities, and the usage."""
    chunks = list(runner.generate(prompt, max_tokens=tokens, stop_tokens=[], logprobs=0))
    usage = chunks[-1].usage
    assert usage is not None
    return [(chunk.token, chunk.logprob) for chunk in chunks], usage


def array(tokens: Sequence[int]) -> TokenArray:
    return np.array(tokens, np.int32)


def on_disk(parking: DiskCache) -> int:
    """Return the bytes of all files in the folder."""
    return sum(path.stat().st_size for path in parking.folder.iterdir())


def served(
    make: Callable[[], Runner], parking: DiskCache, prompt: list[int], tokens: int = 4
) -> int:
    """Answer a prompt as a cold runner does, with what the disk has; return how much is reused."""
    warm, found = make(), parking.find(array(prompt))
    if found is not None:
        warm.cache.adopt(parking.restore(*found), "the disk")
    said, usage = answer(warm, prompt, tokens)
    assert said == answer(make(), prompt, tokens)[0]
    assert warm.entry.is_true
    assert usage.cached_tokens in (0, 0 if found is None else found[1])
    return usage.cached_tokens


def offloaded(
    parking: DiskCache, entry: CacheEntry, replaces: StoredConversation | None = None
) -> StoredConversation | None:
    """Offload an entry, and wait until it is written. Return None if it is not there then."""
    found = parking.offload(entry, replaces=replaces)
    parking.settle()
    return found if found in parking else None


class Desk:
    """A runner with one entry, whose conversation is parked after each answer.

    Before a prompt that a parked conversation serves better, that one takes the entry.
    """

    def __init__(self, runner: Runner, parking: DiskCache) -> None:
        self.runner, self.parking = runner, parking
        self.parked: StoredConversation | None = None
        self.restored = 0

    def ask(self, prompt: list[int], tokens: int = 6) -> tuple[Answer, Usage]:
        """Answer `prompt` with what the entry or the disk has of it."""
        wanted, entry = np.array(prompt, np.int32), self.runner.entry
        here = entry.reach(min(common_prefix(entry.tokens.array, wanted), len(prompt) - 1))[0]
        found = self.parking.find(wanted)
        if found is not None and found[1] > here:
            self.parked, upto = found
            entry_there = self.parking.restore(self.parked, upto)
            self.runner.cache.adopt(entry_there, "the disk")
            self.restored += 1
        said = answer(self.runner, prompt, tokens)
        if found is not None and found[1] > here:
            assert said[1].cached_tokens == found[1]
        self.parked = offloaded(self.parking, self.runner.entry, self.parked)
        return said


def some(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1, 250) for _ in range(count)]
